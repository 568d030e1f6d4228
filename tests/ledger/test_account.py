"""Accounting: figures agree with dp-accounting and closed forms, err upward, and an answer always comes."""

import math
import subprocess
import sys
import time

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from quietgrad import account
from quietgrad.account import (
    delta_curve,
    delta_of,
    gaussian,
    gaussian_mu,
    poisson,
    price,
    rdp_epsilon,
    repeated,
    together,
)
from quietgrad.accountants import pld as losses
from quietgrad.accountants.pld import rounding
from quietgrad.calibration import SMALLEST_MULTIPLIER, calibrate
from quietgrad.errors import PrivacyError

MNIST = 256 / 60_000


def sampled(q, sigma, steps):
    return repeated(poisson(gaussian(sigma), q), steps)


def by_hand(event, delta, grid):
    return PLDAccountant(value_discretization_interval=grid).compose(event).get_epsilon(delta)


# Figures


@pytest.mark.parametrize(
    ("q", "sigma", "steps", "delta", "grid"),
    [
        (MNIST, 1.1, 14_040, 1e-5, 1e-4),
        (MNIST, 0.7, 3_516, 1e-5, 1e-4),
        (MNIST, 4.845, 234, 1e-5, 1e-5),
        (MNIST, 16.4, 3_516, 1e-5, 1e-5),
        (0.00256, 16.29, 19_531, 2e-5, 1e-5),
        (0.01, 1.0, 1_000, 1e-6, 1e-4),
        (0.01, 0.5, 500, 1e-5, 1e-3),
        (0.1, 5.0, 2_000, 1e-7, 1e-4),
        (0.5, 2.0, 20, 1e-5, 1e-3),
        (0.9, 3.0, 100, 1e-6, 1e-3),
    ],
)
def test_agrees_with_dp_accounting_by_hand(q, sigma, steps, delta, grid):
    """A price is within 1 % of dp-accounting's PLD on a fine grid, never below it by more than that grid's error."""
    epsilon = price(sampled(q, sigma, steps), delta).epsilon
    hand = by_hand(sampled(q, sigma, steps), delta, grid)
    assert hand * (1 - 1e-3) <= epsilon <= hand * 1.01


def test_golden_figures():
    """Figures quoted elsewhere: DP-SGD on MNIST, and fixed order, whose participations are plain Gaussians."""
    assert price(sampled(MNIST, 1.1, 14_040), 1e-5).epsilon == pytest.approx(2.380, rel=2e-3)
    assert rdp_epsilon(sampled(MNIST, 1.1, 14_040), 1e-5) == pytest.approx(2.594, abs=1e-3)
    assert price(gaussian(4.845), 1e-5).epsilon == pytest.approx(0.7509, abs=1e-4)
    assert price(repeated(gaussian(16.4), 15), 1e-5).epsilon == pytest.approx(0.8703, abs=1e-4)
    assert price(sampled(MNIST, 4.845, 234), 1e-5).epsilon == pytest.approx(0.0393, rel=5e-3)
    assert price(sampled(MNIST, 16.4, 3_516), 1e-5).epsilon == pytest.approx(0.0442, rel=5e-3)
    assert price(sampled(0.00256, 48.66, 19_531), 2e-5).epsilon < 0.0196  # finer than a grid of 1e-4 can see


def test_the_accountant_is_named():
    """A figure says which accountant gave it, on which grid, and what the other says."""
    assert "PLD (grid 2^-" in price(sampled(MNIST, 1.1, 14_040), 1e-5).accountant
    assert "RDP gives 2.594" in price(sampled(MNIST, 1.1, 14_040), 1e-5).accountant
    assert price(gaussian(2.0), 1e-5).accountant == "exact Gaussian (mu = 0.5)"
    assert price(repeated(gaussian(2.0), 0), 1e-5) == account.Price(0.0, "nothing was released")


