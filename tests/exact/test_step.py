"""The private step is the paper's: sample, clip, add, perturb, divide, move."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.small import (
    MODELS,
    Recorder,
    Recurrent,
    TwoInputs,
    chunks_of,
    context,
    gradients_of,
    mlp,
    parameters_of,
    plan_of,
    sum_of,
    world,
)  # fmt: skip
from torch import Tensor, nn
from torch.nn import functional as F

import quietgrad as qg
from quietgrad.plan import Plan
from quietgrad.smooth import AsIs
from quietgrad.step import private_sum
from quietgrad.stream import Purpose, Stream
from quietgrad.values import PerExample

SGD = torch.optim.SGD
Optimizer = Callable[[Any], torch.optim.Optimizer]


def by_hand(
    plan: Plan, model: nn.Module, data: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer, seed: int
) -> list[bool]:
    """Abadi et al. 2016, algorithm 1, on the same random numbers; says which examples were clipped."""
    stream, clipped = Stream(seed), []
    sigma, clip = plan.noise.multiplier, plan.bound.reach
    lattice = 2.0 ** math.floor(math.log2(sigma * clip * 2.0**-16))
    params = [p for p in model.parameters() if p.requires_grad]
    for t in range(plan.steps):
        total = [torch.zeros_like(p) for p in params]
        for i in plan.sample.draw(stream, t, len(data[1]), None).tolist():
            g = torch.autograd.grad(F.cross_entropy(model(data[0][i : i + 1]), data[1][i : i + 1]), params)
            size = math.sqrt(sum(float((x**2).sum()) for x in g))
            clipped.append(size > clip)
            total = [s + x * min(1.0, clip / size) for s, x in zip(total, g, strict=True)]
        at = 0
        for p, s in zip(params, total, strict=True):
            noise = stream.normals(Purpose.NOISE, t, at, p.numel()).view_as(p)
            p.grad = torch.round((s + sigma * clip * noise) / lattice) * lattice / plan.sample.batch_size
            at += p.numel()
        optimizer.step()
    return clipped


def middle_norm(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    """The median norm of the gradients where training begins."""
    rows = gradients_of(model)(parameters_of(model), chunks_of(data, len(data[1]))[0], (AsIs(),), context(plan_of()))
    return float(rows.norms().median())


OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda p: SGD(p, lr=0.5),
    "momentum": lambda p: SGD(p, lr=0.2, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
}


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [*((k, "sgd") for k in MODELS), *((k, o) for k in ("mlp", "tied") for o in ("momentum", "adam"))],
)
def test_a_run_is_dp_sgd_by_hand(kind: str, optimizer: str) -> None:
    """Weights after a run equal those of a plain loop, in float64, with examples on both sides of the clip."""
    model, data = world(kind)
    plan = plan_of(steps=6, clip=middle_norm(model, data), noise=0.8)
    run = plan.start(model, OPTIMIZERS[optimizer](model.parameters()), loss=qg.losses.CrossEntropy(), seed=3)
    for batch in run.batches(data):
        assert run.step(batch) is None
    other, _ = world(kind)
    clipped = by_hand(plan, other, data, OPTIMIZERS[optimizer](other.parameters()), 3)
    assert any(clipped) and not all(clipped)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_chunks_change_memory_and_nothing_else(kind: str, dtype: torch.dtype) -> None:
    """Chunks of 1, 3, B and more rows, by the loop and by vmap: the same clip decisions, the same sum to rounding."""
    model, data = world(kind, 10, dtype)
    clip = middle_norm(model, data)
    plan = plan_of(clip=clip)
    found: list[tuple[list[bool], dict[str, Tensor]]] = []
    for size in (10, 1, 3, 17):
        engine = gradients_of(model)
        if size != 10:
            engine.choose(parameters_of(model), chunks_of(data, size)[0], context(plan))
            assert engine.name.startswith("vmap") or kind == "lstm", engine.reason
        decided: list[bool] = []

        def watch(p: PerExample, decided: list[bool] = decided) -> None:
            decided.extend((p.norms()[p.real] > 1.0001 * clip).tolist())

        found.append((decided, sum_of(plan, model, data, size, engine, watch).spend()))
    (decisions, total), *others = found
    assert len(decisions) == 10
    for again, sums in others:
        assert again == decisions
        for name, tensor in sums.items():
            torch.testing.assert_close(tensor, total[name], rtol=0, atol=1e-12 if dtype == torch.float64 else 2e-6)


def test_noise_does_not_depend_on_chunks() -> None:
    """A seeded run in chunks of 1, 3 or 50 ends at the same weights."""
    ends = []
    for size in (1, 3, 50):
        model, data = world("mlp")
        run = plan_of().start(model, SGD(model.parameters(), 0.5), loss=qg.losses.CrossEntropy(), seed=4, chunk=size)
        for batch in run.batches(data):
            run.step(batch)
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-11)
    torch.testing.assert_close(ends[0], ends[2], rtol=0, atol=1e-11)


def test_an_empty_batch_is_a_step_with_noise() -> None:
    """At one expected example of 40, empty batches come, and each is released and accounted like any other."""
    model, data = world("mlp")
    plan, recorder = plan_of(batch_size=1, steps=12), Recorder(model.parameters())
    run = plan.start(model, recorder, loss=qg.losses.CrossEntropy(), seed=2)
    empty = []
    for batch in run.batches(data):
        empty.append(not batch.chunks)
        run.step(batch)
    assert 0 < sum(empty) < 12
    assert recorder.flat().shape == (12, 51) and bool((recorder.flat() != 0).all())
    assert run.position == 12 and run.spent(1e-5).epsilon == pytest.approx(plan.epsilon(1e-5))


def test_frozen_parameters_get_no_gradient_and_cost_nothing() -> None:
    """A frozen layer stays, also where somebody left a gradient at it; clip and noise cover the rest alone."""
    model, data = world("mlp")
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    optimizer = SGD(model.parameters(), lr=0.5)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    run = plan_of(clip=0.5).start(model, optimizer, loss=qg.losses.CrossEntropy(), seed=3)
    for batch in run.batches(data):
        run.step(batch)
    assert torch.equal(model[0].weight, before) and model[0].weight.grad is None
    assert list(run.parameters) == ["2.weight", "2.bias"]
    other, _ = world("mlp")
    other[0].requires_grad_(False)
    assert all(by_hand(plan_of(clip=0.5), other, data, SGD(list(other[2].parameters()), lr=0.5), 3)[:1])
    torch.testing.assert_close(model[2].weight, other[2].weight, rtol=0, atol=1e-11)


def per_example(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A whole chain, as a user would write it."""
    return F.cross_entropy(model(batch["a"], b=batch["b"]), batch["label"], reduction="none")


