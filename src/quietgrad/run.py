"""Run: a plan at work on one model. It draws the batches, takes the steps, keeps the ledger, and survives a crash."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from quietgrad import checkpoint, export
from quietgrad.account import Price, price
from quietgrad.batches import Chunk, Collate, Source, leaves
from quietgrad.certificate import Certificate, certify
from quietgrad.errors import PrivacyError
from quietgrad.gradients import Chain, Gradients
from quietgrad.gradients.choose import chunk_size
from quietgrad.journal import Journal
from quietgrad.ledger import Ledger
from quietgrad.meet import meet
from quietgrad.plan import Plan
from quietgrad.stage import counted
from quietgrad.step import States, apply, private_sum, release
from quietgrad.stream import Purpose, Stream
from quietgrad.trained import fingerprints, shapes, trainable, trains
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
    ) -> None:
        if plan.status == "none" and not plan.study:
            raise PrivacyError(
                "noise",
                "the plan has no guarantee (no noise)",
                "calibrate it, or say qg.study(plan) to train without one",
            )
        assert plan.loss is not None
        self.plan, self.model, self.optimizer, self.seed = plan, model, optimizer, seed
        self.parameters = trainable(model, optimizer)
        self.stream = Stream(seed)
        self.gradients = Gradients(Chain(model, plan.loss), self.stream)
        if chunk is not None:
            counted("gradients", "chunk", chunk)
        self.chunk = chunk or chunk_size(self.parameters, plan.sample.batch_size)
        self.folder = None if folder is None else Path(folder).absolute()
        self.rows: int | None = None
        self.memory: Tensor | None = None  # the sampler's own, secret
        self._process, self._saved = os.getpid(), False
        self._met: object = None
        self._open: Batch | None = None
        self._still = fingerprints(model, self.parameters)
        self._journal: Journal | None = None
        self._start_or_resume(resume)
        self._watcher = self._watching(watch)

    # The loop.

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
        chunks, context = self._accept(batch), self.context()
        if self._journal is not None:
            if not self._saved:
                self._write_checkpoint()  # so that there is something to resume from
            self._journal.reserve(self.position, self.plan.steps)
        batch.chunks = None
        try:
            total = private_sum(
                self.plan, self.gradients, self.parameters, chunks, context, self.stream, self._watcher or unwatched
            )
            released = release(self.plan, total, self.states, context, self.stream)
            self.ledger.add(released)
        except BaseException:
            self.ledger.spent = context.step + 1  # released or not, it counts
            raise
        self.optimizer.zero_grad()  # what it holds and does not train must not move by a gradient from elsewhere
        apply(released, self.parameters, self.optimizer)
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
        if self.plan.status == "none":
            return Price(math.inf, "none: a study has no guarantee")
        spent = price(self.ledger.event(), self.plan.delta(delta), self.plan.adjacency)
        return spent if self.stream.secure else Price(spent.epsilon, f"SEEDED, claimed only: {spent.accountant}")

    def certificate(self, delta: float | None = None) -> Certificate:
        """The guarantee of what was released so far."""
        dtypes = {p.dtype for p in self.parameters.values()}
        run = None if self._journal is None else str(self._journal.header["run"])
        return certify(self.plan, self.ledger.spent, delta, secure=self.stream.secure, dtypes=dtypes, run=run)

    def save(self) -> Path:
        """Writes the checkpoint (secret) and gives back the steps that were reserved and not used."""
        if self._journal is None:
            raise PrivacyError("checkpoint", "the run has no folder", "say start(…, folder=…)")
        self._here()
        path = self._write_checkpoint()
        self._journal.give_back(self.position)
        if self._watcher is not None:
            self._watcher.write(self.position)
        return path

    def export(self, folder: str | Path) -> Path:
        """Writes what may be published: weights, buffers as they were at the start, the certificate."""
        changed = [
            name for name, mark in fingerprints(self.model, self.parameters).items() if self._still.get(name) != mark
        ]
        return export.write(Path(folder), self.model, changed, self.certificate())

    def close(self) -> None:
        """Lets go of the folder. Another process may then go on."""
        if self._journal is not None:
            self._journal.close()

    def __str__(self) -> str:
        count = sum(p.numel() for p in self.parameters.values())
        return (
            f"{self.plan}\n"
            f"run      step {self.position:,} of {self.plan.steps:,}; {count:,} parameters\n"
            f"engine   {self.gradients.name}, in chunks of {self.chunk} ({self.gradients.reason})\n"
            f"random   {'secure, a key from the system' if self.stream.secure else 'SEEDED, not for publication'}"
        )

    # How it is done.

    def _batches(self, source: Source, end: int) -> Iterator[Batch]:
        device = next(iter(self.parameters.values())).device
        rows = len(source)
        draws = (self.plan.sample.draw(self.stream, t, rows, self.memory) for t in range(self.position, end))
        seed = self.stream.seed_for(Purpose.FORWARD, self.position, 2**35 - 1)  # for transforms in worker processes
        read = source.read(draws, self.chunk, device, seed)
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
            [m.training for m in self.model.modules()],
        )
        if met != self._met:  # other rows, another collate, a layer back in training mode: all of it is seen again
            meet(self.plan, self.model, self.parameters, source, self.gradients, self.chunk, self.context())
            self._met = met
        if self.rows is None:
            self.rows = rows
            self.memory = self.plan.sample.begin(self.stream, rows)
            self._saved = False  # a checkpoint without them could not go on in the same order

    def _start_or_resume(self, resume: bool) -> None:
        block = max(1, self.plan.steps // 1000)
        self.ledger = Ledger(self.plan)
        self.states = States(self.plan.noise.begin(0), self.plan.denoise.begin(self.parameters))
        if self.folder is None:
            if resume:
                raise PrivacyError(
                    "checkpoint", "there is no folder to resume from", "say start(…, folder=…, resume=True)"
                )
            return
        if not resume:
            facts = {"plan": self.plan.to_json(), "randomness": "secure" if self.stream.secure else "seeded"}
            self._journal = Journal.create(self.folder, facts, block)
            return
        self._journal = Journal.reopen(self.folder, block)
        try:
            self._restore(checkpoint.load(self.folder, next(iter(self.parameters.values())).device))
            self._journal.resumed()
            checkpoint.tidy(self.folder)
        except BaseException:
            self._journal.close()
            raise

    def _write_checkpoint(self) -> Path:
        assert self.folder is not None and self._journal is not None
        content = {
            "format": 1,
            "run": self._journal.header["run"],
            "journal": self._journal.mark(),
            "plan": self.plan.to_json(),
            "step": self.position,
            "seed": self.seed,
            "rows": self.rows,
            "memory": self.memory,
            "shapes": shapes(self.model.state_dict()),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "trains": trains(self.model, self.optimizer),
            "denoise": dict(self.states.denoise),
            "still": self._still,
        }
        path = checkpoint.save(self.folder, content)
        self._saved = True
        return path

    def _restore(self, kept: Mapping[str, Any]) -> None:
        assert self._journal is not None
        checkpoint.belongs(
            kept,
            {
                "run": (
                    self._journal.header["run"],
                    "another run than the journal beside it",
                    "restore the whole folder",
                ),
                "plan": (self.plan.to_json(), "another plan", "start with the plan that the run began with"),
                "seed": (self.seed, "a run with another seed, or with none", "resume with the seed it began with"),
                "shapes": (shapes(self.model.state_dict()), "another model", "build the same model"),
                "trains": (
                    trains(self.model, self.optimizer),
                    "another optimizer",
                    "build the same optimizer, over the same parameters in the same order",
                ),
            },
        )
        if not self._journal.follows(kept["journal"]):
            found = "the journal beside it is older, or another copy's"
            raise PrivacyError("checkpoint", found, "restore the whole folder")
        if self._journal.reserved and kept["rows"] is None:
            found = "it is older than the first batch, whose order it does not know"
            raise PrivacyError("checkpoint", found, "take a later one")
        try:
            self.optimizer.load_state_dict(kept["optimizer"])
        except (ValueError, KeyError) as error:
            raise PrivacyError(
                "checkpoint", f"it belongs to another optimizer ({error})", "build the same optimizer"
            ) from error
        self.model.load_state_dict(kept["model"])
        self._still, self.rows, self.memory, self._saved = kept["still"], kept["rows"], kept["memory"], True
        self.ledger = Ledger(self.plan, self._journal.reserved)  # what was reserved and lost counts
        self.states = States(self.plan.noise.begin(self.position), kept["denoise"])

    def _watching(self, watch: Watch | None) -> Watcher | None:
        if watch is None:
            return None
        if self.folder is None:
            self.close()
            raise PrivacyError("watch", "private figures need a private place", "say start(…, folder=…)")
        return Watcher(watch, self.folder, self.plan.bound.reach)

    def _here(self) -> None:
        if os.getpid() != self._process:
            raise PrivacyError(
                "run", "a forked process holds a copy of this run", "step it in the process that started it"
            )