def test_import_is_lazy():
    """Importing the module does not import dp-accounting, which takes half a second."""
    code = "import sys, quietgrad.account; sys.exit('dp_accounting' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# The closed form


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.845, 50.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-10])
def test_closed_form_agrees_with_pld(sigma, delta):
    """One Gaussian step: the closed form is at most dp-accounting's PLD, and within 0.1 % of it."""
    hand = by_hand(gaussian(sigma), delta, 1e-3 / sigma)
    assert hand * (1 - 1e-3) <= price(gaussian(sigma), delta).epsilon <= hand * (1 + 1e-6)


@given(st.floats(-4, 2.5), st.floats(0.5, 290))
def test_closed_form_inverts_itself_and_errs_upward(log_mu, digits):
    """From delta 0.3 to 1e-290 and mu from 1e-4 to 300: epsilon has at most delta, and 1e-6 less of it has more."""
    mu, delta = 10**log_mu, 10**-digits
    epsilon = price(gaussian(1 / mu), delta).epsilon
    assert delta_of(gaussian(1 / mu), epsilon) <= delta * (1 + 1e-6)
    if epsilon:
        assert delta_of(gaussian(1 / mu), epsilon * (1 - 1e-6)) > delta


@pytest.mark.parametrize(
    ("mu", "epsilon"), [(0.2, 0.1), (1.0, 3.0), (1.0, 0.0), (8.0, 40.0), (40.0, 700.0), (1e-3, 1e-3)]
)
def test_closed_form_is_the_integral(mu, epsilon):
    """delta is the integral of (1 - e^(epsilon - loss)) over losses above epsilon, loss ~ N(mu^2 / 2, mu^2)."""
    loss = np.linspace(epsilon, epsilon + mu * mu + 40 * mu, 400_001)
    integral = np.trapezoid(-np.expm1(epsilon - loss) * norm.pdf(loss, mu * mu / 2, mu), loss)
    assert delta_of(gaussian(1 / mu), epsilon) == pytest.approx(integral, rel=1e-6)


def test_mu_only_where_it_is_exact():
    """Gaussian compositions have a mu; sampling has none, and no limit theorem gives it one."""
    assert gaussian_mu(together(gaussian(2.0), repeated(gaussian(4.0), 12))) == pytest.approx(1.0)
    assert gaussian_mu(poisson(gaussian(2.0), 1.0)) == pytest.approx(0.5)
    assert gaussian_mu(sampled(0.01, 1.0, 10**6)) is None
    assert gaussian_mu(gaussian(0.0)) is None
    assert gaussian_mu(together()) == 0


# Soundness


@pytest.mark.parametrize(
    ("q", "sigma", "steps", "delta", "grid"),
    [
        (0.01, 1.0, 100, 1e-3, 2e-5),
        (0.5, 0.3, 100, 1e-5, 1e-3),
        (0.3, 2.0, 10, 1e-6, 1e-4),
        (0.01, 0.05, 10, 1e-5, 0.01),
    ],
)
def test_not_below_an_optimistic_pld(q, sigma, steps, delta, grid):
    """A PLD rounded the other way is a lower bound: no price is below it, and none is 1 % above."""
    lower = pld.from_gaussian_mechanism(
        sigma, sampling_prob=q, pessimistic_estimate=False, use_connect_dots=False, value_discretization_interval=grid
    )
    lower = lower.self_compose(steps).get_epsilon_for_delta(delta)
    assert lower <= price(sampled(q, sigma, steps), delta).epsilon <= lower * 1.01


def test_a_pld_may_lose_delta_and_the_allowance_covers_it():
    """dp-accounting's transforms can fall below the truth by more than delta 1e-14: 10,000 Gaussian steps, mu 0.5."""
    mu, steps = 0.5, 10_000
    sigma = math.sqrt(steps) / mu
    composed = pld.from_gaussian_mechanism(sigma, value_discretization_interval=0.1 / sigma).self_compose(steps)
    worst = 0.0
    for x in np.linspace(4, 9, 51):
        epsilon = mu * (x + mu / 2)
        worst = min(worst, composed.get_delta_for_epsilon(epsilon) - delta_of(gaussian(1 / mu), epsilon))
    assert worst < -1e-14
    assert worst > -rounding(((1.0, sigma, steps),)) / 10