def test_forward_and_several_inputs_are_the_same_chain() -> None:
    """Dicts through forward=, positional inputs, named inputs: the same weights, bit for bit."""
    g = torch.Generator().manual_seed(1)
    a, b, y = torch.randn(40, 4, generator=g), torch.randn(40, 2, generator=g), torch.randint(3, (40,), generator=g)
    ends = []
    for data, given in (
        ({"a": a, "b": b, "label": y}, {"forward": per_example}),
        (((a, b), y), {"loss": nn.CrossEntropyLoss(reduction="none")}),
        (({"a": a, "b": b}, y), {"loss": qg.losses.CrossEntropy()}),
    ):
        torch.manual_seed(1)
        model = TwoInputs()
        run = plan_of().start(model, SGD(model.parameters(), 0.5), seed=9, **given)
        for batch in run.batches(data):
            run.step(batch)
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-6)
    torch.testing.assert_close(ends[0], ends[2], rtol=0, atol=1e-6)


def test_a_batch_norm_frozen_by_eval_is_a_layer_like_any_other() -> None:
    """With frozen statistics a run equals the plain loop, and the statistics do not move."""

    def make() -> nn.Module:
        torch.manual_seed(2)
        layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()
        layers[1].running_mean += 0.3
        layers[1].eval()
        return layers

    model, other = make(), make()
    data = world("mlp")[1]
    run = plan_of().start(model, SGD(model.parameters(), 0.5), loss=qg.losses.CrossEntropy(), seed=3)
    for batch in run.batches(data):
        run.step(batch)
    by_hand(plan_of(), other, data, SGD(other.parameters(), 0.5), 3)
    for mine, theirs in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


