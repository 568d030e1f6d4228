"""Batches: whatever holds the rows, the same rows come in the same order, in chunks, for one run, once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.small import CPU, Recorder, mlp, plan_of, world
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

import quietgrad as qg
from quietgrad.batches import Source, pad
from quietgrad.gradients import Gradients
from quietgrad.plan import Plan
from quietgrad.run import Run
from quietgrad.values import Nobody


class Rows(Dataset[Any]):
    """Map-style, one row at a time."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i]


class Noisy(Rows):
    """With a random transform."""

    def __getitem__(self, i: int) -> Any:
        return self.x[i] + torch.rand(()), self.y[i]


class Shifted(TensorDataset):
    """A TensorDataset that changes its rows."""

    def __getitem__(self, i: int) -> Any:
        x, y = super().__getitem__(i)
        return x + 1000.0, y


def started(plan: Plan, **options: Any) -> Run:
    model = world("mlp")[0]
    return plan.start(model, Recorder(model.parameters()), loss=qg.losses.CrossEntropy(), seed=5, **options)


def collated(samples: list[Any]) -> Any:
    return default_collate(samples)


def drawn(data: Any, **options: Any) -> list[list[Tensor]]:
    """The inputs that each step sees, dummies left out; and the run takes every step."""
    run, seen = started(plan_of(batch_size=4, steps=7), chunk=3), []
    for batch in run.batches(data, **options):
        assert batch.chunks is not None
        assert all(len(c.real) == 3 for c in batch.chunks)
        seen.append([c.tree[0][c.real] for c in batch.chunks])
        run.step(batch)
    return seen


@pytest.mark.parametrize(
    "how", ["dataset", "collate", "two workers", "TensorDataset", "list of samples", "list of tensors"]
)
def test_whatever_holds_the_rows_the_same_rows_come(how: str) -> None:
    """A Dataset, its workers, its collate, a list of samples: the chunks that tensors give, and the same release."""
    _, (x, y) = world("mlp")
    meant = drawn((x, y))
    held: dict[str, Any] = {
        "TensorDataset": TensorDataset(x, y), "list of samples": list(zip(x, y, strict=True)), "list of tensors": [x, y]
    }  # fmt: skip
    options: dict[str, Any] = {"collate": {"collate": collated}, "two workers": {"workers": 2}}.get(how, {})
    found = drawn(held.get(how, Rows(x, y)), **options)
    assert [len(step) for step in found] == [len(step) for step in meant]
    for mine, theirs in zip(found, meant, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a, b)


def test_a_dataset_that_changes_its_rows_is_asked_for_them() -> None:
    """Only torch's own TensorDataset is read by its tensors."""
    _, (x, y) = world("mlp")
    assert all(bool((chunk > 500).all()) for step in drawn(Shifted(x, y)) for chunk in step)


def test_workers_transforms_differ_from_epoch_to_epoch_and_repeat_with_a_seed() -> None:
    """Generators of worker processes are seeded by the run, at its place."""
    _, (x, y) = world("mlp", 8)

    def values() -> list[Tensor]:
        run, seen = started(plan_of(examples=8, batch_size=8, steps=2)), []
        for _ in range(2):
            for batch in run.batches(Noisy(x, y), epochs=1, workers=1):
                assert batch.chunks
                seen.append(torch.cat([c.tree[0][c.real] for c in batch.chunks]))
                run.step(batch)
        return seen

    first, second = values(), values()
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_empty_batches_of_a_dataset_come_as_steps() -> None:
    """At one expected row of 40, with workers and without, a batch of no chunks is a batch."""
    _, (x, y) = world("mlp")
    for workers in (0, 2):
        run = started(plan_of(batch_size=1, steps=12))
        counts = []
        for batch in run.batches(Rows(x, y), workers=workers):
            assert batch.chunks is not None
            counts.append(sum(int(c.real.sum()) for c in batch.chunks))
            run.step(batch)
        assert len(counts) == 12 and 0 in counts and max(counts) > 0


def test_nested_tuples_lists_and_dicts_are_cut_row_by_row() -> None:
    """A tree keeps its form, every tensor gives the same rows, dummies are zeros."""
    tree = {"a": torch.arange(5.0), "b": [torch.arange(10).view(5, 2), (torch.arange(5) > 1,)]}
    chunk = pad(tree, 7, CPU, 0)
    assert chunk.tree["b"][1][0].tolist() == [False, False, True, True, True, False, False]
    assert chunk.tree["b"][0].shape == (7, 2) and chunk.tree["a"].tolist() == [0, 1, 2, 3, 4, 0, 0]
    assert chunk.real.tolist() == [True] * 5 + [False] * 2


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([])


