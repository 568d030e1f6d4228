"""A run that goes on: exactly where it was if it is seeded, with a new key if it is not, and never with less spent."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ledger.small import (
    DATA,
    EXAMPLES,
    adam,
    begin,
    contents,
    fixed_order,
    linear,
    poisson,
    reserved,
    sgd,
    train,
    weights,
)
from torch import nn

import quietgrad as qg
from quietgrad import PrivacyError, checkpoint
from quietgrad.journal import NAME


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def saved(folder: Path, until: int = 8, **more: Any) -> qg.Run:
    """A run that stood at `until`, was saved and closed."""
    run = train(begin(folder, **more), until)
    run.save()
    run.close()
    return run


def refused(folder: Path, match: str, slot: str = "checkpoint", **more: Any) -> None:
    """A resume that is refused with this message, and leaves the folder as it was, free for the next."""
    before = contents(folder)
    for _ in range(2):
        with pytest.raises(PrivacyError, match=match) as found:
            begin(folder, resume=True, **more)
        assert found.value.slot == slot and found.value.found and found.value.remedy
    assert contents(folder) == before


# Where a run goes on.


@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("plan", [poisson(), fixed_order()], ids=["Poisson", "FixedOrder"])
def test_a_seeded_run_resumes_bit_for_bit(plan: qg.Plan, optimizer: Any, folder: Path) -> None:
    """Saved and resumed twice, in the middle of an epoch, a seeded run gives the weights of one never stopped."""
    whole = train(begin(plan=plan, optimizer=optimizer, seed=3))
    saved(folder, 7, plan=plan, optimizer=optimizer, seed=3)
    again = train(begin(folder, plan=plan, optimizer=optimizer, seed=3, resume=True, model=linear(9)), 13)
    again.save()
    again.close()
    last = train(begin(folder, plan=plan, optimizer=optimizer, seed=3, resume=True, model=linear(9)))
    assert torch.equal(weights(whole), weights(last))
    assert last.position == reserved(folder) == 20
    assert last.certificate().status == "seeded"
    assert last.certificate().claimed_epsilon == whole.certificate().claimed_epsilon


def test_pauses_do_not_change_a_seeded_run(folder: Path) -> None:
    """Loops of one epoch, with saves between them, draw what one loop draws."""
    whole = train(begin(seed=3))
    run = begin(folder, seed=3)
    for _ in range(4):
        for batch in run.batches(DATA, epochs=1):
            run.step(batch)
        run.save()
    assert run.position == 20 and torch.equal(weights(whole), weights(run))


def test_a_secure_run_resumes_with_a_new_key(folder: Path) -> None:
    """A key is never restored: noise and batches after a resume are new ones."""
    first = saved(folder)
    second, third = begin(folder, resume=True), None
    second.close()
    third = begin(folder, resume=True)
    keys = {run.stream._key for run in (first, second, third)}
    assert len(keys) == 3 and None not in keys
    assert third.stream.secure and third.certificate().status == "proved"


def test_a_clean_save_gives_back(folder: Path) -> None:
    """What a block reserved and nobody used is not spent after a save; without one it is."""
    plan = poisson(4000)
    run = train(begin(folder, plan=plan), 6)
    assert reserved(folder) == 8
    run.save()
    assert reserved(folder) == 6
    train(run, 7)
    assert reserved(folder) == 10
    run.close()
    again = begin(folder, plan=plan, resume=True)
    assert again.position == 10
    assert again.spent().epsilon == pytest.approx(qg.account.price(plan.event(10), plan.delta()).epsilon)


def test_a_run_goes_on_behind_the_last_reserved_release(folder: Path) -> None:
    """Weights from the save, position from the journal: what came after the save counts."""
    run = train(begin(folder), 5)
    run.save()
    kept = weights(run)
    train(run, 12).close()
    again = begin(folder, resume=True)
    assert again.position == 12 and torch.equal(weights(again), kept)
    assert train(again).position == 20
    with pytest.raises(PrivacyError, match="resume the run"):
        run.save()


def test_forks_of_one_checkpoint_all_count(folder: Path) -> None:
    """An older checkpoint put back beside the newer journal goes on behind everything that was released since."""
    saved(folder, 4)
    older = (folder / checkpoint.NAME).read_bytes()
    for number in range(3):
        (folder / checkpoint.NAME).write_bytes(older)
        again = begin(folder, resume=True)
        assert again.position == 4 + 3 * number
        train(again, 7 + 3 * number).save()
        again.close()
    assert reserved(folder) == 13
    assert qg.compose(folder, delta=1e-5).runs[0]["releases"] == 13


def test_a_finished_run_resumes_to_its_end(folder: Path) -> None:
    """Nothing is left to spend: no batch comes, and no step is taken."""
    run = saved(folder, 20)
    again = begin(folder, resume=True)
    assert again.position == 20 and not list(again.batches(DATA))
    assert torch.equal(weights(run), weights(again))


def test_learning_rates_are_the_optimizers(folder: Path) -> None:
    """The optimizer goes on as it was, its learning rate too."""
    run = begin(folder)
    run.optimizer.param_groups[0]["lr"] = 0.05
    train(run, 3).save()
    run.close()
    again = begin(folder, resume=True)
    assert again.optimizer.param_groups[0]["lr"] == 0.05
    again_state = again.optimizer.state_dict()["state"]
    for number, state in run.optimizer.state_dict()["state"].items():
        assert torch.equal(state["momentum_buffer"], again_state[number]["momentum_buffer"])


def test_a_run_stays_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative folder is where it was at the start, wherever the process goes."""
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path)
    run = train(begin(Path("run"), watch=qg.Watch(2)), 3)
    monkeypatch.chdir(tmp_path / "away")
    train(run, 6).save()
    run.close()
    assert not contents(tmp_path / "away") and begin(tmp_path / "run", resume=True).position == 6


