"""Each loss is its equation, one value per example, with gradients that hold where outputs are large."""

from __future__ import annotations

import math

import pytest
import torch
from tests.small import plan_of
from torch import Tensor
from torch.nn import functional as F

import quietgrad as qg
from quietgrad.losses import SAE, SSE, CrossEntropy, Focal, Huber, Labelled, Steady, Tailored
from quietgrad.values import Context

LOSSES: list[Labelled] = [
    CrossEntropy(), SSE(), SAE(), Huber(0.1), Huber(1.0), *(Focal(g) for g in (0, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0)),
]  # fmt: skip
named = pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.says.split(":")[0])
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def some(classes: int = 4, count: int = 6, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    outputs = scale * torch.randn(count, classes, generator=g, dtype=torch.float64)
    return outputs.requires_grad_(), torch.randint(classes, (count,), generator=g)


def by_hand(loss: Labelled, h: list[float], y: list[float]) -> float:
    """Equations 5, 6, 10 and 11."""
    if isinstance(loss, SSE):
        return sum((a - b) ** 2 for a, b in zip(h, y, strict=True)) / 2
    if isinstance(loss, SAE):
        return sum(abs(a - b) for a, b in zip(h, y, strict=True))
    if isinstance(loss, Huber):
        d, beta = [abs(a - b) for a, b in zip(h, y, strict=True)], loss.beta
        return sum(e**2 / (2 * beta) if e < beta else e - beta / 2 for e in d)
    p = [math.exp(a) / sum(math.exp(b) for b in h) for a in h]
    missed = sum((1 - b) * a for a, b in zip(p, y, strict=True))
    gamma = loss.gamma if isinstance(loss, Focal) else 0.0
    return -(missed**gamma) * sum(b * math.log(a) for a, b in zip(p, y, strict=True))


@named
@pytest.mark.parametrize("classes", [2, 4])
def test_values_are_the_equations(loss: Labelled, classes: int) -> None:
    """Of class numbers, of one-hot rows (the same to rounding), and of soft labels."""
    outputs, targets = some(classes)
    hard = F.one_hot(targets, classes).double()
    for given, labels in ((targets, hard), (targets.int(), hard), (hard, hard), (0.9 * hard + 0.1 / classes,) * 2):
        meant = [by_hand(loss, h, y) for h, y in zip(outputs.tolist(), labels.tolist(), strict=True)]
        torch.testing.assert_close(loss(outputs, given), torch.tensor(meant, dtype=torch.float64), rtol=1e-10, atol=0)


@named
def test_gradients_are_those_of_finite_differences(loss: Labelled) -> None:
    """In float64, to class numbers and to soft labels."""
    outputs, targets = some()
    soft = torch.softmax(outputs.detach().flip(0), -1)
    for given in (targets, soft):
        assert torch.autograd.gradcheck(lambda h, given=given: loss(h, given), (outputs,), atol=1e-6)


@named
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [50.0, 800.0, 30_000.0])
def test_large_outputs_have_finite_values_and_gradients(loss: Labelled, dtype: torch.dtype, size: float) -> None:
    """Where p is 1 to the last digit, and where it is 0: the raw gradient, before any row is masked."""
    outputs = torch.tensor([[size, -size, 0.0], [-size, size, size], [0.0, size, 0.0]], dtype=dtype, requires_grad=True)
    for targets in (torch.tensor([0, 0, 1]), torch.eye(3, dtype=dtype)[[0, 0, 1]]):
        values = loss(outputs, targets)
        (gradient,) = torch.autograd.grad(values.sum(), outputs)
        values = values.detach()
        assert values.dtype == torch.promote_types(dtype, torch.float32)
        assert bool(values.isfinite().all()) and bool(gradient.isfinite().all())
        if isinstance(loss, Focal):  # nothing is left to learn of the first
            assert float(values[0]) < 1e-20 and float(gradient[0].abs().max()) < 1e-20


