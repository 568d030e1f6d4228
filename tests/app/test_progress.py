"""The budget that a progress bar shows is never below what was spent, and costs little."""

import re
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import quietgrad as qg
from quietgrad.progress import SHARE, Spent, bar


@pytest.fixture(scope="module")
def plan():
    return qg.dp_sgd(examples=1000, batch_size=100, epochs=20).calibrate(epsilon=2.0, delta=1e-5)


def test_what_is_shown_is_never_below_the_price(plan, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    run = SimpleNamespace(plan=plan, position=0, status=plan.status)
    spent, seen = Spent(run), []
    for run.position in range(plan.steps + 1):
        clock.now += 0.05
        figure, budget = re.fullmatch(r"epsilon ≤ ([\d.]+) of ([\d.]+)", spent()).groups()
        seen.append(float(figure))
        assert float(budget) == 2.0
        assert seen[-1] >= qg.account.price(plan.event(run.position), 1e-5).epsilon
    later = seen[20:]
    assert later == sorted(later) and len(set(later)) > 20 and seen[-1] <= 2.0


def test_pricing_takes_a_small_share(plan, monkeypatch):
    clock, priced = SimpleNamespace(now=0.0), []

    def slow(event, delta, adjacency):
        clock.now += 1.0
        priced.append(event)
        return SimpleNamespace(epsilon=1.0)

    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr("quietgrad.progress.price", slow)
    run = SimpleNamespace(plan=plan, position=0, status=plan.status)
    spent = Spent(run)
    for run.position in range(plan.steps + 1):
        clock.now += 1.0
        spent()
    assert 1 < len(priced) <= 2 + SHARE * plan.steps


def test_off_a_terminal_nothing_is_shown(capsys):
    plan = qg.dp_sgd(examples=20, batch_size=10, steps=2).calibrate(epsilon=2.0, delta=1e-5)
    model = nn.Linear(3, 2)
    run = plan.fit(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        (torch.randn(20, 3), torch.arange(20) % 2),
        qg.losses.CrossEntropy(),
    )
    with bar(run) as tick:
        tick()
    assert run.position == 2 and capsys.readouterr() == ("", "")


def test_a_study_has_no_figure(plan):
    plan = plan.calibrate(epsilon=float("inf"), delta=1e-5)
    assert Spent(SimpleNamespace(plan=plan, position=0, status=plan.status))() == "no guarantee"
