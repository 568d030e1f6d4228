"""Every engine gives what the loop gives, and the loop gives autograd's gradient of each example alone."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable

import pytest
import torch
from tests.small import (
    MODELS,
    Recurrent,
    chunks_of,
    context,
    gradients_of,
    parameters_of,
    plan_of,
    rows_from,
    world,
)  # fmt: skip
from torch import Tensor, nn
from torch.nn import functional as F

import quietgrad as qg
from quietgrad.gradients import Rows
from quietgrad.gradients.vmap import vectorised
from quietgrad.smooth import AsIs

PLAIN = (AsIs(),)


def flattened(*layers: nn.Module, features: int) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, 3))


class Branching(nn.Module):
    """Takes a way that depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.a(row) if bool(row.sum() > 0) else self.b(row) for row in x])


class InPlace(nn.Module):
    """Works on its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.sub_(0.5).mul_(2.0))


class Scaled(nn.Module):
    """Has a parameter without axes, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.scale, self.idle = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.layer(x)


class Attending(nn.Module):
    """Attention with dropout written inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x).mean(1))


class FunctionalDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.dropout(x, 0.5, self.training))


FOLLOWED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 3), (4,)),
    "conv1d": (lambda: flattened(nn.Conv1d(2, 3, 3, padding=1), nn.GELU(), features=15), (2, 5)),
    "conv2d, strided, dilated, in groups": (
        lambda: flattened(nn.Conv2d(4, 4, 3, stride=2, dilation=2, groups=2), nn.ReLU(inplace=True), features=16),
        (4, 8, 8)),
    "conv3d": (lambda: flattened(nn.Conv3d(1, 2, 2), nn.Tanh(), features=16), (1, 3, 3, 3)),
    "transposed conv": (lambda: flattened(nn.ConvTranspose2d(1, 2, 2), features=32), (1, 3, 3)),
    "group norm": (lambda: flattened(nn.Conv2d(1, 4, 2), nn.GroupNorm(2, 4), features=36), (1, 4, 4)),
    "layer norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.SiLU(), nn.Linear(6, 3)), (4,)),
    "instance norm": (lambda: flattened(nn.Conv2d(1, 2, 2), nn.InstanceNorm2d(2, affine=True), features=18), (1, 4, 4)),
    "rms norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.RMSNorm(6), nn.Linear(6, 3)), (4,)),
    "prelu": (lambda: nn.Sequential(nn.Linear(4, 6), nn.PReLU(6), nn.Linear(6, 3)), (4,)),
    "bilinear pooling": (lambda: flattened(nn.Conv2d(1, 2, 2), nn.AdaptiveAvgPool2d(2), features=8), (1, 5, 5)),
    "weight norm": (lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (4,)),
    "attention": (Attending, (5, 4)),
    "lstm": (Recurrent, (5, 4)),
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 3)), (4,)),
    "functional dropout": (FunctionalDropout, (4,)),
    "work in place": (InPlace, (4,)),
    "a number and an idle parameter": (Scaled, (4,)),
}  # fmt: skip


@pytest.mark.parametrize("kind", FOLLOWED)
def test_vmap_equals_the_loop(kind: str) -> None:
    """Chosen for these modules in float32, and equal to the loop on other rows than those of the choice."""
    make, shape = FOLLOWED[kind]
    torch.manual_seed(3)
    model, plan = make(), plan_of()
    x, y = torch.randn(7, *shape), torch.randint(3, (7,))
    kept = x.clone()
    engine, params = gradients_of(model), parameters_of(model)
    engine.choose(params, chunks_of((torch.randn(5, *shape), y[:5]), 6)[0], context(plan))
    assert engine.name == "vmap over examples", engine.reason
    model.eval()
    chunk = chunks_of((x, y), 8)[0]
    fast, true = engine(params, chunk, PLAIN, context(plan)), gradients_of(model)(params, chunk, PLAIN, context(plan))
    for name, rows in true.rows().items():
        torch.testing.assert_close(fast.rows()[name], rows, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fast.norms(), true.norms(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fast.losses[:7], true.losses[:7], rtol=1e-4, atol=1e-5)
    assert torch.equal(x, kept)


def test_the_loop_takes_what_vmap_cannot_follow() -> None:
    """A branch on the data, a GRU: the loop serves, and the printed run says so and why."""
    torch.manual_seed(3)
    for model, shape in ((Branching(), (4,)), (Recurrent(nn.GRU), (5, 4))):
        data = torch.randn(40, *shape), torch.randint(3, (40,))
        plan = plan_of(steps=2)
        run = plan.start(model, torch.optim.SGD(model.parameters(), 0.1), loss=qg.losses.CrossEntropy(), seed=1)
        for batch in run.batches(data):
            run.step(batch)
        assert "the loop over examples" in str(run) and "vmap cannot follow the model" in str(run)


def test_a_vmap_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that gives other gradients than the loop is passed over, by name of the parameter."""
    from quietgrad.gradients import choose

    honest = choose.vectorised
    monkeypatch.setattr(choose, "vectorised", lambda *a: rows_from({n: 1.1 * r for n, r in honest(*a).rows().items()}))
    model, data = world("mlp", 6)
    engine = gradients_of(model)
    engine.choose(parameters_of(model), chunks_of(data, 6)[0], context(plan_of()))
    assert engine.engine is choose.loop and "differs from the loop at 0.weight" in engine.reason


