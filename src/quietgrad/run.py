"""Run: a plan at work on one model. It draws the batches, takes the steps, keeps the ledger, and survives a crash."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from torch.utils.data import TensorDataset

from quietgrad import export
from quietgrad.account import Price, price
from quietgrad.average import Average, begun, in_place, start
from quietgrad.batches import Collate, Source
from quietgrad.certificate import Certificate, certify
from quietgrad.deal import Batch, Dealer
from quietgrad.errors import PrivacyError
from quietgrad.gradients import Chain, Gradients
from quietgrad.gradients.choose import chunk_size
from quietgrad.keep import Keeper
from quietgrad.ledger import Ledger
from quietgrad.plan import Plan
from quietgrad.stage import counted
from quietgrad.step import States, apply, private_sum, release
from quietgrad.stream import Stream
from quietgrad.trained import fingerprints, trainable, versions_of
from quietgrad.values import Context
from quietgrad.watch import Watch, Watcher, unwatched


@final
class Run:
    """Made by `Plan.start`. `batches` is the loop, `step` the private step; `spent` and `certificate` come from the
    ledger."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        folder: str | Path | None = None,
        resume: bool = False,
        watch: Watch | None = None,
        seed: int | None = None,
        chunk: int | None = None,
        average: Average | None = None,
    ) -> None:
        if plan.status == "none" and not plan.study:
            fix = "calibrate it, or say qg.study(plan) to train without one"
            raise PrivacyError("noise", "the plan has no guarantee (no noise)", fix)
        assert plan.loss is not None
        self._plan, self.model, self.optimizer, self.seed = plan, model, optimizer, seed
        self.parameters = trainable(model, optimizer)
        plan.smooth.admits(optimizer)
        self.device = next(iter(self.parameters.values())).device
        self.stream = Stream(seed)
        self.gradients = Gradients(Chain(model, plan.loss), self.stream)
        if chunk is not None:
            counted("gradients", "chunk", chunk)
        self.chunk = chunk or chunk_size(self.parameters, plan.sample.batch_size)
        self.dealer = Dealer(plan, model, self.parameters, self.gradients, self.stream, self.chunk)
        self._process = os.getpid()
        self._stepping = threading.RLock()  # an interrupt may leave it held: its own thread may go on
        self._versions: list[tuple[int, int]] | None = versions_of(self.parameters)
        self._still = fingerprints(model, self.parameters)
        self.ledger = Ledger(plan)
        self.states = States(plan.noise.begin(0), plan.denoise.begin(self.parameters))
        self.average, self._mean = average, start(average)
        if folder is None and (resume or watch is not None):
            slot, found = ("checkpoint", "there is no folder") if resume else ("watch", "private figures need one")
            raise PrivacyError(slot, found, "say start(…, folder=…)")
        self._keeper = None if folder is None else Keeper(Path(folder), plan, model, optimizer, seed)
        if self._keeper is not None and resume:
            self._resume(self._keeper)
        elif self._keeper is not None:
            self._keeper.begin()
        self._watcher: Watcher | None = None
        if watch is not None and self._keeper is not None:
            self._watcher = Watcher(watch, self._keeper.folder, plan.bound.reach)

    # The loop.

    @property
    def plan(self) -> Plan:
        """What the run was started with."""
        return self._plan

    @property
    def status(self) -> str:
        """As in the certificate."""
        return self.plan.status if self.plan.status == "none" or self.stream.secure else "seeded"

    @property
    def position(self) -> int:
        """Steps spent: releases made, and those that a crash may have made."""
        return self.ledger.spent

    def batches(
        self, data: Any, *, epochs: int | None = None, collate: Collate | None = None, workers: int = 0
    ) -> Iterator[Batch]:
        """The batches of the plan, from where the run stands to its end; with `epochs`, to that many epochs from here.

        `data` is a tuple, list or dict of tensors with the example axis first, or a map-style Dataset.
        """
        if epochs is not None:
            counted("sample", "epochs", epochs)
        source = Source(data.tensors if type(data) is TensorDataset else data, collate, workers)
        self._here()
        if self.dealer.meet(source, self.context()) and self._keeper is not None:
            self._keeper.saved = False  # a checkpoint without the order could not go on in it
        sample, end = self.plan.sample, self.plan.steps
        if epochs is not None:
            end = min(end, sample.first_step(sample.epoch(self.position) + epochs))
        return self.dealer.deal(source, end, lambda: self.position, self.device)

    def step(self, batch: Batch) -> None:
        """One private step. It returns nothing: a loss would be private."""
        if not self._stepping.acquire(blocking=False):
            raise PrivacyError("run", "another thread is in a step", "take one step at a time")
        try:
            self._step(batch)
        finally:
            self._stepping.release()

    def _step(self, batch: Batch) -> None:
        self._here()
        chunks, context = self.dealer.accept(batch, self.position), self.context()
        self._untouched()
        if self._keeper is not None:
            self._keeper.reserve(self.position, self._rest())
        place, probed = self.plan.denoise.probe(self.parameters, self.states.denoise, context)
        batch.chunks = None
        try:
            total = private_sum(
                self.plan, self.gradients, place, chunks, context, self.stream, self._watcher or unwatched
            )
            self.states.denoise = probed
            released = release(self.plan, total, self.states, context, self.stream)
            self.ledger.add(released)
        except BaseException:
            self.ledger.spent = max(self.ledger.spent, context.step + 1)  # released or not, it counts
            raise
        self.optimizer.zero_grad()  # what it holds and does not train must not move by a gradient from elsewhere
        self._versions = None  # a step that is interrupted from here on has written, and may
        apply(released, self.parameters, self.optimizer)
        if self.average is not None:
            self._mean = self.average.after(self.parameters, self._mean)
        self._versions = versions_of(self.parameters)
        if self._watcher is not None:
            self._watcher.stepped(self.position)

    def context(self) -> Context:
        """Where training stands."""
        rates = {id(p): float(group["lr"]) for group in self.optimizer.param_groups for p in group["params"]}
        return Context(
            step=self.position,
            epoch=self.plan.sample.epoch(self.position),
            learning_rates={name: rates[id(p)] for name, p in self.parameters.items()},
            noise_scale=self.plan.noise_scale,
            divisor=self.plan.sample.divisor,
        )

    # What it cost, and what it leaves.

    def spent(self, delta: float | None = None) -> Price:
        """The price of everything released so far; infinite for a study, and claimed only for a seeded run."""
        if self.status == "none":
            return Price(math.inf, "none: a study has no guarantee")
        spent = price(self.ledger.event(), self.plan.delta(delta), self.plan.adjacency)
        mark = {"seeded": "SEEDED, claimed only: ", "claimed by user": "CLAIMED BY USER: "}.get(self.status, "")
        return Price(spent.epsilon, mark + spent.accountant)

    def certificate(self, delta: float | None = None) -> Certificate:
        """The guarantee of what was released so far."""
        self._untouched()
        run = None if self._keeper is None else self._keeper.run
        return certify(self.plan, self.ledger.spent, delta, secure=self.stream.secure, run=run)

    def save(self) -> Path:
        """Writes the checkpoint (secret) and gives back the steps that were reserved and not used."""
        if self._keeper is None:
            raise PrivacyError("checkpoint", "the run has no folder", "say start(…, folder=…)")
        self._here()
        self._untouched()
        path = self._keeper.write(self._rest())
        self._keeper.journal.give_back(self.position)
        if self._watcher is not None:
            self._watcher.write(self.position)
        return path

    def export(self, folder: str | Path) -> Path:
        """Writes what may be published: weights, buffers as they were at the start, the certificate."""
        now, certificate = fingerprints(self.model, self.parameters), self.certificate()
        changed = [name for name, mark in now.items() if self._still.get(name) != mark]
        with self.averaged():
            return export.write(Path(folder), self.model, changed, certificate)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it the model holds the average of the iterates, as `export` writes it, if the run keeps one. To look
        at: no step and no save is taken there."""
        if not self._mean["count"]:
            yield
            return
        self._untouched()
        try:
            with in_place(self.parameters, self._mean):
                yield
        finally:
            self._versions = versions_of(self.parameters)

    def close(self) -> None:
        """Lets go of the folder. Another process may then go on."""
        if self._keeper is not None:
            self._keeper.close()

    def __str__(self) -> str:
        count = sum(p.numel() for p in self.parameters.values())
        layers = ", ".join(self.gradients.chain.read)
        read = f"penalty  on the outputs of {layers}\n" if layers else ""
        return (
            f"{self.plan.statement(self.status)}\n"
            f"run      step {self.position:,} of {self.plan.steps:,}; {count:,} parameters\n"
            f"engine   {self.gradients.name}, in chunks of {self.chunk} ({self.gradients.reason})\n"
            f"{read}"
            f"random   {'secure, a key from the system' if self.stream.secure else 'SEEDED, not for publication'}"
        )

    # How it is done.

    def _rest(self) -> dict[str, Any]:
        """What the checkpoint holds beside model and optimizer. No key and no noise."""
        return {
            "step": self.position,
            **self.dealer.kept(),
            "denoise": dict(self.states.denoise),
            "average": dict(self._mean),
            "still": self._still,
        }

    def _resume(self, keeper: Keeper) -> None:
        kept = keeper.resume(self.device)
        self.dealer.restore(kept)
        self._still, self._versions = kept["still"], versions_of(self.parameters)
        self.ledger = Ledger(self.plan, keeper.journal.reserved)  # what was reserved and lost counts
        self.states = States(self.plan.noise.begin(self.position), kept["denoise"])
        self._mean = begun(self.average, kept["average"])

    def _untouched(self) -> None:
        if self._versions not in (None, versions_of(self.parameters)):
            found = "parameters were changed outside run.step, by what no noise covers"
            raise PrivacyError("optimizer", found, "drop any other optimizer.step(); try other weights on a copy")

    def _here(self) -> None:
        if os.getpid() != self._process:
            found = "a forked process holds a copy of this run"
            raise PrivacyError("run", found, "step it in the process that started it")
