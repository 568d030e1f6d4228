"""Claimed: a noise whose event rests on its user's word, and says so."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from torch import Tensor

from quietgrad.errors import PrivacyError
from quietgrad.noise import Noise, State
from quietgrad.sample import Sample
from quietgrad.stream import Stream
from quietgrad.values import Contribution

if TYPE_CHECKING:
    from dp_accounting import DpEvent


@final
@dataclass(frozen=True)
class Claimed(Noise):
    """A noise with an event on its user's word: it runs with status `claimed by user`, and the certificate says why.

    **Guarantee**: none of quietgrad's. **Caller's duty**: that `event`, unsampled, bounds what one release of
    `stage` tells.
    """

    multiplier: float | None = field(init=False, repr=False, default=None)
    stage: Noise
    event: DpEvent
    why: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "multiplier", self.stage.multiplier)

    @property
    def says(self) -> str:
        return f"Claimed({self.stage.says}) as {self.event}: {self.why}"

    @property
    def claims(self) -> tuple[str, ...]:
        return (f"{type(self.stage).__name__} costs {self.event} a release: {self.why}",)

    def scaled(self, multiplier: float) -> Noise:
        raise PrivacyError(
            self.slot, "a claimed event cannot be calibrated", "state the multiplier and the event that it has"
        )

    def admits(self, contribution: Contribution, sample: Sample) -> None:
        """The user says so."""

    def cost(self, step: int) -> DpEvent:
        return self.event

    def account(self, sample: Sample, releases: int) -> DpEvent:
        return sample.compose(self.event, releases)

    def begin(self, step: int) -> State:
        return self.stage.begin(step)

    def draw(self, stream: Stream, state: State, step: int, start: int, count: int) -> Tensor:
        return self.stage.draw(stream, state, step, start, count)

    def advance(self, state: State, step: int) -> State:
        return self.stage.advance(state, step)
