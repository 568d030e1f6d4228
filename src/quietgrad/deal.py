"""Deal: a run's batches, each drawn by the run's own sampler for one step, and taken once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from quietgrad.batches import Chunk, Source, leaves
from quietgrad.errors import PrivacyError
from quietgrad.gradients import Gradients
from quietgrad.meet import meet
from quietgrad.plan import Plan
from quietgrad.stream import Purpose, Stream
from quietgrad.trained import digest_of
from quietgrad.values import Context, Tensors


@final
@dataclass(eq=False)
class Batch:
    """A batch drawn for one step of one run. Private; used once."""

    dealer: Dealer
    step: int
    chunks: list[Chunk] | None

    def __repr__(self) -> str:
        return f"Batch(step {self.step}, private)"


@final
class Dealer:
    """What it remembers of the data (how many rows, the order drawn for them) is secret, and in the checkpoint."""

    def __init__(
        self, plan: Plan, model: nn.Module, parameters: Tensors, gradients: Gradients, stream: Stream, chunk: int
    ) -> None:
        self.plan, self.model, self.parameters = plan, model, parameters
        self.gradients, self.stream, self.chunk = gradients, stream, chunk
        self.rows: int | None = None
        self.memory: Tensor | None = None  # the sampler's own
        self.data: str | None = None  # a digest, where the order of the rows matters
        self._met: object = None
        self._row: list[torch.Size] = []
        self._modes: list[bool] = []
        self._open: Batch | None = None

    def kept(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"rows": self.rows, "memory": self.memory, "data": self.data}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """From the checkpoint."""
        self.rows, self.memory, self.data = kept["rows"], kept["memory"], kept["data"]

    def meet(self, source: Source, context: Context) -> bool:
        """Sees the data before the first batch of a loop. Whether an order was drawn, without which nothing resumes."""
        rows = len(source)
        if self.rows is not None and rows != self.rows:
            found = f"the data has {rows:,} rows, the run began with {self.rows:,}"
            raise PrivacyError("sample", found, "go on with the same data")
        alike = leaves(source.data) if source.in_memory else []
        modes = [m.training for m in self.model.modules()]
        met = ([(t.shape[1:], t.dtype) for t in alike] or id(source.data), source.collate, modes)
        self._modes = modes
        if met != self._met:  # other rows, another collate, a layer back in training mode: all of it is seen again
            self._row = meet(self.plan, self.model, self.parameters, source, self.gradients, self.chunk, context)
            self._met = met
        first = self.rows is None
        if first:
            self.rows, self.memory = rows, self.plan.sample.begin(self.stream, rows)
        if self.memory is not None and source.in_memory:
            data = digest_of(alike)
            if self.data not in (None, data):
                found = "the rows are not those the order was drawn for, or not in their order"
                raise PrivacyError("sample", found, "go on with the same data")
            self.data = data
        return first

    def deal(self, source: Source, end: int, position: Callable[[], int], device: torch.device) -> Iterator[Batch]:
        """The batches from where the run stands to `end`; each must be stepped before the next is dealt."""
        start, rows = position(), len(source)
        draws = (self.plan.sample.draw(self.stream, t, rows, self.memory) for t in range(start, end))

        def fresh(k: int) -> Tensor:  # for transforms of a data set, here or in workers
            return self.stream.state_for(Purpose.FORWARD, start, 2**23 + k)

        read = source.read(draws, self.chunk, device, fresh, self._row)
        for step, chunks in zip(range(start, end), read, strict=False):
            batch = self._open = Batch(self, step, chunks)
            yield batch
            if position() != step + 1:
                found = f"the batch of step {step} was passed over"
                raise PrivacyError("sample", found, "call run.step on every batch, an empty one too")

    def accept(self, batch: Batch, position: int) -> list[Chunk]:
        """The chunks of a batch that may be stepped now."""
        if not isinstance(batch, Batch) or batch.dealer is not self:
            found = "this batch was not drawn by this run, so its sampling has no account"
            raise PrivacyError("sample", found, "loop with `for batch in run.batches(data): run.step(batch)`")
        if position >= self.plan.steps:
            raise PrivacyError("plan", f"all {self.plan.steps} steps are spent", "make a longer plan")
        if batch is not self._open or batch.step != position or batch.chunks is None:
            found = f"the batch of step {batch.step} was used or is stale"
            raise PrivacyError("sample", found, "use each batch once, in turn")
        if any(m.training and not before for m, before in zip(self.model.modules(), self._modes, strict=True)):
            found = "a layer was put back in training mode since the batches began"
            raise PrivacyError("model", found, "call run.batches again after model.train()")
        return batch.chunks