# A fixed order.


def test_a_fixed_order_keeps_its_assignment(folder: Path) -> None:
    """The assignment of examples to batches survives a resume, though the key does not."""
    run = saved(folder, 7, plan=fixed_order())
    again = begin(folder, plan=fixed_order(), resume=True)
    assert (
        again.dealer.memory is not None
        and run.dealer.memory is not None
        and torch.equal(again.dealer.memory, run.dealer.memory)
    )
    assert next(again.batches(DATA)).step == 7


def test_a_save_before_the_first_batch_does_not_lose_the_order(folder: Path) -> None:
    """Saved before the order was drawn, the checkpoint is written anew before the first release: it knows the order."""
    run = begin(folder, plan=fixed_order())
    run.save()
    early = (folder / checkpoint.NAME).read_bytes()
    train(run, 3).close()
    again = begin(folder, plan=fixed_order(), resume=True)
    assert (
        again.dealer.memory is not None
        and run.dealer.memory is not None
        and torch.equal(again.dealer.memory, run.dealer.memory)
    )
    again.close()
    (folder / checkpoint.NAME).write_bytes(early)
    refused(folder, "older than the first batch", plan=fixed_order())


def test_a_save_before_the_first_batch_resumes(folder: Path) -> None:
    """A run that was saved before it began, begins."""
    run = begin(folder, plan=fixed_order(), seed=1)
    run.save()
    run.close()
    again = train(begin(folder, plan=fixed_order(), seed=1, resume=True))
    assert torch.equal(weights(again), weights(train(begin(plan=fixed_order(), seed=1))))


@pytest.mark.parametrize("plan", [poisson(), fixed_order()], ids=["Poisson", "FixedOrder"])
def test_data_of_another_length_is_refused(plan: qg.Plan, folder: Path) -> None:
    """A run goes on with the data it began with."""
    saved(folder, 3, plan=plan)
    run = begin(folder, plan=plan, resume=True)
    files = contents(folder)
    for rows in (EXAMPLES - 1, EXAMPLES + 1):
        other = (torch.randn(rows, 3), torch.zeros(rows, dtype=torch.long))
        with pytest.raises(PrivacyError, match=f"the data has {rows} rows, the run began with {EXAMPLES}"):
            run.batches(other)
    assert contents(folder) == files and run.position == 3
    train(run)


# What is refused.


