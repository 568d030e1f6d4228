"""Compose: what several runs on one data set cost together."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent
from tests.ledger.small import Mine, at, begin, die, fixed_order, in_child, poisson, reserved, train

import quietgrad as qg
from quietgrad import PrivacyError, account
from quietgrad.journal import NAME

DELTA = 1e-5
LONG = poisson(4000)


def ran(folder: Path, until: int = 20, **more: Any) -> qg.Run:
    """A run that stood at `until`, was saved and closed."""
    run = train(begin(folder, **more), until)
    run.save()
    run.close()
    return run


def priced(*parts: tuple[qg.Plan, int]) -> float:
    """By hand: one composed event."""
    event = ComposedDpEvent([plan.event(releases) for plan, releases in parts])
    return account.price(event, DELTA).epsilon


def releases(composed: Any) -> list[int]:
    return [part["releases"] for part in composed.runs]


def test_one_run_is_itself(tmp_path: Path) -> None:
    """One run costs what its own certificate says, given as object, JSON file, exported folder or run folder."""
    run = ran(tmp_path / "run")
    made = run.certificate(DELTA)
    run.export(tmp_path / "model")
    for given in (made, tmp_path / "model" / "certificate.json", tmp_path / "model", str(tmp_path / "run")):
        composed = qg.compose(given, delta=DELTA)
        assert composed.epsilon == made.epsilon and composed.status == "proved" and releases(composed) == [20]
        assert composed.adjacency == made.adjacency and composed.unit == made.unit and composed.delta == DELTA


def test_two_runs_cost_the_composed_event(tmp_path: Path) -> None:
    """Two runs cost the price of their events together: more than each, less than the sum; the order is irrelevant."""
    a, b = tmp_path / "a", tmp_path / "b"
    ran(a)
    ran(b, 15, plan=poisson(30, 2.0))
    together = qg.compose(a, b, delta=DELTA)
    assert together.epsilon == priced((poisson(), 20), (poisson(30, 2.0), 15))
    assert qg.compose(b, a, delta=DELTA).epsilon == together.epsilon
    alone = [qg.compose(path, delta=DELTA).epsilon or 0 for path in (a, b)]
    assert max(alone) < (together.epsilon or 0) < sum(alone)


def test_equal_runs_cost_one_long_run(tmp_path: Path) -> None:
    """Three runs of a plan cost what one of three times the length costs."""
    runs = [train(begin(seed=None)) for _ in range(3)]
    composed = qg.compose(*(run.certificate() for run in runs), delta=DELTA)
    assert composed.epsilon == pytest.approx(poisson(60).epsilon(DELTA), rel=1e-9)


def test_samplers_mix(tmp_path: Path) -> None:
    """A Poisson run and one in fixed order are composed from their own events."""
    runs = [train(begin(plan=plan)).certificate() for plan in (poisson(), fixed_order())]
    composed = qg.compose(*runs, delta=DELTA)
    assert composed.epsilon == priced((poisson(), 20), (fixed_order(), 20))


def test_found_twice_counts_once(tmp_path: Path) -> None:
    """The folder, its copy, certificates of then and now: one run, at its longest."""
    run = train(begin(tmp_path / "run"), 5)
    early = run.certificate()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    train(run).save()
    run.export(tmp_path / "model")
    found = [early, run.certificate(), tmp_path / "model", tmp_path / "copy", tmp_path / "run", tmp_path / "run"]
    for order in (found, found[::-1]):
        composed = qg.compose(*order, delta=DELTA)
        assert releases(composed) == [20] and composed.epsilon == run.spent().epsilon
    assert releases(qg.compose(early, tmp_path / "copy", delta=DELTA)) == [5]


def test_an_earlier_copy_that_reserved_more(tmp_path: Path) -> None:
    """A copy from the middle of a block, whose rest was given back and never released, adds nothing."""
    run = train(begin(tmp_path / "run", plan=LONG), 5)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert reserved(tmp_path / "copy") == 8
    run.save()
    assert releases(qg.compose(tmp_path / "run", tmp_path / "copy", delta=DELTA)) == [5]


def test_runs_without_a_folder_all_count() -> None:
    """Certificates without a run's id cannot be told apart: each counts."""
    made = train(begin(), 6).certificate()
    assert releases(qg.compose(made, made, delta=DELTA)) == [6, 6]


