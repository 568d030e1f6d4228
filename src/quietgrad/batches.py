"""Batches: data in, padded chunks of one static size out.

A batch of any size, an empty one too, is cut into chunks of `size` rows; the last is padded with public dummy rows that
count for nothing. Chunking changes memory and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from quietgrad.errors import PrivacyError
from quietgrad.fresh import drawing, fill

Tree = Any  # a tensor, or a tuple, list or mapping of trees; the example axis is first
Collate = Callable[[list[Any]], Tree]


@dataclass(frozen=True)
class Chunk:
    """Rows of one batch, dummies included. Private."""

    tree: Tree
    real: Tensor  # (size,) bool: False for a dummy
    number: int  # which chunk of its batch: public


def tree_map(function: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """The tree with every tensor replaced."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: tree_map(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(tree_map(function, value) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(tree_map(function, value) for value in tree)
    raise PrivacyError("sample", f"a batch holds {type(tree).__name__}", "use tuples, lists and dicts of tensors")


def leaves(tree: Tree) -> list[Tensor]:
    """Every tensor of a tree."""
    found: list[Tensor] = []
    tree_map(lambda t: found.append(t) or t, tree)  # type: ignore[func-returns-value]
    return found


def rows_of(tree: Tree) -> int:
    """The number of rows, which all tensors must share."""
    sizes = {t.shape[0] if t.ndim else None for t in leaves(tree)}
    if len(sizes) != 1 or None in sizes:
        shown = ", ".join(str(tuple(t.shape)) for t in leaves(tree))
        raise PrivacyError(
            "sample", f"the tensors have shapes {shown or 'none'}", "give every tensor one row per example, first"
        )
    return next(iter(sizes))  # type: ignore[return-value]


def row_shapes(tree: Tree) -> list[torch.Size]:
    """What a row looks like: a shape per tensor."""
    return [t.shape[1:] for t in leaves(tree)]


def pad(tree: Tree, size: int, device: torch.device, number: int) -> Chunk:
    """A chunk of `size` rows: those given, then dummies of zeros."""
    count = rows_of(tree)

    def padded(t: Tensor) -> Tensor:
        return torch.cat([t, t.new_zeros((size - count, *t.shape[1:]))]) if count < size else t

    real = torch.arange(size, device=device) < count
    return Chunk(tree_map(lambda t: padded(t).to(device, non_blocking=True), tree), real, number)


