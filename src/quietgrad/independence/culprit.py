"""What moved, and where: the first layer whose outputs moved while its inputs did not."""

from __future__ import annotations

import torch
from torch import Tensor

from quietgrad.errors import PrivacyError
from quietgrad.independence.layers import Call, label
from quietgrad.independence.trial import Trial, Variant

WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
ALONE = "let each value depend on its own example: no mean, sort, choice or negatives across the batch"


def differ(before: list[Tensor], after: list[Tensor], tolerance: float) -> bool:
    """Whether anything moved by more than `tolerance` times the largest magnitude of all (to NaN is a move)."""
    if [t.shape for t in before] != [t.shape for t in after]:
        return True
    first, second = ([t.double() if t.dtype in WHOLE else t for t in ts] for ts in (before, after))
    reach = tolerance * max((float(t.abs().nan_to_num(0.0, 0.0, 0.0).max()) for t in first if t.numel()), default=0.0)
    close = ((a == b) | ((a != a) & (b != b)) | ((a - b).abs() <= reach) for a, b in zip(first, second, strict=True))
    return not all(bool(c.all()) for c in close)


def mixing(trial: Trial, before: Variant, after: Variant, event: str, tolerance: float) -> PrivacyError:
    """The refusal of a chain in which other rows' losses moved."""
    slot, where, remedy = place(trial, before, after, tolerance)
    if len(after.rows[0]) < trial.n:
        remedy = "divide by constants, never by the length of the batch, and choose nothing across it"
    return PrivacyError(slot, f"{where} mixes examples: other rows moved {event}", remedy)


def backward(trial: Trial, before: Variant, after: Variant, event: str, tolerance: float) -> PrivacyError:
    """The refusal of a chain in which the other rows' gradient moved, and their losses by too little to tell."""
    if _culprit(trial, before, after, tolerance) is not None:
        return mixing(trial, before, after, event, tolerance)
    found = f"a backward pass mixes examples: the other rows' gradient moved {event}, their losses did not"
    return PrivacyError("model", found, "look for a custom autograd function or a hook on gradients")


def place(trial: Trial, before: Variant, after: Variant, tolerance: float) -> tuple[str, str, str]:
    """Slot, description and remedy for the call that mixes; without one it is code around the modules."""
    call = _culprit(trial, before, after, tolerance)
    if call is None:
        return ("forward", "the code of `forward`", ALONE) if trial.chain.own else ("loss", "the loss", ALONE)
    where = label(call.name, call.module)
    if getattr(call.module, "batch_first", None) is False:
        return "model", where, "it takes the example axis second: set batch_first=True, or transpose its input"
    if call.name.startswith("loss"):
        return "loss", where, ALONE
    if next(call.module.children(), None) is not None and not type(call.module).__module__.startswith("torch.nn"):
        where = f"the forward code of {where}"
    return "model", where, f"{ALONE}; for norms GroupNorm or LayerNorm"


def _culprit(trial: Trial, before: Variant, after: Variant, tolerance: float) -> Call | None:
    """The first call to end whose outputs moved at the kept rows while its inputs did not."""
    sizes, kept = (trial.n, len(after.rows[0])), (before.kept, after.kept)

    def moved(first: list[Tensor], second: list[Tensor]) -> bool:
        pairs = zip(first, second, strict=False)
        return len(first) != len(second) or any(_rows_moved(a, b, sizes, kept, tolerance) for a, b in pairs)

    try:
        calls = list(zip(trial.calls(before), trial.calls(after), strict=False))
    except Exception:
        return None
    return next((a for a, b in calls if moved(a.outputs, b.outputs) and not moved(a.inputs, b.inputs)), None)


def _rows_moved(a: Tensor, b: Tensor, sizes: tuple[int, int], kept: tuple[Tensor, Tensor], tolerance: float) -> bool:
    """Whether two tensors differ at the kept rows, on whichever axis the examples may lie."""
    first, second = (_by_axis(t, n, k.to(t.device)) for t, n, k in zip((a, b), sizes, kept, strict=True))
    shared = [axis for axis in first.keys() & second.keys() if first[axis].shape == second[axis].shape]
    return all(differ([first[k]], [second[k]], tolerance) for k in shared) if shared else differ([a], [b], tolerance)


def _by_axis(t: Tensor, n: int, kept: Tensor) -> dict[int, Tensor]:
    """The kept rows along every axis of length n; under -1 if rows may lie folded into the first axis."""
    found = {axis: t.index_select(axis, kept) for axis in range(t.dim()) if t.shape[axis] == n}
    if t.dim() and t.shape[0] and t.shape[0] % n == 0:
        found[-1] = t.reshape(n, -1)[kept]
    return found
