"""Rule four, tested: an example's contribution depends on that example, the parameters and fresh randomness only.

The chain (collate, model, loss) runs on a dummy batch with random parameters. Rows are replaced, filled with NaN, left
out: the others' losses and gradients must stay where they were, and nothing may remember a call.

What such a test cannot see: a dependence that no dummy row triggers (a branch on a rare value), padding when all the
samples given have one length, mixing through integers that all rows given share.
What it refuses without need: a layer that draws more or fewer numbers by what it sees (RReLU in training).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from quietgrad.batches import Collate, Tree, leaves, rows_of
from quietgrad.errors import PrivacyError
from quietgrad.independence.culprit import backward, differ, mixing, place
from quietgrad.independence.held import Attributes, Generators, Still, eager, same
from quietgrad.independence.layers import label
from quietgrad.independence.nature import refuse_known
from quietgrad.independence.trial import RUNS, Chain, Outcome, Trial, most_searching, quote
from quietgrad.losses import Loss
from quietgrad.values import Context

PAD = "pad or cut every sample to one fixed public length"


def check(
    model: nn.Module,
    batch: Tree,
    loss: Callable[[Any, Any], Tensor] | None = None,
    *,
    forward: Callable[[nn.Module, Tree], Tensor] | None = None,
    collate: Collate | None = None,
    samples: Sequence[Any] | None = None,
    size: int | None = None,
) -> None:
    """Refuses (PrivacyError) whatever mixes examples or keeps a private buffer; names the layer and the fix.

    `batch` holds a few real rows, two different ones at best: (inputs, targets) for `loss`, anything for `forward`,
    which goes before `loss` where both are given. `size` is the number of dummy rows. With `samples` (raw items of
    the data set) `collate` is tested too. Nothing of the model changes, nor any global generator.
    """
    if size is not None and size < 1:
        raise PrivacyError("check", f"size is {size}", "give the number of rows of a chunk, at least 1")
    if loss is None and forward is None:
        raise PrivacyError("loss", "there is none", "give loss, or forward with one value per example")
    if isinstance(loss, Loss) and loss.tapped and forward is None:
        forward = partial(_tapped, loss)
    refuse_known(model)
    chain = Chain(model, loss, forward)
    generators, attributes = Generators(chain), Attributes(chain)
    try:
        with eager(), torch.inference_mode(False), torch.enable_grad():
            if collate is not None or samples:
                _check_collate(collate or default_collate, samples or (), generators)
            trial = most_searching(chain, batch, max(size or 16, 2), generators)
            attributes.restore()
            _check_chain(trial)
    except PrivacyError:
        raise
    except Exception as error:
        raise PrivacyError("model", f"the chain fails on dummy rows ({quote(error)})", RUNS) from error
    finally:
        attributes.restore()
        generators.rewind()


def _tapped(loss: Loss, model: nn.Module, batch: Tree) -> Tensor:
    from quietgrad.gradients import Chain as Whole

    values: Tensor = Whole(model, loss)(batch, Context(0, 0, {}, 0.0, 1.0))
    return values


def _check_chain(trial: Trial) -> None:
    _remember(trial)
    _repeat(trial)
    positions = sorted({0, trial.n // 2, trial.n - 1})
    for j in positions:
        before = trial.run(trial.dummy(), trial.others(j))
        _replace(trial, j, before)
        _taint(trial, j, before)
    for kept in (*(trial.others(j) for j in positions), torch.arange(0, trial.n, 2), torch.tensor([0])):
        _remove(trial, kept)


def _remember(trial: Trial) -> None:
    """No forward changes a buffer, or a parameter in place."""
    state = trial.state()
    before = {name: tensor.detach().clone() for name, tensor in state.items()}
    trial.run(trial.dummy(), state=state)
    new = {name for name, _ in trial.chain.named_buffers()} - before.keys()
    name = next((k for k, v in state.items() if not same(v.detach(), before[k])), None) or min(new, default=None)
    if name is not None:
        layer, _, tensor = name.rpartition(".")
        found = f"{label(layer, trial.chain.get_submodule(layer))} changes `{tensor}` in a forward, and so remembers"
        remedy = "keep no state in forward: use qg.fix(model) for norms, or .eval() on this layer"
        raise PrivacyError("model", f"{found} private examples", remedy)


def _repeat(trial: Trial) -> None:
    """The same batch gives the same values, whatever ran in between."""
    other = replace(trial.dummy(), rows=trial.spare)
    before, _, after = (trial.run(v).values for v in (trial.dummy(), other, trial.dummy()))
    if differ([before], [after], trial.tight):
        trial.run(other)
        slot, where, _ = place(trial, trial.dummy(), trial.dummy(), trial.tight)
        found = f"{where} gives two answers for one batch: it carries state between calls, or has its own generator"
        raise PrivacyError(slot, found, "start every call from the same state, and draw from torch's default generator")


def _replace(trial: Trial, j: int, before: Outcome) -> None:
    """Another row j moves no other loss or gradient; the others' losses have no gradient to its inputs."""
    others, changed, event = trial.others(j), trial.replaced(j), f"when row {j} was replaced"
    after = trial.run(changed, others)
    if differ([before.values[others]], [after.values[others]], trial.tight):
        raise mixing(trial, trial.dummy(others), changed, event, trial.tight)
    if any(bool(g[j].nan_to_num().any()) for g in before.inputs):
        event = f"with row {j}, as the gradient to its inputs tells"
        raise mixing(trial, trial.dummy(others), trial.tainted(j), event, trial.tight)
    if differ(before.gradients, after.gradients, trial.tight):
        raise backward(trial, trial.dummy(others), changed, event, trial.tight)


