"""Losing Less is its equations: a run with the tailored loss equals a plain loop, its penalty included."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.small import (
    Recorder,
    Recurrent,
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
from quietgrad import audit
from quietgrad.gradients.taps import Taps
from quietgrad.losses import SSE, Fading, Focal, Multiplied, Penalty, Steady, Tailored
from quietgrad.plan import Plan
from quietgrad.smooth import AsIs
from quietgrad.stream import Purpose, Stream

EXAMPLES = Path(__file__).parents[2] / "examples"
SGD = torch.optim.SGD
COEFFICIENTS: dict[type[Penalty], Callable[[float, float], float]] = {
    Fading: lambda alpha, beta: (1 - alpha) / beta,
    Steady: lambda alpha, beta: 1 / beta,
    Multiplied: lambda alpha, beta: beta,
}


def layers_by_hand(kind: str, model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output of each linear layer and convolution of the two models of the tests."""
    p = list(model.parameters())
    if kind == "mlp":
        h = x @ p[0].T + p[1]
        return [h, h.tanh() @ p[2].T + p[3]]
    h = F.conv2d(x, p[0], p[1])
    return [h, F.max_pool2d(h.relu(), 2).flatten(1) @ p[2].T + p[3]]


def loss_by_hand(loss: Tailored, kind: str, model: nn.Module, x: Tensor, y: Tensor, epoch: int) -> Tensor:
    """Equations 5 to 8, of one example."""
    *hidden, logits = layers_by_hand(kind, model, x)
    alpha = 1 / (1 + math.exp(loss.threshold_epoch - epoch))
    p = logits[0].softmax(0)[y[0]]
    focal = -((1 - p) ** loss.gamma) * p.log()
    sse = sum((logits[0, d] - (1.0 if d == int(y[0]) else 0.0)) ** 2 for d in range(logits.shape[1])) / 2
    penalty = sum((h**2).sum() / h.numel() / 2 for h in hidden)
    assert loss.penalty is not None
    return alpha * focal + (1 - alpha) * sse + COEFFICIENTS[type(loss.penalty)](alpha, loss.beta) * penalty


def run_by_hand(plan: Plan, kind: str, model: nn.Module, data: tuple[Tensor, Tensor], seed: int) -> list[bool]:
    """DP-SGD on that loss, with the same random numbers; says which examples were clipped."""
    stream, clipped, params = Stream(seed), [], list(model.parameters())
    lattice = 2.0 ** math.floor(math.log2(plan.noise_scale * 2.0**-16))
    for t in range(plan.steps):
        total = [torch.zeros_like(p) for p in params]
        for i in plan.sample.draw(stream, t, len(data[1]), None).tolist():
            x, y = data[0][i : i + 1], data[1][i : i + 1]
            epoch = t * plan.sample.batch_size // plan.sample.examples
            g = torch.autograd.grad(loss_by_hand(plan.loss, kind, model, x, y, epoch), params)
            size = math.sqrt(sum(float((e**2).sum()) for e in g))
            clipped.append(size > plan.bound.reach)
            total = [s + e * min(1.0, plan.bound.reach / size) for s, e in zip(total, g, strict=True)]
        at = 0
        with torch.no_grad():
            for p, s in zip(params, total, strict=True):
                noise = plan.noise_scale * stream.normals(Purpose.NOISE, t, at, p.numel()).view_as(p)
                p -= 0.5 * torch.round((s + noise) / lattice) * lattice / plan.sample.batch_size
                at += p.numel()
    return clipped


