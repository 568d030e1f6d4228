"""Average: of the iterates, as the optimizer left them. Every iterate is public, so an average of them is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from quietgrad.errors import PrivacyError
from quietgrad.noise import State
from quietgrad.values import Tensors


@final
@dataclass(frozen=True)
class Average:
    """mean_t = mean_{t-1} + r_t (w_t - mean_{t-1}) over the iterates w_1, w_2, …: r_t = 1 / t is their plain mean,
    r_t = (1 - a) / (1 - a^t) weighs w_{t-k} by a^k. The first iterate enters whole, the initial weights never.

    **Guarantee**: post-processing of releases: it costs nothing. **Caller's duty**: none.
    *Why*: uniform is what theorem 2 of DP-LSSGD speaks of (Polyak and Ruppert); exponential, .999 or so, is what wins
    in practice (De et al. 2022).
    """

    decay: float | None = None

    def __post_init__(self) -> None:
        if self.decay is not None and not 0 <= self.decay < 1:
            raise PrivacyError("average", f"decay is {self.decay!r}", "give one of at least 0 and below 1, or None")

    @property
    def says(self) -> str:
        """One line."""
        return "Average: " + ("uniform" if self.decay is None else f"exponential, decay {self.decay!r}")

    @torch.no_grad()
    def after(self, parameters: Tensors, state: State) -> State:
        """The state after one more iterate."""
        count = int(state["count"]) + 1
        rate = 1 / count if self.decay is None else (1 - self.decay) / (1 - self.decay**count)
        means: dict[str, Tensor | int | float] = {**start(self), "count": count}
        for name, p in parameters.items():
            wide, kept = p.detach().to(torch.promote_types(p.dtype, torch.float32)), state.get(f"mean.{name}")
            means[f"mean.{name}"] = torch.lerp(kept, wide, rate) if isinstance(kept, Tensor) else wide.clone()
        return means


def start(average: Average | None) -> State:
    """The state before the first iterate: how many went in, and by which rule (-1: none is kept, 1: uniform)."""
    return {"count": 0, "rule": -1.0 if average is None else 1.0 if average.decay is None else average.decay}


def begun(average: Average | None, state: State) -> State:
    """The state of a run that goes on; refused if it began with another average, or with none."""
    if state["rule"] != start(average)["rule"]:
        found = f"it belongs to a run with another average than {'none' if average is None else average.says}"
        raise PrivacyError("checkpoint", found, "resume with the average the run began with")
    return state


@contextmanager
def in_place(parameters: Tensors, state: State) -> Iterator[None]:
    """The averages in the parameters' place, and back."""
    last = {name: p.detach().clone() for name, p in parameters.items()}
    try:
        _put(parameters, {name: state.get(f"mean.{name}", last[name]) for name in last})
        yield
    finally:
        _put(parameters, last)


@torch.no_grad()
def _put(parameters: Tensors, values: State) -> None:
    for name, p in parameters.items():
        value = values[name]
        assert isinstance(value, Tensor)
        p.copy_(value)
