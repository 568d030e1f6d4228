"""What a review with a fresh mind found, and what now stands in its way: each test fails on the code before it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import quietgrad as qg
from quietgrad import PrivacyError
from quietgrad.account import up
from quietgrad.fresh import PUBLIC, drawing, fill
from quietgrad.gradients import Rows
from quietgrad.stream import STATE, Purpose, Stream
from quietgrad.values import L2Ball

DATA = (torch.rand(60, 4, generator=torch.Generator().manual_seed(1)), torch.arange(60) % 3)


def begin(plan: qg.Plan | None = None, model: nn.Module | None = None, **more: object) -> qg.Run:
    torch.manual_seed(0)
    net = nn.Linear(4, 3) if model is None else model
    plan = plan or qg.dp_sgd(examples=60, batch_size=12, steps=10, noise_multiplier=1.0)
    return plan.start(net, torch.optim.SGD(net.parameters(), lr=0.1), loss=qg.losses.CrossEntropy(), **more)  # type: ignore[arg-type]


# Randomness before the bound


class Noisy(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Transforms that draw from all three global generators."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.drawn.append((float(torch.rand(())), float(np.random.rand()), random.random()))
        return DATA[0][i], DATA[1][i]

    drawn: ClassVar[list[tuple[float, float, float]]] = []


@pytest.mark.parametrize("which", [0, 1, 2])
def test_transforms_do_not_draw_from_what_the_user_seeded(which: int) -> None:
    """Two secure runs after the same seeds draw nothing alike (false alarm below 2^-20 a pair), and the user's own
    generators are where they would have been."""
    seen = []
    for _ in range(2):
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        Noisy.drawn = []
        run = begin()
        torch.manual_seed(0)
        for batch in run.batches(Noisy()):
            run.step(batch)
        seen.append({draw[which] for draw in Noisy.drawn[20:]})
        after = float(torch.rand(())), float(np.random.rand()), random.random()
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    assert after == (float(torch.rand(())), float(np.random.rand()), random.random())
    assert len(seen[0]) > 50 and not seen[0] & seen[1]


def test_a_filled_generator_gives_what_the_reference_gives() -> None:
    """Mersenne twisters from the same 624 words agree, in torch (whose layout this pins), NumPy and Python."""
    words = Stream(3).state_for(Purpose.FORWARD, 0, 0)[:624]
    with drawing(PUBLIC, torch.device("cpu")):
        fill(words.repeat(3))
        ours = torch.empty(700, dtype=torch.int32).random_().tolist()  # 31 bits of each
        theirs = np.random.randint(0, 2**32, 700, dtype=np.uint32).tolist()
        assert ours == [word % 2**31 for word in theirs]
        assert theirs == [random.getrandbits(32) for _ in range(700)]
    assert len(PUBLIC) == STATE


def test_dropout_uses_all_bits_of_the_key() -> None:
    """States that agree in the 32 bits a seed would keep give other masks."""
    words = Stream(4).state_for(Purpose.FORWARD, 0, 0)
    other = words.clone()
    other[5] ^= 1 << 31
    masks = []
    for state in (words, other):
        with drawing(state, torch.device("cpu")):
            masks.append(torch.rand(2000))
    assert not torch.equal(*masks)


# Sampling and order


@pytest.mark.parametrize(("examples", "size"), [(60, 6), (60, 7), (61, 10)])
def test_a_fixed_order_is_priced_by_its_participations(examples: int, size: int) -> None:
    """For every number of releases, the count that is composed is the most that any row has taken part in."""
    sample = qg.FixedOrder(examples, size, 3 * examples)
    memory, part = sample.begin(Stream(1), examples), torch.zeros(examples, dtype=torch.int64)
    event = qg.Gaussian(1.0).event(0)
    for step in range(35):
        part[sample.draw(Stream(1), step, examples, memory)] += 1
        assert sample.compose(event, step + 1).count == max(1, int(part.max())) == step // sample.batches + 1
    assert [qg.FixedOrder(60, 6, 30).compose(event, k).count for k in (1, 9, 10, 11, 20, 21)] == [1, 1, 1, 2, 2, 3]


def test_a_fixed_order_wants_the_rows_in_their_order(tmp_path: Path) -> None:
    """The same rows in another order, within a run or over a resume, would let an example take part twice an epoch."""
    plan = qg.Plan(sample=qg.FixedOrder(60, 12, 20), bound=qg.Clip(1.0), noise=qg.Gaussian(2.0))
    run = begin(plan, folder=tmp_path / "run")
    for batch in run.batches(DATA, epochs=1):
        run.step(batch)
    turned = tuple(t.flip(0) for t in DATA)
    with pytest.raises(PrivacyError, match="not in their order"):
        run.batches(turned)
    run.save()
    run.close()
    again = begin(plan, folder=tmp_path / "run", resume=True)
    with pytest.raises(PrivacyError, match="not in their order"):
        again.batches(turned)
    again.batches(DATA)
    assert any("order" in line for line in run.certificate().assumptions)


def test_a_row_that_follows_its_batch_is_refused() -> None:
    """Padding to the longest that the first rows hide: a chunk of another shape is refused before its step."""

    class Ragged(torch.utils.data.Dataset[tuple[Tensor, int]]):
        def __len__(self) -> int:
            return 60

        def __getitem__(self, i: int) -> tuple[Tensor, int]:
            return torch.ones(9 if i % 10 == 3 else 4), i % 3

    def collate(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        longest = max(len(x) for x, _ in items)
        rows = torch.stack([nn.functional.pad(x, (0, longest - len(x)))[:longest] for x, _ in items])
        return rows, torch.tensor([y for _, y in items])

    class Short(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[:, :4])

    run = begin(model=Short(4, 3))
    with pytest.raises(PrivacyError, match="fixed public length"):
        for batch in run.batches(Ragged(), collate=collate):
            run.step(batch)


class Skips(nn.Linear):
    """Leaves a layer out by a coin that is Python's or NumPy's: under vmap there is one coin for a chunk."""

    def __init__(self, coin: Callable[[], float]) -> None:
        super().__init__(4, 3)
        self.coin = coin

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if not self.training or self.coin() < 0.5 else 0.5)


@pytest.mark.parametrize("coin", [random.random, lambda: float(np.random.rand())])
def test_one_coin_for_a_chunk_is_not_drawn(coin: Callable[[], float]) -> None:
    """A coin shared by a chunk ties its examples together: such a model goes to the loop, a coin for each."""
    run = begin(model=Skips(coin))
    run.step(next(iter(run.batches(DATA))))
    assert run.gradients.name == "the loop over examples" and "generator" in run.gradients.reason


def test_a_coin_that_comes_late_is_noticed() -> None:
    """A model that was met without a coin and throws one later: the shared draw is thrown away, the loop takes over."""
    run = begin(model=Skips(lambda: 0.0))
    batches = iter(run.batches(DATA))
    run.step(next(batches))
    assert run.gradients.name == "vmap over examples"
    run.model.coin = random.random
    run.step(next(batches))
    assert run.gradients.name == "the loop over examples"


def test_a_collate_sees_one_sample_at_a_time() -> None:
    """What a collate draws (a crop for the whole batch) is drawn for each example."""
    seen: list[int] = []

    def collate(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        seen.append(len(items))
        shift = torch.rand(())
        return torch.stack([x + shift for x, _ in items]), torch.stack([y for _, y in items])

    run, pairs = begin(), list(zip(*DATA, strict=True))
    batches = iter(run.batches(pairs, collate=collate))
    seen.clear()
    batch = next(batches)
    assert set(seen) <= {1}
    run.step(batch)


# The ledger, and what stands beside it


def test_one_step_at_a_time() -> None:
    """A second thread in a step is refused: it would draw the noise of a step that another has drawn."""
    entered, leave = threading.Event(), threading.Event()

    class Waiting(nn.Linear):
        waits = False

        def forward(self, x: Tensor) -> Tensor:
            if self.waits:
                entered.set()
                leave.wait(10)
            return super().forward(x)

    model = Waiting(4, 3)
    run = begin(model=model)
    batches = iter(run.batches(DATA))
    batch = next(batches)
    model.waits = True
    worker = threading.Thread(target=run.step, args=(batch,))
    worker.start()
    assert entered.wait(10)
    with pytest.raises(PrivacyError, match="another thread"):
        run.step(batch)
    leave.set()
    worker.join()
    assert run.position == 1


def test_a_failure_never_turns_the_ledger_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens while a step fails, what was spent stays spent."""
    run = begin()
    batch = next(iter(run.batches(DATA)))

    def fails(*_: object) -> None:
        run.ledger.spent = 5
        raise RuntimeError("late")

    monkeypatch.setattr("quietgrad.run.release", fails)
    with pytest.raises(RuntimeError, match="late"):
        run.step(batch)
    assert run.position == 5