def middle_norm(model: nn.Module, data: tuple[Tensor, Tensor], loss: Tailored) -> float:
    engine = gradients_of(model, loss)
    rows = engine(parameters_of(model), chunks_of(data, 40)[0], (AsIs(),), context(plan_of()))
    return float(rows.norms().median())


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("penalty", COEFFICIENTS, ids=lambda c: c.__name__)
def test_a_run_is_losing_less_by_hand(kind: str, penalty: type[Penalty]) -> None:
    """In float64, over three epochs, in chunks of 3 and 40, with examples on both sides of the clip."""
    loss = Tailored(1, 1.5, 2, penalty())
    model, data = world(kind)
    plan = plan_of(steps=15, clip=middle_norm(model, data, loss), noise=0.5).replace(loss=loss)
    for chunk in (3, 40):
        model, other = world(kind)[0], world(kind)[0]
        run = plan.start(model, SGD(model.parameters(), 0.5), seed=3, chunk=chunk)
        for batch in run.batches(data):
            run.step(batch)
        assert run.gradients.name.startswith("vmap"), run.gradients.reason
        clipped = run_by_hand(plan, kind, other, data, 3)
        assert any(clipped) and not all(clipped)
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_loop_and_vmap_agree_and_chunks_change_nothing(kind: str) -> None:
    """The penalty's gradient is each example's own."""
    model, data = world(kind, 10)
    loss = Tailored(0, 0.1, 2)
    plan = plan_of().replace(loss=loss)
    sums = []
    for size, fast in ((10, False), (1, True), (3, True), (17, True)):
        engine = gradients_of(model, loss)
        if fast:
            engine.choose(parameters_of(model), chunks_of(data, size)[0], context(plan))
            assert engine.name.startswith("vmap"), engine.reason
        sums.append(sum_of(plan, model, data, size, engine).spend())
    for other in sums[1:]:
        for name, tensor in other.items():
            torch.testing.assert_close(tensor, sums[0][name], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("alpha", "same"), [(0.0, SSE()), (1.0, Focal(5))])
def test_alpha_0_and_1_without_penalty_train_as_sse_and_focal(alpha: float, same: qg.losses.Loss) -> None:
    """The weights of a seeded run, bit for bit; with gamma 0, those of cross-entropy, thus of DP-SGD."""

    def end(loss: qg.losses.Loss) -> Tensor:
        model, data = world("mlp", dtype=torch.float32)
        run = plan_of().start(model, SGD(model.parameters(), 0.5), loss=loss, seed=4)
        for batch in run.batches(data):
            run.step(batch)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(end(Tailored(0, 1, 5, penalty=None, alpha=alpha)), end(same))
    assert torch.equal(end(Tailored(0, 1, 0, penalty=None, alpha=1.0)), end(qg.losses.CrossEntropy()))


class Mixed(nn.Module):
    """Tokens in the second axis, a tied layer used twice, an addmm, a convolution with a computed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.twice, self.out = nn.Conv1d(2, 4, 3), nn.Linear(4, 4), nn.Linear(4, 3)
        self.free = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = F.conv1d(x, 2 * self.conv.weight).tanh().movedim(2, 0)  # (positions, n, 4)
        h = self.twice(self.twice(h).tanh()).tanh().mean(0)
        return self.out(torch.addmm(torch.zeros(4), h, self.free).tanh())


def test_taps_are_the_uses_in_order_by_name() -> None:
    """Gradients flow through them, and nothing is left behind in the model."""
    model = Mixed()
    with Taps(model) as taps:
        model(torch.randn(5, 2, 6))
    assert [tap.layer for tap in taps.seen] == ["conv1d", "twice", "twice", "free", "out"]
    assert [len(tap.output.shape) for tap in taps.seen] == [3, 3, 3, 2, 2]
    assert all(tap.output.requires_grad for tap in taps.seen)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def started(loss: Tailored, model: nn.Module, x: Tensor) -> qg.Run:
    run = plan_of().replace(loss=loss).start(model, Recorder(model.parameters()))
    run.batches((x, torch.randint(3, (40,), generator=torch.Generator().manual_seed(2))))
    return run


@pytest.mark.parametrize(
    ("layers", "names"),
    [(None, "conv1d, twice, twice, free"), (1, "conv1d"), (5, "conv1d, twice, twice, free, out"),
     (("twice",), "twice, twice"), (("free", "conv1d"), "conv1d, free")],
)  # fmt: skip
def test_the_layers_that_count_are_printed_and_can_be_named(layers: int | tuple[str, ...] | None, names: str) -> None:
    """All but the last use, a number of uses, or names; a model whose sequence comes first passes rule 4."""
    run = started(Tailored(0, 1, 2, Fading(layers)), Mixed(), torch.randn(40, 2, 6))
    assert f"\npenalty  on the outputs of {names}\n" in str(run)


X = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
HIDDEN = {
    "of which the model shows none": (Fading(), nn.Linear(4, 3), X),
    r"none \(linear or convolution: out\)": (Fading(), Recurrent(), torch.randn(40, 5, 4)),
    "on 3 layers, the model shows 0, 2": (Fading(3), mlp(), X),
    "on encoder, the model shows 0, 2": (Steady(("0", "encoder")), mlp(), X),
}


@pytest.mark.parametrize("found", HIDDEN)
def test_a_model_without_the_layers_is_refused_at_the_meeting(found: str) -> None:
    """Before any release."""
    penalty, model, x = HIDDEN[found]
    with pytest.raises(qg.PrivacyError, match=found):
        started(Tailored(0, 1, 2, penalty), model, x)


def test_a_forward_of_ones_own_has_no_taps() -> None:
    """Refused with the reason; without a penalty the plan's other loss is refused as ever."""
    model = mlp()
    plan = qg.losing_less(plan_of())
    with pytest.raises(qg.PrivacyError, match="forward= is the whole chain, so the pre-activations Tailored reads"):
        plan.start(model, Recorder(model.parameters()), forward=lambda m, b: m(b[0]).sum(1))


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_rule_4_passes_and_still_refuses(kind: str) -> None:
    """With taps as without; a model that mixes examples is refused beneath the tailored loss too."""
    model, (x, y) = world(kind)
    qg.check(model, (x, y), Tailored(0, 1, 2))
    qg.check(model, (x, F.one_hot(y, 3).double()), Tailored(0, 1, 2, Multiplied()))

    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    mixing = nn.Sequential(Centred(), model)
    with pytest.raises(qg.PrivacyError, match="Centred"):
        qg.check(mixing, (x, y), Tailored(0, 1, 2))
    with pytest.raises(qg.PrivacyError):
        plan = plan_of().replace(loss=Tailored(0, 1, 2))
        plan.start(mixing, Recorder(mixing.parameters())).batches((x, y))


