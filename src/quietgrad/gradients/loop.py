"""The loop over examples: what every engine must equal, and the last fallback."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from quietgrad.batches import Chunk, tree_map
from quietgrad.gradients.chain import Chain
from quietgrad.gradients.rows import Rows
from quietgrad.smooth import View
from quietgrad.values import Context, Tensors


def loop(chain: Chain, parameters: Tensors, chunk: Chunk, views: Sequence[View], context: Context) -> Rows:
    """Each example alone, as a batch of one: forward, backward, next; over views, the sum of share times
    gradient."""
    count = len(chunk.real)
    rows = {name: p.new_zeros((count, *p.shape)) for name, p in parameters.items()}
    losses = torch.zeros(count, device=chunk.real.device)
    for i in range(count):
        example = tree_map(partial(_row, i), chunk.tree)
        for view in views:
            leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
            used, seen = view(leaves, tree_map(torch.clone, example))  # a model may work in place
            with torch.enable_grad():
                value = chain.values(used, seen, context)
                gradients = torch.autograd.grad(value.sum(), list(leaves.values()), allow_unused=True)
            for name, gradient in zip(leaves, gradients, strict=True):
                if gradient is not None:
                    rows[name][i] += gradient * view.share
            losses[i] += value[0].detach() / len(views)
    return Rows(parameters, rows, losses, chunk.real)


def _row(i: int, t: Tensor) -> Tensor:
    return t[i : i + 1]