@pytest.mark.parametrize(
    ("q", "sigma", "steps", "delta"),
    [
        (0.01, 0.3, 1_000, 1e-5),  # epsilon 70
        (0.5, 0.3, 1_000, 1e-5),  # epsilon 2,700
        (1.0, 0.3, 1_000, 1e-5),
        (0.001, 1.0, 10**6, 1e-5),
        (0.001, 1.0, 10**6, 1e-12),
        (1.0, 1.0, 10**6, 1e-12),
        (MNIST, 1.1, 14_040, 1e-12),
        (1 - 1e-12, 1.0, 10, 1e-12),
        (1e-9, 1.0, 10**6, 1e-12),
        (0.01, 0.01, 10, 1e-5),
        (0.1, 1e6, 100_000, 1e-9),
        (0.1, 5.0, 1, 1e-12),
        (0.01, 1.0, 10**9, 0.5),
    ],
)
def test_an_answer_always_comes(q, sigma, steps, delta):
    """Small noise, large epsilons, 10^6 steps, q = 1, delta 1e-12: finite, fast, at most RDP, silent, explained."""
    started = time.perf_counter()
    event = sampled(q, sigma, steps)
    found = price(event, delta)
    assert time.perf_counter() - started < 10
    assert 0 <= found.epsilon <= min(rdp_epsilon(event, delta), price(repeated(gaussian(sigma), steps), delta).epsilon)
    assert found.epsilon < math.inf
    assert found.accountant
    assert delta_of(event, found.epsilon) <= max(2 * delta, 20 * rounding(((q, sigma, steps),)))


def test_rounding_beside_delta_passes_the_pld_over():
    """Where delta is of the size of the arithmetic's rounding, RDP answers, and why is said."""
    found = price(sampled(0.001, 1.0, 10**6), 1e-12)
    assert found.accountant.startswith("RDP (order")
    assert "PLD passed over: its rounding" in found.accountant


@pytest.mark.parametrize("answer", [math.nan, math.inf, -1.0, OverflowError("no"), ValueError("no")])
def test_nonsense_of_a_pld_is_not_believed(monkeypatch, answer):
    """A PLD that raises, or answers NaN, infinity or less than zero, is replaced by RDP."""

    class Broken:
        def get_epsilon_for_delta(self, delta):
            if isinstance(answer, Exception):
                raise answer
            return answer

    event = sampled(0.0123, 1.234, 567)
    monkeypatch.setattr(losses, "distribution", lambda *_: Broken())
    account._price.cache_clear()
    found = price(event, 1e-5)
    account._price.cache_clear()
    assert found.epsilon == rdp_epsilon(event, 1e-5)
    assert "PLD passed over: it " in found.accountant


def test_no_noise_has_no_epsilon():
    """A multiplier of 0, alone, sampled or in company, costs an infinite epsilon and delta 1."""
    for event in (gaussian(0.0), poisson(gaussian(0.0), 0.01), together(gaussian(1.0), dp.GaussianDpEvent(0.0))):
        assert price(event, 1e-5).epsilon == math.inf
        assert rdp_epsilon(event, 1e-5) == math.inf
        assert delta_of(event, 3.0) == 1
    assert price(poisson(gaussian(0.0), 0.0), 1e-5).epsilon in (0, math.inf)


# Structure


