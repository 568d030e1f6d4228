"""The certificate: every key that a reviewer looks for, and every figure as the accountant gives it."""

from __future__ import annotations

import dataclasses
import json
import math
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from dp_accounting import GaussianDpEvent, NeighboringRelation, NonPrivateDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from tests.ledger.small import adam, begin, fixed_order, linear, poisson, train

import quietgrad as qg
from quietgrad import Certificate, PrivacyError
from quietgrad.plan import Plan

KEYS = {
    "epsilon", "delta", "status", "adjacency", "unit", "accountant", "sampling", "event", "steps",
    "expected_batch_size", "examples", "randomness", "covers", "epsilon_without_sampling", "epsilon_once_per_epoch",
    "gdp_mu", "delta_curve", "public_data", "tuning", "assumptions", "claimed_epsilon", "rounding", "audit", "plan",
    "versions", "created", "run",
}  # fmt: skip
CLAIMED = poisson().replace(noise=qg.Claimed(qg.Gaussian(1.0), GaussianDpEvent(0.8), why="we measured it"))
RUNS: dict[str, tuple[Plan, int | None]] = {
    "proved": (poisson(), None),
    "seeded": (poisson(), 4),
    "claimed by user": (CLAIMED, None),
    "none": (qg.study(poisson()), None),
}


def certificate(status: str) -> Certificate:
    plan, seed = RUNS[status]
    return train(begin(plan=plan, seed=seed)).certificate()


@pytest.fixture(scope="module")
def certificates() -> dict[str, Certificate]:
    return {status: certificate(status) for status in RUNS}


@pytest.mark.parametrize("status", RUNS)
def test_every_key_is_there(status: str, certificates: dict[str, Certificate]) -> None:
    """JSON holds the keys of the contract, whatever the status, and reads back as the same certificate."""
    made = certificates[status]
    text = made.to_json()
    read = json.loads(text, parse_constant=lambda c: pytest.fail(f"{c} in JSON"))
    assert set(read) == KEYS
    assert Certificate.from_json(text) == made
    assert Plan.from_json(json.dumps(read["plan"])) == RUNS[status][0].with_loss(loss=qg.losses.CrossEntropy())


@pytest.mark.parametrize("status", RUNS)
def test_the_four_statuses(status: str, certificates: dict[str, Certificate]) -> None:
    """An epsilon is stated where it is proved or claimed by the user; for a seed or a study it is null, and so is
    everything that might be taken for one."""
    made = certificates[status]
    assert made.status == status
    stated = (made.epsilon, made.epsilon_without_sampling, made.epsilon_once_per_epoch)
    if status in ("proved", "claimed by user"):
        assert all(isinstance(figure, float) and 0 < figure < math.inf for figure in stated)
        assert made.claimed_epsilon is None and made.delta_curve
        assert f"({qg.account.up(made.epsilon or 0)}, 1e-05)-differentially private, {status}" in str(made)
    else:
        assert stated == (None, None, None) and made.gdp_mu is None and made.delta_curve == ()
        assert "differentially private" not in str(made)
    assert (made.claimed_epsilon is not None) == (status == "seeded")
    assert made.randomness == ("seeded" if status == "seeded" else "secure")
    warning = {"seeded": "NOT FOR PUBLICATION", "none": "NO GUARANTEE"}.get(status, "")
    assert str(made).startswith(warning)


def test_what_the_user_claims_is_spelled_out(certificates: dict[str, Certificate]) -> None:
    """A claimed event is priced as claimed, and stands among the assumptions with its reason."""
    made = certificates["claimed by user"]
    assert any("we measured it" in line and "0.8" in line for line in made.assumptions)
    assert made.epsilon == poisson(20, 0.8).epsilon()
    assert not any("claimed" in line for line in certificates["proved"].assumptions)


def test_a_seeded_figure_is_the_secure_one(certificates: dict[str, Certificate]) -> None:
    """What a seeded run claims is what the same run would prove with secure randomness."""
    assert certificates["seeded"].claimed_epsilon == certificates["proved"].epsilon