@pytest.mark.parametrize("lengths", [(11, 11), (11, 14), (14, 11)])
def test_copies_that_diverged_count_in_full(lengths: tuple[int, int], tmp_path: Path) -> None:
    """A folder was copied and both were resumed: what each released counts, equal lengths included."""
    ran(tmp_path / "a", 8)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for name, until in zip(("a", "b"), lengths, strict=True):
        run = train(begin(tmp_path / name, resume=True), until)
        run.save()
        run.close()
    composed = qg.compose(tmp_path / "a", tmp_path / "b", delta=DELTA)
    assert releases(composed) == list(lengths)
    assert composed.epsilon == priced((poisson(), lengths[0]), (poisson(), lengths[1]))


def test_steps_lost_in_a_crash_count(tmp_path: Path) -> None:
    """A folder says more than a certificate of what was seen: what a kill lost is in the journal."""

    def work() -> None:
        run = train(begin(tmp_path / "run", plan=LONG), 9)
        with at("quietgrad.run.apply", "before", die):
            train(run)

    assert in_child(work) == "killed"
    composed = qg.compose(tmp_path / "run", delta=DELTA)
    assert releases(composed) == [12] and composed.epsilon == priced((LONG, 12))


def test_half_a_line_does_not_count(tmp_path: Path) -> None:
    """A line that a crash left half-written reserved nothing; a damaged one is refused."""
    ran(tmp_path / "run", 5)
    path = tmp_path / "run" / NAME
    with path.open("a") as file:
        file.write('{"reserve": [5, ')
    assert releases(qg.compose(tmp_path / "run", delta=DELTA)) == [5]
    with path.open("a") as file:
        file.write("\n")
    with pytest.raises(PrivacyError, match="is damaged"):
        qg.compose(tmp_path / "run", delta=DELTA)


def test_the_command_lines_folder(tmp_path: Path) -> None:
    """A folder with `private/run` and `publish` is one run: its journal prevails."""
    run = train(begin(tmp_path / "out" / "private" / "run"), 7)
    run.export(tmp_path / "out" / "publish")
    train(run, 9).save()
    assert releases(qg.compose(tmp_path / "out", delta=DELTA)) == [9]
    shutil.rmtree(tmp_path / "out" / "private")
    assert releases(qg.compose(tmp_path / "out", delta=DELTA)) == [7]


WEAK = {
    "proved": begin,
    "claimed by user": lambda: begin(
        plan=poisson().replace(noise=qg.Claimed(qg.Gaussian(1.0), GaussianDpEvent(0.9), why="a reason"))
    ),
    "seeded": lambda: begin(seed=3),
    "none": lambda: begin(plan=qg.study(poisson())),
}


@pytest.mark.parametrize("weakest", WEAK)
def test_the_status_is_the_weakest(weakest: str) -> None:
    """One part that is claimed, seeded or without a guarantee makes the whole so; a figure stands where it may."""
    order = ["proved", "claimed by user", "seeded", "none"]
    parts = [train(WEAK[status]()).certificate() for status in order[: order.index(weakest) + 1]]
    composed = qg.compose(*parts, delta=DELTA)
    assert composed.status == weakest
    assert (composed.epsilon is not None) == (weakest in ("proved", "claimed by user"))
    assert (composed.claimed_epsilon is not None) == (weakest == "seeded")
    marks = {"seeded": "NOT FOR PUBLICATION", "none": "NO GUARANTEE"}
    assert str(composed).startswith(marks.get(weakest, "together ("))


