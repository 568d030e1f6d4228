"""A plan is a frozen record: compared, hashed, printed, written down and read back, and never over its budget."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from dp_accounting import ComposedDpEvent, GaussianDpEvent, NoOpDpEvent, SelfComposedDpEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ledger.small import Mine, begin, linear, poisson, sgd
from torch import Tensor, nn

import quietgrad as qg
from quietgrad import PrivacyError
from quietgrad.losses import Own
from quietgrad.plan import Budget, Plan, default_delta

CALIBRATED = qg.dp_sgd(examples=1000, batch_size=50, steps=100).calibrate(epsilon=2.0, delta=1e-5)


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - nn.functional.one_hot(targets, 2)).square().sum(-1)


def whole(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return squares(model(batch[0]), batch[1])


# A record.


def test_a_plan_is_frozen() -> None:
    """Neither a slot nor a field of a stage can be set."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        CALIBRATED.noise = qg.Gaussian(0.1)  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        CALIBRATED.noise.multiplier = 0.1  # type: ignore[misc]


def test_plans_are_compared_and_hashed_by_content() -> None:
    """Two plans of the same stages are one key; any field that differs makes another."""
    same = qg.dp_sgd(examples=40, batch_size=8, steps=20, clip=1.0, noise_multiplier=1.0)
    assert poisson() == same and hash(poisson()) == hash(same) and len({poisson(), same}) == 1
    others = [
        poisson(21), poisson(20, 1.1), qg.study(poisson()), poisson().replace(bound=qg.Clip(2.0)),
        poisson().replace(loss=qg.losses.CrossEntropy()), poisson().replace(sample=qg.FixedOrder(40, 8, 20)),
        dataclasses.replace(poisson(), budget=Budget(1.0, 1e-5)),
    ]  # fmt: skip
    assert len({poisson(), *others}) == len(others) + 1


def test_a_printed_plan_is_the_privacy_statement() -> None:
    """Every stage in order, which side of the noise it is on, what it costs, what is assumed."""
    lines = str(CALIBRATED).splitlines()
    slots = ["sample", "loss", "smooth", "bound", "noise", "denoise", "optimizer"]
    assert [line.split()[0] for line in lines[1:8]] == slots
    sides = ["sees data"] * 4 + ["the noise"] + ["sees releases only"] * 2
    assert [line.rpartition("|")[2].strip() for line in lines[1:8]] == sides
    text = str(CALIBRATED)
    for fact in ("100 steps", "1,000 examples", "delta 1e-05", "proved", "add or remove one", "public fact", "tuning"):
        assert fact in text
    assert f"epsilon {qg.account.up(CALIBRATED.epsilon())}" in text
    assert "calibrate" in str(poisson(20, None))
    assert "NO GUARANTEE" in str(qg.study(poisson())) and "study" in str(qg.study(poisson()))


# On paper.


