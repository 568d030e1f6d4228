"""Losses: one value per example. A loss may ask for the public Context; it never sees another example."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from quietgrad.errors import PrivacyError
from quietgrad.stage import Stage, digest, qualified
from quietgrad.values import Context


@dataclass(frozen=True)
class Loss(Stage):
    """Abstract. **Guarantee**: free, if the value of an example depends on that example alone (tested by
    `qg.check`)."""

    slot: ClassVar[str] = "loss"

    @abstractmethod
    def __call__(self, outputs: Any, targets: Any, context: Context | None = None) -> Tensor:
        """(n,) values."""

    def admits(self, outputs: Any, targets: Any) -> None:
        """Refuses targets that cannot be right, before any release. Seen by the curator only."""


@final
@dataclass(frozen=True)
class CrossEntropy(Loss):
    """-log softmax(outputs)[target]; targets are class numbers (n,) or probabilities (n, classes).

    A class number out of range counts as an example without a gradient: inside a step nothing raises.
    """

    @property
    def says(self) -> str:
        return "CrossEntropy"

    def __call__(self, outputs: Tensor, targets: Tensor, context: Context | None = None) -> Tensor:
        logs = outputs.log_softmax(-1)  # (n, classes)
        if targets.is_floating_point():
            return -(targets * logs).sum(-1)
        known = (targets >= 0) & (targets < outputs.shape[-1])
        picked = logs.gather(-1, torch.where(known, targets, 0).long().unsqueeze(-1)).squeeze(-1)
        return torch.where(known, -picked, torch.nan)

    def admits(self, outputs: Tensor, targets: Tensor) -> None:
        if not isinstance(outputs, Tensor) or outputs.ndim != 2:
            shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise PrivacyError(
                self.slot, f"CrossEntropy wants outputs (n, classes), the model gives {shape}", "reshape them"
            )
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
class Own(Loss):
    """A loss of the user's: any callable from (outputs, targets) to one value per example, known by name and digest."""

    name: str
    digest: str
    call: Callable[[Any, Any], Tensor] | None = field(default=None, repr=False, compare=False)

    @property
    def says(self) -> str:
        return f"{self.name} (the user's; {self.digest[:12]})"

    @classmethod
    def of(cls, call: Callable[..., Tensor], stated: str | None = None) -> Own:
        """Names a callable; one that averages over the batch is refused."""
        reduction = getattr(call, "reduction", "none")
        if reduction != "none":
            raise PrivacyError(
                cls.slot,
                f"{qualified(call)} has reduction={reduction!r}, so it mixes the batch",
                "build it with reduction='none'",
            )
        return cls(qualified(call), stated or digest(call), call)

    def __call__(self, outputs: Any, targets: Any, context: Context | None = None) -> Tensor:
        if self.call is None:
            raise PrivacyError(
                self.slot, f"the plan knows {self.name} by name only", "pass the callable to start(loss=…)"
            )
        return self.call(outputs, targets)

    def admits(self, outputs: Any, targets: Any) -> None:
        """Tries every whole-number target on one row of outputs: out of range, it would raise inside a step."""
        if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or targets.is_floating_point():
            return
        kinds = targets.unique(dim=0).to(outputs.device)
        for some in kinds.split(4096):
            try:
                self(outputs[:1].expand(len(some), *outputs.shape[1:]), some)
            except Exception as error:
                found = f"{self.name} does not take these targets: {str(error).strip().splitlines()[0][:160]}"
                raise PrivacyError(self.slot, found, "mend targets, their dtype or the loss") from error


@final
@dataclass(frozen=True)
class Forward(Loss):
    """The user's whole chain, `forward(model, batch)` to one value per example, known by name and digest."""

    name: str
    digest: str
    call: Callable[[Any, Any], Tensor] | None = field(default=None, repr=False, compare=False)

    @property
    def says(self) -> str:
        return f"{self.name}(model, batch) (the user's; {self.digest[:12]})"

    @classmethod
    def of(cls, call: Callable[[Any, Any], Tensor], stated: str | None = None) -> Forward:
        """Names a forward."""
        return cls(qualified(call), stated or digest(call), call)

    def __call__(self, outputs: Any, targets: Any, context: Context | None = None) -> Tensor:
        """Here `outputs` is the model and `targets` the whole batch: see `gradients.chain`."""
        if self.call is None:
            raise PrivacyError(
                self.slot, f"the plan knows {self.name} by name only", "pass the callable to start(forward=…)"
            )
        return self.call(outputs, targets)