def test_the_status_of_a_folder(tmp_path: Path) -> None:
    """A folder knows its own status: of a seeded run it is seeded, of a study none."""
    ran(tmp_path / "seeded", 3, seed=1)
    ran(tmp_path / "study", 3, plan=qg.study(poisson()))
    assert qg.compose(tmp_path / "seeded", delta=DELTA).status == "seeded"
    assert qg.compose(tmp_path / "study", delta=DELTA).status == "none"


def test_a_users_stage_is_given_again(tmp_path: Path) -> None:
    """A plan with a stage of the user's is read where its class is given, as a claim."""
    ran(tmp_path / "run", plan=poisson().replace(noise=Mine(1.0)))
    with pytest.raises(PrivacyError, match="pass its class"):
        qg.compose(tmp_path / "run", delta=DELTA)
    composed = qg.compose(tmp_path / "run", delta=DELTA, stages=(Mine,))
    assert composed.status == "claimed by user" and composed.epsilon == poisson().epsilon()


def test_a_users_loss_needs_not_be_given(tmp_path: Path) -> None:
    """What a run cost does not depend on its loss."""
    ran(tmp_path / "run", loss=lambda outputs, targets: outputs.square().sum(-1))
    assert qg.compose(tmp_path / "run", delta=DELTA).epsilon == poisson().epsilon()


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [("adjacency", "zero-out", "differ in adjacency"), ("unit", "one person", "differ in unit")],
)
def test_runs_of_different_kinds_are_refused(field: str, value: str, match: str) -> None:
    """What protects different things, or against different neighbours, does not add up."""
    made = train(begin(), 3).certificate()
    other = dataclasses.replace(made, **{field: value})
    with pytest.raises(PrivacyError, match=match):
        qg.compose(made, other, delta=DELTA)
    assert getattr(qg.compose(other, delta=DELTA), field) == value


def test_runs_on_different_data_are_refused() -> None:
    """Numbers of examples that cannot be of one data set are refused; nearly equal ones pass."""

    def of(examples: int) -> qg.Certificate:
        made = train(begin(), 3).certificate()
        plan = qg.dp_sgd(examples=examples, batch_size=8, steps=20, noise_multiplier=1.0)
        return dataclasses.replace(made, plan=json.loads(plan.to_json()), examples=examples)

    with pytest.raises(PrivacyError, match="speak of 40 and 60 examples"):
        qg.compose(of(40), of(60), delta=DELTA)
    qg.compose(of(40), of(41), delta=DELTA)
    with pytest.raises(PrivacyError, match="delta is"):
        qg.compose(of(40), of(41), delta=1 / 41)


@pytest.mark.parametrize("delta", [0.0, -1.0, 1 / 40, 1.0, math.nan])
def test_deltas_are_checked(delta: float) -> None:
    """As for a plan."""
    with pytest.raises(PrivacyError, match="delta is"):
        qg.compose(train(begin(), 1).certificate(), delta=delta)


def test_what_is_no_run(tmp_path: Path) -> None:
    """Nothing, an empty folder, a missing one, a text: refused."""
    with pytest.raises(PrivacyError, match="no run was given"):
        qg.compose(delta=DELTA)
    (tmp_path / "text.json").write_text("{}")
    for given, match in (
        (tmp_path, "neither a certificate"),
        (tmp_path / "no", "neither"),
        (tmp_path / "text.json", "not a"),
    ):
        with pytest.raises(PrivacyError, match=match):
            qg.compose(given, delta=DELTA)


def test_json(tmp_path: Path) -> None:
    """All keys, as JSON without NaN."""
    run = ran(tmp_path / "run", 4)
    read = json.loads(qg.compose(run.certificate(), delta=DELTA).to_json(), parse_constant=pytest.fail)
    assert read["epsilon"] == run.spent(DELTA).epsilon and read["runs"][0]["run"] == run.certificate().run
    assert set(read) == {
        "epsilon", "delta", "status", "adjacency", "unit", "accountant", "claimed_epsilon", "runs",
    }  # fmt: skip
