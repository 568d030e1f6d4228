"""Run: a plan at work on one model. It draws the batches, takes the steps, keeps the ledger, and survives a crash."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from quietgrad import export
from quietgrad.account import Price, price
from quietgrad.average import Average, begun, in_place, start
from quietgrad.batches import Chunk, Collate, Source, leaves
from quietgrad.certificate import Certificate, certify
from quietgrad.errors import PrivacyError
from quietgrad.gradients import Chain, Gradients
from quietgrad.gradients.choose import chunk_size
from quietgrad.keep import Keeper
from quietgrad.ledger import Ledger
from quietgrad.meet import meet
from quietgrad.plan import Plan
from quietgrad.stage import counted
from quietgrad.step import States, apply, private_sum, release
from quietgrad.stream import Purpose, Stream
from quietgrad.trained import digest_of, fingerprints, trainable, versions_of
from quietgrad.values import Context
from quietgrad.watch import Watch, Watcher, unwatched


@final
@dataclass(eq=False)
class Batch:
    """A batch drawn for one step of one run. Private; used once."""

    run: Run
    step: int
    chunks: list[Chunk] | None

    def __repr__(self) -> str:
        return f"Batch(step {self.step}, private)"


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
            raise PrivacyError(
                "noise",
                "the plan has no guarantee (no noise)",
                "calibrate it, or say qg.study(plan) to train without one",
            )
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
        self.rows: int | None = None
        self.memory: Tensor | None = None  # the sampler's own, secret
        self._process = os.getpid()
        self._stepping = threading.RLock()  # an interrupt may leave it held: its own thread may go on
        self._versions: list[tuple[int, int]] | None = versions_of(self.parameters)
        self._met: object = None
        self._row: list[torch.Size] = []
        self._data: str | None = None  # a digest, where the order of the rows matters
        self._open: Batch | None = None
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
        self._meet(source)
        sample, end = self.plan.sample, self.plan.steps
        if epochs is not None:
            end = min(end, sample.first_step(sample.epoch(self.position) + epochs))
        return self._batches(source, end)

    def step(self, batch: Batch) -> None:
        """One private step. It returns nothing: a loss would be private."""
        if not self._stepping.acquire(blocking=False):
            raise PrivacyError("run", "another thread is in a step", "take one step at a time")
        try:
            self._step(batch)
        finally:
            self._stepping.release()

    def _step(self, batch: Batch) -> None:
        chunks, context = self._accept(batch), self.context()
        self._untouched()
        if self._keeper is not None:
            self._keeper.reserve(self.position, self._rest())
        batch.chunks = None
        place, probed = self.plan.denoise.probe(self.parameters, self.states.denoise, context)
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
        changed = [
            name for name, mark in fingerprints(self.model, self.parameters).items() if self._still.get(name) != mark
        ]
        certificate = self.certificate()
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

    def _batches(self, source: Source, end: int) -> Iterator[Batch]:
        device = self.device
        rows = len(source)
        draws = (self.plan.sample.draw(self.stream, t, rows, self.memory) for t in range(self.position, end))
        at = self.position

        def fresh(k: int) -> Tensor:  # for transforms of a data set, here or in workers
            return self.stream.state_for(Purpose.FORWARD, at, 2**23 + k)

        read = source.read(draws, self.chunk, device, fresh, self._row)
        for step, chunks in zip(range(self.position, end), read, strict=False):
            batch = self._open = Batch(self, step, chunks)
            yield batch
            if self.position != step + 1:
                raise PrivacyError(
                    "sample",
                    f"the batch of step {step} was passed over",
                    "call run.step on every batch, an empty one too",
                )

    def _accept(self, batch: Batch) -> list[Chunk]:
        self._here()
        if not isinstance(batch, Batch) or batch.run is not self:
            raise PrivacyError(
                "sample",
                "this batch was not drawn by this run, so its sampling has no account",
                "loop with `for batch in run.batches(data): run.step(batch)`",
            )
        if self.position >= self.plan.steps:
            raise PrivacyError("plan", f"all {self.plan.steps} steps are spent", "make a longer plan")
        if batch is not self._open or batch.step != self.position or batch.chunks is None:
            raise PrivacyError(
                "sample", f"the batch of step {batch.step} was used or is stale", "use each batch once, in turn"
            )
        if any(m.training and not before for m, before in zip(self.model.modules(), self._modes, strict=True)):
            found = "a layer was put back in training mode since the batches began"
            raise PrivacyError("model", found, "call run.batches again after model.train()")
        return batch.chunks

    def _meet(self, source: Source) -> None:
        self._here()
        rows = len(source)
        if self.rows is not None and rows != self.rows:
            raise PrivacyError(
                "sample", f"the data has {rows:,} rows, the run began with {self.rows:,}", "go on with the same data"
            )
        alike = leaves(source.data) if source.in_memory else []
        met = (
            [(t.shape[1:], t.dtype) for t in alike] or id(source.data),
            source.collate,
            modes := [m.training for m in self.model.modules()],
        )
        self._modes = modes
        if met != self._met:  # other rows, another collate, a layer back in training mode: all of it is seen again
            self._row = meet(self.plan, self.model, self.parameters, source, self.gradients, self.chunk, self.context())
            self._met = met
        if self.rows is None:
            self.rows = rows
            self.memory = self.plan.sample.begin(self.stream, rows)
            if self._keeper is not None:
                self._keeper.saved = False  # a checkpoint without them could not go on in the same order
        if self.memory is not None and source.in_memory:
            data = digest_of(leaves(source.data))
            if self._data not in (None, data):
                found = "the rows are not those the order was drawn for, or not in their order"
                raise PrivacyError("sample", found, "go on with the same data")
            self._data = data

    def _rest(self) -> dict[str, Any]:
        """What the checkpoint holds beside model and optimizer. No key and no noise."""
        return {
            "step": self.position,
            "rows": self.rows,
            "memory": self.memory,
            "data": self._data,
            "denoise": dict(self.states.denoise),
            "average": dict(self._mean),
            "still": self._still,
        }

    def _resume(self, keeper: Keeper) -> None:
        kept = keeper.resume(self.device)
        self._still, self.rows, self.memory = kept["still"], kept["rows"], kept["memory"]
        self._data, self._versions = kept["data"], versions_of(self.parameters)
        self.ledger = Ledger(self.plan, keeper.journal.reserved)  # what was reserved and lost counts
        self.states = States(self.plan.noise.begin(self.position), kept["denoise"])
        self._mean = begun(self.average, kept["average"])

    def _untouched(self) -> None:
        if self._versions not in (None, versions_of(self.parameters)):
            found = "parameters were changed outside run.step, by what no noise covers"
            raise PrivacyError("optimizer", found, "drop any other optimizer.step(); try other weights on a copy")

    def _here(self) -> None:
        if os.getpid() != self._process:
            raise PrivacyError(
                "run", "a forked process holds a copy of this run", "step it in the process that started it"
            )
