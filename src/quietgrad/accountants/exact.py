"""The exact accountant: Gaussian mechanisms without sampling, in closed form (Balle and Wang 2018)."""

from __future__ import annotations

import math


def log_delta(mu: float, epsilon: float) -> float:
    """The log of delta = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu) (Balle and Wang 2018), rounded up.

    With x = eps/mu - mu/2, density phi and Mills ratio R it is phi(x) (R(x) - R(x + mu)): nothing over- or underflows.
    """
    from scipy import special

    x = epsilon / mu - mu / 2
    mills = [math.sqrt(math.pi / 2) * float(special.erfcx(t / math.sqrt(2))) for t in (max(x, 0.0), x + mu)]
    log_phi = -x * x / 2 - math.log(2 * math.pi) / 2
    if x > 0:
        return log_phi + math.log(mills[0] - mills[1] + 1e-15 * mills[0]) + 1e-9
    return min(0.0, math.log(math.exp(float(special.log_ndtr(-x))) - math.exp(log_phi) * mills[1] + 1e-15))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The smallest epsilon of one Gaussian mechanism, by bisection; what is returned satisfies delta."""
    if mu == 0 or log_delta(mu, 0.0) <= math.log(delta):
        return 0.0
    low, high = 0.0, (mu * mu / 2 + mu * math.sqrt(2 * -math.log(delta))) * (1 + 1e-9)
    while low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if log_delta(mu, middle) <= math.log(delta) else (middle, high)
    return high