@settings(max_examples=6, deadline=None)
@given(st.sampled_from([1.0, 0.5, 0.02]), st.floats(0.5, 5), st.integers(1, 6), st.integers(1, 3))
def test_repeated_equals_unrolled(q, sigma, count, times):
    """repeated(event, n) is n copies, for Gaussian and sampled Gaussian events, nested or beside others, here and by
    each accountant of dp-accounting."""
    event = poisson(gaussian(sigma), q) if q < 1 else gaussian(sigma)
    folded = together(repeated(repeated(event, count), times), gaussian(3.0))
    unrolled = together(gaussian(3.0), *[event] * (count * times))
    assert price(folded, 1e-5) == price(unrolled, 1e-5)
    assert rdp_epsilon(folded, 1e-5) == rdp_epsilon(unrolled, 1e-5)
    assert delta_of(folded, 1.0) == delta_of(unrolled, 1.0)
    for accountant in (lambda: PLDAccountant(value_discretization_interval=0.02), RdpAccountant):
        epsilons = [accountant().compose(e).get_epsilon(1e-5) for e in (folded, unrolled)]
        assert epsilons[0] == pytest.approx(epsilons[1], rel=0.02)
        assert price(folded, 1e-5).epsilon <= epsilons[1] * 1.01


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from([1.0, 0.3, 0.02, 1e-3]),
    st.floats(0.4, 20),
    st.integers(1, 20_000),
    st.sampled_from([1e-3, 1e-5, 1e-8]),
)
def test_monotone(q, sigma, steps, delta):
    """More noise, fewer steps, rarer sampling and a larger delta never cost more (up to the grid's 0.5 %)."""
    epsilon = price(sampled(q, sigma, steps), delta).epsilon
    cheaper = [(q, sigma * 1.3, steps, delta), (q, sigma, steps // 2, delta), (q / 2, sigma, steps, delta)]
    for *setting, at in [*cheaper, (q, sigma, steps, delta * 10)]:
        assert price(sampled(*setting), at).epsilon <= epsilon * 1.005
    assert epsilon <= rdp_epsilon(sampled(q, sigma, steps), delta) * (1 + 1e-9)


def test_rdp_curve_is_dp_accountings():
    """The Renyi curve read from dp-accounting gives the epsilon that its own accountant gives."""
    for q, sigma, steps in ((MNIST, 1.1, 14_040), (0.1, 0.6, 100), (0.5, 3.0, 40)):
        event = sampled(q, sigma, steps)
        hand = RdpAccountant(account.ORDERS).compose(event).get_epsilon(1e-5)
        assert hand <= rdp_epsilon(event, 1e-5) <= hand + 1e-6


def test_zero_out_costs_what_add_or_remove_costs():
    """For Gaussians, sampled or not, an example that becomes nothing is an example that is removed."""
    event = together(gaussian(5.0), sampled(0.01, 1.0, 500))
    assert price(event, 1e-5, "zero-out") == price(event, 1e-5, "add-or-remove-one")
    hand = PLDAccountant(dp.NeighboringRelation.REPLACE_SPECIAL, 1e-3).compose(event).get_epsilon(1e-5)
    assert price(event, 1e-5, "zero-out").epsilon == pytest.approx(hand, rel=0.01)


def test_delta_and_epsilon_agree():
    """delta_of is the delta that price was asked for, within the accountants' tightness; the curve holds pairs."""
    event = sampled(MNIST, 1.1, 14_040)
    assert 1e-5 * 0.98 <= delta_of(event, price(event, 1e-5).epsilon) <= 1e-5 * 1.02
    deltas = [delta_of(event, e) for e in (0.0, 0.5, 1.0, 2.0, 4.0, 100.0)]
    assert deltas == sorted(deltas, reverse=True)
    assert 0 < deltas[-1] < 1e-30
    assert delta_of(event, math.inf) == 0
    started = time.perf_counter()
    curve = delta_curve(event)
    assert time.perf_counter() - started < 5
    assert all(price(event, d).epsilon == e for e, d in curve)
    assert [e for e, _ in curve] == sorted(e for e, _ in curve)


def test_prices_are_remembered():
    """A progress bar may ask again and again: a known price takes well under a millisecond."""
    event = sampled(MNIST, 1.1, 14_040)
    price(event, 1e-5)
    started = time.perf_counter()
    for _ in range(200):
        price(event, 1e-5)
    assert time.perf_counter() - started < 0.5


# Calibration


@pytest.mark.parametrize("q", [1.0, 0.1, MNIST, 2e-4])
@pytest.mark.parametrize("steps", [1, 1_000, 100_000])
@pytest.mark.parametrize("epsilon", [0.1, 3.0, 60.0])
def test_calibrate_uses_the_budget(q, steps, epsilon):
    """The multiplier's price is within the budget and uses 99 % of it, up to 100,000 steps."""
    multiplier = calibrate(lambda m: sampled(q, m, steps), epsilon, 1e-6)
    assert 0.99 * epsilon <= price(sampled(q, multiplier, steps), 1e-6).epsilon <= epsilon


@pytest.mark.alone
@pytest.mark.parametrize("q", [0.1, MNIST, 1e-4])
@pytest.mark.parametrize("epsilon", [0.3, 1.5, 9.0])
def test_calibrate_is_quick(q, epsilon):
    """100,000 steps are calibrated in under 5 s on two cores."""
    started = time.perf_counter()
    calibrate(lambda m: sampled(q, m, 100_000), epsilon, 1e-5)
    assert time.perf_counter() - started < 5


def test_calibrate_beside_a_fixed_cost():
    """An event may have parts that the multiplier does not touch: what they leave is used."""
    fixed = repeated(gaussian(30.0), 10)

    def event_of(multiplier):
        return together(fixed, sampled(0.01, multiplier, 1_000))

    multiplier = calibrate(event_of, 1.0, 1e-5)
    assert 0.99 <= price(event_of(multiplier), 1e-5).epsilon <= 1
    with pytest.raises(PrivacyError, match=r"cannot be met.*costs 0\.3.*fewer steps, more data or a smaller batch"):
        calibrate(event_of, 0.2, 1e-5)


def test_calibrate_stops_at_the_smallest_multiplier():
    """Where any noise is private enough, the smallest multiplier considered is returned."""
    assert calibrate(lambda m: sampled(1e-7, m, 1), 1.0, 1e-5) == SMALLEST_MULTIPLIER


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan, math.inf])
def test_calibrate_refuses_a_budget_that_is_none(epsilon):
    """A budget that is not positive and finite is refused."""
    with pytest.raises(PrivacyError, match="budget"):
        calibrate(gaussian, epsilon, 1e-5)


