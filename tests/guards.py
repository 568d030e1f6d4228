"""Guards: small tests that an honest stage passes and a broken one does not.

Each raises `Caught`. False-alarm rates are per call and hold for any seed; the seeds that the tests use are fixed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from scipy.stats import chi2, kstest
from tests.small import norm
from torch import Tensor

Tensors = Mapping[str, Tensor]


class Caught(AssertionError):
    """A guard fired."""


def require(holds: bool, found: str) -> None:
    """Fires unless."""
    if not holds:
        raise Caught(found)


# The noise.


def has_scale(noise: Tensor, scale: float) -> None:
    """Normal with this standard deviation. False alarm 1e-5; at 100,000 draws 2 % too much or too little is caught with
    more than 99.9 %, half of the noise surely."""
    noise = noise.double().flatten()
    spread, count = float(noise.square().mean().sqrt()), len(noise)
    require(abs(spread / scale - 1) <= 4.6 / math.sqrt(2 * count), f"standard deviation {spread:.5g}, not {scale:.5g}")
    p = kstest((noise / scale).numpy(), "norm").pvalue
    require(p >= 5e-6, f"not normal: Kolmogorov-Smirnov p = {p:.2g}")


def covers_every_coordinate(releases: Sequence[Tensors], scale: float) -> None:
    """Every tensor has the noise, at every coordinate. False alarm 1e-6 a tensor; a tensor without noise is caught
    surely, one with half of it with more than 99.9 % from 100 numbers on."""
    for name in releases[0]:
        seen = torch.stack([r[name].double() for r in releases]) / scale
        require(bool((seen != seen[0]).any(0).all()) and bool((seen != 0).any(0).all()), f"{name} lacks noise")
        low, high = chi2.ppf([5e-7, 1 - 5e-7], seen.numel())
        require(low <= float(seen.square().sum()) <= high, f"{name} has noise of another scale")


def are_independent(noises: Sequence[Tensor]) -> None:
    """No two draws are alike: correlations within 5 / sqrt(n). False alarm 6e-7 a pair; equal or opposite noise is
    caught surely, a correlation of 10 / sqrt(n) with more than 99.9 %."""
    unit = torch.stack([n.double().flatten() / n.double().norm() for n in noises])
    worst = float((unit @ unit.T).fill_diagonal_(0.0).abs().max())
    require(worst <= 5 / math.sqrt(unit.shape[1]), f"two draws of noise have correlation {worst:.3f}")


def lies_on_lattice(release: Tensor, divisor: float, scale: float) -> None:
    """Before the division it is a multiple of a power of two, at most scale * 2^-16. Exact; low bits that tell of the
    sum are caught surely."""
    spacing = 2.0 ** math.floor(math.log2(scale * 2.0**-16))
    steps = release.double() * divisor / spacing
    require(bool((steps - steps.round()).abs().max() <= 1e-4), "low bits are left in the release")


# How far one example reaches.


def shares_within(shares: Sequence[Tensors], radius: float) -> None:
    """Each share, all tensors together, is within the radius, rounding included. Exact."""
    worst = max(norm(s) for s in shares)
    require(worst <= radius * (1 + 2.0**-50), f"a share has norm {worst:.9g}, the radius is {radius:.9g}")


def neighbours_within(sum_of: Callable[[list[int]], Tensors], count: int, radius: float, slack: float = 1e-6) -> None:
    """Sums with and without any one of `count` examples differ by the radius at most, and `slack` of it. Exact."""
    everyone = list(range(count))
    whole = sum_of(everyone)
    for i in everyone:
        rest = sum_of(everyone[:i] + everyone[i + 1 :])
        moved = norm({name: whole[name].double() - rest[name].double() for name in whole})
        require(moved <= radius * (1 + slack), f"example {i} moved the sum by {moved:.6g}, the radius is {radius:.6g}")


def bad_example_is_nothing(sum_of: Callable[[bool], Tensors]) -> None:
    """With a bad example in it (True) the sum is bit for bit what it is with nothing in its place, silently. Exact."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            without, within = sum_of(False), sum_of(True)
    except Exception as error:
        raise Caught(f"a value was heard of: {error!r}") from error
    alike = all(torch.equal(without[name], within[name]) for name in without)
    require(alike, "an example that is not finite moved the sum")


