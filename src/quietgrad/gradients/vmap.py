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
    """All examples of a chunk at once, each as a batch of one; over views, the sum of share times gradient."""
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
            if name in rows:
                rows[name].add_(gradient, alpha=view.share)
            else:  # a gradient may be one zero seen many times, which cannot be added to
                rows[name] = gradient if len(views) == 1 and view.share == 1.0 else gradient * view.share
        losses = values.detach() if losses is None else losses + values.detach()
    assert losses is not None
    return Rows(parameters, rows, losses / len(views), chunk.real)