def test_a_layer_back_in_training_mode_is_seen_at_the_next_epoch() -> None:
    """model.train() after an evaluation wakes a frozen batch norm: the next batches() refuses it."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    model[1].eval()
    data = world("mlp")[1]
    run = plan_of(steps=10).start(model, SGD(model.parameters(), 0.5), loss=qg.losses.CrossEntropy(), seed=3)
    for batch in run.batches(data, epochs=1):
        run.step(batch)
    model.train()
    with pytest.raises(qg.PrivacyError, match="batch norm"):
        run.batches(data, epochs=1)


def test_dropout_is_fresh_for_each_example_and_leaves_the_generator_alone() -> None:
    """Equal rows get different masks, each step others, all from the run's seed; torch's generator stands still."""
    model = nn.Sequential(nn.Linear(4, 50, bias=False), nn.Dropout(0.5), nn.Linear(50, 3)).double()
    x, y = torch.ones(6, 4, dtype=torch.float64), torch.zeros(6, dtype=torch.int64)
    plan = plan_of()
    for vectorise in (False, True):
        engine = gradients_of(model)
        before = torch.get_rng_state()
        if vectorise:
            engine.choose(parameters_of(model), chunks_of((x, y), 6)[0], context(plan))
            assert engine.name.startswith("vmap"), engine.reason
        rows = [
            engine(parameters_of(model), chunks_of((x, y), 6)[0],
                   plan.smooth.views(context(plan, s), engine.stream, parameters_of(model)),
                   context(plan, s)).rows()["0.weight"]
            for s in (0, 0, 1)
        ]  # fmt: skip
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.equal(rows[0], rows[1])
        masks = (rows[0].abs().sum(2) != 0).double()
        assert all(not torch.equal(masks[i], masks[j]) for i in range(6) for j in range(i))
        assert not torch.equal(rows[0], rows[2])
        assert 0.3 < float(masks.mean()) < 0.7


def test_a_run_leaves_the_users_generator_alone() -> None:
    """From start to end, with dropout, meeting included, torch's generator gives what it would have given."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    data, before = world("mlp")[1], torch.get_rng_state()
    run = plan_of().start(model, SGD(model.parameters(), 0.5), loss=qg.losses.CrossEntropy(), seed=3)
    for batch in run.batches(data):
        run.step(batch)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_scheduler_between_steps_sets_the_rate_of_the_next() -> None:
    """torch's schedulers work, and the Context tells the stages the rate."""
    model, data = world("mlp")
    optimizer = SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    run = plan_of(steps=4).start(model, optimizer, loss=qg.losses.CrossEntropy(), seed=3)
    rates = []
    for batch in run.batches(data):
        rates.append(run.context().learning_rates["0.weight"])
        run.step(batch)
        scheduler.step()
    assert rates == [1.0, 0.5, 0.25, 0.125]


def test_the_release_keeps_a_wide_parameters_dtype() -> None:
    """float32 at least, the parameters' own where that is wider."""
    for dtype, released in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2):
        model = mlp().to(dtype)
        plan, at = plan_of(), context(plan_of())
        total = private_sum(plan, gradients_of(model), parameters_of(model), [], at, Stream(1), lambda p: None)
        out = plan.noise(total, {}, at, Stream(1))[0]
        assert all(t.dtype == released for t in out.tensors.values())


def test_recurrent_models_train_in_float32() -> None:
    """An LSTM and a GRU take steps, whichever engine serves them, without a warning."""
    for kind in (nn.LSTM, nn.GRU):
        torch.manual_seed(1)
        model, recorder = Recurrent(kind), None
        recorder = Recorder(model.parameters())
        g = torch.Generator().manual_seed(1)
        data = torch.randn(40, 5, 4, generator=g), torch.randint(3, (40,), generator=g)
        run = plan_of(steps=2).start(model, recorder, loss=qg.losses.CrossEntropy(), seed=3)
        for batch in run.batches(data):
            run.step(batch)
        assert bool(recorder.flat().isfinite().all())
