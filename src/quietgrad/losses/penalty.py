"""The penalty of Losing Less on hidden layers, R, and three readings of its coefficient, which the text lost.

    R = sum over the hidden layers of mean(h^2) / 2        (equation 7)

h is the output of a linear layer or a convolution: the pre-activation, unless a normalisation comes between. The
last of them gives the logits and is left out. What torch fuses (recurrent cells, attention) is not seen.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from quietgrad.errors import PrivacyError
from quietgrad.losses.labelled import widened
from quietgrad.losses.loss import Tap
from quietgrad.stage import Stage, counted

BESIDE = "take a model with hidden layers, name them (layers=…), or leave the penalty out (penalty=None)"


@dataclass(frozen=True)
class Penalty(Stage):
    """Abstract. `layers` says which count: all but the last use (None), the first so many uses, or those of the
    layers of these names.

    **Guarantee**: one example's penalty is of that example's layers alone. **Caller's duty**: none.
    """

    slot: ClassVar[str] = "loss"

    layers: int | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.layers, int):
            counted(self.slot, "layers", self.layers)
        elif self.layers is not None:
            names = self.layers
            if not isinstance(names, tuple) or not names or not all(isinstance(name, str) for name in names):
                raise PrivacyError(self.slot, f"layers is {names!r}", "give a number of layers, or a tuple of names")

    @abstractmethod
    def coefficient(self, alpha: float, beta: float) -> float:
        """What R is multiplied by."""

    @abstractmethod
    def shown(self, beta: float) -> str:
        """The term, for the printed plan."""

    @property
    def says(self) -> str:
        return self.shown(1.0)

    def picked(self, taps: Sequence[Tap]) -> list[Tap]:
        """The taps that count."""
        if isinstance(self.layers, tuple):
            return [tap for tap in taps if tap.layer in self.layers]
        return list(taps[: len(taps) - 1 if self.layers is None else self.layers])

    def names(self, taps: Sequence[Tap]) -> tuple[str, ...]:
        """The names of the layers that count; refuses a model without them."""
        there = ", ".join(tap.layer for tap in taps) or "none"
        picked = tuple(tap.layer for tap in self.picked(taps))
        if not picked:
            found = f"the penalty is on hidden layers, of which the model shows none (linear or convolution: {there})"
            raise PrivacyError(self.slot, found, BESIDE)
        lacks = set(self.layers) - set(picked) if isinstance(self.layers, tuple) else set()
        if lacks or (isinstance(self.layers, int) and len(picked) < self.layers):
            wanted = ", ".join(sorted(lacks)) or f"{self.layers} layers"
            raise PrivacyError(self.slot, f"the penalty is on {wanted}, the model shows {there}", "name those it shows")
        return picked

    def total(self, taps: Sequence[Tap], count: int) -> Tensor | float:
        """(count,) values of R."""
        return sum(halves(tap.output, count) for tap in self.picked(taps))


@final
@dataclass(frozen=True)
class Fading(Penalty):
    """(1 - alpha) / beta * R: it goes as the focal loss comes. The default, because the one independent
    implementation reads the paper so."""

    def coefficient(self, alpha: float, beta: float) -> float:
        return (1 - alpha) / beta

    def shown(self, beta: float) -> str:
        return f"(1 - a) / {beta:g} R"


@final
@dataclass(frozen=True)
class Steady(Penalty):
    """R / beta: the same in every epoch."""

    def coefficient(self, alpha: float, beta: float) -> float:
        return 1 / beta

    def shown(self, beta: float) -> str:
        return f"1 / {beta:g} R"


@final
@dataclass(frozen=True)
class Multiplied(Penalty):
    """beta * R: beta as a factor, as equation 8 may have had it."""

    def coefficient(self, alpha: float, beta: float) -> float:
        return beta

    def shown(self, beta: float) -> str:
        return f"{beta:g} R"


def a_penalty(given: object) -> None:
    """Refuses what is neither a penalty nor None."""
    if given is not None and not isinstance(given, Penalty):
        raise PrivacyError("loss", f"penalty is {given!r}", "give losses.Fading(), Steady(), Multiplied() or None")


def halves(output: Tensor, count: int) -> Tensor:
    """(count,) half the mean square over what belongs to each example: the first axis is theirs, alone or with
    others folded into it, or the second where a sequence comes first. An engine asks with one example."""
    if output.ndim > 2 and output.shape[0] != count and output.shape[1] == count:
        output = output.movedim(1, 0)
    square = widened(output).square()
    if square.shape[0] % count:
        return square.mean().expand(count) / 2
    return square.reshape(count, -1).mean(1) / 2
