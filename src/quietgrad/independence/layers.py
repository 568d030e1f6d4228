"""The layers of a chain, at work: their names, their calls, NaN in what embeddings give."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Call(NamedTuple):
    """One call of a layer, with copies of what went in and what came out."""

    name: str
    module: nn.Module
    inputs: list[Tensor]
    outputs: list[Tensor]


def label(name: str, module: nn.Module) -> str:
    """How a message names a layer."""
    short = ".".join(part for part in name.removeprefix("model").split(".") if part not in ("", "_orig_mod"))
    return f"layer `{short}` ({type(module).__name__})" if short else f"the model ({type(module).__name__})"


def tensors(value: Any) -> list[Tensor]:
    """Every tensor among what a call takes or gives; unlike `leaves` it passes over anything else."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return [t for part in parts for t in tensors(part)]


@contextmanager
def traced(chain: nn.Module, kind: type[nn.Module]) -> Iterator[list[Call]]:
    """Collects the calls of the modules below, inputs copied before and outputs after."""
    calls: list[Call] = []
    entered: list[list[Tensor]] = []
    names = {m: name for name, m in chain.named_modules() if m is not chain and isinstance(m, kind)}

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        entered.append([t.detach().clone() for t in tensors((args, kwargs))])

    def leave(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        calls.append(Call(names[module], module, entered.pop(), [t.detach().clone() for t in tensors(out)]))

    with ExitStack() as hooks:
        for m in names:
            hooks.enter_context(m.register_forward_pre_hook(enter, with_kwargs=True))
            hooks.enter_context(m.register_forward_hook(leave, with_kwargs=True))
        yield calls


@contextmanager
def tainted(chain: nn.Module, masks: list[Tensor]) -> Iterator[None]:
    """The outputs of the embeddings, call by call, become NaN where the masks say."""
    left = iter(masks)

    def taint(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        mask = next(left, None)
        return out if mask is None or mask.shape != out.shape[:-1] else out.masked_fill(mask.unsqueeze(-1), torch.nan)

    with ExitStack() as hooks:
        for m in chain.modules():
            if masks and isinstance(m, nn.Embedding):
                hooks.enter_context(m.register_forward_hook(taint))
        yield
