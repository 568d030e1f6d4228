"""Smoothing: the gradient of an example as the mean over public perturbations of the parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor
from torch.optim import SGD, Optimizer

from quietgrad.errors import PrivacyError
from quietgrad.smooth import Combine, MeanOfViews, Smooth, View
from quietgrad.stage import counted
from quietgrad.stream import Purpose, Stream
from quietgrad.values import Context, Tensors


@final
class Perturbed(View):
    """The parameters plus one draw, the example as it is. Nothing is changed in place."""

    def __init__(self, added: Tensors, share: float) -> None:
        self.added, self.share = added, share

    def __call__(self, parameters: Tensors, example: Any) -> tuple[Tensors, Any]:
        return {n: p + self.added[n] if n in self.added else p for n, p in parameters.items()}, example


@final
@dataclass(frozen=True)
class RandomizedSmoothing(Smooth):
    """g(x) = 1/K sum_k grad L(theta + nu_k, x), with K = `samples` and nu_k ~ N(0, sigma_smooth^2 I), where
    sigma_smooth = radius * (learning rate / expected batch) * (noise multiplier * clip): `radius` times what the noise
    moves a parameter in one step. The rate is public and read at each step, by parameter. Or `sigma`, fixed.

    **Guarantee**: draws are fresh and see no data, so that an example's mean depends on that example alone; it is taken
    before the bound. **Caller's duty**: none. Radius 0 is DP-SGD; so is any radius in a study without noise.
    *Why*: Wang et al., DPLIS, equation 6 and algorithm 2; radius 10 (the default, if no sigma is given) and 10 samples
    are theirs. One draw serves all examples of a step, as theirs; K copies of the parameters are held meanwhile.
    `antithetic`: draws in pairs nu, -nu, which cancel what is linear in nu. `ball`: uniform in a ball of radius
    sigma_smooth * sqrt(n + 2), n the number of coordinates, which gives each the same variance.
    """

    radius: float | None = None
    samples: int = 10
    sigma: float | None = None
    antithetic: bool = False
    ball: bool = False
    combine: Combine = field(default_factory=MeanOfViews)

    def __post_init__(self) -> None:
        counted(self.slot, "samples", self.samples)
        if self.radius is not None and self.sigma is not None:
            found = f"radius is {self.radius!r} and sigma is {self.sigma!r}"
            raise PrivacyError(self.slot, found, "give one: radius follows the learning rate, sigma is fixed")
        if self.radius is None and self.sigma is None:
            object.__setattr__(self, "radius", 10.0)
        name, number = ("radius", self.radius) if self.sigma is None else ("sigma", self.sigma)
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < math.inf:
            raise PrivacyError(self.slot, f"{name} is {number!r}", f"give a finite {name} of at least 0")
        given: tuple[object, ...] = (self.antithetic, self.ball, self.combine)
        if not (isinstance(given[0], bool) and isinstance(given[1], bool) and isinstance(given[2], Combine)):
            found = "antithetic, ball, combine are {!r}, {!r}, {!r}".format(*given)
            raise PrivacyError(self.slot, found, "give True or False, twice, and MeanOfViews() or SummedViews()")
        if self.antithetic and self.samples % 2:
            raise PrivacyError(self.slot, f"{self.samples} samples in antithetic pairs", "give an even number")

    @property
    def says(self) -> str:
        how = f"sigma {self.sigma:g}" if self.sigma is not None else f"{self.radius:g} times a step's noise"
        shape = ", antithetic" * self.antithetic + ", in a ball" * self.ball
        return f"RandomizedSmoothing: {self.combine.says} over {self.samples} views, parameters moved by {how}{shape}"

    @property
    def count(self) -> int:
        return self.samples

    def admits(self, optimizer: Optimizer) -> None:
        plain = type(optimizer) is SGD and not any(group["momentum"] for group in optimizer.param_groups)
        if self.radius and not plain:
            name = "SGD with momentum" if type(optimizer) is SGD else type(optimizer).__name__
            found = (
                f"radius is {self.radius:g}, and a learning rate of {name} is not how far a gradient moves a parameter"
            )
            raise PrivacyError(
                self.slot, found, "use torch.optim.SGD without momentum, or RandomizedSmoothing(sigma=…)"
            )

    def spread(self, name: str, context: Context) -> float:
        """sigma_smooth of one parameter at this step."""
        if self.radius is None:
            return self.sigma or 0.0
        return self.radius and self.radius * context.learning_rates[name] / context.divisor * context.noise_scale

    def views(self, context: Context, stream: Stream, parameters: Tensors) -> Sequence[View]:
        share, spreads = self.combine.share(self.samples), {n: self.spread(n, context) for n in parameters}
        return tuple(Perturbed(self._draw(k, spreads, context, stream, parameters), share) for k in range(self.samples))

    def _draw(
        self, k: int, spreads: dict[str, float], context: Context, stream: Stream, parameters: Tensors
    ) -> dict[str, Tensor]:
        if not any(spreads.values()):
            return {}
        sign = -1.0 if self.antithetic and k % 2 else 1.0
        width = sum(p.numel() for p in parameters.values())
        stride = width + width % 2 + 2  # normals come in pairs of words; the last two are the radius's in the ball
        start = (k // 2 if self.antithetic else k) * stride
        unit = stream.normals(Purpose.SMOOTH, context.step, start, width)
        if self.ball:
            inside = float(stream.uniforms(Purpose.SMOOTH, context.step, start + stride - 2, 1)[0])
            unit *= inside ** (1 / width) * math.sqrt(width + 2) / unit.norm()
        pieces = unit.split([p.numel() for p in parameters.values()])
        return {
            n: (piece * (sign * spreads[n])).view(p.shape).to(p.device, p.dtype)
            for (n, p), piece in zip(parameters.items(), pieces, strict=True)
            if spreads[n]
        }
