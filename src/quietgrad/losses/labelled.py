"""Losses between outputs (n, classes) and labels: class numbers (n,), or one number per class (n, classes).

A class number out of range counts as an example without a gradient: inside a step nothing raises. Half precision is
widened to float32 first, because the square of 300 is more than float16 holds.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

from quietgrad.errors import PrivacyError
from quietgrad.losses.loss import Loss, Tap
from quietgrad.stage import positive
from quietgrad.values import Context


@dataclass(frozen=True)
class Labelled(Loss):
    """Abstract."""

    @abstractmethod
    def distance(self, outputs: Tensor, targets: Tensor, labels: Tensor) -> Tensor:
        """(n,) values; `labels` (n, classes) are the targets as one number per class, `outputs` at least float32."""

    def __call__(
        self, outputs: Tensor, targets: Tensor, context: Context | None = None, taps: Sequence[Tap] | None = None
    ) -> Tensor:
        outputs = widened(outputs)
        if targets.is_floating_point():
            return self.distance(outputs, targets, targets)
        classes = outputs.shape[-1]
        labels = targets.unsqueeze(-1) == torch.arange(classes, device=outputs.device)
        known = (targets >= 0) & (targets < classes)
        return torch.where(known, self.distance(outputs, targets, labels.to(outputs.dtype)), torch.nan)

    def admits(self, outputs: Tensor, targets: Tensor) -> None:
        if not isinstance(outputs, Tensor) or outputs.ndim != 2:
            shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            found = f"{type(self).__name__} wants outputs (n, classes), the model gives {shape}"
            raise PrivacyError(self.slot, found, "reshape them")
        classes = outputs.shape[-1]
        if not isinstance(targets, Tensor):
            raise PrivacyError(self.slot, f"targets are a {type(targets).__name__}", "give one tensor of targets")
        if targets.is_floating_point():
            if targets.shape[1:] != outputs.shape[1:]:
                raise PrivacyError(
                    self.slot,
                    f"floating targets have shape {tuple(targets.shape)} beside outputs (n, {classes})",
                    "give class numbers (int64), or one probability per class",
                )
        elif targets.ndim != 1:
            raise PrivacyError(
                self.slot, f"class numbers have shape {tuple(targets.shape)}", "give one number per example, (n,)"
            )
        elif len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < classes:
            found = f"targets run from {int(targets.min())} to {int(targets.max())}, the model has {classes} outputs"
            raise PrivacyError(self.slot, found, f"number the classes 0 to {classes - 1}")


@final
@dataclass(frozen=True)
class CrossEntropy(Labelled):
    """-log softmax(outputs)[target]; targets are class numbers (n,) or probabilities (n, classes)."""

    @property
    def says(self) -> str:
        return "CrossEntropy"

    def distance(self, outputs: Tensor, targets: Tensor, labels: Tensor) -> Tensor:
        return entropy(outputs.log_softmax(-1), targets)


@final
@dataclass(frozen=True)
class Focal(Labelled):
    """(1 - p)^gamma * CrossEntropy, p the probability of the target: what is learned already counts less.

    Of soft targets y, 1 - p is the sum of (1 - y_d) p_d, which is the same for one class. It is taken as a logarithm,
    so that neither value nor gradient breaks where p is 1. Focal(0) is CrossEntropy.

    **Guarantee**: one value per example. **Caller's duty**: none. *Paper*: Lin et al. 2017; Losing Less, equation 6.
    """

    gamma: float

    def __post_init__(self) -> None:
        if self.gamma != 0:
            positive(self.slot, "gamma", self.gamma)

    @property
    def says(self) -> str:
        return f"Focal({self.gamma:g}): (1 - p)^{self.gamma:g} times the cross-entropy"

    def distance(self, outputs: Tensor, targets: Tensor, labels: Tensor) -> Tensor:
        logs = outputs.log_softmax(-1)
        if self.gamma == 0:
            return entropy(logs, targets)
        missed = (logs + (1 - labels).clamp(min=0).log()).logsumexp(-1)  # log(1 - p)
        return (self.gamma * missed).exp() * entropy(logs, targets)


@final
@dataclass(frozen=True)
class SSE(Labelled):
    """Half the squared distance of outputs and one-hot labels, summed over classes.

    **Guarantee**: one value per example. **Caller's duty**: none. *Paper*: Losing Less, equation 5.
    """

    @property
    def says(self) -> str:
        return "SSE: half the squared distance of outputs and one-hot labels"

    def distance(self, outputs: Tensor, targets: Tensor, labels: Tensor) -> Tensor:
        return (outputs - labels).square().sum(-1) / 2


@final
@dataclass(frozen=True)
class SAE(Labelled):
    """The distance of outputs and one-hot labels, summed over classes.

    **Guarantee**: one value per example. **Caller's duty**: none. *Paper*: Losing Less, equation 10.
    """

    @property
    def says(self) -> str:
        return "SAE: the absolute distance of outputs and one-hot labels"

    def distance(self, outputs: Tensor, targets: Tensor, labels: Tensor) -> Tensor:
        return (outputs - labels).abs().sum(-1)


@final
@dataclass(frozen=True)
class Huber(Labelled):
    """d^2 / (2 beta) for a distance d below beta, else d - beta / 2, summed over classes (torch's smooth_l1_loss).

    **Guarantee**: one value per example. **Caller's duty**: none. *Paper*: Losing Less, equation 11; beta .1 to 1.
    """

    beta: float

    def __post_init__(self) -> None:
        positive(self.slot, "beta", self.beta)

    @property
    def says(self) -> str:
        return f"Huber({self.beta:g}): squared within {self.beta:g} of the one-hot labels, absolute beyond"

    def distance(self, outputs: Tensor, targets: Tensor, labels: Tensor) -> Tensor:
        return F.smooth_l1_loss(outputs, labels.to(outputs.dtype), reduction="none", beta=self.beta).sum(-1)


def entropy(logs: Tensor, targets: Tensor) -> Tensor:
    """(n,) cross-entropies of log probabilities (n, classes)."""
    if targets.is_floating_point():
        return -(targets * logs).sum(-1)
    known = (targets >= 0) & (targets < logs.shape[-1])
    return -logs.gather(-1, torch.where(known, targets, 0).long().unsqueeze(-1)).squeeze(-1)


def widened(t: Tensor) -> Tensor:
    """At least float32."""
    return t.to(torch.promote_types(t.dtype, torch.float32))