def test_another_optimizer_step_is_noticed() -> None:
    """A line left over from an ordinary loop trains without noise: the next step and the certificate refuse."""
    run = begin()
    batches = iter(run.batches(DATA))
    run.step(next(batches))
    run.certificate()
    nn.functional.cross_entropy(run.model(DATA[0]), DATA[1]).backward()
    run.optimizer.step()
    with pytest.raises(PrivacyError, match=r"outside run\.step"):
        run.step(next(batches))
    with pytest.raises(PrivacyError, match=r"outside run\.step"):
        run.certificate()


def test_a_layer_put_back_in_training_mode_inside_the_loop() -> None:
    """A batch norm that was met frozen must stay frozen; leaving training mode is no matter."""
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    model[1].eval()
    run = begin(model=model)
    batches = iter(run.batches(DATA))
    model.eval()
    run.step(next(batches))
    model.train()
    with pytest.raises(PrivacyError, match="training mode"):
        run.step(next(batches))


def test_the_plan_of_a_run_cannot_be_exchanged() -> None:
    """What is accounted is the plan that ran."""
    run = begin()
    with pytest.raises(AttributeError):
        run.plan = qg.dp_sgd(examples=60, batch_size=12, steps=10, noise_multiplier=9.0)  # type: ignore[misc]