def divides_by_a_constant(released: Callable[[int], Tensor]) -> None:
    """Without noise, the release of three equal examples is three times that of one, and of none it is zero. Exact."""
    require(bool(released(0).abs().max() == 0), "an empty batch released something without noise")
    worst = float((released(3) - 3 * released(1)).abs().max() / released(1).abs().max())
    require(worst <= 1e-6, "the divisor moves with the batch")


def sees_releases_only(released: Callable[[bool], Tensor]) -> None:
    """Two batches whose sums are equal, with the same noise, are released alike. Exact."""
    require(torch.equal(released(False), released(True)), "what comes after the noise saw more than the release")


# Who takes part, and what is counted.


def are_poisson(draws: Sequence[Tensor], rows: int, q: float) -> None:
    """Every row in every draw independently with probability q.

    False alarm 1e-5 over all its parts together. With 20,000 rows, 200 draws and q = 0.01: a q that is off by 5 % is
    caught with more than 99.9 %; batches of a fixed size, of consecutive rows, or that share out an epoch, surely.
    """
    steps, spread = len(draws), q * (1 - q)
    for d in draws:
        require(bool((d[1:] > d[:-1]).all()), "a row twice in one batch, or out of order")
        require(not len(d) or (int(d[0]) >= 0 and int(d[-1]) < rows), "a row that is not there")
    sizes = torch.tensor([len(d) for d in draws], dtype=torch.float64)
    counts = torch.bincount(torch.cat(list(draws)), minlength=rows).double()
    members = float(sizes.sum())
    z = (members - rows * steps * q) / math.sqrt(rows * steps * spread)
    require(abs(z) <= 5, f"a row is in a batch with frequency {members / rows / steps:.5g}, not {q:.5g}")
    dispersion = float((sizes - rows * q).square().sum()) / (rows * spread)
    low, high = chi2.ppf([1e-6, 1 - 1e-6], steps)
    require(low <= dispersion <= high, f"sizes of batches vary by {dispersion / steps:.3f} of a binomial's variance")
    each = float((counts - steps * q).square().sum()) / (steps * spread)
    unit = 1 + (1 / spread - 6) / steps / 2  # a multiple of a chi-square with the mean and variance that this has
    low, high = unit * chi2.ppf([1e-6, 1 - 1e-6], rows / unit)
    require(low <= each <= high, f"rows differ: chi-square {each:.6g} of {rows}")
    pairs = [int((d[1:] - d[:-1] == 1).sum()) for d in draws]
    _count("neighbouring rows together", sum(pairs), steps * (rows - 1), q)
    again = [int(torch.isin(b, a, assume_unique=True).sum()) for a, b in pairwise(draws)]
    _count("rows in two draws running", sum(again), (steps - 1) * rows, q)


def _count(what: str, seen: int, trials: int, q: float) -> None:
    mean, variance = trials * q**2, trials * (q**2 * (1 - q**2) + 2 * q**3 * (1 - q))  # neighbouring pairs share a row
    require(abs(seen - mean) <= 5 * math.sqrt(variance) + 10, f"{what}: {seen}, expected {mean:.1f}")


def counts_every_release(released: Sequence[int], spent: int) -> None:
    """As many are accounted as were released, and none is released twice. Exact."""
    require(len(set(released)) == len(released), "one step was released twice")
    require(spent >= len(released), f"{len(released)} releases, {spent} accounted")


def releases_every_step(released: Sequence[int], steps: int) -> None:
    """A release for every step, whatever its batch held. Exact."""
    require(
        list(released) == list(range(steps)), f"{len(released)} releases in {steps} steps: the rest tell who was out"
    )
