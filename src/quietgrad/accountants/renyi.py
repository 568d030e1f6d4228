"""The Renyi accountant: dp-accounting's divergences, at orders up to 4096, each rounded up."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from quietgrad.accountants.bill import Bill

ORDERS = np.array([*(1 + k / 10 for k in range(1, 100)), *range(11, 64), *(round(2 ** (k / 2)) for k in range(12, 25))])


@contextmanager
def quiet() -> Iterator[None]:
    """Neither warnings nor log lines of a computation whose result is checked anyway."""
    import dp_accounting  # noqa: F401  (absl must have made its own logger)

    logger = logging.getLogger("absl")
    was, logger.disabled = logger.disabled, True
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        logger.disabled = was


@lru_cache(maxsize=256)
def renyi(probability: float, multiplier: float, relation: str) -> Any:
    """The Renyi divergence of one step at ORDERS, rounded up."""
    from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(ORDERS, NeighboringRelation[relation])
    with quiet():
        accountant.compose(PoissonSampledDpEvent(probability, GaussianDpEvent(multiplier)))
    divergence = accountant._rdp  # nothing public answers with the curve
    return np.where(np.isnan(divergence), np.inf, np.maximum(divergence, 0) + 1e-14 * (1 + 1 / (ORDERS - 1)))


def total_renyi(bill: Bill, relation: str) -> Any:
    """The Renyi divergence of the whole bill at ORDERS."""
    return sum((n * renyi(q, sigma, relation) for q, sigma, n in bill), np.zeros(len(ORDERS)))


def rdp(bill: Bill, delta: float, relation: str) -> tuple[float, float]:
    """Epsilon and the order that gives it."""
    from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

    with quiet():
        epsilon, order = compute_epsilon(ORDERS, total_renyi(bill, relation), delta)
    return float(epsilon), float(order)