def test_a_claim_without_noise_has_no_guarantee() -> None:
    """An infinite epsilon is null, and says so in words."""
    plan = poisson().replace(noise=qg.Claimed(qg.Gaussian(1.0), NonPrivateDpEvent(), why="an experiment"))
    made = train(begin(plan=plan), 2).certificate()
    assert made.epsilon is None and made.epsilon_without_sampling is None
    assert str(made).startswith("NO GUARANTEE") and Certificate.from_json(made.to_json()) == made


def test_facts_of_the_run(certificates: dict[str, Certificate]) -> None:
    """Steps, batch, examples, sampling, adjacency, unit, what is covered, versions and date."""
    made = certificates["proved"]
    assert (made.steps, made.expected_batch_size, made.examples, made.delta) == (20, 8.0, 40, 1e-5)
    assert made.adjacency == "add-or-remove-one" and "one row" in made.unit
    assert "0.2" in made.sampling and "Poisson" in made.sampling
    assert "every iterate" in made.covers and "never metrics" in made.covers
    assert made.event == str(poisson().event()) and "GaussianDpEvent" in made.event
    assert set(made.versions) == {"python", "quietgrad", "torch", "dp-accounting", "cryptography"}
    assert made.versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert timedelta(0) <= datetime.now(UTC) - datetime.fromisoformat(made.created) < timedelta(minutes=10)
    assert made.audit is None and "not accounted" in made.tuning and made.public_data == "none stated"


def test_assumptions_are_spelled_out(certificates: dict[str, Certificate], tmp_path: Path) -> None:
    """What the figure rests on stands in words: public facts, rounding with its figure, a default delta, a folder."""
    made = certificates["proved"]
    text = " ".join(made.assumptions)
    for fact in (
        "40 examples",
        "public facts",
        "independently",
        "initial weights",
        "not published",
        "rounding",
        "1e-05",
    ):
        assert fact in text
    assert made.rounding in text and "of the bound" in made.rounding
    assert "copy of the run's folder" not in text and made.run is None
    kept = begin(tmp_path / "run").certificate()
    assert "copy of the run's folder" in " ".join(kept.assumptions) and kept.run
    assert kept.run in (tmp_path / "run" / "journal.jsonl").read_text()
    chosen = begin().certificate(delta=1e-3)
    assert chosen.delta == 1e-3 and "default" not in " ".join(chosen.assumptions)


def test_the_rounding_is_stated_for_as_many_rows_as_are_let_in() -> None:
    """2 B u with u of float64, whatever the model's precision: shares are added in float64. Far below 5 %."""

    def share(model: Any) -> float:
        return float(begin(model=model).certificate().rounding.split()[2])

    most = 1.1 * begin().plan.sample.examples + 10
    assert share(linear()) == share(linear().double()) == pytest.approx(2 * most * 2.0**-53, rel=1e-3)


@pytest.mark.parametrize(
    ("examples", "size", "steps", "multiplier", "delta"),
    [(40, 8, 20, 1.0, 1e-5), (1000, 50, 100, 0.8, 1e-5), (60_000, 256, 3516, 1.1, 1e-5), (10_000, 100, 500, 4.0, 1e-6)],
)
def test_figures_agree_with_dp_accounting(
    examples: int, size: int, steps: int, multiplier: float, delta: float
) -> None:
    """Epsilon is within 1 % of dp-accounting's, called by hand on the sampled Gaussian."""
    plan = qg.dp_sgd(examples=examples, batch_size=size, steps=steps, noise_multiplier=multiplier)
    accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE, 1e-4)
    accountant.compose(PoissonSampledDpEvent(size / examples, GaussianDpEvent(multiplier)), steps)
    by_hand = accountant.get_epsilon(delta)
    assert plan.epsilon(delta) == pytest.approx(by_hand, rel=0.01)


def test_figures_without_sampling(certificates: dict[str, Certificate]) -> None:
    """Every example in every step costs most, one batch an epoch less, Poisson least; both are priced as Gaussians."""
    made = certificates["proved"]
    assert made.epsilon_without_sampling is not None and made.epsilon_once_per_epoch is not None
    assert made.epsilon_without_sampling >= made.epsilon_once_per_epoch >= (made.epsilon or math.inf)
    for figure, times in ((made.epsilon_without_sampling, 20), (made.epsilon_once_per_epoch, 4)):
        accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE, 1e-4)
        accountant.compose(GaussianDpEvent(1.0), times)
        assert figure == pytest.approx(accountant.get_epsilon(1e-5), rel=0.005)


