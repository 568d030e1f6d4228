"""Filters over steps: rivals of Laplacian smoothing in the same slot, and Chain, which composes them.

What each remembers is made of releases, so it costs nothing and may be kept over a resume.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from quietgrad.denoise import Denoise, Keep
from quietgrad.errors import PrivacyError
from quietgrad.noise import NOTHING, State
from quietgrad.values import Context, Tensors


@final
@dataclass(frozen=True)
class Averaging(Denoise):
    """m_t = a m_{t-1} + (1 - a) g_t with m_0 = 0; the optimizer gets m_t / (1 - a^t).

    **Guarantee**: post-processing. An average with positive weights of sum 1: a constant passes unchanged from the
    first step on; a = 0 is the identity. In the long run noise keeps (1 - a) / (1 + a) of its variance.
    **Caller's duty**: none. *Why*: Kingma and Ba 2015, the first moment alone; .9 is theirs.
    """

    decay: float = 0.9

    def __post_init__(self) -> None:
        _fraction("decay", self.decay)

    @property
    def says(self) -> str:
        return f"Averaging: of releases over steps, decay {self.decay:g}"

    def begin(self, parameters: Tensors) -> State:
        return {"steps": 0}

    def filter(self, released: Tensors, state: State, context: Context) -> tuple[Mapping[str, Tensor], State]:
        steps = int(state["steps"]) + 1
        means = {n: torch.lerp(kept(state, "mean", n, g), g, 1 - self.decay) for n, g in released.items()}
        better = {n: m / (1 - self.decay**steps) for n, m in means.items()}
        return better, {"steps": steps, **named("mean", means)}


@final
@dataclass(frozen=True)
class LowPass(Denoise):
    """m_t = a m_{t-1} + (1 - a)(b0 g_t + b1 g_{t-1}) / (b0 + b1); the optimizer gets m_t / c_t, where c_t is what the
    filter makes of ones. a is `feedback`, b0 is `now`, b1 is `before`.

    **Guarantee**: post-processing. Gain 1 at frequency 0, from the first step on; a = b1 = 0 is the identity.
    **Caller's duty**: none. *Why*: Zhang et al. 2024 (DOPPLER), at first order, which leave the coefficients open. 9/11
    with equal taps is the Butterworth filter cut off at .2 radians a step; it takes the highest frequency to nothing.
    """

    feedback: float = 9 / 11
    now: float = 1.0
    before: float = 1.0

    def __post_init__(self) -> None:
        _fraction("feedback", self.feedback)
        for name in ("now", "before"):
            tap = getattr(self, name)
            if not (0 < tap < float("inf") or (tap == 0 and name == "before")):
                raise PrivacyError(self.slot, f"{name} is {tap!r}", f"give a finite {name} above 0 (before may be 0)")

    @property
    def says(self) -> str:
        return f"LowPass: first order over steps, feedback {self.feedback:.4g}, taps {self.now:g} and {self.before:g}"

    def begin(self, parameters: Tensors) -> State:
        return {"steps": 0, "ones": 0.0}

    def filter(self, released: Tensors, state: State, context: Context) -> tuple[Mapping[str, Tensor], State]:
        share, first = self.before / (self.now + self.before), state["steps"] == 0
        ones = self.feedback * float(state["ones"]) + (1 - self.feedback) * (1 - share if first else 1.0)
        means: dict[str, Tensor] = {}
        for name, g in released.items():
            fresh = torch.lerp(g, kept(state, "last", name, g), share)
            means[name] = torch.lerp(kept(state, "mean", name, g), fresh, 1 - self.feedback)
        better = {n: m / ones for n, m in means.items()}
        return better, {"steps": 1, "ones": ones, **named("mean", means), **named("last", released)}


@final
@dataclass(frozen=True, init=False)
class Chain(Denoise):
    """Filters one after the other, the first nearest to the noise: Chain(a, b) is b(a(release)).

    **Guarantee**: post-processing, as each of them is. A gradient is taken where the last of them probes, seen from
    where those before it do. **Caller's duty**: none.
    """

    stages: tuple[Denoise, ...]

    def __init__(self, *filters: Denoise, stages: tuple[Denoise, ...] = ()) -> None:
        object.__setattr__(self, "stages", (*filters, *stages))
        odd = [stage for stage in self.stages if not isinstance(stage, Denoise)]
        if odd or not self.stages:
            found = f"a Chain of {type(odd[0]).__name__}" if odd else "an empty Chain"
            raise PrivacyError(self.slot, found, "give filters: Chain(a, b, …)")

    @property
    def says(self) -> str:
        return "; then ".join(stage.says for stage in self.stages)

    def begin(self, parameters: Tensors) -> State:
        return _joined([stage.begin(parameters) for stage in self.stages])

    def probe(self, parameters: Tensors, state: State, context: Context) -> tuple[Tensors, State]:
        states = _parted(state, len(self.stages))
        for i, stage in enumerate(self.stages):
            parameters, states[i] = stage.probe(parameters, states[i], context)
        return parameters, _joined(states)

    def filter(self, released: Tensors, state: State, context: Context) -> tuple[Mapping[str, Tensor], State]:
        states = _parted(state, len(self.stages))
        for i, stage in enumerate(self.stages):
            released, states[i] = stage.filter(released, states[i], context)
        return released, _joined(states)


def then(first: Denoise, second: Denoise) -> Denoise:
    """`second` after `first`: in place of Keep, at the end of a Chain, else a Chain of both."""
    if isinstance(first, Keep):
        return second
    return Chain(*(first.stages if isinstance(first, Chain) else (first,)), second)


def _fraction(name: str, number: float) -> None:
    if not 0 <= number < 1:
        raise PrivacyError(Denoise.slot, f"{name} is {number!r}", f"give a {name} of at least 0 and below 1")


def named(what: str, tensors: Tensors) -> dict[str, Tensor]:
    """Tensors as a filter keeps them: under what they are and their parameter's name."""
    return {f"{what}.{name}": t for name, t in tensors.items()}


def kept(state: State, what: str, name: str, like: Tensor, start: Tensor | None = None) -> Tensor:
    """What was kept under a parameter's name; before anything was, `start`, or zeros."""
    value = state.get(f"{what}.{name}")
    if isinstance(value, Tensor):
        return value
    return torch.zeros_like(like) if start is None else start


def _joined(states: list[State]) -> State:
    return {f"{i}.{key}": value for i, state in enumerate(states) for key, value in state.items()}


def _parted(state: State, count: int) -> list[State]:
    parts: list[dict[str, Tensor | int | float]] = [dict(NOTHING) for _ in range(count)]
    for key, value in state.items():
        place, _, name = key.partition(".")
        parts[int(place)][name] = value
    return list(parts)
