"""DP-LSSGD on paper: Wang et al., its formulas, its tables 3 and 4, and where its constants do not follow.

The stage is `quietgrad.laplacian`. A certificate never rests on anything here: its epsilon is the accountant's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SIGMAS = (1, 2, 3, 4, 5)
TABLE_3 = (0.447, 0.333, 0.277, 0.243, 0.218)  # gamma as printed, at d = 1,000, 10,000 and 100,000 alike
TABLE_4 = (0.268, 0.185, 0.149, 0.128, 0.114)  # beta, likewise


def alpha(sigma: float) -> float:
    """(2 sigma + 1 - sqrt(4 sigma + 1)) / (2 sigma) of propositions 1 and 2, written so that nothing cancels."""
    return 2 * sigma / (2 * sigma + 1 + math.sqrt(4 * sigma + 1))


def lemma_7(sigma: float, k: int) -> float:
    """f[k] = alpha^|k| / sqrt(4 sigma + 1): the kernel of A^-1 on an endless line; around d places it is wrapped."""
    return float(alpha(sigma) ** abs(k) / math.sqrt(4 * sigma + 1))


def spectrum(sigma: float, d: int) -> Tensor:
    """(d,) float64: the eigenvalues of A^-1, 1 / (1 + 2 sigma - 2 sigma cos(2 pi i / d)), i = 1 to d."""
    angles = 2 * math.pi * torch.arange(1, d + 1, dtype=torch.float64) / d
    return 1 / (1 + 4 * sigma * torch.sin(angles / 2) ** 2)


def gamma_sum(sigma: float, d: int) -> float:
    """Gamma as theorem 2 defines it: the mean eigenvalue of A^-1."""
    return float(spectrum(sigma, d).mean())


def beta_sum(sigma: float, d: int) -> float:
    """Beta as theorem 3 defines it: the mean squared eigenvalue, which is the share of its variance that noise
    keeps."""
    return float(spectrum(sigma, d).square().mean())


def gamma(sigma: float, d: int) -> float:
    """Proposition 1. The text lets gamma "converge to 0 almost exponentially" in d: it tends to 1 / sqrt(4 sigma + 1),
    that fast (table 3 has equal rows)."""
    a = alpha(sigma) ** d
    return float((1 + a) / ((1 - a) * math.sqrt(4 * sigma + 1)))


def beta(sigma: float, d: int) -> float:
    """Proposition 2. It tends to (1 + 2 sigma) / (1 + 4 sigma)^1.5, and is there at d = 100."""
    if sigma == 0:
        return 1.0  # the form below is 0 / 0
    a, xi = alpha(sigma), -math.sqrt(1 + 4 * sigma) / sigma
    top = 2 * a ** (2 * d + 1) - xi * a ** (2 * d) + 2 * xi * d * a**d - 2 * a + xi
    return float(top / (sigma**2 * xi**3 * (1 - a**d) ** 2))


def zeta(sigma: float, d: int) -> float:
    """(1 + 4 sigma) sqrt(beta) > 1: what theorem 3's bound is multiplied by in the l2 norm, in place of
    sqrt(beta)."""
    return (1 + 4 * sigma) * math.sqrt(beta_sum(sigma, d))


def lemma_4(sigma: float, d: int) -> float:
    """E |x|^2 in the norm of A^-1, x standard normal: d gamma. The proof's last line says gamma, and drops d."""
    return d * gamma_sum(sigma, d)


def lemma_5(sigma: float, d: int) -> float:
    """E |A^-1 x|^2 = d beta. The proof's last line says beta, and drops d."""
    return d * beta_sum(sigma, d)


def remark_3(smoothed: Tensor, sigma: float) -> float:
    """|d|^2 + 2 sigma |D+ d|^2 + sigma^2 |L d|^2, which is |g|^2 for d = A^-1 g. The text prints |d| and |g| without
    the squares and 1/d before the other two: that is no identity. Nor does a smaller |d| buy privacy, for the noise
    is smoothed alike: constants pass unshrunk, and what may be undone cannot cost less."""
    step, bend = smoothed.roll(-1) - smoothed, smoothed.roll(-1) - 2 * smoothed + smoothed.roll(1)
    return float(smoothed.square().sum() + 2 * sigma * step.square().sum() + sigma**2 * bend.square().sum())


@dataclass(frozen=True)
class Condition:
    """One condition of a theorem or of its proof: where it stands, what it compares, whether it is met."""

    where: str
    says: str
    value: float
    limit: float
    met: bool


@dataclass(frozen=True)
class Theorem1:
    """nu, the noise on the batch mean; `multiplier` is nu b / G, what Gaussian(multiplier=…) takes with Clip(G).

    A multiplier is all that leaves this theorem. It speaks of replace-one and sampling without replacement; under
    Poisson, add or remove one, the same multiplier has the accountant's price and no other.
    """

    nu: float
    order: float
    multiplier: float
    conditions: tuple[Condition, ...]

    @property
    def holds(self) -> bool:
        """Whether every condition is met, the one that the text leaves out too."""
        return all(condition.met for condition in self.conditions)


