"""Recipes: DP-SGD and the papers, one expression each. A recipe takes a plan and gives a plan, and they compose."""

from __future__ import annotations

from quietgrad.bound import Clip
from quietgrad.errors import PrivacyError
from quietgrad.filters import then
from quietgrad.laplacian import LaplacianSmoothing
from quietgrad.losses import Tailored
from quietgrad.noise import Gaussian
from quietgrad.plan import Plan
from quietgrad.sample import Poisson, steps_of
from quietgrad.smoothing import RandomizedSmoothing


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


def dplis(plan: Plan, radius: float = 10.0, samples: int = 10) -> Plan:
    """Gradients of a smoothed loss: means over perturbed parameters, before the clip (Wang et al., DPLIS; plain SGD).

    >>> plan = dp_sgd(examples=60_000, batch_size=256, epochs=15).calibrate(epsilon=3.0, delta=1e-5)
    >>> dplis(plan).epsilon() == plan.epsilon()
    True
    """
    return plan.replace(smooth=RandomizedSmoothing(radius, samples))


LOSING_LESS = {  # Losing Less, table 6: end-to-end networks, then those on the features of a scattering transform
    "cifar10": Tailored(threshold_epoch=7, beta=11, gamma=5),
    "fashion-mnist": Tailored(threshold_epoch=0, beta=1, gamma=5),
    "mnist": Tailored(threshold_epoch=0, beta=1, gamma=5),
    "cifar10-scatter": Tailored(threshold_epoch=2, beta=1, gamma=2),
    "fashion-mnist-scatter": Tailored(threshold_epoch=2, beta=51, gamma=2),
    "mnist-scatter": Tailored(threshold_epoch=2, beta=11, gamma=10),
}


def losing_less(plan: Plan, preset: str = "mnist") -> Plan:
    """Losing Less: the tailored loss, with a preset of table 6; for other settings plan.replace(loss=Tailored(…)).

    >>> print(losing_less(dp_sgd(examples=60_000, batch_size=512, epochs=40)).loss.says)
    Tailored: a Focal(5) + (1 - a) SSE + (1 - a) / 1 R, a = sigmoid(epoch - 0)
    """
    if preset not in LOSING_LESS:
        raise PrivacyError("loss", f"no preset is called {preset!r}", f"give one of {', '.join(LOSING_LESS)}")
    return plan.replace(loss=LOSING_LESS[preset])


def dp_lssgd(plan: Plan, sigma: float = 1.0) -> Plan:
    """DP-LSSGD (Wang et al.): releases smoothed along their coordinates, after whatever filters the plan has.

    >>> print(dp_lssgd(dp_sgd(examples=60_000, batch_size=256, epochs=15), sigma=3.0).denoise.says)
    LaplacianSmoothing: sigma 3, along the whole vector
    """
    return plan.replace(denoise=then(plan.denoise, LaplacianSmoothing(sigma)))
