"""One example moves a sum by at most the radius, whatever it holds and however the batch is cut; a broken bound shows.

Everything is deterministic: no false alarms. What is compared is what `private_sum` gives, before the noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import quietgrad as qg
from quietgrad import audit
from quietgrad.gradients.rows import Rows
from quietgrad.values import Context, Contribution, L2Ball, PerExample

ROWS, CLASSES = 23, 5


def plan_of(radius: float, bound: type[qg.Bound] | None = None) -> qg.Plan:
    plan = qg.dp_sgd(examples=1000, batch_size=20, steps=10, clip=radius, noise_multiplier=1.0)
    return plan if bound is None else qg.Plan(plan.sample, bound(radius), plan.noise)


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, CLASSES))


def convolutions() -> nn.Module:
    torch.manual_seed(1)
    first, second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 8, 3)
    return nn.Sequential(first, nn.GroupNorm(2, 4), nn.ReLU(), second, nn.Flatten(), nn.Linear(128, CLASSES))


def words() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Embedding(30, 6), nn.Flatten(), nn.Linear(24, CLASSES))


def tied() -> nn.Module:
    """One weight, used twice."""
    torch.manual_seed(3)
    layer = nn.Linear(12, 12)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(12, CLASSES))


def of(kind: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A model and a batch."""
    draw = torch.Generator().manual_seed(4)
    targets = torch.randint(CLASSES, (ROWS,), generator=draw)
    flat = torch.randn(ROWS, 12, generator=draw)
    if kind == "convolutions":
        return convolutions(), (torch.randn(ROWS, 3, 8, 8, generator=draw), targets)
    if kind == "words":
        return words(), (torch.randint(30, (ROWS, 4), generator=draw), targets)
    if kind == "tied":
        return tied(), (flat, targets)
    if kind == "float64":
        return perceptron().double(), (flat.double(), targets)
    return perceptron(), (flat, targets)


@pytest.mark.parametrize("kind", ["perceptron", "convolutions", "words", "tied", "float64"])
@pytest.mark.parametrize("radius", [1e-3, 0.3, 50.0])
def test_the_clip_holds(kind: str, radius: float) -> None:
    """Where every gradient is clipped the radius is reached, to 1e-4; where none is, the sum moves by the gradient."""
    model, data = of(kind)
    before = [p.clone() for p in model.parameters()]
    found = audit.sensitivity(plan_of(radius), model, qg.losses.CrossEntropy(), data, examples=5, seed=0)
    assert found.passed, str(found)
    assert found.radius == radius
    assert found.rounding <= 4e-4 * radius
    assert found.largest >= (radius if radius < 1 else 0.1) * (1 - 1e-4)
    assert found.comparisons == 5 * (3 if kind == "words" else 6)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("chunk", [1, 4, ROWS, 64])
def test_chunks(chunk: int) -> None:
    """Chunks of one row, and one chunk that is mostly dummies."""
    model, data = of("perceptron")
    found = audit.sensitivity(plan_of(0.3), model, qg.losses.CrossEntropy(), data, examples=3, chunk=chunk, seed=0)
    assert 0.2999 <= found.largest <= 0.3 * (1 + 1e-4)
    assert found.passed


def test_without_a_seed_and_at_a_later_step() -> None:
    model, data = of("perceptron")
    found = audit.sensitivity(plan_of(0.3), model, qg.losses.CrossEntropy(), data, examples=2, step=7)
    assert found.passed
    assert "rounding may add" in str(found)


# Bounds that are broken on purpose: each claims an L2 ball of its radius


@dataclass(frozen=True)
class Twin(qg.Bound):
    """Abstract."""

    radius: float
    says: ClassVar[str] = "Twin"

    @property
    def contribution(self) -> Contribution:
        return L2Ball(self.radius)

    @property
    def reach(self) -> float:
        return self.radius


def norms(rows: dict[str, Tensor]) -> Tensor:
    return torch.stack([r.double().flatten(1).norm(dim=1) for r in rows.values()]).norm(dim=0)  # (n,)


def weighed(weights: Tensor, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: torch.einsum("i,i...->...", weights, r.double()) for n, r in rows.items()}


@dataclass(frozen=True)
class Unclipped(Twin):
    def total(self, per_example: PerExample, context: Context) -> Callable[[], dict[str, Tensor]]:
        return lambda: per_example.weighted_sum(torch.ones_like(per_example.norms()))


@dataclass(frozen=True)
class Twice(Twin):
    """Clips at 2 C, claims C."""

    def total(self, per_example: PerExample, context: Context) -> Callable[[], dict[str, Tensor]]:
        weights = (2 * self.radius / per_example.norms()).clamp(max=1.0)
        return lambda: per_example.weighted_sum(weights)


@dataclass(frozen=True)
class ClippedMean(Twin):
    """Clips the mean of a chunk, not each example: one example turns the direction of all."""

    def total(self, per_example: PerExample, context: Context) -> Callable[[], dict[str, Tensor]]:
        present = per_example.real.double()
        mean = weighed(present / present.sum().clamp(min=1), per_example.rows())
        norm = math.hypot(*(float(t.norm()) for t in mean.values()))
        scale = float(present.sum()) * min(1.0, self.radius / max(norm, 1e-300))
        return lambda: {n: t * scale for n, t in mean.items()}


@dataclass(frozen=True)
class ByLayer(Twin):
    """Clips each tensor to C, and claims C for all together."""

    def total(self, per_example: PerExample, context: Context) -> Callable[[], dict[str, Tensor]]:
        def layer(rows: Tensor) -> Tensor:
            return weighed((self.radius / norms({"": rows})).clamp(max=1.0), {"": rows})[""]

        return lambda: {n: layer(r) for n, r in per_example.rows().items()}