def _taint(trial: Trial, j: int, before: Outcome) -> None:
    """NaN in row j reaches no other loss. A chain that answers NaN with an exception says nothing of mixing."""
    tainted, others = trial.tainted(j), trial.others(j)
    if not (tainted.taint or any(trial.floats)):
        return
    try:
        after = trial.run(tainted)
    except Exception:
        return
    if differ([before.values[others]], [after.values[others]], trial.tight):
        raise mixing(trial, trial.dummy(others), tainted, f"when row {j} was filled with NaN", trial.tight)


def _remove(trial: Trial, kept: Tensor) -> None:
    """The rows kept have the losses and the gradient that they have in the whole batch; one row alone too."""
    whole, fewer = trial.dummy(kept, Still()), trial.fewer(kept)
    event = f"when the batch had {len(kept)} rows instead of {trial.n}"
    before = trial.run(whole, kept)
    try:
        after = trial.run(fewer, fewer.kept)
    except Exception as error:
        remedy = "let it take any number of rows, one included: squeeze() drops the axis of a single row"
        raise PrivacyError("model", f"the chain fails {event} ({quote(error)})", remedy) from error
    if differ([before.values[kept]], [after.values], trial.loose):
        raise mixing(trial, whole, fewer, event, trial.loose)
    if differ(before.gradients, after.gradients, trial.loose):
        raise backward(trial, whole, fewer, event, trial.loose)


def _check_collate(collate: Collate, samples: Sequence[Any], generators: Generators) -> None:
    """A sample's row is the same alone and with another, and whatever the others are."""
    if not samples:
        raise PrivacyError("collate", "there are no samples to try it on", "give a few items of the data set")
    few = list(samples[:6])
    for a, b in product(few, few):
        alone, two = (_collated(collate, items, generators, Still()) for items in ([a], [a, b]))
        _same_rows(alone, two, [0])
    many = [few[i % len(few)] for i in range(8)]
    for j in (0, 4, 7):
        other = [*many[:j], few[(j + 1) % len(few)], *many[j + 1 :]]
        before, after = (_collated(collate, items, generators, None) for items in (many, other))
        _same_rows(before, after, [i for i in range(8) if i != j])


def _collated(collate: Collate, items: list[Any], generators: Generators, still: Still | None) -> list[Tensor]:
    generators.rewind()
    try:
        with still or nullcontext():
            tree = collate(items)
            rows = rows_of(tree)
    except Exception as error:
        raise PrivacyError("collate", f"fails on {len(items)} samples ({quote(error)})", PAD) from error
    if rows != len(items):
        raise PrivacyError("collate", f"makes {rows} rows of {len(items)} samples", "make one row of each")
    return leaves(tree)


def _same_rows(first: list[Tensor], second: list[Tensor], rows: list[int]) -> None:
    if [x.shape[1:] for x in first] != [x.shape[1:] for x in second]:
        raise PrivacyError("collate", "the shape of a row depends on the other samples (padding to the longest?)", PAD)
    if not all(same(x[rows], y[rows]) for x, y in zip(first, second, strict=True)):
        raise PrivacyError("collate", "a sample's row depends on the other samples", "make a row from its sample only")