def test_no_folder_to_resume_from() -> None:
    """Resume says where from."""
    with pytest.raises(PrivacyError, match="there is no folder"):
        begin(resume=True)
    with pytest.raises(PrivacyError, match="no folder"):
        begin().save()
    with pytest.raises(PrivacyError, match="private figures need one"):
        begin(watch=qg.Watch())


def test_an_empty_folder_cannot_be_resumed(folder: Path) -> None:
    """Nor one that is not there; it is not made."""
    refused(folder, "unknown", slot="journal")
    assert not folder.exists()


def test_missing_parts(folder: Path) -> None:
    """A checkpoint without its journal is refused, and a journal without its checkpoint."""
    saved(folder)
    (folder / NAME).rename(folder / "elsewhere")
    refused(folder, "unknown", slot="journal")
    with pytest.raises(PrivacyError, match="holds a run already"):
        begin(folder)
    (folder / "elsewhere").rename(folder / NAME)
    (folder / checkpoint.NAME).rename(folder / "elsewhere")
    refused(folder, "is not there")
    with pytest.raises(PrivacyError, match="holds a run already"):
        begin(folder)


def test_a_run_is_never_started_over(folder: Path) -> None:
    """A start in the folder of a run is refused, and changes nothing."""
    saved(folder)
    before = contents(folder)
    with pytest.raises(PrivacyError, match=r"holds a run already.*resume=True"):
        begin(folder)
    assert contents(folder) == before
    assert begin(folder, resume=True).position == 8


def test_a_start_that_was_refused_can_be_repeated(folder: Path) -> None:
    """Data that does not fit is refused before any release, and what is left does not stand in the way."""
    run = begin(folder)
    with pytest.raises(PrivacyError, match="NaN"):
        run.batches((torch.full((EXAMPLES, 3), torch.nan), DATA[1]))
    run.close()
    assert reserved(folder) == 0 and set(contents(folder)) == {NAME}
    assert train(begin(folder)).position == 20


def test_every_truncation_of_a_checkpoint(folder: Path) -> None:
    """Cut anywhere, a checkpoint is refused; whole, it resumes."""
    saved(folder, optimizer=adam)
    path = folder / checkpoint.NAME
    whole = path.read_bytes()
    lengths = [*range(0, 64), *range(64, len(whole), 37), *range(len(whole) - 64, len(whole))]
    device = torch.device("cpu")
    for length in lengths:
        path.write_bytes(whole[:length])
        with pytest.raises(PrivacyError, match=r"cannot be read.*restore the file"):
            checkpoint.load(folder, device)
    refused(folder, "cannot be read", optimizer=adam)
    path.write_bytes(whole)
    assert begin(folder, optimizer=adam, resume=True).position == 8


def test_a_damaged_checkpoint(folder: Path) -> None:
    """A changed bit is noticed, in the weights as well; what is read in spite of one is what was written."""
    saved(folder)
    path = folder / checkpoint.NAME
    whole = path.read_bytes()
    device = torch.device("cpu")
    right = weights_of(checkpoint.load(folder, device))
    noticed = 0
    for place in range(0, len(whole), 5):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        try:
            assert torch.equal(weights_of(checkpoint.load(folder, device)), right)
        except PrivacyError:
            noticed += 1
    assert noticed > len(whole) / 5 / 3  # the rest is padding


def weights_of(kept: dict[str, Any]) -> torch.Tensor:
    return torch.cat([t.flatten() for t in kept["model"].values()])


@pytest.mark.parametrize("text", [b"PK", b"text", b"\x80\x02."])
def test_something_else_for_a_checkpoint(folder: Path, text: bytes) -> None:
    """A file that is not a checkpoint is refused; nothing in it is run."""
    saved(folder)
    (folder / checkpoint.NAME).write_bytes(text)
    refused(folder, "cannot be read")
    torch.save({"format": 2}, folder / checkpoint.NAME)
    refused(folder, "not a checkpoint of this version")
    torch.save([1], folder / checkpoint.NAME)
    refused(folder, "not a checkpoint of this version")


class Wide(nn.Module):
    def __init__(self, width: int = 3, names: tuple[str, ...] = ("first", "second")) -> None:
        super().__init__()
        for name, layer in zip(names, (nn.Linear(3, width), nn.Linear(width, 2)), strict=True):
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x)
        return x