@dataclass(frozen=True)
class UseByUse(Twin):
    """What a clip does that takes half of a shared gradient for the norm of the whole."""

    def total(self, per_example: PerExample, context: Context) -> Callable[[], dict[str, Tensor]]:
        halves = {n: r / math.sqrt(2) for n, r in per_example.rows().items()}
        weights = (self.radius / norms(halves)).clamp(max=1.0)
        return lambda: per_example.weighted_sum(weights)


@dataclass(frozen=True)
class Pairs(Twin):
    """Micro-batches of two: the mean of two neighbours is clipped, so a removal shifts every later pair."""

    def total(self, per_example: PerExample, context: Context) -> Callable[[], dict[str, Tensor]]:
        rows = {n: r[: len(r) // 2 * 2].unflatten(0, (-1, 2)).mean(1) for n, r in per_example.rows().items()}
        return lambda: weighed((self.radius / norms(rows)).clamp(max=1.0), rows)


@dataclass(frozen=True)
class Realised(Twin):
    """Divides by the number of examples in the chunk, and multiplies by the expected one."""

    def total(self, per_example: PerExample, context: Context) -> Callable[[], dict[str, Tensor]]:
        weights = (self.radius / per_example.norms()).clamp(max=1.0)
        share = context.divisor / max(1, int(per_example.real.sum()))
        return lambda: per_example.weighted_sum(weights * share)


@dataclass(frozen=True)
class EmptyBatchSkipped(Twin):
    """Adds a constant wherever there is an example: the sum of the empty batch is told apart."""

    def total(self, per_example: PerExample, context: Context) -> Callable[[], dict[str, Tensor]]:
        weights = (self.radius / per_example.norms()).clamp(max=1.0)
        offset = float(per_example.real.any())
        return lambda: {n: t + offset for n, t in per_example.weighted_sum(weights).items()}


@pytest.mark.parametrize(
    "bound", [Unclipped, Twice, ClippedMean, ByLayer, UseByUse, Pairs, Realised, EmptyBatchSkipped]
)
def test_twins(bound: type[Twin]) -> None:
    model, data = of("perceptron")
    found = audit.sensitivity(plan_of(0.01, bound), model, qg.losses.CrossEntropy(), data, examples=6, seed=0)
    assert not found.passed, str(found)
    assert found.largest > 1.05 * found.radius
    assert "BROKEN" in str(found)


def test_twin_a_loss_that_mixes_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine gives a loss more than one example at a time, so what mixes them has nothing to mix; with an engine
    that takes the batch whole it shows: the removal of one example moves every gradient."""

    def mixing(outputs: Tensor, targets: Tensor) -> Tensor:
        centred = outputs - outputs.mean(0, keepdim=True)
        return nn.functional.cross_entropy(20 * centred + outputs, targets, reduction="none")

    @dataclass
    class Whole:
        """An engine that is none: gradients of a loss on the whole chunk."""

        chain: nn.Module
        stream: object

        def choose(self, *given: object) -> None:
            pass

        def __call__(self, parameters: dict[str, Tensor], chunk: audit.Chunk, views: object, context: Context) -> Rows:
            leaves = {n: p.detach().requires_grad_() for n, p in parameters.items()}
            kept = audit.tree_map(lambda t: t[chunk.real], chunk.tree)
            values = self.chain.values(leaves, kept, context)
            rows = {n: torch.zeros(len(chunk.real), *p.shape) for n, p in parameters.items()}
            for i, value in enumerate(values):
                for n, g in zip(
                    leaves, torch.autograd.grad(value, list(leaves.values()), retain_graph=True), strict=True
                ):
                    rows[n][i] = g
            return Rows(parameters, rows, values, chunk.real)

    model, data = of("words")
    assert audit.sensitivity(plan_of(1.0), model, mixing, data, examples=3, seed=0).passed
    monkeypatch.setattr(audit, "Gradients", Whole)
    assert audit.sensitivity(plan_of(1.0), model, qg.losses.CrossEntropy(), data, examples=3, seed=0).passed
    assert not audit.sensitivity(plan_of(1.0), model, mixing, data, examples=3, seed=0).passed


def test_twin_a_nan_that_poisons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are not finite count as zero; let through, one poisons the sum."""
    model, data = of("perceptron")
    made = Rows.__init__

    def unmasked(self: Rows, parameters: object, rows: dict[str, Tensor], losses: Tensor, real: Tensor) -> None:
        made(self, parameters, rows, losses, real)
        self.unmasked = rows

    monkeypatch.setattr(Rows, "__init__", unmasked)
    monkeypatch.setattr(Rows, "weighted_sum", lambda self, weights: weighed(weights, self.unmasked))
    found = audit.sensitivity(plan_of(0.3), model, qg.losses.CrossEntropy(), data, examples=2, seed=0)
    assert found.largest == math.inf
    assert "made" in found.worst
    assert not found.passed


def test_twin_squares_that_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Squared in float32, 1e25 is infinite: the weight is zero, which is sound, if useless. A clip that takes what
    overflowed for zero bounds nothing."""

    def overflowing(self: Rows) -> Tensor:
        squares = torch.stack([r.flatten(1).square().sum(1) for r in self.rows().values()]).sum(0)
        return torch.where(squares.isfinite(), squares, 0.0).double().sqrt()

    monkeypatch.setattr(Rows, "norms", overflowing)
    data = of("perceptron")[1]
    found = audit.sensitivity(plan_of(0.3), nn.Linear(12, CLASSES), qg.losses.CrossEntropy(), data, examples=2, seed=0)
    assert found.largest > 1e20
    assert "1e+25" in found.worst