PLANS = {
    "uncalibrated": poisson(20, None),
    "plain": poisson(),
    "calibrated": CALIBRATED,
    "fixed order": poisson().replace(sample=qg.FixedOrder(40, 8, 20)),
    "with a loss": poisson().replace(loss=qg.losses.CrossEntropy()),
    "a study": qg.study(poisson()),
    "without noise": poisson().calibrate(epsilon=math.inf, delta=1e-5),
    "claimed": poisson().replace(noise=qg.Claimed(qg.Gaussian(1.0), GaussianDpEvent(0.5), why="a reason")),
    "claimed, nested": poisson().replace(
        sample=qg.FixedOrder(40, 8, 20),
        noise=qg.Claimed(
            qg.Gaussian(1.0),
            ComposedDpEvent((SelfComposedDpEvent(GaussianDpEvent(2.0), 3), GaussianDpEvent(4.0), NoOpDpEvent())),
            why="more",
        ),
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_json_and_back(name: str) -> None:
    """A plan that is written down and read back is the same plan; the text is JSON without NaN, and stable."""
    plan = PLANS[name]
    text = plan.to_json()
    json.loads(text, parse_constant=lambda c: pytest.fail(f"{c} in JSON"))
    back = Plan.from_json(text)
    assert back == plan and hash(back) == hash(plan) and back.to_json() == text and str(back) == str(plan)


@settings(max_examples=100, deadline=None)
@given(
    examples=st.integers(1, 10**9), share=st.floats(0, 1), steps=st.integers(1, 10**6),
    clip=st.floats(1e-9, 1e9), multiplier=st.none() | st.floats(1e-3, 1e6), study=st.booleans(), fixed=st.booleans(),
)  # fmt: skip
def test_json_keeps_every_number(
    examples: int, share: float, steps: int, clip: float, multiplier: float | None, study: bool, fixed: bool
) -> None:
    """Every number survives to the last bit."""
    size = max(1, int(examples * share))
    plan = qg.dp_sgd(examples=examples, batch_size=size, steps=steps, clip=clip, noise_multiplier=multiplier)
    if fixed:
        plan = plan.replace(sample=qg.FixedOrder(examples, size, steps))
    plan = qg.study(plan) if study else plan
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("kind", ["loss", "forward"])
def test_a_users_loss_is_known_by_name_and_digest(kind: str) -> None:
    """JSON holds the name and digest of a loss, never its code; it is given again, and must be the same one."""
    mine, other = (squares, lambda o, t: 2 * squares(o, t)) if kind == "loss" else (whole, lambda m, b: 2 * whole(m, b))
    plan = poisson().with_loss(**{kind: mine})
    assert plan.loss is not None
    text = plan.to_json()
    assert mine.__qualname__ in text and "one_hot" not in text
    back = Plan.from_json(text)
    assert back == plan
    with pytest.raises(PrivacyError, match=r"by name only.*pass the callable"):
        back.loss(torch.zeros(2, 2), torch.zeros(2))  # type: ignore[misc]
    again = back.with_loss(**{kind: mine})
    assert again == plan and again.loss is not None and again.loss.call is mine  # type: ignore[attr-defined]
    with pytest.raises(PrivacyError, match="the plan says"):
        back.with_loss(**{kind: other})
    with pytest.raises(PrivacyError, match="the plan says"):
        back.with_loss(loss=qg.losses.CrossEntropy())
    if kind == "loss":
        assert Plan.from_json(text, loss=mine) == plan
        with pytest.raises(PrivacyError, match="the plan says"):
            Plan.from_json(text, loss=other)


def test_a_stated_digest() -> None:
    """A loss without source is named by a digest that the user states."""
    blind = eval("lambda o, t: (o.sum(-1) - t) ** 2")
    assert Own.of(blind, "version 1").digest == "version 1"
    plan = poisson().replace(loss=Own.of(blind, "version 1"))
    assert Plan.from_json(plan.to_json()) == plan
    assert plan != poisson().replace(loss=Own.of(blind, "version 2"))


def test_a_users_stage() -> None:
    """A user's stage is written by its full name, and read back where its class is given; its status is the user's."""
    plan = poisson().replace(noise=Mine(1.5, 4))
    assert plan.status == "claimed by user"
    with pytest.raises(PrivacyError, match=r"no stage is called 'tests.*Mine'; pass its class"):
        Plan.from_json(plan.to_json())
    assert Plan.from_json(plan.to_json(), stages=(Mine,)) == plan
    assert plan.calibrate(epsilon=1.0, delta=1e-5).noise == Mine(
        plan.calibrate(epsilon=1.0, delta=1e-5).noise.multiplier, 4
    )


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda r: "text", "not a plan"),
        (lambda r: "[]", "not a plan"),
        (lambda r: "{}", "not a plan"),
        (lambda r: json.dumps(r | {"quietgrad": 2}), "format 2"),
        (lambda r: json.dumps(r | {"noise": {"stage": "Nothing"}}), "no stage is called 'Nothing'"),
        (lambda r: json.dumps(r | {"noise": {"multiplier": 1.0}}), "no stage is called"),
        (lambda r: json.dumps(r | {"noise": r["bound"]}), "cannot use Clip here"),
        (lambda r: json.dumps(r | {"noise": None}), "cannot use NoneType here"),
        (lambda r: json.dumps(r | {"noise": 3}), "cannot use int here"),
        (lambda r: json.dumps(r | {"noise": r["noise"] | {"colour": 1}}), "no field colour"),
        (lambda r: json.dumps(r | {"noise": r["noise"] | {"multiplier": -1}}), "multiplier is -1"),
        (lambda r: json.dumps(r | {"noise": r["noise"] | {"multiplier": "1"}}), "multiplier is '1'"),
        (lambda r: json.dumps(r | {"noise": r["noise"] | {"multiplier": math.nan}}), "multiplier is nan"),
        (lambda r: json.dumps(r | {"sample": {"stage": "Poisson", "examples": 3}}), "missing or odd"),
        (lambda r: json.dumps(r | {"budget": {"epsilon": 1}}), "missing or odd"),
        (lambda r: json.dumps(r | {"sample": r["sample"] | {"steps": 2.5}}), "steps is 2.5"),
        (lambda r: json.dumps(r | {"bound": {"dp_event": "os"}}), "no event is called 'os'"),
    ],
)  # fmt: skip
def test_json_that_is_not_a_plan(change: Any, match: str) -> None:
    """What is not a plan is refused with what was found."""
    with pytest.raises(PrivacyError, match=match):
        Plan.from_json(change(json.loads(poisson().to_json())))


