"""Dummy rows and random parameters: near what is given, and never the same number twice where it can be helped."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quietgrad.independence.held import same

PATTERNS = 16  # at most so many of the given rows are copied into the dummy batch


def patterns(given: list[Tensor], floats: list[bool]) -> list[Tensor]:
    """The distinct finite rows among the first; a lone row of integers gets a second, rolled along its last axis."""
    first = [x.detach()[:PATTERNS] for x in given]
    count = range(len(first[0]))
    distinct: list[int] = []
    for i in [i for i in count if all(bool(x[i].isfinite().all()) for x in first)] or count:
        if not any(all(same(x[i], x[k]) for x in first) for k in distinct):
            distinct.append(i)
    pool = [x[distinct] for x in first]
    if len(distinct) > 1 or any(floats):
        return pool
    return [torch.cat([x, x.roll(1, -1) if x.dim() > 1 else x]) for x in pool]


def dummies(pool: list[Tensor], moved: list[bool], size: int, shift: int) -> list[Tensor]:
    """Row i is pattern i + shift, in turn, moved where it may be. Integers stay, and so stay valid."""
    index, generator = (torch.arange(size) + shift) % len(pool[0]), torch.Generator().manual_seed(shift)
    return [_moved(x, index, generator) if m else x[index.to(x.device)] for x, m in zip(pool, moved, strict=True)]


def noised(parameter: Tensor, seed: int, amount: float) -> nn.Parameter:
    """p plus noise of half the larger of p's own deviation and 1 / sqrt(fan-in), so that no gradient vanishes."""
    p = parameter.detach().clone()
    if p.is_floating_point() and p.numel():
        fan_in = p.numel() // len(p) if p.dim() > 1 else p.numel()
        spread = max(float(p.float().std(correction=0)), fan_in**-0.5)
        p += (0.5 * amount * spread * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))).to(p)
    return nn.Parameter(p, requires_grad=parameter.requires_grad)


def _moved(pool: Tensor, index: Tensor, generator: torch.Generator) -> Tensor:
    """Float rows moved towards the next pattern, by element: within its range. Where all are alike, noise."""
    index = index.to(pool.device)
    rows, ahead = pool[index], pool[(index + 1) % len(pool)]
    if not same(pool, pool[:1].expand_as(pool)):
        return rows + 0.5 * torch.rand(rows.shape, generator=generator).to(rows) * (ahead - rows)
    low, high = (float(pool.min()), float(pool.max())) if pool.numel() else (0.0, 0.0)
    noise = torch.randn(rows.shape, generator=generator).to(rows)
    return (rows + 0.5 * (high - low) * noise).clamp(low, high) if low < high else rows + (0.1 * abs(low) or 1) * noise
