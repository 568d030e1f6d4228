"""Bound: how far one example may reach. The last stage that sees gradients of single examples."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from quietgrad.errors import PrivacyError
from quietgrad.stage import Stage, positive
from quietgrad.values import BOUND, Bounded, Context, Contribution, L2Ball, PerExample, received


@dataclass(frozen=True)
class Bound(Stage):
    """Abstract: makes Bounded out of PerExample, and states the contribution."""

    slot: ClassVar[str] = "bound"

    @property
    @abstractmethod
    def contribution(self) -> Contribution:
        """Within what the share of each example lies, whatever the example."""

    @property
    @abstractmethod
    def reach(self) -> float:
        """The radius that a noise multiplier is relative to."""

    @abstractmethod
    def total(self, per_example: PerExample, context: Context) -> Callable[[], dict[str, Tensor]]:
        """How the shares are summed, in float64: one tensor per parameter."""

    @final
    def __call__(self, per_example: PerExample, context: Context) -> Bounded:
        received(per_example, PerExample, self.slot)
        return Bounded(BOUND, per_example, self.contribution, self.total(per_example, context))


@final
@dataclass(frozen=True)
class Clip(Bound):
    """The share of an example is g * min(1, radius / |g|), |g| its L2 norm over all parameters together.

    **Guarantee**: every share is within an L2 ball of `radius`; a gradient that is not finite counts as zero.
    **Caller's duty**: none. *Why*: Abadi et al. 2016, equation 3 (norms are bounded from above, so rounding stays
    inside).
    """

    radius: float

    def __post_init__(self) -> None:
        positive(self.slot, "radius", self.radius)
        if not 1e-30 <= self.radius <= 1e30:
            raise PrivacyError(
                self.slot, f"radius is {self.radius:g}", "keep it within what float32 can sum: 1e-30 to 1e30"
            )

    @property
    def says(self) -> str:
        return f"Clip: each example's gradient, all parameters together, within an L2 ball of {self.radius:g}"

    @property
    def contribution(self) -> L2Ball:
        return L2Ball(self.radius)

    @property
    def reach(self) -> float:
        return self.radius

    def total(self, per_example: PerExample, context: Context) -> Callable[[], dict[str, Tensor]]:
        weights = (self.radius / per_example.norms()).clamp_(max=1.0)  # radius / 0 is infinite, so the weight is 1
        return lambda: per_example.weighted_sum(weights)