# What does not fit.


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: poisson().replace(noise=qg.Clip(1.0)), "noise: cannot use Clip here; it fills 'bound'"),
        (lambda: Plan(sample=qg.Clip(1.0), bound=qg.Clip(1.0), noise=qg.Gaussian()), "sample: cannot use Clip here"),
        (lambda: Plan(sample=qg.Poisson(9, 3, 1), bound=1.0, noise=qg.Gaussian()), "bound: cannot use float.*a Bound"),
        (lambda: qg.dp_sgd(examples=10, batch_size=11, steps=1), "batch_size 11 exceeds examples 10"),
        (lambda: qg.dp_sgd(examples=0, batch_size=1, steps=1), "examples is 0"),
        (lambda: qg.dp_sgd(examples=10.0, batch_size=1, steps=1), "examples is 10.0"),
        (lambda: qg.dp_sgd(examples=10, batch_size=0, steps=1), "batch_size is 0"),
        (lambda: qg.dp_sgd(examples=10, batch_size=1, steps=0), "steps is 0"),
        (lambda: qg.dp_sgd(examples=10, batch_size=1, steps=True), "steps is True"),
        (lambda: qg.dp_sgd(examples=10, batch_size=1), "give one of the two"),
        (lambda: qg.dp_sgd(examples=10, batch_size=1, steps=1, epochs=1), "give one of the two"),
        (lambda: qg.dp_sgd(examples=10, batch_size=1, epochs=0), "epochs is 0"),
        (lambda: qg.dp_sgd(examples=10, batch_size=1, epochs=math.nan), "epochs is nan"),
        (lambda: qg.dp_sgd(examples=10, batch_size=1, epochs=math.inf), "epochs is inf"),
        (lambda: qg.dp_sgd(examples=10, batch_size=1, steps=1, clip=0.0), "radius is 0.0"),
        (lambda: qg.dp_sgd(examples=10, batch_size=1, steps=1, clip=-1.0), "radius is -1.0"),
        (lambda: qg.dp_sgd(examples=10, batch_size=1, steps=1, clip=math.inf), "radius is inf"),
        (lambda: qg.dp_sgd(examples=10, batch_size=1, steps=1, noise_multiplier=-1.0), "multiplier is -1.0"),
        (lambda: qg.dp_sgd(examples=10, batch_size=1, steps=1, noise_multiplier=math.nan), "multiplier is nan"),
        (lambda: poisson(20, None).epsilon(1e-5), "multiplier is not set; call plan.calibrate"),
        (lambda: poisson(20, None).event(), "multiplier is not set"),
        (lambda: begin(plan=poisson(20, None)), "multiplier is not set"),
        (lambda: begin(plan=poisson(20, 0.0)), "no guarantee.*qg.study"),
        (lambda: poisson().start(linear(), sgd(linear())), "the plan has no loss"),
        (lambda: poisson().with_loss(loss=squares, forward=whole), "both loss and forward"),
        (lambda: poisson().with_loss(loss=nn.CrossEntropyLoss()), "mixes the batch.*reduction='none'"),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, match: str) -> None:
    """A wrong stage, a wrong number, a plan without a price: refused with slot, finding and remedy."""
    with pytest.raises(PrivacyError, match=match) as found:
        make()
    assert found.value.slot and found.value.found and found.value.remedy


# Delta.


@pytest.mark.parametrize(
    ("examples", "delta"),
    [(1, 1e-5), (40, 1e-5), (99_999, 1e-5), (100_000, 1e-6), (100_001, 1e-6), (1_000_000, 1e-7), (10**9 - 1, 1e-9)],
)
def test_the_default_delta(examples: int, delta: float) -> None:
    """The smaller of 1e-5 and the largest power of ten below 1 / examples, also where 1 / examples is one."""
    assert default_delta(examples) == pytest.approx(delta, rel=1e-12)
    assert default_delta(examples) < 1 / examples


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 10**15))
def test_the_default_delta_is_always_admitted(examples: int) -> None:
    """No number of examples makes the default one that is refused, or ten times smaller than it need be."""
    delta = default_delta(examples)
    assert 0 < delta < 1 / examples
    assert delta == 1e-5 or 10 * delta >= 1 / examples * (1 - 1e-9)


def test_deltas_are_checked() -> None:
    """A delta of 1 / examples or above, or none at all, is refused; the budget's is used where none is given."""
    for delta in (1 / 40, 0.5, 1.0, 2.0, 0.0, -1e-5, math.nan):
        for ask in (poisson().epsilon, poisson().delta, lambda d: poisson().calibrate(epsilon=1.0, delta=d)):
            with pytest.raises(PrivacyError, match="delta is"):
                ask(delta)
    assert poisson().delta() == 1e-5
    assert poisson().calibrate(epsilon=1.0, delta=1e-3).delta() == 1e-3
    assert poisson().calibrate(epsilon=1.0, delta=1e-3).delta(1e-4) == 1e-4
    with pytest.raises(TypeError):
        poisson().calibrate(epsilon=1.0)  # type: ignore[call-arg]