def frozen(model: nn.Module) -> nn.Module:
    next(iter(model.parameters())).requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("other", "match"),
    [
        ({"plan": poisson(21)}, "another plan"),
        ({"plan": poisson(20, 1.5)}, "another plan"),
        ({"plan": qg.study(poisson())}, "another plan"),
        ({"plan": fixed_order()}, "another plan"),
        ({"loss": nn.CrossEntropyLoss(reduction="none")}, "another plan"),
        ({"model": Wide(4)}, r"another model \(first.bias, first.weight, second.weight"),
        ({"model": Wide(names=("first", "third"))}, "another model"),
        ({"model": linear()}, "another model"),
        ({"model": Wide().double()}, "another model"),
        ({"model": frozen(Wide())}, "another optimizer"),
        ({"optimizer": adam}, "another optimizer"),
        ({"optimizer": lambda m: torch.optim.SGD(list(m.parameters())[::-1], lr=0.1)}, "another optimizer"),
        ({"optimizer": lambda m: torch.optim.SGD([{"params": [p]} for p in m.parameters()], lr=0.1)}, "another optim"),
        ({"seed": 1}, "another seed"),
    ],
)
def test_a_checkpoint_of_something_else(other: dict[str, Any], match: str, folder: Path) -> None:
    """Another plan, model, optimizer or seed is refused, with nothing changed on disk or in the model."""
    saved(folder, model=Wide())
    model = other.get("model", Wide())
    before = {name: t.clone() for name, t in model.state_dict().items()}
    refused(folder, match, **{"model": model, **other})
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert begin(folder, model=Wide(), resume=True).position == 8


def test_a_seeded_run_needs_its_seed(folder: Path) -> None:
    """Not another one, and not none."""
    saved(folder, seed=5)
    for seed in (None, 6):
        refused(folder, "another seed", seed=seed)
    assert begin(folder, seed=5, resume=True).position == 8


def test_a_checkpoint_of_another_run(folder: Path, tmp_path: Path) -> None:
    """The same plan, model and optimizer, but not the run of the journal beside it."""
    saved(folder)
    saved(tmp_path / "other")
    shutil.copy(tmp_path / "other" / checkpoint.NAME, folder)
    refused(folder, "another run than the journal")


def test_an_older_journal(folder: Path) -> None:
    """A journal that was put back from before the checkpoint would under-count: refused."""
    run = train(begin(folder), 4)
    run.save()
    older = (folder / NAME).read_bytes()
    train(run, 9).save()
    run.close()
    (folder / NAME).write_bytes(older)
    refused(folder, r"journal beside it is older.*whole folder")


def test_the_journal_of_a_copy(folder: Path, tmp_path: Path) -> None:
    """Two copies of a folder went on apart: the checkpoint of one is refused beside the journal of the other, though
    both journals reserved the same."""
    saved(folder)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    for place in (folder, copy):
        run = train(begin(place, resume=True), 11)
        run.save()
        run.close()
    assert reserved(folder) == reserved(copy) == 11
    shutil.copy(copy / NAME, folder)
    refused(folder, "another copy's")


def test_a_damaged_journal(folder: Path) -> None:
    """A journal that does not add up is refused, and so is an empty one."""
    saved(folder)
    whole = (folder / NAME).read_bytes().splitlines(keepends=True)
    (folder / NAME).write_bytes(b"".join(whole[:3] + whole[4:]))
    refused(folder, "line 4 of .* is damaged", slot="journal")
    (folder / NAME).write_bytes(b"")
    refused(folder, "is empty", slot="journal")
    with pytest.raises(PrivacyError, match=r"is empty|holds a run already"):
        begin(folder)


def test_another_writer(folder: Path) -> None:
    """While a run is open nobody resumes it, not even in the same process; closed or dropped, it can be."""
    run = train(begin(folder), 3)
    refused(folder, "another run writes", slot="journal")
    train(run, 5)
    run.close()
    again = begin(folder, resume=True)
    assert again.position == 5
    with pytest.raises(PrivacyError, match="closed"):
        train(run, 6)
    assert reserved(folder) == 5
    assert train(again).position == 20