class Endless(Dataset[Any]):
    def __getitem__(self, i: int) -> Any:
        return i


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (Stream(), "in its own order"),
        (iter([1, 2]), "in its own order"),
        (Endless(), "in its own order"),
        ((torch.zeros(40, 4), torch.zeros(30)), r"shapes \(40, 4\), \(30,\)"),
        ((torch.zeros(40, 4), torch.tensor(1)), "one row per example"),
        ((torch.zeros(0, 4), torch.zeros(0)), "empty"),
        ([], "none"),
        ((torch.zeros(40, 4), ["a"] * 40), "holds str"),
        ((torch.zeros(40, 4).numpy(), torch.zeros(40).numpy()), "holds ndarray"),
    ],
    ids=["iterable", "iterator", "no length", "rows", "no axis", "no rows", "nothing", "strings", "numpy"],
)
def test_data_that_cannot_be_drawn_from_is_refused(data: Any, found: str) -> None:
    """By name of what was found, with a remedy."""
    with pytest.raises(qg.PrivacyError, match=f"^sample: .*{found}"):
        started(plan_of()).batches(data)


def twice(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    return (torch.cat([x, x]), torch.cat([y, y])) if len(samples) == 1 else (x, y)


def test_a_collate_that_makes_two_rows_of_one_example_is_refused() -> None:
    """At the start where the check sees it, and at a chunk of one row where it did not."""
    _, (x, y) = world("mlp")
    with pytest.raises(qg.PrivacyError, match="rows"):
        drawn(Rows(x, y), collate=twice)
    read = Source(Rows(x, y), twice, 0).read(iter([torch.tensor([4])]), 3, CPU)
    with pytest.raises(qg.PrivacyError, match="made 2 rows of 1 example"):
        next(read)


def stepped(run: Run, data: Any, epochs: int) -> int:
    before = run.position
    for batch in run.batches(data, epochs=epochs):
        run.step(batch)
    return run.position - before


@pytest.mark.parametrize("fixed", [False, True])
def test_fifteen_loops_of_one_epoch_are_the_plan(fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 234.375 steps an epoch (60,000 rows at 256, here 1,875 at 8): 15 loops take exactly the plan's steps."""
    monkeypatch.setattr(Gradients, "__call__", lambda self, parameters, *rest: Nobody(parameters))
    plan = qg.dp_sgd(examples=1875, batch_size=8, epochs=15, noise_multiplier=1.0)
    assert plan.steps == 3516 == qg.dp_sgd(examples=60_000, batch_size=256, epochs=15).steps
    if fixed:
        plan = plan.replace(sample=qg.FixedOrder(1875, 8, 235 * 15))
    model = nn.Linear(1, 1, bias=False)
    run = plan.start(model, Recorder(model.parameters()), forward=linear, seed=1, chunk=16)
    counts = [stepped(run, torch.ones(1875, 1), 1) for _ in range(15)]
    assert sum(counts) == plan.steps == run.position
    assert set(counts) == ({235} if fixed else {234, 235})
    assert stepped(run, torch.ones(1875, 1), 1) == 0


def linear(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).squeeze(1)


def test_epochs_begin_where_the_public_clock_says() -> None:
    """`first_step` is the first step whose epoch it is, for odd fractions and for 60,000 rows at 256."""
    for sample in (qg.Poisson(60_000, 256, 9999), qg.Poisson(7, 3, 99), qg.FixedOrder(60_000, 256, 9999)):
        for epoch in range(20):
            first = sample.first_step(epoch)
            assert sample.epoch(first) == epoch and (first == 0 or sample.epoch(first - 1) == epoch - 1)


def test_fixed_order_draws_every_row_once_an_epoch() -> None:
    """An epoch is a partition, and every epoch is the same one."""
    plan = plan_of().replace(sample=qg.FixedOrder(40, 8, 15))
    _, (x, y) = world("mlp")
    run, epochs = started(plan), []
    for _ in range(3):
        rows = []
        for batch in run.batches((torch.cat([x, torch.arange(40.0)[:, None]], 1)[:, 1:], y), epochs=1):
            assert batch.chunks is not None
            rows.append([v for c in batch.chunks for v in c.tree[0][c.real][:, -1].tolist()])
            run.step(batch)
        epochs.append(rows)
    assert sorted(v for rows in epochs[0] for v in rows) == list(range(40))
    assert epochs[0] == epochs[1] == epochs[2]


# What a step accepts.


@pytest.fixture
def run() -> Run:
    return started(plan_of())


def test_a_batch_is_of_this_run_and_used_once(run: Run) -> None:
    """A batch of another run, one used twice, a stale one, a hand-made tuple: refused, and nothing is released."""
    _, data = world("mlp")
    other = started(plan_of())
    mine, theirs = run.batches(data), other.batches(data)
    first = next(mine)
    for wrong, found in ((next(theirs), "not drawn by this run"), (data, "not drawn"), ([first], "not drawn")):
        with pytest.raises(qg.PrivacyError, match=found):
            run.step(wrong)  # type: ignore[arg-type]
    again = next(run.batches(data))
    with pytest.raises(qg.PrivacyError, match="used or is stale"):
        run.step(first)
    run.step(again)
    with pytest.raises(qg.PrivacyError, match="used or is stale"):
        run.step(again)
    assert run.position == 1 and len(run.optimizer.seen) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("last", [False, True])
def test_a_batch_that_is_passed_over_is_refused(run: Run, last: bool) -> None:
    """`continue` on an empty batch would tell that it was empty; the last one of the plan too."""
    at = 4 if last else 1
    with pytest.raises(qg.PrivacyError, match=f"batch of step {at} was passed over"):
        for batch in run.batches(world("mlp")[1]):
            if batch.step != at:
                run.step(batch)
    assert run.position == at


def test_steps_beyond_the_plan_are_refused(run: Run) -> None:
    """After the plan's end no batch comes, and no old one is taken."""
    batches = run.batches(world("mlp")[1])
    for last in batches:
        run.step(last)
    assert not list(run.batches(world("mlp")[1]))
    with pytest.raises(qg.PrivacyError, match="all 5 steps are spent"):
        run.step(last)


def test_a_loop_that_was_left_goes_on_where_it_stood(run: Run) -> None:
    """break, then another loop: the steps that are missing, and no step twice."""
    data, steps = world("mlp")[1], []
    for batch in run.batches(data):
        if batch.step == 2:
            break
        run.step(batch)
        steps.append(batch.step)
    for batch in run.batches(data):
        run.step(batch)
        steps.append(batch.step)
    assert steps == list(range(5))
    assert all(not torch.equal(a, b) for a, b in pairwise(run.optimizer.flat()))  # type: ignore[attr-defined]


def test_other_data_is_seen_again(run: Run) -> None:
    """Another number of rows is refused; another collate is checked as the first was."""
    _, (x, y) = world("mlp")
    for batch in run.batches((x, y), epochs=1):
        run.step(batch)
        break
    with pytest.raises(qg.PrivacyError, match="the run began with 40"):
        run.batches((x[:39], y[:39]))
    with pytest.raises(qg.PrivacyError, match="rows"):
        run.batches(Rows(x, y), collate=twice)


def test_a_collate_that_would_be_ignored_is_refused(run: Run) -> None:
    """Tensors have their rows already."""
    with pytest.raises(qg.PrivacyError, match="collate is given for tensors"):
        run.batches(world("mlp")[1], collate=collated)


def test_batch_and_run_show_nothing_of_the_data(run: Run) -> None:
    """repr of a batch names the step alone."""
    batch = next(run.batches(world("mlp")[1]))
    assert repr(batch) == "Batch(step 0, private)" and "tensor" not in str(run)


@pytest.mark.parametrize("epochs", [0, -1, 1.5, True, "2"])
def test_epochs_are_whole_and_positive(run: Run, epochs: Any) -> None:
    """Anything else is refused by name."""
    with pytest.raises(qg.PrivacyError, match="epochs is"):
        run.batches(world("mlp")[1], epochs=epochs)


def test_a_chunk_of_no_rows_is_refused() -> None:
    """Chunks hold at least one row."""
    model = mlp()
    for chunk in (0, -3):
        with pytest.raises(qg.PrivacyError, match="chunk"):
            plan_of().start(model, Recorder(model.parameters()), loss=qg.losses.CrossEntropy(), chunk=chunk)


def test_a_sorted_table_is_met_all_over() -> None:
    """The rows that the checks see come from all over the data, of which the first may be all alike."""
    table = torch.arange(100) // 10
    assert Source((table, table), None, 0).some(8)[0].unique().numel() == 8
    assert [int(x) for x, _ in Source(list(zip(table, table, strict=True)), None, 0).samples(3)] == [0, 4, 9]
    assert len(Source((table[:3], table[:3]), None, 0).some(8)[0]) == 3
