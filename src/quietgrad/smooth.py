"""Smooth: under which public perturbations each example's gradient is taken and averaged, before the bound."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from quietgrad.stage import Stage
from quietgrad.stream import Stream
from quietgrad.values import Context, Tensors


class View(ABC):
    """One public perturbation: of the parameters, of one example, or of both."""

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
    gradient
    depends on that example alone, and the bound comes after."""

    slot: ClassVar[str] = "smooth"

    @abstractmethod
    def views(self, context: Context, stream: Stream) -> Sequence[View]:
        """The views over which the gradient of each example is averaged."""


@final
@dataclass(frozen=True)
class Plain(Smooth):
    """One view, as it is: DP-SGD."""

    @property
    def says(self) -> str:
        return "Plain: the gradient where the parameters are"

    def views(self, context: Context, stream: Stream) -> Sequence[View]:
        return (AsIs(),)