def theorem1_noise(
    *, examples: int, batch_size: int, steps: int, epsilon: float, delta: float, lipschitz: float = 1.0
) -> Theorem1:
    """nu^2 = 8 T alpha G^2 / (n^2 epsilon), alpha = 2 log(1/delta) / epsilon + 1.

    Remark 1 calls it tight: it is an upper bound on what is needed. Lemma 1 quotes its source without the limit on the
    order alpha, which is not met in any column of table 2 (13 to 351 where below 1 is asked): as proved in the text,
    the theorem does not cover its own experiments.

    >>> found = theorem1_noise(examples=50_000, batch_size=128, steps=19_531, epsilon=0.3, delta=1e-5)
    >>> round(found.multiplier, 2), [condition.met for condition in found.conditions]
    (16.29, [True, True, False])
    """
    log, rate = math.log(1 / delta), batch_size / examples
    order = 2 * log / epsilon + 1
    nu = math.sqrt(8 * steps * order / epsilon) * lipschitz / examples
    multiplier = nu * batch_size / lipschitz
    ratio = (multiplier / 2) ** 2  # nu^2 / Delta^2, Delta = 2 G / b: one example is replaced
    limit, bound = 5 * steps * log * rate**2, order * rate * (1 + ratio)
    conditions = (
        Condition("theorem 1", "epsilon^2 <= 5 T log(1/delta) b^2/n^2", epsilon**2, limit, epsilon**2 <= limit),
        Condition("lemma 1", "nu^2/Delta^2 >= 1/1.25 (the proof prints nu^2)", ratio, 0.8, ratio >= 0.8),
        Condition("left out of lemma 1", "alpha tau (1 + nu^2/Delta^2) < 1", bound, 1.0, bound < 1),
    )
    return Theorem1(nu, order, multiplier, conditions)


@dataclass(frozen=True)
class Utility:
    """A bound, the number of steps at which it is reached, and the number that the theorem states."""

    bound: float
    steps: float
    steps_printed: float
    conditions: tuple[Condition, ...]


def theorem_2(
    *, examples: int, d: int, sigma: float, epsilon: float, delta: float, lipschitz: float, distance: float
) -> Utility:
    """Convex: E F(mean iterate) - F* <= 2 G sqrt(6 gamma (D + G^2) d log(1/delta)) / (n epsilon), D = |w0 - w*|^2 in
    the norm of A, eta = 1/sqrt(T). The theorem's T lacks gamma (the proof's has it), so that at its own T the bound is
    larger by (sqrt(gamma) + 1/sqrt(gamma)) / 2; the constant 24 in the proof needs epsilon <= log(1/delta)."""
    g, log, start = gamma_sum(sigma, d), math.log(1 / delta), distance + lipschitz**2
    steps = start * (examples * epsilon) ** 2 / (24 * d * lipschitz**2 * log)
    bound = 2 * lipschitz * math.sqrt(6 * g * start * d * log) / (examples * epsilon)
    return Utility(bound, steps / g, steps, (_constant(epsilon, log),))


def theorem_3(
    *, examples: int, d: int, sigma: float, epsilon: float, delta: float, lipschitz: float, smooth: float, gap: float
) -> Utility:
    """Nonconvex: E |grad F|^2 in the norm of A^-1 <= 4 G sqrt(6 beta d L (2 D + L G^2) log(1/delta)) / (n epsilon),
    D = F(w0) - F*, at a *random* iterate. The text says the average of the iterates: take F = cos and the iterates 0
    and pi, where the gradient vanishes, as it does not at pi / 2. Its T = (D + L nu^2) n^2 epsilon^2 / (12 d L G^2
    log(1/delta)) is not its proof's, which is taken here, and nu there depends on T; eta L <= 1 is not stated."""
    b, log, start = beta_sum(sigma, d), math.log(1 / delta), 2 * gap + smooth * lipschitz**2
    scale = (examples * epsilon) ** 2 / (d * smooth * lipschitz**2 * log)
    steps, bend = start * scale / (24 * b), 8 * lipschitz**2 * (2 * log / epsilon + 1) / (examples**2 * epsilon)
    # T = (D + L nu^2) scale / 12 with nu^2 = T bend, solved for T; no T solves it where L bend scale >= 12
    printed = gap * scale / (12 - smooth * bend * scale) if smooth * bend * scale < 12 else math.inf
    bound = 4 * lipschitz * math.sqrt(6 * b * d * smooth * start * log) / (examples * epsilon)
    rate = smooth / math.sqrt(steps)
    step = Condition("left out of theorem 3", "eta L <= 1, eta = 1/sqrt(T)", rate, 1.0, rate <= 1)
    return Utility(bound, steps, printed, (_constant(epsilon, log), step))


def _constant(epsilon: float, log: float) -> Condition:
    says = "epsilon <= log(1/delta), for nu^2 <= 24 T G^2 log(1/delta) / (n epsilon)^2"
    return Condition("left out of theorems 2 and 3", says, epsilon, log, epsilon <= log)
