"""Sample: which examples take part in a step. Sees the number of rows; its draw is private.

The event that prices a step is the one of the sampler that drew it: a run accepts only batches its own sampler drew.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, log1p, sqrt
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor

from quietgrad import account
from quietgrad.errors import PrivacyError
from quietgrad.stage import Stage, counted, positive
from quietgrad.stream import Purpose, Stream

if TYPE_CHECKING:
    from dp_accounting import DpEvent


@dataclass(frozen=True)
class Sample(Stage):
    """Abstract. `examples` is a public number that the user states; the data may hold a few more or fewer."""

    slot: ClassVar[str] = "sample"
    adjacency: ClassVar[str] = "add-or-remove-one"

    assumes: ClassVar[tuple[str, ...]] = ()  # of the data, beside what every run assumes

    examples: int
    batch_size: int
    steps: int

    def __post_init__(self) -> None:
        counted(self.slot, "examples", self.examples)
        counted(self.slot, "batch_size", self.batch_size)
        counted(self.slot, "steps", self.steps)
        if self.batch_size > self.examples:
            raise PrivacyError(
                self.slot, f"batch_size {self.batch_size} exceeds examples {self.examples}", "take a smaller batch"
            )

    @property
    @abstractmethod
    def divisor(self) -> float:
        """The expected batch size, by which every noisy sum is divided: a public constant."""

    @abstractmethod
    def begin(self, stream: Stream, rows: int) -> Tensor | None:
        """What the sampler must remember of its own randomness (secret: it goes into the checkpoint), if anything."""

    @abstractmethod
    def draw(self, stream: Stream, step: int, rows: int, memory: Tensor | None) -> Tensor:
        """The rows of this step: int64, ascending, none twice."""

    @abstractmethod
    def compose(self, event: DpEvent, releases: int) -> DpEvent:
        """What the first `releases` releases cost together, if each costs `event` to those who take part."""

    @abstractmethod
    def epoch(self, step: int) -> int:
        """The public clock."""

    @abstractmethod
    def first_step(self, epoch: int) -> int:
        """The first step of an epoch, by the public clock."""


@final
@dataclass(frozen=True)
class Poisson(Sample):
    """Every example joins every step independently with probability q = batch_size / examples.

    A batch may be empty, and an empty batch is a noisy step like any other.

    **Guarantee**: each row is in the draw of a step with probability q, independently of rows and steps.
    **Caller's duty**: none. *Why*: amplification by sampling (Mironov et al. 2019; Koskela et al. 2020) is for this
    sampler.
    """

    @property
    def says(self) -> str:
        return f"Poisson: each of {self.examples:,} examples joins a step with probability {self.probability:.4g}"

    @property
    def probability(self) -> float:
        return self.batch_size / self.examples

    @property
    def divisor(self) -> float:
        return float(self.batch_size)

    def begin(self, stream: Stream, rows: int) -> None:
        return None

    def draw(self, stream: Stream, step: int, rows: int, memory: Tensor | None) -> Tensor:
        # The gap to the next member is geometric: floor(log U / log(1 - q)) rows are skipped.
        q = self.probability
        if q == 1.0:
            return torch.arange(rows)
        expected = rows * q
        ahead = int(expected + 6 * sqrt(expected) + 16)
        members: list[Tensor] = []
        last, drawn = -1.0, 0
        while last < rows:
            gaps = stream.uniforms(Purpose.SAMPLE, step, drawn, ahead).log_().div_(log1p(-q)).floor_().add_(1.0)
            gaps[0] += last
            members.append(gaps.cumsum_(0))
            last, drawn = float(gaps[-1]), drawn + ahead
        places = torch.cat(members) if len(members) > 1 else members[0]
        return places[: int(torch.searchsorted(places, float(rows)))].long()

    def compose(self, event: DpEvent, releases: int) -> DpEvent:
        return account.repeated(account.poisson(event, self.probability), releases)

    def epoch(self, step: int) -> int:
        return step * self.batch_size // self.examples

    def first_step(self, epoch: int) -> int:
        return ceil(Fraction(epoch * self.examples, self.batch_size))


@final
@dataclass(frozen=True)
class FixedOrder(Sample):
    """Every example is assigned once, independently of the others, to one of b = ceil(examples / batch_size) batches;
    the batches come in the same order in every epoch.

    **Guarantee**: an example takes part only at steps a, a + b, a + 2b, … of its own a, and no other example's a moves
    when it comes or goes. So the cost is that of ceil(steps / b) participations, without amplification.
    **Caller's duty**: the rows keep their order, over epochs and resumes. *Why*: what correlated noise needs (it
    admits no random sampling), and parallel composition.
    """

    assumes: ClassVar[tuple[str, ...]] = ("the rows of the data keep their order from the first batch to the last",)

    @property
    def says(self) -> str:
        return (
            f"FixedOrder: each of {self.examples:,} examples is in one of {self.batches:,} batches, the same each epoch"
        )

    @property
    def batches(self) -> int:
        """Batches in an epoch."""
        return ceil(Fraction(self.examples, self.batch_size))

    @property
    def divisor(self) -> float:
        return self.examples / self.batches

    def begin(self, stream: Stream, rows: int) -> Tensor:
        places = (
            stream.uniforms(Purpose.ORDER, 0, 0, rows).mul_(self.batches).ceil_().sub_(1.0)
        )  # uniforms are in (0, 1]
        return places.to(torch.int32)

    def draw(self, stream: Stream, step: int, rows: int, memory: Tensor | None) -> Tensor:
        if memory is None or len(memory) != rows:
            held = "none" if memory is None else f"one of {len(memory)} rows"
            raise PrivacyError(
                self.slot, f"the order covers {held}, the data has {rows}", "go on with the data the run began with"
            )
        return (memory == step % self.batches).nonzero().flatten()

    def compose(self, event: DpEvent, releases: int) -> DpEvent:
        return account.repeated(event, ceil(Fraction(releases, self.batches)))

    def epoch(self, step: int) -> int:
        return step // self.batches

    def first_step(self, epoch: int) -> int:
        return epoch * self.batches


def steps_of(examples: int, batch_size: int, epochs: float) -> int:
    """ceil(epochs * examples / batch_size), in exact arithmetic."""
    counted("sample", "examples", examples)
    counted("sample", "batch_size", batch_size)
    positive("sample", "epochs", epochs)
    return ceil(Fraction(epochs).limit_denominator(10**6) * examples / batch_size)
