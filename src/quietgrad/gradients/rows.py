"""Gradients with every row formed: what the loop and vmap give."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from quietgrad.values import PerExample, Tensors


@final
class Rows(PerExample):
    """(n, *shape) per parameter.

    A row that is a dummy, or holds anything that is not finite, is set to zero when it is made, so it is zero
    everywhere.
    """

    def __init__(self, parameters: Tensors, rows: dict[str, Tensor], losses: Tensor, real: Tensor) -> None:
        self.parameters, self.losses, self.real = parameters, losses.detach(), real
        wide = {name: r.detach().to(torch.promote_types(r.dtype, torch.float32)) for name, r in rows.items()}
        flat = {name: r.reshape(len(real), parameters[name].numel()) for name, r in wide.items()}
        finite = real.clone()
        for f in flat.values():
            finite &= f.isfinite().all(1)
        self._flat = {name: torch.where(finite[:, None], f, 0.0) for name, f in flat.items()}
        self._norms = self._bounded_norms(len(real))

    def norms(self) -> Tensor:
        return self._norms

    def rows(self) -> dict[str, Tensor]:
        return {name: f.view(len(f), *self.parameters[name].shape) for name, f in self._flat.items()}

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        # Products are formed one by one, never by a matrix product, which may round its factors to tf32 or bf16. They
        # are added in float64: when one example leaves, the others' rounding hardly moves (rule 16 b).
        total = {}
        for name, f in self._flat.items():  # (n, p)
            used = rounded_down(weights, f.dtype)[:, None]
            total[name] = (used * f).sum(0, dtype=torch.float64).view(self.parameters[name].shape)
        return total

    def _bounded_norms(self, count: int) -> Tensor:
        # Scaled before squaring (1e25 squared overflows float32, 1e200 float64), and rounded up by four units of the
        # rows' precision, which covers the rounding of weight times row, and by what a sum of p squares can lose.
        flat = [f for f in self._flat.values() if f.numel()]
        if not flat:
            return torch.zeros(count, dtype=torch.float64, device=self.real.device)
        top = torch.stack([f.abs().amax(1) for f in flat]).amax(0).double()  # (n,)
        top = torch.where(top > 0, top, 1.0)
        if any(f.dtype == torch.float64 for f in flat):
            squares = [torch.linalg.vector_norm(f / top[:, None], dim=1, dtype=torch.float64).square() for f in flat]
            norms = top * torch.stack(squares).sum(0).sqrt()
        else:
            squares = [torch.linalg.vector_norm(f, dim=1, dtype=torch.float64).square() for f in flat]
            norms = torch.stack(squares).sum(0).sqrt()
        unit = max(torch.finfo(f.dtype).eps for f in flat)
        return norms * (1 + 4 * unit + sum(f.shape[1] for f in flat) * torch.finfo(torch.float64).eps)


def rounded_down(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights of at least 0 in a narrower type, never above what they were: the nearest to 1e-45 is above it."""
    near = weights.to(dtype)
    return torch.where(near.to(weights.dtype) > weights, near.nextafter(torch.zeros_like(near)), near)
