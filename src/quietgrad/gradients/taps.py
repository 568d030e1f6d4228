"""Taps: the outputs of linear layers and convolutions, for a loss that asks, without a hook in the user's model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from quietgrad.losses import Tap

WEIGHTS: Mapping[Any, int] = {  # where the weight stands among the arguments
    F.linear: 1, F.conv1d: 1, F.conv2d: 1, F.conv3d: 1, torch.addmm: 2, torch.Tensor.addmm: 2,
    F.conv_transpose1d: 1, F.conv_transpose2d: 1, F.conv_transpose3d: 1,
}  # fmt: skip


class Taps(TorchFunctionMode):
    """While it is entered, `seen` grows by a tap at each use, named as the layer whose weight was used.

    It works in a vmap as it does in a loop, and gradients flow through what it keeps.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {id(p): name.removesuffix(".weight") for name, p in model.named_parameters()}
        self.seen: list[Tap] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        output = func(*args, **given)
        place = WEIGHTS.get(func)
        if place is not None:
            weight = args[place] if place < len(args) else given.get("weight", given.get("mat2"))
            self.seen.append(Tap(self.names.get(id(weight), func.__name__), output))
        return output