# Refusals


@pytest.mark.parametrize(
    ("event", "culprit"),
    [
        (dp.LaplaceDpEvent(1.0), "LaplaceDpEvent"),
        (dp.RandomizedResponseDpEvent(0.5, 2), "RandomizedResponseDpEvent"),
        (dp.ZCDpEvent(0.1), "ZCDpEvent"),
        (dp.PoissonSampledDpEvent(0.1, dp.LaplaceDpEvent(1.0)), "LaplaceDpEvent"),
        (dp.PoissonSampledDpEvent(0.1, dp.SelfComposedDpEvent(dp.GaussianDpEvent(1.0), 2)), "SelfComposedDpEvent"),
        (dp.SampledWithoutReplacementDpEvent(100, 10, dp.GaussianDpEvent(1.0)), "SampledWithoutReplacementDpEvent"),
        (dp.UnsupportedDpEvent(), "UnsupportedDpEvent"),
    ],
)
def test_events_without_an_accountant_are_refused(event, culprit):
    """Whatever is not a composition of sampled or plain Gaussians is refused by name, however deep it lies."""
    for nested in (event, together(gaussian(1.0), repeated(event, 3))):
        for ask in (lambda e: price(e, 1e-5), lambda e: rdp_epsilon(e, 1e-5), lambda e: delta_of(e, 1.0), gaussian_mu):
            with pytest.raises(PrivacyError, match=culprit):
                ask(nested)


def test_bad_numbers_are_refused():
    """Probabilities, multipliers, counts, deltas and adjacencies out of range are refused, with a remedy."""
    for event in (
        gaussian(-1.0),
        gaussian(math.nan),
        gaussian(math.inf),
        poisson(gaussian(1.0), 1.1),
        poisson(gaussian(1.0), math.nan),
        repeated(gaussian(1.0), -1),
        repeated(gaussian(1.0), 1.5),
        repeated(gaussian(1.0), math.nan),
    ):
        with pytest.raises(PrivacyError, match=r"event: .*; give"):
            price(event, 1e-5)
    for delta in (0.0, -1e-5, 1.0, 2.0, math.nan):
        with pytest.raises(PrivacyError, match="delta"):
            price(gaussian(1.0), delta)
    for epsilon in (-1.0, math.nan):
        with pytest.raises(PrivacyError, match="epsilon"):
            delta_of(gaussian(1.0), epsilon)
    with pytest.raises(PrivacyError, match="adjacency: it is 'replace-one'"):
        price(gaussian(1.0), 1e-5, "replace-one")
