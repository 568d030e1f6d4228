"""The loss of Losing Less: easy examples first, then the hard ones, and small pre-activations throughout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from quietgrad.errors import PrivacyError
from quietgrad.losses.labelled import SSE, Focal, Labelled
from quietgrad.losses.loss import Loss, Tap
from quietgrad.losses.penalty import Fading, Penalty, a_penalty
from quietgrad.stage import positive
from quietgrad.values import Context


@final
@dataclass(frozen=True)
class Tailored(Loss):
    """alpha * Focal(gamma) + (1 - alpha) * SSE + penalty, alpha = sigmoid(epoch - threshold_epoch).

    The epoch is that of the public clock, the first is 0 (and what a call by hand, without a context, means).
    `alpha=` fixes it instead. The penalty's coefficient is its own (`Fading`: (1 - alpha) / beta); None is none.

    **Guarantee**: one value per example; alpha depends on the public clock alone. **Caller's duty**: none.
    *Paper*: Losing Less, equations 5 to 8. It wants bounded activations (tanh); `recipes.LOSING_LESS` has table 6.
    """

    threshold_epoch: float
    beta: float
    gamma: float
    penalty: Penalty | None = field(default_factory=Fading)
    alpha: float | None = None

    def __post_init__(self) -> None:
        epoch = self.threshold_epoch
        if isinstance(epoch, bool) or not isinstance(epoch, int | float) or not math.isfinite(epoch):
            found = f"threshold_epoch is {self.threshold_epoch!r}"
            raise PrivacyError(self.slot, found, "give the epoch at which focal loss and SSE weigh the same")
        positive(self.slot, "beta", self.beta)
        Focal(self.gamma)
        a_penalty(self.penalty)
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise PrivacyError(self.slot, f"alpha is {self.alpha!r}", "give a number from 0 to 1, or None: the clock")

    @property
    def says(self) -> str:
        term = "" if self.penalty is None else f" + {self.penalty.shown(self.beta)}"
        clock = f"sigmoid(epoch - {self.threshold_epoch:g})" if self.alpha is None else f"{self.alpha:g}"
        return f"Tailored: a Focal({self.gamma:g}) + (1 - a) SSE{term}, a = {clock}"

    @property
    def tapped(self) -> bool:
        return self.penalty is not None

    def weight(self, context: Context | None) -> float:
        """alpha: of public facts alone."""
        if self.alpha is not None:
            return self.alpha
        ahead = (context.epoch if context is not None else 0) - self.threshold_epoch
        return 1 / (1 + math.exp(-ahead)) if ahead > 0 else math.exp(ahead) / (1 + math.exp(ahead))

    def __call__(
        self, outputs: Tensor, targets: Tensor, context: Context | None = None, taps: Sequence[Tap] | None = None
    ) -> Tensor:
        alpha = self.weight(context)
        terms: list[tuple[float, Labelled]] = [(alpha, Focal(self.gamma)), (1 - alpha, SSE())]
        first, *rest = (w * loss(outputs, targets) for w, loss in terms if w)
        values = first + rest[0] if rest else first
        if self.penalty is None:
            return values
        if taps is None:
            found = "the penalty is on pre-activations, and none were passed"
            raise PrivacyError(self.slot, found, "train with start(loss=…), or leave it out (penalty=None)")
        total = self.penalty.coefficient(alpha, self.beta) * self.penalty.total(taps, len(values))
        return torch.where(values.isnan(), torch.nan, values + total)  # an unknown class has no penalty either

    def admits(self, outputs: Tensor, targets: Tensor) -> None:
        SSE().admits(outputs, targets)

    def layers(self, taps: Sequence[Tap]) -> tuple[str, ...]:
        return () if self.penalty is None else self.penalty.names(taps)

    def suits(self, last_epoch: int) -> None:
        if self.alpha is None and self.threshold_epoch > last_epoch:
            found = f"threshold_epoch {self.threshold_epoch:g} never comes: the plan's last epoch is {last_epoch}"
            raise PrivacyError(self.slot, found, "train longer, put it earlier, or fix alpha (alpha=0.0 is SSE)")
