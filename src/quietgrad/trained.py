"""What is trained, and what must stay as it was."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quietgrad.errors import PrivacyError
from quietgrad.stage import qualified


def trainable(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The parameters that are trained, by name: the optimizer's. What would train or release anything else is
    refused."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        name = type(optimizer).__name__
        raise PrivacyError(
            "optimizer",
            f"{name} evaluates the loss by itself, unaccounted",
            "use one that takes a gradient, as SGD or Adam",
        )
    named = dict(model.named_parameters())
    known = {id(p): name for name, p in named.items()}
    given = [p for group in optimizer.param_groups for p in group["params"]]
    if any(id(p) not in known for p in given):
        raise PrivacyError(
            "optimizer",
            "it holds a parameter that is not the model's",
            "build it from model.parameters() (qg.fix: the copy's)",
        )
    held = {id(p) for p in given}
    outside = [name for name, p in named.items() if p.requires_grad and id(p) not in held]
    if outside:
        raise PrivacyError(
            "optimizer",
            f"it leaves out {', '.join(outside[:3])}, which require a gradient",
            "add them, or freeze them: requires_grad_(False)",
        )
    chosen: dict[str, Tensor] = {name: p for name, p in named.items() if p.requires_grad}
    if not chosen:
        raise PrivacyError("optimizer", "nothing is trainable", "let a parameter require a gradient")
    odd = [name for name, p in chosen.items() if not p.is_floating_point()]
    if odd:
        raise PrivacyError("optimizer", f"{odd[0]} is {chosen[odd[0]].dtype}", "train real floating-point parameters")
    bad = [name for name, p in chosen.items() if not bool(p.isfinite().all())]
    if bad:
        raise PrivacyError("optimizer", f"{bad[0]} holds NaN or infinity", "initialise the model anew")
    return chosen


def fingerprints(model: nn.Module, trained: Mapping[str, Tensor]) -> dict[str, str]:
    """A digest of everything in the model that training must not move: buffers and frozen parameters."""
    moving = {id(p) for p in trained.values()}
    still = [*model.named_buffers(), *((name, p) for name, p in model.named_parameters() if id(p) not in moving)]
    return {name: digest_of([t]) for name, t in still}


def digest_of(tensors: Iterable[Tensor]) -> str:
    """SHA-256 over the values of tensors."""
    whole = hashlib.sha256()
    for t in tensors:
        whole.update(f"{t.dtype} {tuple(t.shape)}".encode() + _bytes(t))
    return whole.hexdigest()


def shapes(state: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names, dtypes and shapes of a state dict."""
    return {name: (str(t.dtype), tuple(t.shape)) for name, t in state.items() if isinstance(t, Tensor)}


def _bytes(t: Tensor) -> bytes:
    return t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def trains(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """The optimizer's class and, by group, the names of what it holds: a checkpoint must meet the same again."""
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    return [qualified(type(optimizer)), groups, [name for name, p in model.named_parameters() if p.requires_grad]]


def versions_of(parameters: Mapping[str, Tensor]) -> list[tuple[int, int]]:
    """Where each parameter lies and how often it was written to: what tells that somebody else wrote."""
    return [(p.data_ptr(), p._version) for p in parameters.values()]