def test_a_fixed_order() -> None:
    """A fixed order costs what one batch an epoch costs, which is exactly Gaussian: mu is stated."""
    made = train(begin(plan=fixed_order())).certificate()
    assert made.epsilon == made.epsilon_once_per_epoch
    assert made.gdp_mu == pytest.approx(2.0) and "exact" in made.accountant
    assert made.sampling.startswith("FixedOrder")
    assert begin().certificate().gdp_mu in (None, 0.0)


def test_no_mu_for_a_sample(certificates: dict[str, Certificate]) -> None:
    """A sampled Gaussian is not Gaussian: no mu is stated, from a limit theorem least of all."""
    assert certificates["proved"].gdp_mu is None


def test_the_delta_curve(certificates: dict[str, Certificate]) -> None:
    """Pairs that hold: a smaller delta costs more, and the certificate's own pair is one of them."""
    made = certificates["proved"]
    curve = {d: e for e, d in made.delta_curve}
    assert curve[1e-5] == made.epsilon
    by_delta = [curve[d] for d in sorted(curve)]
    assert by_delta == sorted(by_delta, reverse=True)


@pytest.mark.parametrize("plan", [poisson(), fixed_order()], ids=["Poisson", "FixedOrder"])
def test_a_partial_run(plan: Plan) -> None:
    """A run that stands at step 7 has spent 7 steps, not the plan."""
    run = train(begin(plan=plan), 7)
    made = run.certificate()
    assert made.steps == 7 and made.event == str(plan.event(7))
    assert made.epsilon == run.spent().epsilon < plan.epsilon()
    assert train(run).certificate().epsilon == plan.epsilon()


def test_a_run_that_released_nothing() -> None:
    """Nothing released costs nothing, in every status."""
    for plan, seed in RUNS.values():
        made = begin(plan=plan, seed=seed).certificate()
        assert made.steps == 0 and not made.epsilon and not made.claimed_epsilon
        assert "inf" not in made.headline and Certificate.from_json(made.to_json()) == made


def test_the_budgets_delta_is_the_default() -> None:
    """A calibrated plan is certified at the delta it was calibrated for, within its budget."""
    plan = poisson(20, None).calibrate(epsilon=2.0, delta=1e-4)
    made = train(begin(plan=plan)).certificate()
    assert made.delta == 1e-4 and 0.99 * 2 <= (made.epsilon or 0) <= 2
    for delta in (1 / 40, 0.0, math.nan):
        with pytest.raises(PrivacyError, match="delta is"):
            begin(plan=plan).certificate(delta)


def test_nothing_private_is_in_it(tmp_path: Path) -> None:
    """Two runs on different data, seeded alike, give the same certificate but for its date."""

    def made(sign: float, name: str) -> dict[str, Any]:
        run = begin(tmp_path / name, seed=2, watch=qg.Watch(5), optimizer=adam)
        torch.manual_seed(0)
        for batch in run.batches((sign * torch.rand(40, 3), torch.arange(40) % 2)):
            run.step(batch)
        return dataclasses.asdict(run.certificate()) | {"created": "", "run": ""}

    assert made(1.0, "a") == made(-100.0, "b")


@pytest.mark.parametrize(
    "change",
    [lambda r: "", lambda r: "[]", lambda r: "{}", lambda r: json.dumps(r | {"status": "fine"}),
     lambda r: json.dumps({k: v for k, v in r.items() if k != "steps"}), lambda r: json.dumps(r | {"colour": 1}),
     lambda r: json.dumps(r | {"delta_curve": [1]})],
)  # fmt: skip
def test_what_is_not_a_certificate(change: Any, certificates: dict[str, Certificate]) -> None:
    """Other JSON is refused."""
    with pytest.raises(PrivacyError, match="not a certificate"):
        Certificate.from_json(change(json.loads(certificates["proved"].to_json())))


def test_pages(tmp_path: Path, certificates: dict[str, Certificate]) -> None:
    """Every status has a page for a person, which shows it."""
    for status, made in certificates.items():
        page = made.to_html(tmp_path / f"{status}.html").read_text()
        assert status in page and "40" in page