@dataclass(frozen=True)
class Source:
    """Where the rows are: a tree of tensors, or a map-style Dataset read by `workers` processes."""

    data: Any
    collate: Collate | None
    workers: int

    def __post_init__(self) -> None:
        mapped = hasattr(self.data, "__getitem__") and hasattr(self.data, "__len__")
        if isinstance(self.data, IterableDataset) or not (self.in_memory or mapped):
            raise PrivacyError(
                "sample",
                f"{type(self.data).__name__} gives examples in its own order, so no sampler can draw them",
                "give tensors or a map-style Dataset (with __len__ and __getitem__)",
            )
        if self.in_memory and self.collate is not None:
            raise PrivacyError("sample", "collate is given for tensors, which have their rows already", "leave it out")
        if len(self) == 0:
            raise PrivacyError("sample", "the data is empty", "give at least one example")

    @property
    def in_memory(self) -> bool:
        """Whether the data is a tree of tensors."""
        kinds = (Tensor, Mapping, tuple, list)
        return (
            isinstance(self.data, kinds) and not isinstance(self.data, Dataset) and not _is_list_of_samples(self.data)
        )

    def __len__(self) -> int:
        return rows_of(self.data) if self.in_memory else len(self.data)

    def first(self, count: int) -> Tree:
        """A few rows, for the checks before the first release."""
        few = range(min(count, len(self)))
        if self.in_memory:
            return tree_map(lambda t: t[: len(few)].clone(), self.data)
        return self._collate([self.data[i] for i in few])

    def some(self, count: int) -> Tree:
        """A few rows from all over the data: a sorted table may begin with rows that are all alike."""
        if self.in_memory:
            return tree_map(lambda t: t[self._spread(count)].clone(), self.data)
        return self._collate([self.data[i] for i in self._spread(count)])

    def samples(self, count: int) -> list[Any]:
        """A few raw items of a Dataset (none of tensors in memory, which are never collated)."""
        return [] if self.in_memory else [self.data[i] for i in self._spread(count)]

    def _spread(self, count: int) -> list[int]:
        count = min(count, len(self))
        return [k * (len(self) - 1) // max(count - 1, 1) for k in range(count)]

    def _collate(self, samples: Sequence[Any]) -> Tree:
        """A row of each sample. A collate of the user's sees one at a time: what it draws or pads cannot be shared."""
        if self.collate is None:
            return default_collate(list(samples))
        alone = [self.collate([sample]) for sample in samples]
        if any(rows_of(tree) != 1 for tree in alone):
            found = f"collate made {max(rows_of(tree) for tree in alone)} rows of 1 example"
            raise PrivacyError("sample", found, "make one row of each: the bound holds for a row")
        shapes = {tuple(row_shapes(tree)) for tree in alone}
        if len(shapes) > 1:
            raise PrivacyError(
                "sample", "examples differ in shape", "pad or cut every sample to one fixed public length"
            )
        columns = zip(*(leaves(tree) for tree in alone), strict=True)
        whole = iter([torch.cat(column) for column in columns])
        return tree_map(lambda _: next(whole), alone[0])

    def read(
        self,
        draws: Iterator[Tensor],
        size: int,
        device: torch.device,
        fresh: Callable[[int], Tensor] | None = None,
        row: Sequence[torch.Size] | None = None,
    ) -> Iterator[list[Chunk]]:
        """One list of chunks for each draw of rows, in order. Transforms draw from the states that `fresh` gives.

        A chunk whose rows are not shaped as `row` says is refused: a shape that follows the batch (padding to the
        longest) would carry one example into another.
        """
        if self.in_memory:
            for rows in draws:
                yield [
                    pad(tree_map(_rows(part), self.data), size, device, k) for k, part in enumerate(_cut(rows, size))
                ]
            return
        plan: list[list[int]] = []  # rows per chunk of each batch, filled as the loader draws ahead

        def parts() -> Iterator[list[int]]:
            for rows in draws:
                cuts = _cut(rows, size)
                plan.append([len(c) for c in cuts])
                yield from (c.tolist() for c in cuts)
                if not cuts:
                    yield []

        def read_part(samples: Sequence[Any]) -> Tree | None:
            return self._collate(samples) if samples else None

        states = None if fresh is None else [fresh(k) for k in range(self.workers)]
        loader = DataLoader(
            _Listed(self.data), batch_size=None, sampler=parts(), num_workers=self.workers, collate_fn=read_part,
            worker_init_fn=None if states is None else (lambda k: fill(states[k])), persistent_workers=False,
            generator=torch.Generator(),  # else it would take its seeds from the user's
        )  # fmt: skip
        stream, part = iter(loader), count(self.workers)

        def following() -> Tree:
            if fresh is None or self.workers:
                return next(stream)
            with drawing(fresh(next(part)), torch.device("cpu")):  # transforms run in this process
                return next(stream)

        while True:
            try:
                trees = following()
            except StopIteration:
                return
            batch: list[Chunk] = []
            for number, asked in enumerate(plan.pop(0)):
                tree = trees if number == 0 else following()
                if rows_of(tree) != asked:
                    found = f"collate made {rows_of(tree)} rows of {asked} examples"
                    raise PrivacyError("sample", found, "make one row of each: the bound holds for a row")
                if row is not None and row_shapes(tree) != row:
                    found = "rows of a batch are not shaped as those that were met (padding to the longest?)"
                    raise PrivacyError("sample", found, "pad or cut every sample to one fixed public length")
                batch.append(pad(tree, size, device, number))
            yield batch


class _Listed(Dataset[list[Any]]):
    """A dataset that is asked for several rows at once, and asks for each by itself: what `__getitems__` would draw or
    mix for all of them ties examples together."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __getitem__(self, rows: list[int]) -> list[Any]:
        return [self.data[i] for i in rows]


def _cut(rows: Tensor, size: int) -> Sequence[Tensor]:
    return rows.split(size) if len(rows) else ()


def _rows(rows: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda t: t.index_select(0, rows.to(t.device))


def _is_list_of_samples(data: Any) -> bool:
    return isinstance(data, list) and bool(data) and not isinstance(data[0], Tensor | list)
