"""Audit: attacks on the private step itself, from `private_sum` to the last filter.

`one_step` asks whether a release tells more than its price says; `sensitivity` whether an example moves a sum further
than its bound says. A pass proves nothing; a failure shows that the guarantee is broken.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quietgrad import account
from quietgrad.batches import Chunk, Source, leaves, tree_map
from quietgrad.errors import PrivacyError
from quietgrad.gradients import Chain, Gradients
from quietgrad.gradients.choose import still
from quietgrad.plan import Plan
from quietgrad.smooth import View
from quietgrad.stage import counted
from quietgrad.step import States, private_sum, release
from quietgrad.stream import Stream
from quietgrad.values import Context, PerExample, Release, Tensors
from quietgrad.watch import unwatched

Floats = NDArray[np.float64]

HUGE = 1e30  # a canary's gradient: any clip brings it to the radius
PILOT = 20  # one canary in so many is known to the attacker, who takes aim with it
MOST_CELLS = 2**24  # of rows that are formed
ROUNDED = 64  # units of an example's own precision by which its gradient may follow its place in a chunk
MARGINS = np.arange(0.02, 8.0, 0.02)  # thresholds that are considered, in spreads
QUANTILES = torch.tensor([0.158655, 0.5, 0.841345], dtype=torch.float64)  # of a normal law: one spread apart
ODD = (math.nan, math.inf, 1e25)  # what an example may be made of


@final
@dataclass(frozen=True)
class Audit:
    """What one attack found: epsilon is at least `lower`, with this confidence; `upper` is what was certified."""

    lower: float
    upper: float
    confidence: float
    delta: float
    canaries: int  # that were scored
    right: int  # true guesses, "in" or "out": the true positives of both directions
    wrong: int  # false ones: the false positives
    thresholds: tuple[float, ...]  # by tensor: how far from the middle a guess is made, in radii

    @property
    def passed(self) -> bool:
        """Whether the attack stayed within the certified figure."""
        return self.lower <= self.upper

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "BROKEN, it tells more than its price says"
        return (
            f"one release: epsilon >= {self.lower:.3f} at {self.confidence:.0%} confidence, certified <= "
            f"{account.up(self.upper)}, delta {self.delta:g} ({self.right:,} guesses right and {self.wrong:,} wrong "
            f"on {self.canaries:,} canaries): {verdict}"
        )


@final
class Diagonal(PerExample):
    """Canaries: the gradient of example i is HUGE in coordinate i of all parameters laid end to end, zero elsewhere."""

    def __init__(self, parameters: Tensors, chunk: Chunk) -> None:
        self.parameters, self.real, self.places = parameters, chunk.real, chunk.tree
        self.losses = torch.zeros(len(self.places))

    def norms(self) -> Tensor:
        return self.real.double() * (HUGE * (1 + 2.0**-50))

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        flat = torch.zeros(_width(self.parameters), dtype=torch.float64)
        return self._cut(flat.index_add_(0, self.places, torch.where(self.real, weights * HUGE, 0.0)))

    def rows(self) -> dict[str, Tensor]:
        count, width = len(self.places), _width(self.parameters)
        if count * width > MOST_CELLS:
            found = f"this bound wants {count:,} rows of {width:,} coordinates"
            raise PrivacyError("audit", found, "use fewer canaries, or smaller chunks")
        flat = torch.zeros((count, width), dtype=torch.float64)
        flat[torch.arange(count), self.places] = self.real.double() * HUGE
        return self._cut(flat)

    def _cut(self, flat: Tensor) -> dict[str, Tensor]:
        pieces = flat.split([p.numel() for p in self.parameters.values()], dim=-1)
        return {
            n: t.view(*flat.shape[:-1], *p.shape) for (n, p), t in zip(self.parameters.items(), pieces, strict=True)
        }


def one_step(
    plan: Plan,
    *,
    canaries: int = 1_000_000,
    delta: float = 1e-5,
    confidence: float = 0.95,
    tensors: int = 1,
    chunk: int | None = None,
    step: int = 0,
    seed: int | None = None,
) -> Audit:
    """Attacks one release that every example is in, by the step that training runs: see `guesses` and `lower_bound`.

    Each canary has a coordinate to itself and is in the batch by the toss of a coin. The attacker sees what comes out
    of the plan's denoiser, coordinate by coordinate. `tensors` and `chunk` say how canaries are cut into parameters and
    chunks (of a third of the batch, if not said), `step` where in the plan it is, as after a resume.
    """
    counted("audit", "canaries", canaries)
    counted("audit", "tensors", tensors)
    if canaries < 100 * tensors:
        raise PrivacyError("audit", f"{canaries} canaries in {tensors} tensors", "take at least 100 for each")
    cost = plan.noise.cost(step)  # correlated noise has none, and begins afresh: that is its first release
    event = plan.noise.account(plan.sample, 1) if cost is None else cost
    upper = account.price(event, delta, plan.adjacency).epsilon
    coins = torch.Generator().manual_seed(secrets.randbits(63) if seed is None else seed)
    inside = torch.randint(2, (canaries,), generator=coins, dtype=torch.uint8).bool()
    parts = inside.tensor_split(tensors)
    for part in parts:
        part[::PILOT] = torch.arange(len(part[::PILOT])) % 2 == 0
    parameters = {f"canaries.{k}": torch.zeros(()).expand(len(part)) for k, part in enumerate(parts)}
    seen = attacked(plan, parameters, inside, chunk, step, Stream(seed)).tensors
    found = [guesses(seen[n], part, canaries, delta, confidence) for n, part in zip(parameters, parts, strict=True)]
    rights, guessed, scored, margins = (tuple(column) for column in zip(*found, strict=True))
    lower = lower_bound(sum(rights), guessed, scored, delta, confidence)
    thresholds = tuple(m * plan.sample.divisor / plan.bound.reach for m in margins)
    wrong = sum(guessed) - sum(rights)
    return Audit(lower, upper, confidence, delta, sum(scored), sum(rights), wrong, thresholds)


def attacked(plan: Plan, parameters: Tensors, inside: Tensor, chunk: int | None, step: int, stream: Stream) -> Release:
    """What the private step releases of the canaries that are `inside`."""
    rows = inside.nonzero().flatten()
    source = Source(torch.arange(len(inside)), None, 0)
    chunks = next(source.read(iter([rows]), chunk or max(1, math.ceil(len(rows) / 3)), rows.device))
    context = _context(plan, parameters, step)
    states = States(plan.noise.begin(step), plan.denoise.begin(parameters))
    total = private_sum(plan, _diagonal, parameters, chunks, context, stream, unwatched)
    return release(plan, total, states, context, stream)


def guesses(
    seen: Tensor, inside: Tensor, canaries: int, delta: float, confidence: float
) -> tuple[int, int, int, float]:
    """Guesses on one released tensor: how many are right, how many were made, of how many, and the threshold.

    A canary that lies above the middle by the threshold is called in, one below by as much out, the rest stay open.
    Both are fixed before a scored canary is looked at: a twentieth of the canaries, whose coins the attacker knows,
    shows shift and spread; the threshold is the one that promises the largest bound if the noise is Gaussian. (One
    that trusted the claimed noise scale would be out of reach, and find nothing, where less noise is drawn.)
    """
    from scipy.special import ndtr

    flat, known = seen.detach().flatten().cpu().double(), inside[::PILOT]
    out, in_ = (torch.quantile(flat[::PILOT][side][: 2**24], QUANTILES) for side in (~known, known))
    middle, shift = float(out[1] + in_[1]) / 2, float(in_[1] - out[1])
    spread = max(float(out[2] - out[0] + in_[2] - in_[0]) / 4, abs(shift) / 100, 1e-300)
    hit, miss = canaries * ndtr(shift / spread / 2 - MARGINS), canaries * ndtr(-shift / spread / 2 - MARGINS)
    promised = _bounds(hit, (hit + miss)[None], np.array([[float(canaries)]]), delta, confidence)
    margin = spread * float(MARGINS[int(np.argmax(promised))])
    called_in, called_out = flat >= middle + margin, flat <= middle - margin
    called_in[::PILOT] = called_out[::PILOT] = False
    right = int((called_in & inside).sum()) + int((called_out & ~inside).sum())
    return right, int(called_in.sum()) + int(called_out.sum()), len(flat) - len(known), margin


def lower_bound(
    right: int, guessed: Sequence[int], canaries: Sequence[int], delta: float, confidence: float = 0.95
) -> float:
    """The largest epsilon at which TPR - e^eps FPR <= delta, one test of both directions together, is rejected.

    Let p be the chance that a canary is guessed at all, one for each tensor (`guessed` of its `canaries`). Under (eps,
    delta) a guess that was made is right with a chance of at most (e^eps + delta / p) / (1 + e^eps), independently, so
    the number of right ones is in its tail at most binomial (Hoeffding 1956): tested exactly, given the guesses made.
    p is taken at its exact (Clopper-Pearson) lower bound, at a fiftieth of the error that is allowed.
    """
    made, of = np.array([guessed], dtype=np.float64).T, np.array([canaries], dtype=np.float64).T
    return float(_bounds(np.array([float(right)]), made, of, delta, confidence)[0]) if sum(guessed) else 0.0


def _bounds(right: Floats, guessed: Floats, canaries: Floats, delta: float, confidence: float) -> Floats:
    """`lower_bound` of many outcomes: right (m,), guessed (tensors, m), canaries (tensors, 1)."""
    error, total = 1 - confidence, np.maximum(guessed.sum(0), 1e-300)
    rate = _at_least(guessed, canaries, error / 50 / len(guessed))
    free = delta * np.divide(guessed, rate, out=np.zeros_like(rate), where=rate > 0).sum(0)  # right guesses for nothing
    share = _at_least(right, total, error * 49 / 50)
    return np.asarray(np.log(np.maximum((share - free / total) / (1 - share), 1.0)))


def _at_least(successes: Floats, trials: Floats, error: float) -> Floats:
    """The lower Clopper-Pearson bound of a proportion."""
    from scipy.special import betaincinv

    some = np.maximum(successes, 1e-9)
    return np.where(successes > 0, betaincinv(some, np.maximum(trials - some, 0.0) + 1, error), 0.0)


@final
@dataclass(frozen=True)
class Sensitivity:
    """How far one example moved a sum at the most, beside how far it may."""

    largest: float
    radius: float  # what the noise is scaled to
    rounding: float  # what the rounding of the others' float32 sum may add
    worst: str  # where the largest was found
    comparisons: int

    @property
    def passed(self) -> bool:
        """Whether no example moved a sum further than it may."""
        return self.largest <= self.radius + self.rounding

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "BROKEN, the noise is too small for it"
        return (
            f"one example moved a sum by {self.largest:.6g} ({self.worst}; the most in {self.comparisons} comparisons)"
            f", the bound is {self.radius:g}, rounding may add {self.rounding:.1g}: {verdict}"
        )


def sensitivity(
    plan: Plan,
    model: nn.Module,
    loss: Callable[..., Tensor] | None,
    data: Any,
    *,
    examples: int = 8,
    chunk: int | None = None,
    step: int = 0,
    seed: int | None = None,
) -> Sensitivity:
    """Compares the sums of batches that differ in one example: `data` whole and without it, in equal chunks and others.

    Also with its numbers made NaN, infinite or 1e25, and alone, so that its batch becomes empty. All else is equal: the
    same random numbers, and dropout is off (a mask belongs to a place in the batch).
    """
    plan, source = plan.with_loss(loss=loss), Source(data, None, 0)
    assert plan.loss is not None
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    count, device = len(source), next(iter(parameters.values())).device
    floats = any(t.is_floating_point() for t in leaves(source.first(1)))
    spoilt = Source(tree_map(_spoilt, source.first(count)), None, 0)  # row i + k count is row i, made of ODD[k - 1]
    stream, context = Stream(seed), _context(plan, parameters, step)
    gradients = Gradients(Chain(model, plan.loss), stream)
    size = chunk or math.ceil(count / 3)

    def chunked(rows: Tensor, size: int) -> list[Chunk]:
        return next(spoilt.read(iter([rows]), size, device))

    def total(rows: Tensor, size: int) -> dict[str, Tensor]:
        with still(gradients.chain):
            chunks = chunked(rows, size)
            return private_sum(plan, gradients, parameters, chunks, context, stream, unwatched).spend()

    def pairs() -> Iterator[tuple[str, dict[str, Tensor], dict[str, Tensor]]]:
        every = torch.arange(count)
        whole, empty = total(every, size), total(every[:0], size)
        for row in sorted({round(x) for x in np.linspace(0, count - 1, min(examples, count))}):
            others, alone = every[every != row], every[row : row + 1]
            rest = total(others, size)
            yield f"row {row} removed", whole, rest
            yield f"row {row} removed, other chunks", whole, total(others, max(1, size // 2))
            yield f"row {row} alone", total(alone, size), empty
            for k, value in enumerate(ODD if floats else (), 1):
                yield f"row {row} made {value:g}", total(every + k * count * (every == row), size), rest

    gradients.choose(parameters, chunked(torch.arange(min(size, count)), size)[0], context)
    largest, worst, comparisons = 0.0, "none moved", 0
    for where, one, other in pairs():
        comparisons += 1
        if (moved := _distance(one, other)) > largest:
            largest, worst = moved, where
    unit = max(torch.finfo(torch.promote_types(p.dtype, torch.float32)).eps / 2 for p in parameters.values())
    reach = plan.bound.reach
    return Sensitivity(largest, reach, reach * 2 * count * ROUNDED * unit, worst, comparisons)


def _spoilt(t: Tensor) -> Tensor:
    return torch.cat([t, *(torch.full_like(t, v) if t.is_floating_point() else t for v in ODD)])


def _distance(one: Tensors, other: Tensors) -> float:
    """The L2 distance over all parameters together; infinite where it is not a number."""
    distance = math.hypot(*(float((one[name] - other[name]).norm()) for name in one))
    return math.inf if math.isnan(distance) else distance


def _context(plan: Plan, parameters: Tensors, step: int) -> Context:
    rates = dict.fromkeys(parameters, 1.0)
    return Context(step, plan.sample.epoch(step), rates, plan.noise_scale, plan.sample.divisor)


def _diagonal(parameters: Tensors, chunk: Chunk, views: Sequence[View], context: Context) -> PerExample:
    return Diagonal(parameters, chunk)


def _width(parameters: Tensors) -> int:
    return sum(p.numel() for p in parameters.values())