def test_an_unknown_class_has_no_penalty_either() -> None:
    """Its gradient is zero, penalty and all; the others keep theirs."""
    model, (x, y) = world("mlp", 4)
    loss = Tailored(0, 0.1, 2)
    rows = [
        gradients_of(model, loss)(parameters_of(model), chunks_of((x, t), 4)[0], (AsIs(),), context(plan_of()))
        for t in (y, torch.cat([y[:3], torch.tensor([9])]))
    ]
    assert float(rows[1].norms()[3]) == 0.0 and float(rows[0].norms()[3]) > 0
    assert torch.equal(rows[0].norms()[:3], rows[1].norms()[:3])


def test_one_example_moves_the_sum_by_the_clip_at_most() -> None:
    """As without the loss: it comes before the bound."""
    model, data = world("mlp", 10)
    plan = plan_of(examples=10, batch_size=10).replace(loss=Tailored(0, 0.1, 2))
    assert audit.sensitivity(plan, model, plan.loss, data).passed


def test_presets_are_table_6_and_survive_json() -> None:
    """Threshold, beta and gamma of six; a plan reads back the same, its penalty's choices too."""
    found = {name: (t.threshold_epoch, t.beta, t.gamma) for name, t in qg.recipes.LOSING_LESS.items()}
    assert found == {
        "cifar10": (7, 11, 5), "fashion-mnist": (0, 1, 5), "mnist": (0, 1, 5),
        "cifar10-scatter": (2, 1, 2), "fashion-mnist-scatter": (2, 51, 2), "mnist-scatter": (2, 11, 10),
    }  # fmt: skip
    base = plan_of(steps=50)
    plans = [qg.losing_less(base, name) for name in found]
    for penalty in (None, Steady(2), Multiplied(("0", "2")), Fading()):
        plans.append(base.replace(loss=Tailored(2, 3, 4, penalty, alpha=0.5)))
    for plan in plans:
        assert Plan.from_json(plan.to_json()) == plan and plan.epsilon(1e-5) == base.epsilon(1e-5)
    assert json.loads(plans[-3].to_json())["loss"]["penalty"] == {"stage": "Steady", "layers": 2}


def test_the_example_is_base_with_one_changed_line() -> None:
    """The recipe, and nothing else."""
    base, mine = ((EXAMPLES / name).read_text().splitlines() for name in ("base.py", "losing_less.py"))
    assert len(base) == len(mine)
    assert [m for b, m in zip(base, mine, strict=True) if b != m] == [
        'run = qg.losing_less(plan, "mnist").start(model, optimizer)'
    ]
