"""The private step, in the open.

sample → loss → smooth → per-example gradients → bound → sum → noise ┊ denoise → optimizer
                                                         above sees data ┊ below sees only releases
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from quietgrad.batches import Chunk
from quietgrad.noise import State
from quietgrad.plan import Plan
from quietgrad.smooth import View
from quietgrad.stream import Stream
from quietgrad.values import Context, Nobody, PerExample, Release, Sum, Tensors, received

Engine = Callable[[Tensors, Chunk, Sequence[View], Context], PerExample]


@dataclass
class States:
    """What the stages below the sum remember."""

    noise: State
    denoise: State


def private_sum(
    plan: Plan,
    gradients: Engine,
    parameters: Tensors,
    chunks: Iterable[Chunk],
    context: Context,
    stream: Stream,
    watch: Callable[[PerExample], None],
) -> Sum:
    """Above the noise: everything here sees data."""
    views = plan.smooth.views(context, stream, parameters)
    total = plan.bound(Nobody(parameters), context).sum()  # an empty batch is this sum
    for chunk in chunks:
        per_example = gradients(parameters, chunk, views, context)  # PerExample: no row is bounded yet
        watch(per_example)
        bounded = plan.bound(per_example, context)  # Bounded: each share within the contribution
        total += bounded.sum()  # Sum: one example more or less moves it by one share
    return total


def release(plan: Plan, total: Sum, states: States, context: Context, stream: Stream) -> Release:
    """The noise, and below it: from the first line on, everything may be shown to anyone."""
    released, states.noise = plan.noise(total, states.noise, context, stream)
    released, states.denoise = plan.denoise(released, states.denoise, context)
    return released


@torch.no_grad()
def apply(released: Release, parameters: Tensors, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's step, on a release and nothing else."""
    received(released, Release, "optimizer")
    for name, parameter in parameters.items():
        parameter.grad = released.tensors[name].to(parameter.dtype)
    optimizer.step()
