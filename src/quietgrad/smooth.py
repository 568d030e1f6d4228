"""Smooth: under which public perturbations each example's gradient is taken, and how its views become one gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch.optim import Optimizer

from quietgrad.stage import Stage
from quietgrad.stream import Stream
from quietgrad.values import Context, Tensors


class View(ABC):
    """One public perturbation: of the parameters, of one example, or of both."""

    share: float = 1.0  # what its gradient is multiplied by before the views of an example are added

    @abstractmethod
    def __call__(self, parameters: Tensors, example: Any) -> tuple[Tensors, Any]:
        """What the model is run with in this view. It sees one example at a time."""


@final
class AsIs(View):
    """No perturbation."""

    def __call__(self, parameters: Tensors, example: Any) -> tuple[Tensors, Any]:
        return parameters, example


@dataclass(frozen=True)
class Smooth(Stage):
    """Abstract. **Guarantee**: views depend on public facts and fresh randomness only, so an example's averaged
    gradient depends on that example alone, and the bound comes after."""

    slot: ClassVar[str] = "smooth"

    @property
    @abstractmethod
    def count(self) -> int:
        """How many views there are."""

    @abstractmethod
    def views(self, context: Context, stream: Stream, parameters: Tensors) -> Sequence[View]:
        """The views of this step; an example's gradient is the sum of theirs, each times its share. What they draw
        comes from `Purpose.SMOOTH` of the stream; of the parameters they read names, shapes and places."""

    def admits(self, optimizer: Optimizer) -> None:
        """Refuses an optimizer under which the views would not be what they are said to be. Called at the start."""

    def tries(self, examples: Sequence[Any]) -> None:
        """Refuses what would mix examples, before any release: a few batches of one row. Seen by the curator only."""


@final
@dataclass(frozen=True)
class Plain(Smooth):
    """One view, as it is: DP-SGD."""

    @property
    def says(self) -> str:
        return "Plain: the gradient where the parameters are"

    @property
    def count(self) -> int:
        return 1

    def views(self, context: Context, stream: Stream, parameters: Tensors) -> Sequence[View]:
        return (AsIs(),)


@dataclass(frozen=True)
class Combine(Stage):
    """Abstract: how the gradients of an example's views become one. **Guarantee**: free, the bound comes after."""

    slot: ClassVar[str] = "smooth"

    @abstractmethod
    def share(self, count: int) -> float:
        """What each of `count` gradients is multiplied by before they are added."""


@final
@dataclass(frozen=True)
class MeanOfViews(Combine):
    """The mean: the paper's algorithm 2."""

    @property
    def says(self) -> str:
        return "mean"

    def share(self, count: int) -> float:
        return 1.0 / count


@final
@dataclass(frozen=True)
class SummedViews(Combine):
    """The sum, as the authors of DPLIS released it: the bound then clips a mean at radius / K, and what is left is
    multiplied by K. **Guarantee**: as for the mean, since the sum is taken before the bound. *Why*: to see what of a
    gain is smoothing, and what is a smaller clip with a longer step."""

    @property
    def says(self) -> str:
        return "sum"

    def share(self, count: int) -> float:
        return 1.0
