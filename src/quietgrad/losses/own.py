"""Losses of the user's own: known by name and digest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor

from quietgrad.errors import PrivacyError
from quietgrad.losses.loss import Loss, Tap
from quietgrad.stage import digest, qualified
from quietgrad.values import Context


@dataclass(frozen=True)
class Named(Loss):
    """Abstract: a callable of the user's. A plan read back knows it by name and digest until it is given again."""

    name: str
    digest: str
    call: Callable[[Any, Any], Tensor] | None = field(default=None, repr=False, compare=False)

    @final
    def __call__(
        self, outputs: Any, targets: Any, context: Context | None = None, taps: Sequence[Tap] | None = None
    ) -> Tensor:
        if self.call is None:
            found = f"the plan knows {self.name} by name only"
            raise PrivacyError(self.slot, found, "pass the callable to start(loss=…), or start(forward=…)")
        return self.call(outputs, targets)


@final
@dataclass(frozen=True)
class Own(Named):
    """A loss of the user's: any callable from (outputs, targets) to one value per example, known by name and digest."""

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
class Forward(Named):
    """The user's whole chain, `forward(model, batch)` to one value per example, known by name and digest.

    Called with the model as `outputs` and the whole batch as `targets`: see `gradients.chain`.
    """

    @property
    def says(self) -> str:
        return f"{self.name}(model, batch) (the user's; {self.digest[:12]})"

    @classmethod
    def of(cls, call: Callable[[Any, Any], Tensor], stated: str | None = None) -> Forward:
        """Names a forward."""
        return cls(qualified(call), stated or digest(call), call)
