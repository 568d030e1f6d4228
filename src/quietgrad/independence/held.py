"""What is held while a chain is tested: generators, attributes, draws; nothing moves by itself, all is put back."""

from __future__ import annotations

import copy
import random
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from quietgrad.independence.layers import tensors


class Generators:
    """The global generators a chain may draw from, held at one state."""

    def __init__(self, chain: nn.Module) -> None:
        self._python, self._numpy, self._torch = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
        self._cuda = {d: torch.cuda.get_rng_state(d) for d in {p.device for p in chain.parameters() if p.is_cuda}}

    def rewind(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        torch.set_rng_state(self._torch)
        for device, state in self._cuda.items():
            torch.cuda.set_rng_state(state, device)


class Attributes:
    """What every module holds (tensors by value, containers one level deep), so that a forward leaves no trace."""

    def __init__(self, chain: nn.Module) -> None:
        self._held = [(m, dict(vars(m)), {k: _copied(v) for k, v in vars(m).items()}) for m in chain.modules()]

    def restore(self) -> None:
        for module, attributes, copies in self._held:
            vars(module).clear()
            vars(module).update(attributes)
            for name, value in attributes.items():
                if isinstance(value, dict | set | list):
                    value.clear()
                    (value.extend if isinstance(value, list) else value.update)(copies[name])
                elif isinstance(value, Tensor) and not same(value.detach(), copies[name]):
                    value.data.copy_(copies[name])


class Still(TorchDispatchMode):
    """Every draw gives a constant and dropout keeps all: a row that is missing shifts nobody's draws."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.eps = 0.0  # of the coarsest dtype seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        draws = torch.Tag.nondeterministic_seeded in func.tags
        out = _still(func, args, kwargs or {}) if draws else func(*args, **kwargs or {})
        self.eps = max([self.eps, *(torch.finfo(t.dtype).eps for t in tensors(out) if t.is_floating_point())])
        return out


def eager() -> AbstractContextManager[Any]:
    """Compiled modules run as they were written: the same function, and one that takes hooks."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in shape, dtype and every value, where NaN equals NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, dict | set | list) else None


def _still(func: Any, args: Any, kwargs: Any) -> Any:
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    off = {k: 0.0 for k in ("dropout", "dropout_p") if k in given} or {k: False for k in ("train",) if k in given}
    positional = [off.get(k, v) for k, v in zip(names, args, strict=False)]
    out = func(*positional, **{k: off.get(k, v) for k, v in kwargs.items()})
    if off or not isinstance(out, Tensor):
        return out
    if "randperm" in func._schema.name:
        return out.copy_(torch.arange(len(out)))
    middle = 0.5 if out.is_floating_point() else given.get("low", 0)
    return out.fill_(1 if "bernoulli" in func._schema.name else middle)
