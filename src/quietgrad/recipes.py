"""Recipes: DP-SGD and the papers, one expression each. A recipe takes a plan and gives a plan, and they compose."""

from __future__ import annotations

from quietgrad.bound import Clip
from quietgrad.errors import PrivacyError
from quietgrad.noise import Gaussian
from quietgrad.plan import Plan
from quietgrad.sample import Poisson, steps_of


def dp_sgd(
    *,
    examples: int,
    batch_size: int,
    epochs: float | None = None,
    steps: int | None = None,
    clip: float = 1.0,
    noise_multiplier: float | None = None,
) -> Plan:
    """Poisson sampling, a clip of each example's gradient, Gaussian noise (Abadi et al. 2016).

    >>> plan = dp_sgd(examples=60_000, batch_size=256, epochs=15).calibrate(epsilon=3.0, delta=1e-5)
    >>> plan.steps, 2.97 < plan.epsilon() <= 3.0
    (3516, True)
    """
    if (epochs is None) == (steps is None):
        raise PrivacyError("sample", f"epochs is {epochs!r} and steps is {steps!r}", "give one of the two")
    length = steps if steps is not None else steps_of(examples, batch_size, epochs or 0.0)
    return Plan(sample=Poisson(examples, batch_size, length), bound=Clip(clip), noise=Gaussian(noise_multiplier))
