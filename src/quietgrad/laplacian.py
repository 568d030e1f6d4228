"""Laplacian smoothing of a release, along its coordinates (DP-LSSGD)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from quietgrad.denoise import Denoise
from quietgrad.errors import PrivacyError
from quietgrad.noise import NOTHING, State
from quietgrad.values import Context, Tensors


@final
@dataclass(frozen=True)
class LaplacianSmoothing(Denoise):
    """u = A^-1 v, where A = I - sigma L and L is the periodic second difference (equations 3 and 4): A u at i is
    (1 + 2 sigma) u[i] - sigma u[i - 1] - sigma u[i + 1]. Two coordinates are each other's neighbour twice, one is its
    own: u = v.

    v is the release as one vector, tensor after tensor in the order of the parameters (the text); the last coordinate
    of a tensor is then a neighbour of the first of the next. `by_tensor` smooths each tensor alone (what the authors
    released).
    **Guarantee**: post-processing, whatever sigma is. Constant vectors pass unchanged, independent noise keeps the
    share beta of its variance (proposition 2), sigma = 0 is the identity. Under any optimizer; Adam makes it LSAdam.
    **Caller's duty**: none. *Why*: Wang et al., DP-LSSGD; its tables take sigma 1 to 3.
    """

    sigma: float
    tensorwise: bool = False

    def __post_init__(self) -> None:
        number = isinstance(self.sigma, int | float) and not isinstance(self.sigma, bool)
        if not (number and 0 <= self.sigma < math.inf):
            raise PrivacyError(self.slot, f"sigma is {self.sigma!r}", "give a finite sigma of at least 0")

    @classmethod
    def by_tensor(cls, sigma: float) -> LaplacianSmoothing:
        """Each tensor by itself, around its own ends."""
        return cls(sigma, tensorwise=True)

    @property
    def says(self) -> str:
        return f"LaplacianSmoothing: sigma {self.sigma:g}, " + (
            "each tensor by itself" if self.tensorwise else "along the whole vector"
        )

    def begin(self, parameters: Tensors) -> State:
        return NOTHING

    def filter(self, released: Tensors, state: State, context: Context) -> tuple[Mapping[str, Tensor], State]:
        if self.sigma == 0:
            return released, state
        if self.tensorwise:
            return {name: smoothed(t.flatten(), self.sigma).view_as(t) for name, t in released.items()}, state
        vector = smoothed(torch.cat([t.flatten() for t in released.values()]), self.sigma)
        pieces = vector.split([t.numel() for t in released.values()])
        return {n: u.view_as(t).to(t.dtype) for (n, t), u in zip(released.items(), pieces, strict=True)}, state


def smoothed(vector: Tensor, sigma: float) -> Tensor:
    """A^-1 times a vector, in O(d log sqrt(sigma)) and without a transform.

    With S the shift by one place around the circle, A = (1 - a S)(1 - a S') / (1 - a)^2, where a is lemma 7's alpha,
    and 1 / (1 - a S) = (1 + a S)(1 + a^2 S^2)(1 + a^4 S^4)..., until a^(2^j) is lost in rounding. Each factor over
    its sum is an average of two shifted vectors with positive weights: nothing cancels, at any sigma.
    """
    size = vector.numel()
    if sigma == 0 or size < 2:
        return vector
    rate = math.log1p((1 + 2 * math.sqrt(sigma + 0.25)) / sigma / 2)  # -log alpha, also where alpha rounds to 1
    enough = -math.log(torch.finfo(torch.float64).eps / 8)  # float64: at large sigma what is left may be small
    this, power = vector.to(torch.float64, copy=True), 1
    other = torch.empty_like(this)
    while rate * power < enough:
        shift, weight = power % size, 1 / (1 + math.exp(rate * power))  # a^power / (1 + a^power)
        for places in (shift, size - shift) if shift else ():
            torch.lerp(this[places:], this[: size - places], weight, out=other[places:])
            torch.lerp(this[:places], this[size - places :], weight, out=other[:places])
            this, other = other, this
        power *= 2
    return this.to(vector.dtype)