def test_focal_sees_what_1_minus_p_would_round_away() -> None:
    """At p = 1 - 2e-22 the gradient is 1.5 (1 - p)^1.5 for gamma .5: found to that factor, neither 0 nor infinite."""
    outputs = torch.tensor([[50.0, 0.0]], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(Focal(0.5)(outputs, torch.tensor([0])).sum(), outputs)
    assert math.exp(-75.01) <= float(gradient[0, 1]) <= 1.5 * math.exp(-74.99)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_focal_0_is_cross_entropy(dtype: torch.dtype) -> None:
    """Bit for bit, and cross-entropy is torch's."""
    outputs, targets = some(10, 50)
    outputs = outputs.to(dtype)
    assert torch.equal(Focal(0)(outputs, targets), CrossEntropy()(outputs, targets))
    wide = outputs.to(torch.promote_types(dtype, torch.float32))
    torch.testing.assert_close(CrossEntropy()(outputs, targets), F.cross_entropy(wide, targets, reduction="none"))


ALL = [*LOSSES, Tailored(1, 3, 2, penalty=None), Tailored(1, 3, 2, penalty=None, alpha=0.3)]


@pytest.mark.parametrize("loss", ALL, ids=lambda loss: loss.says)
@pytest.mark.parametrize("wrong", [-1, 4, 255])
def test_a_class_out_of_range_is_an_example_without_a_gradient(loss: qg.losses.Loss, wrong: int) -> None:
    """Nothing raises, and the others are what they were."""
    outputs, targets = some()
    values = loss(outputs, torch.cat([targets[:-1], torch.tensor([wrong])]))
    (gradient,) = torch.autograd.grad(values.sum(), outputs)
    assert torch.equal(values[:-1], loss(outputs, targets)[:-1]) and bool(values[-1].isnan())
    assert bool((gradient[-1] == 0).all()) and bool((gradient[:-1] != 0).any())


@pytest.mark.parametrize("loss", ALL, ids=lambda loss: loss.says)
def test_a_vmap_of_rows_is_the_batch(loss: qg.losses.Loss) -> None:
    """One value per example, alone as in company."""
    outputs, targets = some()
    alone = torch.func.vmap(lambda h, y: loss(h[None], y[None])[0])(outputs, targets)
    torch.testing.assert_close(alone, loss(outputs, targets), rtol=1e-12, atol=0)


def at(epoch: int) -> Context:
    return Context(0, epoch, {}, 1.0, 1.0)


@pytest.mark.parametrize("epoch", [0, 3, 7, 12])
def test_tailored_is_equation_8_by_the_public_clock(epoch: int) -> None:
    """alpha = sigmoid(epoch - threshold): of the context's epoch, 0 where a call by hand has none."""
    outputs, targets = some()
    alpha = 1 / (1 + math.exp(7 - epoch))
    meant = alpha * Focal(5)(outputs, targets) + (1 - alpha) * SSE()(outputs, targets)
    loss = Tailored(7, 11, 5, penalty=None)
    torch.testing.assert_close(loss(outputs, targets, at(epoch)), meant, rtol=1e-12, atol=0)
    assert torch.equal(loss(outputs, targets), loss(outputs, targets, at(0)))
    assert loss.weight(at(10**6)) == 1.0 and Tailored(10.0**6, 1, 1).weight(at(0)) == 0.0


@pytest.mark.parametrize(("alpha", "same"), [(0.0, SSE()), (1.0, Focal(5))])
def test_alpha_0_and_1_are_sse_and_focal_bit_for_bit(alpha: float, same: Labelled) -> None:
    """Values and gradients, even where the other term would overflow."""
    for scale in (2.0, 1e200):
        outputs, targets = some(scale=scale)
        mine = Tailored(7, 11, 5, penalty=None, alpha=alpha)(outputs, targets, at(3))
        theirs = same(outputs, targets)
        assert torch.equal(mine, theirs)
        pair = (torch.autograd.grad(v.sum(), outputs)[0] for v in (mine, theirs))
        assert torch.equal(*pair)


def test_the_printed_plan_says_it() -> None:
    """In one line that fits."""
    plan = plan_of(steps=50).replace(loss=Tailored(7, 11, 5))
    said = "  loss     Tailored: a Focal(5) + (1 - a) SSE + (1 - a) / 11 R, a = sigmoid(epoch - 7)"
    assert said in str(plan)
    assert all(len(loss.says) <= 88 for loss in [*LOSSES, *qg.recipes.LOSING_LESS.values()])


BAD = {
    "gamma is -1": lambda: Focal(-1),
    "gamma is nan": lambda: Focal(math.nan),
    "gamma is inf": lambda: Tailored(1, 1, math.inf),
    "beta is 0": lambda: Huber(0),
    "beta is -3": lambda: Tailored(1, -3, 1),
    "threshold_epoch is nan": lambda: Tailored(math.nan, 1, 1),
    "threshold_epoch is inf": lambda: Tailored(math.inf, 1, 1),
    "threshold_epoch is '7'": lambda: Tailored("7", 1, 1),  # type: ignore[arg-type]
    "threshold_epoch 7 never comes: the plan's last epoch is 0": lambda: plan_of().replace(loss=Tailored(7, 1, 1)),
    "alpha is 1.5": lambda: Tailored(1, 1, 1, alpha=1.5),
    "penalty is 0.1": lambda: Tailored(1, 1, 1, penalty=0.1),  # type: ignore[arg-type]
    "layers is 0": lambda: Steady(0),
    "layers is ()": lambda: Steady(()),
    "layers is 'first'": lambda: Steady("first"),  # type: ignore[arg-type]
    "no preset is called 'imagenet'": lambda: qg.losing_less(plan_of(), "imagenet"),
    "none were passed": lambda: Tailored(1, 1, 1)(*some()),
    "subclasses the finished stage Tailored": lambda: type("Mine", (Tailored,), {}),
}


@pytest.mark.parametrize("found", BAD)
def test_bad_settings_are_refused(found: str) -> None:
    """By name, with a remedy."""
    with pytest.raises(qg.PrivacyError) as error:
        BAD[found]()
    assert found in str(error.value) and error.value.slot and error.value.remedy


@pytest.mark.parametrize("loss", [SSE(), Focal(2), SAE(), Huber(1.0), Tailored(1, 3, 2, alpha=0.5)], ids=str)
def test_labels_that_cannot_be_right_are_refused_before_any_release(loss: qg.losses.Loss) -> None:
    """As for CrossEntropy."""
    outputs, targets = some()
    loss.admits(outputs, targets)
    for wrong in (targets + 1, targets - 9, targets[:, None], outputs[:, :3]):
        with pytest.raises(qg.PrivacyError, match="loss: "):
            loss.admits(outputs, wrong)