# Stages of the user's own


class Mixing(qg.Smooth):
    """A smoothing of the user's own."""

    @property
    def says(self) -> str:
        return "Mixing"

    count = 1

    def views(self, *given: object) -> tuple[()]:
        return ()


def test_a_smoothing_of_ones_own_is_a_claim() -> None:
    """Nothing tests what its views do, so the plan says whose word it is."""
    plan = qg.dp_sgd(examples=60, batch_size=12, steps=10, noise_multiplier=1.0).replace(smooth=Mixing())
    assert plan.status == "claimed by user" and "Mixing" in plan.claims[0]


def test_a_bound_that_scales_the_noise_to_less_than_it_promises() -> None:
    """Noise of a multiple of `reach` covers a contribution of `reach`, not a wider one."""

    class Wide(qg.Bound):
        says = "Wide"
        reach = 0.01
        contribution = L2Ball(1.0)

        def total(self, per_example: object, context: object) -> object:
            raise AssertionError

    with pytest.raises(PrivacyError, match="reach"):
        qg.Plan(sample=qg.Poisson(60, 12, 10), bound=Wide(), noise=qg.Gaussian(2.0))


def test_a_tensor_of_extra_state_is_not_exported(tmp_path: Path) -> None:
    """get_extra_state may hold anything that a forward saw."""

    class Keeps(nn.Linear):
        most = torch.zeros(())

        def get_extra_state(self) -> Tensor:
            return self.most

        def set_extra_state(self, state: Tensor) -> None:
            self.most = state

    run = begin(model=Keeps(4, 3))
    with pytest.raises(PrivacyError, match="neither a parameter nor a buffer"):
        run.export(tmp_path / "model")


def test_a_seeded_run_never_prints_its_figure_as_proved() -> None:
    """Plan, price and certificate of a seeded run say so wherever a figure stands."""
    run = begin(seed=3)
    for batch in run.batches(DATA):
        run.step(batch)
    assert "CLAIMED ONLY (seeded" in str(run) and "proved" not in str(run)
    assert "SEEDED" in run.spent().accountant and run.status == run.certificate().status == "seeded"


# Figures


def test_figures_are_rounded_up() -> None:
    """Four digits, never below; what has four digits stays as it is."""
    assert [up(x) for x in (1e-5, 1.0000049e-5, 0.36001, 2.9994, 2.99999, 3.0, 676.9, 1710.01)] == [
        "1e-05", "1.001e-05", "0.3601", "3", "3", "3", "676.9", "1711",
    ]  # fmt: skip


def test_large_batches_move_the_sum_by_less_than_a_millionth() -> None:
    """Twenty thousand shares of one size: without the first, the sum of the others is what it was."""
    count, like = 20_000, {"w": torch.zeros(30)}
    rows = torch.randn((count, 30), generator=torch.Generator().manual_seed(0))
    every = torch.ones(count, dtype=torch.bool)
    parts = [(rows, every), (rows, torch.arange(count) > 0), (rows[:1], every[:1])]
    clip = qg.Clip(1.0)
    sums = [clip.total(Rows(like, {"w": r}, torch.zeros(len(r)), real), None)()["w"] for r, real in parts]  # type: ignore[arg-type]
    assert float((sums[0] - sums[1] - sums[2]).norm()) < 1e-9


def test_items_are_asked_for_one_by_one() -> None:
    """A dataset that would draw once for all the rows it is asked for is not asked that way."""

    class Together(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
        def __len__(self) -> int:
            return 60

        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            return DATA[0][i], DATA[1][i]

        def __getitems__(self, rows: list[int]) -> list[tuple[Tensor, Tensor]]:
            raise AssertionError("asked for several at once")

    run = begin()
    for batch in run.batches(Together()):
        run.step(batch)
    assert run.position == 10