def test_an_engine_that_could_not_be_compared_is_not_used() -> None:
    """Where every gradient is zero, or not finite, any engine equals the loop: then the loop serves."""
    model, (x, y) = world("mlp", 6)
    for spoiled in (x * math.nan, x):
        engine = gradients_of(model)
        chunk = chunks_of((spoiled, y), 6)[0]
        if spoiled is x:
            chunk.real[:] = False
        engine.choose(parameters_of(model), chunk, context(plan_of()))
        assert engine.name == "the loop over examples" and "nothing could be compared" in engine.reason


@pytest.mark.parametrize("kind", MODELS)
def test_a_row_is_autograds_gradient_of_its_example_alone(kind: str) -> None:
    """Dummies are zero, a tied parameter is there once and whole, a norm is at least the row's and hardly more."""
    model, (x, y) = world(kind, 5)
    rows = gradients_of(model)(parameters_of(model), chunks_of((x, y), 7)[0], PLAIN, context(plan_of()))
    assert rows.rows().keys() == parameters_of(model).keys()
    params = list(parameters_of(model).values())
    for i in range(5):
        alone = torch.autograd.grad(F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), params)
        for mine, theirs in zip(rows.rows().values(), alone, strict=True):
            torch.testing.assert_close(mine[i], theirs, rtol=0, atol=1e-13)
        size = sum(float(g.square().sum()) for g in alone) ** 0.5
        assert size <= float(rows.norms()[i]) <= size * (1 + 1e-12)
    assert float(rows.norms()[5:].abs().max()) == 0.0
    assert all(bool((r[5:] == 0).all()) for r in rows.rows().values())


def test_a_model_that_works_in_place_leaves_the_data_alone() -> None:
    """Neither the meeting nor the steps touch a tensor of the user's, in chunks of one row or several."""
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(40, 4, generator=g), torch.randint(3, (40,), generator=g)
    for size in (1, 4, 9):
        kept, model = x.clone(), InPlace()
        run = plan_of().start(
            model, torch.optim.SGD(model.parameters(), 0.1), loss=qg.losses.CrossEntropy(), seed=1, chunk=size
        )
        for batch in run.batches((x, y)):
            run.step(batch)
        assert torch.equal(x, kept)


def test_losses_of_the_users_own_serve_per_example() -> None:
    """torch's losses without reduction and a function of one's own give the rows that quietgrad's loss gives."""
    model, data = world("mlp", 6)
    chunk, params = chunks_of(data, 6)[0], parameters_of(model)
    meant = gradients_of(model)(params, chunk, PLAIN, context(plan_of())).rows()
    for loss in (nn.CrossEntropyLoss(reduction="none"), lambda o, t: F.cross_entropy(o, t, reduction="none")):
        own = qg.losses.Own.of(loss, "stated")
        for name, rows in gradients_of(model, own)(params, chunk, PLAIN, context(plan_of())).rows().items():
            torch.testing.assert_close(rows, meant[name], rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "loss",
    [nn.CrossEntropyLoss(), F.cross_entropy, lambda o, t: F.mse_loss(o, o.detach() * 0, reduction="none")],
    ids=["reduction in its name", "a mean", "a matrix"],
)
def test_a_loss_that_is_not_per_example_is_refused(loss: Callable[..., Tensor]) -> None:
    """With slot, finding and remedy, before any release."""
    model, data = world("mlp")
    with pytest.raises(qg.PrivacyError, match=r"^loss: .*; .*(reduction|sum)"):
        run = plan_of().start(model, torch.optim.SGD(model.parameters(), 0.1), loss=loss)
        run.batches(data)


def test_rows_of_low_precision_are_summed_in_float32_at_least() -> None:
    """bf16 and float16 rows become float32 before the bound; float64 stays."""
    for dtype, kept in ((torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64,) * 2):
        rows: Rows = rows_from({"w": torch.ones(3, 2, dtype=dtype)})
        assert rows.rows()["w"].dtype == kept
        assert rows.weighted_sum(torch.ones(3, dtype=torch.float64))["w"].dtype == torch.float64


def test_an_interrupt_inside_vmap_waits_for_its_end() -> None:
    """Ctrl-C between torch.func's own lines would break it; it comes right after, by the handler that was there."""
    model, data = world("mlp", 6)
    seen: list[int] = []

    class Interrupting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            signal.raise_signal(signal.SIGINT)
            seen.append(1)
            return inner(x)

    inner, outer = model, Interrupting()
    outer.inner = inner
    theirs = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it may be ignored
    chain = gradients_of(outer).chain
    try:
        with pytest.raises(KeyboardInterrupt):
            vectorised(chain, parameters_of(outer), chunks_of(data, 6)[0], PLAIN, context(plan_of()))
        assert seen == [1] and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, theirs)
    assert torch.empty(3).uniform_().shape == (3,)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_model_gets_its_parameters_back_whatever_happens(error: type[BaseException]) -> None:
    """An interrupt while parameters are swapped, before they are put back: the model holds its own again."""
    model, data = world("tied", 6)
    engine, params, own = gradients_of(model), parameters_of(model), dict(model.named_parameters())

    def dying(chain: nn.Module, *_: object) -> Rows:
        for module in chain.modules():
            for name, p in module._parameters.items():
                module._parameters[name] = None if p is None else p.detach().clone()  # type: ignore[assignment]
        raise error

    engine.engine = dying  # type: ignore[assignment]
    with pytest.raises(error):
        engine(params, chunks_of(data, 6)[0], PLAIN, context(plan_of()))
    assert all(p is own[name] for name, p in model.named_parameters())
    assert model.head.weight is model.embedding.weight
