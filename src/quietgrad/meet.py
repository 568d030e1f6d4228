"""Meet: a plan, a model and the data see each other for the first time, before any release.

What does not fit is refused here, to the curator only; inside a step nothing about a value raises.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from quietgrad.batches import Source, Tree, leaves, pad, row_shapes, rows_of, tree_map
from quietgrad.errors import PrivacyError
from quietgrad.fresh import PUBLIC, drawing
from quietgrad.gradients import Chain, Gradients
from quietgrad.gradients.choose import still
from quietgrad.independence import check
from quietgrad.losses import Forward, Loss
from quietgrad.plan import Plan
from quietgrad.values import Context, Tensors


def meet(
    plan: Plan,
    model: nn.Module,
    parameters: Tensors,
    source: Source,
    gradients: Gradients,
    chunk: int,
    context: Context,
) -> list[torch.Size]:
    """The data's size and values, then rule 4 on the whole chain, then which engine gives what the loop gives.
    What a row looks like is handed back."""
    rows, stated = len(source), plan.sample.examples
    if abs(rows - stated) > max(10, stated / 10):
        found = f"the data has {rows:,} rows, the plan says {stated:,} examples"
        raise PrivacyError("sample", found, "state the number of examples in the plan")
    device = next(iter(parameters.values())).device
    with drawing(PUBLIC, device):
        few, samples = tree_map(lambda t: t.to(device), source.some(8)), source.samples(6)
    for tensor in leaves(source.data if source.in_memory else few):
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise PrivacyError(
                "sample", "the data holds NaN or infinity", "clean it: such an example counts for nothing"
            )
    loss = plan.loss
    assert loss is not None
    size = min(chunk, 64)
    if isinstance(loss, Forward):
        own = loss
        check(model, few, forward=lambda m, b: own(m, b, context), samples=samples, collate=source.collate, size=size)
    else:
        pair = gradients.chain.pair(few)
        _admit(loss, gradients, pair, source, device)
        if loss.tapped:
            chained: Callable[[nn.Module, Tree], Tensor] = lambda m, b: Chain(m, loss)(b, context)  # noqa: E731
            check(model, pair, forward=chained, samples=samples, collate=source.collate, size=size)
        else:
            check(model, pair, lambda o, t: loss(o, t, context), samples=samples, collate=source.collate, size=size)
    with drawing(PUBLIC, device):
        dummy = tree_map(_like, few)
    plan.smooth.tries([tree_map(partial(_row, i), few) for i in range(rows_of(few))])
    views = plan.smooth.views(context, gradients.stream, parameters)
    gradients.choose(parameters, pad(dummy, max(chunk, rows_of(few)), device, 0), context, views)
    return row_shapes(few)


def _admit(loss: Loss, gradients: Gradients, pair: tuple[Tree, Tree], source: Source, device: torch.device) -> None:
    with torch.no_grad(), drawing(PUBLIC, device), still(gradients.chain):  # a batch norm would remember this call
        try:
            chain = gradients.chain
            outputs, taps = chain.tapped(pair[0]) if loss.tapped else (chain.outputs(pair[0]), [])
        except Exception:  # the check that follows says which rows and why
            return
        chain.read = loss.layers(taps)
        loss.admits(outputs, source.data[1] if source.in_memory else pair[1])


def _row(i: int, t: Tensor) -> Tensor:
    return t[i : i + 1]


def _like(t: Tensor) -> Tensor:
    """Public numbers of a tensor's shape: the choice of an engine sees no data."""
    return torch.rand_like(t, dtype=t.dtype) if t.is_floating_point() else torch.zeros_like(t)
