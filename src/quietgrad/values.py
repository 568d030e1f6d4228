"""The four values of a private step, and what is known of each.

    PerExample  one gradient per example; nothing is known of its size; private
    Bounded     each example's share is within a stated Contribution; private
    Sum         one example more or less moves it by at most the Contribution; private
    Release     may be shown to anyone; carries what it cost

Each is made only where its claim is made true: a `Bound` makes Bounded, `Bounded.sum` makes Sum, a `Noise` makes
Release.
Optimizer and ledger take a Release and refuse the rest. Types stop accidents, not malice: the audit is for that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from quietgrad.errors import PrivacyError

if TYPE_CHECKING:
    from dp_accounting import DpEvent

Tensors = Mapping[str, Tensor]  # one tensor per trainable parameter, by its name


@dataclass(frozen=True)
class Context:
    """Where training stands: public numbers, and nothing else."""

    step: int  # releases so far, this one not counted
    epoch: int  # of the public clock
    learning_rates: Mapping[str, float]  # by parameter
    noise_scale: float  # standard deviation (or scale) of the noise on the sum
    divisor: float  # the expected batch size, a public constant


class Contribution(ABC):
    """How far the share of one example reaches. A noise states which contributions it can account for."""


@final
@dataclass(frozen=True)
class L2Ball(Contribution):
    """The share, over all parameters together, has an L2 norm of at most `radius`."""

    radius: float


class PerExample(ABC):
    """One gradient per example of a chunk: a promise, not a matrix.

    Dummy rows and rows that are not finite count as zero in every answer.
    """

    parameters: Tensors  # what the gradients are taken to: public names, shapes, dtypes
    losses: Tensor  # (n,) private
    real: Tensor  # (n,) bool, False for dummies; private

    @abstractmethod
    def norms(self) -> Tensor:
        """(n,) float64: at least the L2 norm of each example's gradient, as `weighted_sum` will use it."""

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """The sum over examples of weight times gradient: one float64 tensor per parameter."""

    @abstractmethod
    def rows(self) -> dict[str, Tensor]:
        """(n, *shape) per parameter, for a bound that must see each coordinate."""


class _Key:
    """Held by the one base class that may make a value."""


BOUND, NOISE = _Key(), _Key()
_SUM = _Key()


def _made_by(key: _Key, held: _Key, value: str, maker: str) -> None:
    if key is not held:
        raise PrivacyError(
            maker.lower(), f"a {value} was made outside a {maker}", f"let a {maker} make it from its input"
        )


@final
class Bounded:
    """Shares of examples, each within `contribution`. Made by a Bound; summed once."""

    def __init__(
        self, key: _Key, per_example: PerExample, contribution: Contribution, total: Callable[[], dict[str, Tensor]]
    ) -> None:
        _made_by(key, BOUND, "Bounded", "Bound")
        self.contribution, self._per_example = contribution, per_example
        self._total: Callable[[], dict[str, Tensor]] | None = total

    def sum(self) -> Sum:
        """The sum of the shares, in float64."""
        if self._total is None:
            raise PrivacyError("bound", "a Bounded was summed twice, so an example would count twice", "sum it once")
        total, self._total = self._total, None
        return Sum(_SUM, total(), self._per_example.parameters, self.contribution)


@final
class Sum:
    """A sum of shares: one example more or less moves it by at most `contribution`. Made by `Bounded.sum`.

    Sums over disjoint examples add to a Sum with the same contribution; each is used once.
    """

    def __init__(self, key: _Key, tensors: dict[str, Tensor], parameters: Tensors, contribution: Contribution) -> None:
        _made_by(key, _SUM, "Sum", "Bound")
        _alike("bound", "sum", tensors, parameters)
        self._tensors: dict[str, Tensor] | None = {name: t.double() for name, t in tensors.items()}
        self.parameters, self.contribution = parameters, contribution

    def spend(self) -> dict[str, Tensor]:
        """The tensors, once."""
        if self._tensors is None:
            raise PrivacyError("noise", "a Sum was used twice", "take a fresh sum for every release")
        tensors, self._tensors = self._tensors, None
        return tensors

    def __iadd__(self, other: Sum) -> Sum:
        if not isinstance(other, Sum) or other.contribution != self.contribution:
            raise PrivacyError(
                "bound", f"a Sum within {self.contribution} met {other!r}", "bound all chunks of a step alike"
            )
        mine, theirs = self.spend(), other.spend()
        for name, tensor in theirs.items():
            mine[name] += tensor
        self._tensors = mine
        return self

    def __repr__(self) -> str:
        return f"Sum({self.contribution}, private)"


@final
class Release:
    """What may be shown to anyone. Made by a Noise; carries its place among the releases, and its event if it has one.

    `event` is None where the price is not one release's own (correlated noise): then the place, in the plan's
    cumulative
    event, is the price.
    """

    def __init__(self, key: _Key, tensors: Tensors, step: int, event: DpEvent | None) -> None:
        _made_by(key, NOISE, "Release", "Noise")
        self.tensors, self.step, self.event = tensors, step, event

    def after(self, tensors: Tensors) -> Release:
        """The same release, post-processed: what is computed from releases and public facts alone costs nothing."""
        _alike("denoise", "filter's answer", tensors, self.tensors)
        return Release(NOISE, tensors, self.step, self.event)

    def __repr__(self) -> str:
        return f"Release(step {self.step}, {self.event})"


@final
class Nobody(PerExample):
    """The gradients of no examples: where the sum of every batch, an empty one too, begins."""

    def __init__(self, parameters: Tensors) -> None:
        self.parameters = parameters
        self.losses = torch.zeros(0)
        self.real = torch.zeros(0, dtype=torch.bool)

    def norms(self) -> Tensor:
        return torch.zeros(0, dtype=torch.float64)

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        return {n: torch.zeros(p.shape, dtype=torch.float64, device=p.device) for n, p in self.parameters.items()}

    def rows(self) -> dict[str, Tensor]:
        return {n: torch.zeros((0, *p.shape), dtype=p.dtype, device=p.device) for n, p in self.parameters.items()}


def _alike(slot: str, what: str, tensors: Tensors, parameters: Tensors) -> None:
    for name in parameters.keys() | tensors.keys():
        if name not in tensors or name not in parameters or tensors[name].shape != parameters[name].shape:
            found = f"the {what} has {_shape(tensors, name)} for {name}, not {_shape(parameters, name)}"
            raise PrivacyError(slot, found, "give one tensor for each parameter, of its shape: noise must cover it all")


def _shape(tensors: Tensors, name: str) -> str:
    return str(tuple(tensors[name].shape)) if name in tensors else "nothing"


def received(value: object, kind: type, slot: str) -> None:
    """Refuses a value that has not come as far as `kind`."""
    if not isinstance(value, kind):
        fix = {"noise": "give it a Sum", "bound": "give it the per-example gradients"}.get(slot, "give it a Release")
        raise PrivacyError(slot, f"was given {type(value).__name__}, which it must not see", fix)
