"""Which engine serves a model: the fastest that is equal to the loop, tried before the first release."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from quietgrad.batches import Chunk, tree_map
from quietgrad.fresh import PUBLIC, drawing, others
from quietgrad.gradients.chain import Chain
from quietgrad.gradients.loop import loop
from quietgrad.gradients.rows import Rows
from quietgrad.gradients.vmap import vectorised
from quietgrad.smooth import AsIs, View
from quietgrad.stream import Purpose, Stream
from quietgrad.values import Context, PerExample, Tensors

Engine = Callable[[Chain, Tensors, Chunk, Sequence[View], Context], Rows]
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # relative, of row norms
SHARED = "it draws from Python's or NumPy's generator, once for all examples under vmap"
MEMORY = 256 * 2**20  # bytes of formed rows in a chunk


class Gradients:
    """(parameters, chunk, views, context) to PerExample. `name` and `reason` say which engine serves, and why."""

    def __init__(self, chain: Chain, stream: Stream) -> None:
        self.chain, self.stream = chain, stream
        self.engine: Engine = loop
        self.name, self.reason = "the loop over examples", "no other was tried"

    def __call__(self, parameters: Tensors, chunk: Chunk, views: Sequence[View], context: Context) -> PerExample:
        held = [(m._parameters, dict(m._parameters)) for m in self.chain.modules() if m._parameters]
        words, device = self.stream.state_for(Purpose.FORWARD, context.step, chunk.number), chunk.real.device
        try:
            with drawing(words, device):
                before = others()
                rows = self.engine(self.chain, parameters, chunk, views, context)
                shared = self.engine is not loop and others() != before
            if shared:  # one draw for a whole chunk ties examples together: what was computed is thrown away
                self._fall_back(SHARED)
                with drawing(words, device):
                    rows = loop(self.chain, parameters, chunk, views, context)
            return rows
        except BaseException:  # an interrupt may come before functional_call has put the model's parameters back
            for places, own in held:
                places.update(own)
            raise

    def _fall_back(self, reason: str) -> None:
        self.engine, self.name, self.reason = loop, "the loop over examples", reason

    def choose(self, parameters: Tensors, chunk: Chunk, context: Context, views: Sequence[View] = (AsIs(),)) -> None:
        """Tries vmap on a chunk as it will be used; then, without dropout, beside the loop on its first rows."""
        few = min(4, len(chunk.real))
        with drawing(PUBLIC, chunk.real.device):
            before = others()
            try:
                vectorised(self.chain, parameters, chunk, views[:1], context)
                if others() != before:
                    self._fall_back(SHARED)
                    return
                with still(self.chain):
                    fast = vectorised(self.chain, parameters, chunk, (AsIs(),), context)
            except Exception as error:  # whatever a model does that vmap cannot follow: the loop can
                self.reason = f"vmap cannot follow the model: {str(error).strip().splitlines()[0][:120]}"
                return
            with still(self.chain):
                true = loop(self.chain, parameters, cut(chunk, few), (AsIs(),), context)
        if not bool((true.norms() > 0).any()):
            self.reason = "the rows tried have no gradient, so nothing could be compared"
            return
        for name, meant in true.rows().items():
            got = fast.rows()[name][:few]
            scale = true.norms().max().clamp(min=torch.finfo(torch.float32).tiny)
            if not (
                (got - meant).reshape(few, -1).norm(dim=1) <= CLOSE.get(parameters[name].dtype, 1e-3) * scale
            ).all():
                self.reason = f"vmap differs from the loop at {name}"
                return
        self.engine, self.name, self.reason = vectorised, "vmap over examples", "equal to the loop on the first chunk"


def chunk_size(parameters: Tensors, batch_size: int) -> int:
    """A quarter of the batch (padding then costs about an eighth), or what keeps the rows within MEMORY."""
    row = sum(p.numel() * p.element_size() for p in parameters.values())
    return max(1, min(-(-batch_size // 4), MEMORY // max(row, 1)))


def cut(chunk: Chunk, count: int) -> Chunk:
    """The first rows of a chunk."""
    return Chunk(tree_map(lambda t: t[:count], chunk.tree), chunk.real[:count], chunk.number)


@contextmanager
def still(module: nn.Module) -> Iterator[None]:
    """In evaluation mode: without dropout, wherever it is written."""
    off = [m for m in module.modules() if m.training]
    for m in off:
        m.training = False
    try:
        yield
    finally:
        for m in off:
            m.training = True
