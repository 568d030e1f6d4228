"""Noise: the one place where a Sum becomes a Release. Above it everything sees data, below it nothing does.

A release is formed in float64, rounded to a public lattice (a power of two, at most 2^-16 standard deviations), *then*
divided by the expected batch size and cast, so that the low bits of a float tell nothing of the sum.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import floor, log2
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor

from quietgrad import account
from quietgrad.errors import PrivacyError
from quietgrad.sample import Sample
from quietgrad.stage import Stage, positive
from quietgrad.stream import Purpose, Stream
from quietgrad.values import NOISE, Context, Contribution, L2Ball, Release, Sum, received

if TYPE_CHECKING:
    from dp_accounting import DpEvent

State = Mapping[str, Tensor | int | float]  # what a stage remembers from step to step
NOTHING: State = {}


@dataclass(frozen=True)
class Noise(Stage):
    """Abstract. `multiplier` is the scale over the bound's radius; None until `calibrate` sets it."""

    slot: ClassVar[str] = "noise"
    multiplier: float | None

    def scaled(self, multiplier: float) -> Noise:
        """The same noise at another multiplier."""
        return dataclasses.replace(self, multiplier=multiplier)

    @property
    def claims(self) -> tuple[str, ...]:
        """What of its account rests on the user's word."""
        return ()

    @abstractmethod
    def admits(self, contribution: Contribution, sample: Sample) -> None:
        """Refuses what this noise has no account for."""

    @abstractmethod
    def cost(self, step: int) -> DpEvent | None:
        """What the release of one step costs by itself to those who take part; None if the noises are correlated."""

    @abstractmethod
    def account(self, sample: Sample, releases: int) -> DpEvent:
        """What the first `releases` releases cost together."""

    @abstractmethod
    def begin(self, step: int) -> State:
        """The state at the first release after a start or resume. It is never written down: rule 10."""

    @abstractmethod
    def draw(self, stream: Stream, state: State, step: int, start: int, count: int) -> Tensor:
        """float64: noise of scale 1 for coordinates start to start + count."""

    @abstractmethod
    def advance(self, state: State, step: int) -> State:
        """The state after the release of `step`."""

    @final
    def __call__(self, total: Sum, state: State, context: Context, stream: Stream) -> tuple[Release, State]:
        received(total, Sum, self.slot)
        scale, released, start = context.noise_scale, {}, 0
        for name, tensor in total.spend().items():
            if scale > 0:
                noise = self.draw(stream, state, context.step, start, tensor.numel()).to(tensor.device)
                tensor = to_lattice(tensor.add_(noise.view_as(tensor), alpha=scale), scale)
            wide = torch.promote_types(total.parameters[name].dtype, torch.float32)
            released[name] = tensor.div_(context.divisor).to(wide)
            start += tensor.numel()
        return Release(NOISE, released, context.step, self.cost(context.step)), self.advance(state, context.step)


@dataclass(frozen=True)
class Independent(Noise):
    """Abstract: fresh noise for every release, so releases are priced one by one and composed by the sampler."""

    @abstractmethod
    def event(self, step: int) -> DpEvent:
        """The event of one release, unsampled."""

    @final
    def cost(self, step: int) -> DpEvent:
        return self.event(step)

    def account(self, sample: Sample, releases: int) -> DpEvent:
        return sample.compose(self.event(0), releases)

    @final
    def begin(self, step: int) -> State:
        return NOTHING

    @final
    def advance(self, state: State, step: int) -> State:
        return NOTHING


@final
@dataclass(frozen=True)
class Gaussian(Independent):
    """Sum + multiplier * radius * N(0, I), on every coordinate of every trainable parameter.

    **Guarantee**: one release is a Gaussian mechanism with noise multiplier `multiplier` (Poisson or not is the
    sampler's).
    **Caller's duty**: none. *Why*: Abadi et al. 2016; the price is dp-accounting's GaussianDpEvent.
    """

    multiplier: float | None = None

    def __post_init__(self) -> None:
        if (
            self.multiplier is not None and self.multiplier != 0
        ):  # 0 prices as infinite: the plan refuses it outside a study
            positive(self.slot, "multiplier", self.multiplier)

    @property
    def says(self) -> str:
        return "Gaussian: " + ("not calibrated" if self.multiplier is None else f"multiplier {self.multiplier:.4g}")

    def admits(self, contribution: Contribution, sample: Sample) -> None:
        if not isinstance(contribution, L2Ball):
            raise PrivacyError(
                self.slot, f"Gaussian cannot account for {contribution}", "give it a bound in an L2 ball, such as Clip"
            )

    def event(self, step: int) -> DpEvent:
        if self.multiplier is None:
            raise PrivacyError(
                self.slot, "the multiplier is not set", "call plan.calibrate(epsilon=…, delta=…) or give one"
            )
        return account.gaussian(self.multiplier)

    def draw(self, stream: Stream, state: State, step: int, start: int, count: int) -> Tensor:
        return stream.normals(Purpose.NOISE, step, start, count)


def to_lattice(tensor: Tensor, scale: float) -> Tensor:
    """Rounds in place to multiples of the largest power of two that is at most scale * 2^-16."""
    spacing = 2.0 ** (floor(log2(scale)) - 16)
    return tensor.div_(spacing).round_().mul_(spacing)
