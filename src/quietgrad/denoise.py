"""Denoise: what happens to a release before the optimizer. It sees releases, public facts, its own past: all free."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from quietgrad.noise import NOTHING, State
from quietgrad.stage import Stage
from quietgrad.values import Context, Release, Tensors, received


@dataclass(frozen=True)
class Denoise(Stage):
    """Abstract. **Guarantee**: post-processing of releases, so it costs nothing; its state may be kept over a
    resume."""

    slot: ClassVar[str] = "denoise"

    @abstractmethod
    def begin(self, parameters: Tensors) -> State:
        """The state before the first release."""

    @abstractmethod
    def filter(self, released: Tensors, state: State, context: Context) -> tuple[Mapping[str, Tensor], State]:
        """Better tensors, and the state after them."""

    def probe(self, parameters: Tensors, state: State, context: Context) -> tuple[Tensors, State]:
        """Where the next gradient is taken, and the state after: where the parameters are, or at a point that iterates
        and earlier releases give, which are public."""
        return parameters, state

    @final
    def __call__(self, release: Release, state: State, context: Context) -> tuple[Release, State]:
        received(release, Release, self.slot)
        tensors, state = self.filter(release.tensors, state, context)
        return release.after(tensors), state


@final
@dataclass(frozen=True)
class Keep(Denoise):
    """The release as it is: DP-SGD."""

    @property
    def says(self) -> str:
        return "Keep: the release as it is"

    def begin(self, parameters: Tensors) -> State:
        return NOTHING

    def filter(self, released: Tensors, state: State, context: Context) -> tuple[Tensors, State]:
        return released, state
