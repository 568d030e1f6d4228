"""Any module that torch.func can vectorise: the loop, vectorised over a chunk."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from quietgrad.batches import Chunk, tree_map
from quietgrad.gradients.chain import Chain
from quietgrad.gradients.rows import Rows
from quietgrad.signals import signals_wait
from quietgrad.smooth import View
from quietgrad.values import Context, Tensors


def vectorised(chain: Chain, parameters: Tensors, chunk: Chunk, views: Sequence[View], context: Context) -> Rows:
    """All examples of a chunk at once, each as a batch of one; the mean over views."""
    still = {name: p.detach() for name, p in parameters.items()}
    rows: dict[str, Tensor] = {}
    losses: Tensor | None = None
    for view in views:

        def value(leaves: dict[str, Tensor], example: Any, view: View = view) -> Tensor:
            used, seen = view(leaves, tree_map(lambda t: t.unsqueeze(0).clone(), example))
            return chain.values(used, seen, context).squeeze(0)

        with torch.enable_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # some operations are looped over: LSTM
            each = vmap(grad_and_value(value), in_dims=(None, 0), randomness="different")
            with signals_wait():
                gradients, values = each(still, chunk.tree)
        for name, gradient in gradients.items():
            rows[name] = rows[name].add_(gradient) if name in rows else gradient
        losses = values.detach() if losses is None else losses + values.detach()
    assert losses is not None
    share = 1.0 / len(views)
    scaled = rows if len(views) == 1 else {name: r.mul_(share) for name, r in rows.items()}
    return Rows(parameters, scaled, losses * share, chunk.real)
