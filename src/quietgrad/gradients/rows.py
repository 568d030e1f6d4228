"""Gradients with every row formed: what the loop and vmap give."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from quietgrad.values import PerExample, Tensors


@final
class Rows(PerExample):
    """(n, *shape) per parameter.

    A row that is a dummy, or holds anything that is not finite, is zero in every answer.
    """

    def __init__(self, parameters: Tensors, rows: dict[str, Tensor], losses: Tensor, real: Tensor) -> None:
        self.parameters, self.losses, self.real = parameters, losses.detach(), real
        wide = {name: r.detach().to(torch.promote_types(r.dtype, torch.float32)) for name, r in rows.items()}
        self._flat = {name: r.reshape(len(real), parameters[name].numel()) for name, r in wide.items()}
        norms = self._bounded_norms(len(real))
        self._kept = real & norms.isfinite()
        self._norms = torch.where(self._kept, norms, 0.0)

    def norms(self) -> Tensor:
        return self._norms

    def rows(self) -> dict[str, Tensor]:
        kept = self._kept[:, None]
        shapes = {name: (len(f), *self.parameters[name].shape) for name, f in self._flat.items()}
        return {name: torch.where(kept, f, 0.0).view(shapes[name]) for name, f in self._flat.items()}

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        # Row by row in float64, never by a matrix product, which may round its factors to tf32 or bf16: when one
        # example leaves, the others' rounding hardly moves (rule 16 b), and nothing large is allocated.
        total = {name: f.new_zeros(f.shape[1], dtype=torch.float64) for name, f in self._flat.items()}
        for i in self._kept.nonzero().flatten().tolist():
            for name, f in self._flat.items():
                torch.addcmul(total[name], f[i].double(), weights[i], out=total[name])
        return {name: summed.view(self.parameters[name].shape) for name, summed in total.items()}

    def _bounded_norms(self, count: int) -> Tensor:
        # In float64, where no square of a float32 overflows; float64 rows are scaled before squaring (1e200). Rounded
        # up by four units of the rows' precision and what a sum of p squares can lose. Not finite where a row is not.
        flat = [f for f in self._flat.values() if f.numel()]
        if not flat:
            return torch.zeros(count, dtype=torch.float64, device=self.real.device)
        top = torch.ones(count, dtype=torch.float64, device=self.real.device)
        if any(f.dtype == torch.float64 for f in flat):
            top = torch.stack([f.abs().amax(1).double() for f in flat]).amax(0)
            top = torch.where(top > 0, top, 1.0)
            flat = [f / top[:, None] for f in flat]
        squares = [torch.stack([_norm(row) for row in f]).square() for f in flat]
        unit = max(torch.finfo(f.dtype).eps for f in self._flat.values())
        lost = sum(f.shape[1] for f in flat) * torch.finfo(torch.float64).eps
        return top * torch.stack(squares).sum(0).sqrt() * (1 + 4 * unit + lost)


def _norm(row: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(row, dtype=torch.float64)
    return norm
