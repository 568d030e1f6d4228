"""The simplified Kalman filter over steps (DiSK), which says where the gradient is taken too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from quietgrad.denoise import Denoise
from quietgrad.errors import PrivacyError
from quietgrad.filters import kept, named
from quietgrad.noise import State
from quietgrad.values import Context, Tensors


@final
@dataclass(frozen=True)
class Kalman(Denoise):
    """The simplified Kalman filter with one gradient: ghat_t is the release of the gradient taken at
    x_t + gamma (x_t - x_{t-1}), gamma = (1 - kappa) / kappa; g_t = (1 - kappa) g_{t-1} + kappa ghat_t, g_0 = ghat_0.

    This object owns the pair: `probe` says where the gradient is taken, from iterates that are public, and `filter`
    what is made of it. The general case adds a gradient at x_t itself, with weights of its own (one may be negative),
    example by example inside the clip. A probe of two weighted points would carry it; one point does not: not offered.
    **Guarantee**: post-processing, and a public place for the next gradient. kappa = 1 is DP-SGD. Under plain SGD at
    a constant rate the points probed are the iterates of DP-SGD (after a first step 1 / kappa as long), and x their
    exponential average with weight kappa.
    **Caller's duty**: none. *Why*: Zhang et al. 2025 (DiSK), kappa .7.
    """

    kappa: float = 0.7

    def __post_init__(self) -> None:
        if not 0 < self.kappa <= 1:
            raise PrivacyError(self.slot, f"kappa is {self.kappa!r}", "give a kappa above 0 and at most 1")

    @property
    def says(self) -> str:
        return f"Kalman: over steps, kappa {self.kappa:g}, the gradient {1 / self.kappa - 1:.4g} of a step ahead"

    def begin(self, parameters: Tensors) -> State:
        return {"steps": 0}

    def probe(self, parameters: Tensors, state: State, context: Context) -> tuple[Tensors, State]:
        here = {name: p.detach().clone() for name, p in parameters.items()}
        ahead = {n: x + (1 / self.kappa - 1) * (x - kept(state, "here", n, x, x)) for n, x in here.items()}
        return ahead, {**state, **named("here", here)}

    def filter(self, released: Tensors, state: State, context: Context) -> tuple[Mapping[str, Tensor], State]:
        means = {n: torch.lerp(kept(state, "mean", n, g, g), g, self.kappa) for n, g in released.items()}
        here = {name: value for name, value in state.items() if name.startswith("here.")}
        return {n: m.clone() for n, m in means.items()}, {"steps": 1, **here, **named("mean", means)}