# What is on disk.


def test_permissions(folder: Path) -> None:
    """Everything is its owner's alone."""
    run = train(begin(folder, watch=qg.Watch(4)), 9)
    run.save()
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (folder, *folder.rglob("*"))}
    assert modes == {
        folder.name: 0o700, NAME: 0o600, checkpoint.NAME: 0o600, "private": 0o700, "watch.jsonl": 0o600,
    }  # fmt: skip
    assert "not-for-release" in checkpoint.NAME


def test_neither_key_nor_noise(folder: Path) -> None:
    """No byte of the key is on disk in a row of eight, and no noise: neither as numbers nor as a tensor."""
    run = begin(folder, plan=fixed_order())
    keys, noises = [run.stream._key], []
    draw = type(run.plan.noise).draw

    def noted(*args: Any) -> torch.Tensor:
        noises.append(draw(*args).clone())
        return noises[-1].clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(run.plan.noise), "draw", noted)
        train(run, 8).save()
        run.close()
        again = begin(folder, plan=fixed_order(), resume=True)
        keys.append(again.stream._key)
        train(again, 12).save()
    written = b"".join(contents(folder).values())
    for key in keys:
        assert key is not None and len(key) == 32
        for start in range(0, 25):
            assert key[start : start + 8] not in written and key[start : start + 8].hex().encode() not in written
    assert len(noises) == 24
    for noise in noises:
        for dtype, row in ((torch.float64, 1), (torch.float32, 2)):
            for piece in noise.flatten().to(dtype).unfold(0, row, 1):
                assert piece.contiguous().numpy().tobytes() not in written
    kept = checkpoint.load(folder, torch.device("cpu"))
    assert set(kept) == {
        "format", "run", "journal", "plan", "step", "seed", "rows", "memory", "model", "optimizer", "trains",
        "denoise", "average", "still", "shapes", "data",
    }  # fmt: skip


def test_the_journal_holds_no_data(folder: Path) -> None:
    """The journal holds the plan, an id and counts."""
    train(begin(folder), 5).save()
    entries = [json.loads(line) for line in (folder / NAME).read_text().splitlines()]
    assert set(entries[0]["open"]) == {"format", "run", "plan", "randomness"}
    assert all(set(entry) <= {"reserve", "back", "resume"} for entry in entries[1:])


# Batches.


def test_a_batch_is_used_once_and_in_turn() -> None:
    """A batch of another run, a used one, a stale one, something else: refused before anything is drawn."""
    run, other = begin(), begin()
    batches = run.batches(DATA)
    first = next(batches)
    mistakes: list[tuple[Any, str]] = [(next(other.batches(DATA)), "not drawn by this run"), (DATA, "not drawn by")]
    for wrong, match in mistakes:
        with pytest.raises(PrivacyError, match=match):
            run.step(wrong)
    run.step(first)
    with pytest.raises(PrivacyError, match="used or is stale"):
        run.step(first)
    stale = next(batches)
    fresh = next(run.batches(DATA))
    with pytest.raises(PrivacyError, match="stale"):
        run.step(stale)
    run.step(fresh)
    with pytest.raises(PrivacyError, match="passed over"):
        passed = run.batches(DATA)
        next(passed), next(passed)
    assert run.position == 2
    assert "private" in repr(fresh)


def test_a_step_beyond_the_plan_is_refused() -> None:
    """The plan's end is the end."""
    run = begin(plan=poisson(2))
    kept = [run.step(batch) or batch for batch in run.batches(DATA)]
    assert run.position == 2
    with pytest.raises(PrivacyError, match="all 2 steps are spent"):
        run.step(kept[-1])
    assert not list(run.batches(DATA))


def test_a_gradient_from_elsewhere_does_not_train() -> None:
    """A frozen parameter that the optimizer holds, with a gradient left from before, does not move."""
    model = Wide()
    nn.functional.cross_entropy(model(DATA[0]), DATA[1]).backward()
    first = frozen(model).get_parameter("first.weight")
    before = first.detach().clone()
    train(begin(model=model), 3)
    assert torch.equal(first, before)
