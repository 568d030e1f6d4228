"""What every loss is, and the taps that it may ask for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from quietgrad.stage import Stage
from quietgrad.values import Context


class Tap(NamedTuple):
    """What one use of a linear layer or a convolution gave: private, and part of the loss's graph."""

    layer: str  # its public name
    output: Tensor


@dataclass(frozen=True)
class Loss(Stage):
    """Abstract. **Guarantee**: free, if the value of an example depends on that example alone (tested by
    `qg.check`)."""

    slot: ClassVar[str] = "loss"

    @property
    def tapped(self) -> bool:
        """Whether it asks for taps: one for each use of a linear layer or a convolution, in order."""
        return False

    @abstractmethod
    def __call__(
        self, outputs: Any, targets: Any, context: Context | None = None, taps: Sequence[Tap] | None = None
    ) -> Tensor:
        """(n,) values."""

    def admits(self, outputs: Any, targets: Any) -> None:
        """Refuses targets that cannot be right, before any release. Seen by the curator only."""

    def layers(self, taps: Sequence[Tap]) -> tuple[str, ...]:
        """The names of the layers that it reads; refuses a model in which there is none."""
        return ()

    def suits(self, last_epoch: int) -> None:
        """Refuses a plan whose public clock ends too early for it."""