# The budget.


@pytest.mark.parametrize("epsilon", [0.3, 2.0, 9.0])
@pytest.mark.parametrize("sample", [qg.Poisson(1000, 50, 100), qg.FixedOrder(1000, 50, 100)], ids=["Poisson", "Fixed"])
def test_calibrated_plans_stay_within_the_budget(sample: qg.Sample, epsilon: float) -> None:
    """The price of a calibrated plan is at most the budget, and at least 99 % of it."""
    plan = Plan(sample, qg.Clip(1.0), qg.Gaussian()).calibrate(epsilon=epsilon, delta=1e-5)
    assert 0.99 * epsilon <= plan.epsilon() <= epsilon
    assert plan.budget == Budget(epsilon, 1e-5) and plan.status == "proved"


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan, -math.inf])
def test_impossible_budgets(epsilon: float) -> None:
    """An epsilon that is not positive is refused."""
    with pytest.raises(PrivacyError, match="epsilon is"):
        poisson().calibrate(epsilon=epsilon, delta=1e-5)


def test_an_infinite_budget_is_a_study() -> None:
    """Epsilon infinity clips without noise, with status `none`; a study stays one, whatever it is calibrated to."""
    plan = poisson().calibrate(epsilon=math.inf, delta=1e-5)
    assert plan.noise.multiplier == 0 and plan.study and plan.status == "none" and plan.epsilon() == math.inf
    assert plan.calibrate(epsilon=1.0, delta=1e-5).status == "none"
    run = begin(plan=plan)
    assert run.certificate().epsilon is None and run.spent().epsilon == math.inf


def test_a_study_has_no_guarantee() -> None:
    """A plan that may train without a proof says so, even with noise."""
    assert qg.study(poisson()).status == "none" and poisson().status == "proved"
    assert qg.study(poisson()).epsilon() == poisson().epsilon()


def test_replace_keeps_the_budget() -> None:
    """Another sampler, bound or noise without a multiplier: calibrated again. Another loss: nothing moves."""
    longer = CALIBRATED.replace(sample=qg.Poisson(1000, 50, 400))
    assert longer.noise.multiplier > CALIBRATED.noise.multiplier  # type: ignore[operator]
    for plan in (
        longer,
        CALIBRATED.replace(bound=qg.Clip(7.0)),
        CALIBRATED.replace(noise=qg.Gaussian()),
        CALIBRATED.replace(sample=qg.FixedOrder(1000, 50, 100)),
    ):
        assert plan.budget == CALIBRATED.budget and 0.99 * 2.0 <= plan.epsilon() <= 2.0
    assert CALIBRATED.replace(loss=qg.losses.CrossEntropy()).noise == CALIBRATED.noise
    assert CALIBRATED.replace() == CALIBRATED


def test_replace_holds_to_the_budget() -> None:
    """An explicit multiplier is kept if it stays within the budget, and refused if it does not."""
    enough = CALIBRATED.noise.multiplier * 1.5  # type: ignore[operator]
    assert CALIBRATED.replace(noise=qg.Gaussian(enough)).noise.multiplier == enough
    with pytest.raises(PrivacyError, match="costs epsilon"):
        CALIBRATED.replace(noise=qg.Gaussian(enough / 3))
    with pytest.raises(PrivacyError, match="costs epsilon"):
        CALIBRATED.replace(sample=qg.Poisson(1000, 50, 4000), noise=qg.Gaussian(enough))


def test_replace_without_a_budget() -> None:
    """A noise without a multiplier takes the one that was there; one with its own keeps it."""
    assert poisson().replace(noise=qg.Gaussian()).noise == qg.Gaussian(1.0)
    assert poisson().replace(noise=qg.Gaussian(2.0)).noise == qg.Gaussian(2.0)
    assert poisson().replace(sample=qg.Poisson(40, 4, 9)).noise == qg.Gaussian(1.0)


def test_the_length_of_a_plan() -> None:
    """steps = ceil(epochs * examples / batch_size), exactly."""
    assert qg.dp_sgd(examples=60_000, batch_size=256, epochs=15).steps == 3516
    assert qg.dp_sgd(examples=60_000, batch_size=256, epochs=1).steps == 235
    assert qg.dp_sgd(examples=10, batch_size=5, epochs=0.1).steps == 1
    assert qg.dp_sgd(examples=3, batch_size=1, epochs=0.1 + 0.2).steps == 1
