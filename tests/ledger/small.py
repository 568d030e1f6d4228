"""The smallest run that is a run: forty rows, a linear model, and a child process that may be killed."""

from __future__ import annotations

import os
import pkgutil
import resource
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import quietgrad as qg
from quietgrad import journal
from quietgrad.values import Contribution

EXAMPLES, BATCH, FEATURES, CLASSES = 40, 8, 3, 2
DATA = (
    torch.randn(EXAMPLES, FEATURES, generator=torch.Generator().manual_seed(1)),
    torch.arange(EXAMPLES) % CLASSES,
)


def poisson(steps: int = 20, multiplier: float | None = 1.0) -> qg.Plan:
    return qg.dp_sgd(examples=EXAMPLES, batch_size=BATCH, steps=steps, noise_multiplier=multiplier)


def fixed_order(steps: int = 20) -> qg.Plan:
    return poisson(steps).replace(sample=qg.FixedOrder(EXAMPLES, BATCH, steps))


def linear(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(FEATURES, CLASSES)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def begin(
    folder: Path | None = None,
    *,
    plan: qg.Plan | None = None,
    model: nn.Module | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    **more: Any,
) -> qg.Run:
    model = linear() if model is None else model
    more = {"loss": qg.losses.CrossEntropy(), "chunk": BATCH * 3, **more}
    return (plan or poisson()).start(model, optimizer(model), folder=folder, **more)


def train(run: qg.Run, until: int | None = None) -> qg.Run:
    """Steps until the run stands at `until`, or to the plan's end."""
    for batch in run.batches(DATA):
        if run.position == until:
            break
        run.step(batch)
    return run


def weights(run: qg.Run) -> Tensor:
    return torch.cat([p.detach().flatten() for p in run.model.parameters()]).clone()


def reserved(folder: Path) -> int:
    return journal.read(folder / journal.NAME)[0].reserved


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def fork(work: Callable[[], object]) -> int:
    """Does `work` in a child process, and gives its id. The child's exit status is 1 if work raised."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        torch.set_num_threads(1)
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def outcome(pid: int) -> str:
    """How a child ended: "done", "failed" or "killed"."""
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return "killed" if os.WTERMSIG(status) == signal.SIGKILL else f"signal {os.WTERMSIG(status)}"
    return "done" if os.WEXITSTATUS(status) == 0 else "failed"


def in_child(work: Callable[[], object]) -> str:
    return outcome(fork(work))


def die() -> None:
    """`kill -9`, here and now."""
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def at(name: str, when: str, act: Callable[[], object], number: int = 1) -> Iterator[None]:
    """Acts once: before or after the `number`-th call of what `name` refers to."""
    real, calls = pkgutil.resolve_name(name), 0

    def wrapped(*args: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        now = calls == number
        if now and when == "before":
            act()
        given = real(*args, **more)
        if now and when == "after":
            act()
        return given

    with mock.patch(name, wrapped):
        yield


@contextmanager
def room(size: int) -> Iterator[None]:
    """Files cannot grow beyond `size` bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@dataclass(frozen=True)
class Mine(qg.Independent):
    """A user's noise, with an event of its own."""

    multiplier: float | None = None
    shape: int = 3

    @property
    def says(self) -> str:
        return "Mine"

    def admits(self, contribution: Contribution, sample: qg.Sample) -> None:
        pass

    def event(self, step: int) -> Any:
        return qg.account.gaussian(self.multiplier or 0.0)

    def draw(self, stream: qg.Stream, state: Any, step: int, start: int, count: int) -> Tensor:
        return qg.Gaussian(1.0).draw(stream, {}, step, start, count)
