"""Progress: a bar on standard error with steps, time left, and the budget spent so far."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

from quietgrad.account import price, up

if TYPE_CHECKING:
    from quietgrad.run import Run

MARKS = 40  # places in the plan where epsilon is priced, at most
SHARE = 0.02  # of the time that goes into pricing, at most


@contextmanager
def bar(run: Run) -> Iterator[Callable[[], None]]:
    """Gives a function to call after each step. Without rich, or off a terminal, it shows nothing."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ModuleNotFoundError:
        yield quietly
        return
    console = Console(stderr=True)
    if not sys.stderr.isatty():
        yield quietly
        return
    spent = Spent(run)
    columns = (
        TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"),
        TextColumn("[bold]{task.fields[spent]}"), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, refresh_per_second=5) as progress:
        task = progress.add_task("training", total=run.plan.steps, completed=run.position, spent=spent())

        def tick() -> None:
            progress.update(task, completed=run.position, spent=spent())

        yield tick


@final
class Spent:
    """What was spent so far, in words. Never below the price: it is that of the next mark, a place further on."""

    def __init__(self, run: Run) -> None:
        self.run, self.first, self.began = run, run.position, time.perf_counter()
        self.mark, self.cost = run.position, 0.01  # seconds that pricing took
        self.total = math.inf if run.plan.status == "none" else run.plan.epsilon()
        self.shown = "no guarantee" if self.total == math.inf else self.words(self.total)

    def __call__(self) -> str:
        """The words for where the run stands. The next mark is so far on that pricing takes a small share of time."""
        plan, position, now = self.run.plan, self.run.position, time.perf_counter()
        if self.total == math.inf or position <= self.mark or self.cost > SHARE * (now - self.began):
            return self.shown
        pace = (now - self.began) / (position - self.first)  # seconds a step
        ahead = max(math.ceil(plan.steps / MARKS), math.ceil(self.cost / (SHARE * pace)))
        self.mark = min(plan.steps, position + ahead)
        self.shown = self.words(price(plan.event(self.mark), plan.delta(), plan.adjacency).epsilon)
        self.cost = time.perf_counter() - now
        return self.shown

    def words(self, epsilon: float) -> str:
        """A figure beside the budget."""
        budget = self.run.plan.budget
        kind = {"proved": "epsilon", "claimed by user": "claimed epsilon"}.get(self.run.status, "seeded: epsilon")
        return f"{kind} ≤ {up(epsilon)} of {up(self.total if budget is None else budget.epsilon)}"


def quietly() -> None:
    """Shows nothing."""
