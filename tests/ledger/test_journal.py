"""The journal by itself: what is reserved is on disk before it is used, whatever interrupts the writing."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quietgrad import PrivacyError, checkpoint
from quietgrad.journal import NAME, Journal, read

STEPS, BLOCK = 40, 3


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / NAME).read_text().splitlines()]


def worn(folder: Path) -> Path:
    """A journal with every kind of line."""
    first = Journal.create(folder, {"plan": "a plan"}, BLOCK)
    for step in range(5):
        first.reserve(step, STEPS)
    first.give_back(5)
    first.close()
    second = Journal.reopen(folder, BLOCK)
    second.resumed()
    for step in range(5, 10):
        second.reserve(step, STEPS)
    second.close()
    return folder / NAME


def test_reserves_blocks(tmp_path: Path) -> None:
    """A line is written for each block, not for each step, and the last block ends with the plan."""
    kept = Journal.create(tmp_path, {}, 4)
    for step in range(10):
        kept.reserve(step, 10)
        assert kept.reserved > step
    assert [entry.get("reserve") for entry in lines(tmp_path)[1:]] == [[0, 4], [4, 8], [8, 10]]


def test_a_reservation_is_synced_before_it_is_granted(tmp_path: Path) -> None:
    """When `reserve` returns, the line was written and then synced."""
    kept = Journal.create(tmp_path, {}, 1)
    done: list[str] = []
    write, sync = os.write, os.fsync
    with (
        mock.patch("os.write", lambda f, b: (done.append("write"), write(f, b))[1]),
        mock.patch("os.fsync", lambda f: (done.append("sync"), sync(f))[1]),
    ):
        kept.reserve(0, 10)
        done.append("granted")
    assert done == ["write", "sync", "granted"]


def test_only_the_next_step_is_granted(tmp_path: Path) -> None:
    """A step before the last block or beyond the next one is refused."""
    kept = Journal.create(tmp_path, {}, 2)
    for step in range(3):
        kept.reserve(step, 10)
    for step in (1, 5):
        with pytest.raises(PrivacyError, match="not the next release"):
            kept.reserve(step, 10)
    for step in (1, 5):
        with pytest.raises(PrivacyError, match="not within the last block"):
            kept.give_back(step)


def test_giving_back_shortens_only_the_last_block(tmp_path: Path) -> None:
    """What a clean save gives back may be reserved again; what was lost before a resume may not be given back."""
    kept = Journal.create(tmp_path, {}, 5)
    kept.reserve(0, 50)
    kept.give_back(2)
    assert kept.reserved == 2
    kept.give_back(2)
    kept.reserve(2, 50)
    assert kept.reserved == 7
    kept.close()
    again = Journal.reopen(tmp_path, 5)
    again.resumed()
    with pytest.raises(PrivacyError, match="not within the last block"):
        again.give_back(3)
    assert again.reserved == 7


def test_permissions(tmp_path: Path) -> None:
    """The journal is its owner's alone, and so is a folder that was made for it."""
    before = os.umask(0)
    try:
        Journal.create(tmp_path / "run", {}, 1)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run" / NAME).stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700


def test_one_writer(tmp_path: Path) -> None:
    """While a journal is open, nobody opens it a second time, in this process or another; the first one goes on."""
    kept = Journal.create(tmp_path, {}, 1)
    before = (tmp_path / NAME).read_bytes()
    with pytest.raises(PrivacyError, match="another run writes"):
        Journal.reopen(tmp_path, 1)
    with pytest.raises(PrivacyError, match="another run writes"):
        Journal.create(tmp_path, {}, 1)
    assert (tmp_path / NAME).read_bytes() == before
    kept.reserve(0, 5)
    kept.close()
    with pytest.raises(PrivacyError, match="closed"):
        kept.reserve(1, 5)
    assert Journal.reopen(tmp_path, 1).reserved == 1


def test_a_dropped_journal_is_unlocked(tmp_path: Path) -> None:
    """An object that nobody holds any longer does not keep the folder locked."""
    kept = Journal.create(tmp_path, {}, 1)
    kept.reserve(0, 5)
    del kept
    assert Journal.reopen(tmp_path, 1).reserved == 1


def test_a_folder_with_a_run_is_refused(tmp_path: Path) -> None:
    """A new run never takes the place of one that reserved something, nor of a checkpoint without its journal."""
    kept = Journal.create(tmp_path, {}, 1)
    kept.reserve(0, 5)
    kept.close()
    before = (tmp_path / NAME).read_bytes()
    with pytest.raises(PrivacyError, match="holds a run already"):
        Journal.create(tmp_path, {}, 1)
    assert (tmp_path / NAME).read_bytes() == before
    orphan = tmp_path / "orphan"
    orphan.mkdir()
    (orphan / checkpoint.NAME).write_bytes(b"precious")
    with pytest.raises(PrivacyError, match="holds a run already"):
        Journal.create(orphan, {}, 1)
    assert [p.name for p in orphan.iterdir()] == [checkpoint.NAME]


def test_a_run_that_never_began_may_be_replaced(tmp_path: Path) -> None:
    """A journal that reserved nothing protects nothing: a start that was refused can be repeated in its folder."""
    first = Journal.create(tmp_path, {"plan": "wrong"}, 1)
    name = first.header["run"]
    first.close()
    second = Journal.create(tmp_path, {"plan": "right"}, 1)
    second.reserve(0, 5)
    second.close()
    assert Journal.reopen(tmp_path, 1).header["plan"] == "right"
    assert second.header["run"] != name


@pytest.mark.parametrize("left", [b"", b'{"open": {"for'])
def test_an_empty_journal_is_refused(tmp_path: Path, left: bytes) -> None:
    """A journal without a first line says nothing of what was spent: neither resumed nor replaced."""
    (tmp_path / NAME).write_bytes(left)
    for open_it in (lambda: Journal.reopen(tmp_path, 1), lambda: Journal.create(tmp_path, {}, 1)):
        with pytest.raises(PrivacyError, match="is empty"):
            open_it()
    assert (tmp_path / NAME).read_bytes() == left


def test_a_missing_journal_is_refused(tmp_path: Path) -> None:
    """No journal, no resume."""
    with pytest.raises(PrivacyError, match="unknown"):
        Journal.reopen(tmp_path, 1)
    assert not list(tmp_path.iterdir())


def test_every_truncation(tmp_path: Path) -> None:
    """Cut at any byte, a journal says what its whole lines say, or is refused if the first is not whole."""
    whole = worn(tmp_path).read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    cut = tmp_path / "cut.jsonl"
    totals = [read(tmp_path / NAME)[0].reserved]
    for length in reversed(range(len(whole))):
        cut.write_bytes(whole[:length])
        if length < ends[0]:
            with pytest.raises(PrivacyError, match="is empty"):
                read(cut)
            continue
        tally, kept = read(cut)
        assert len(kept) == sum(end <= length for end in ends)
        totals.append(tally.reserved)
    assert totals[0] == 11 and totals[-1] == 0


def test_half_a_line_is_overwritten(tmp_path: Path) -> None:
    """What a crash left half-written reserved nothing, and the next line does not grow out of it."""
    path = worn(tmp_path)
    with path.open("ab") as file:
        file.write(b'{"reserve": [11, 1')
    again = Journal.reopen(tmp_path, BLOCK)
    assert again.reserved == 11
    again.resumed()
    again.reserve(11, STEPS)
    again.close()
    assert read(path)[0].reserved == 14


def test_damage_in_the_middle(tmp_path: Path) -> None:
    """A changed, missing or repeated line in the middle: refused, or worth what it was; the file is left as it is."""
    path = worn(tmp_path)
    whole = path.read_bytes()
    good, kept = read(path)
    first, last = len(kept[0]) + 1, whole[:-1].rfind(b"\n") + 1
    for place in range(first, last):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            assert read(path)[0].reserved == good.reserved
        except PrivacyError as error:
            assert error.slot == "journal"
    for number in range(1, len(kept) - 1):
        if b"resume" in kept[number]:
            continue  # without it the lines add up to the same
        for damaged in (kept[:number] + kept[number + 1 :], [*kept[:number], kept[number], *kept[number:]]):
            path.write_bytes(b"\n".join(damaged) + b"\n")
            with pytest.raises(PrivacyError, match=r"is damaged.*restore the file"):
                Journal.reopen(tmp_path, BLOCK)
            assert path.read_bytes() == b"\n".join(damaged) + b"\n"


@pytest.mark.parametrize(
    "line",
    [
        "text", "[]", "7", '{"reserve": [11, 11]}', '{"reserve": [12, 13]}', '{"reserve": [11]}', '{"back": [11, 7]}',
        '{"back": [11, 12]}', '{"resume": 11}', '{"resume": [9, "a"]}', '{"open": {"format": 1, "run": "b"}}',
        '{"reserve": ["a", "b"]}', '{"reserve": [11, 12], "back": [12, 11]}', '{"other": 1}', "{}", "\x00",
    ],
)  # fmt: skip
def test_lines_that_do_not_follow(tmp_path: Path, line: str) -> None:
    """A whole line that says something impossible is damage."""
    path = worn(tmp_path)
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(PrivacyError, match=r"is damaged"):
        read(path)


def test_a_journal_of_another_format_is_refused(tmp_path: Path) -> None:
    """A later format is not guessed at."""
    (tmp_path / NAME).write_text('{"open": {"format": 2, "run": "a"}}\n')
    with pytest.raises(PrivacyError, match="damaged"):
        Journal.reopen(tmp_path, 1)


def test_a_removed_journal_is_noticed(tmp_path: Path) -> None:
    """Reservations in a file that has no name any longer would be lost with the process: refused."""
    kept = Journal.create(tmp_path, {}, 1)
    kept.reserve(0, 5)
    (tmp_path / NAME).unlink()
    with pytest.raises(PrivacyError, match="was removed"):
        kept.reserve(1, 5)


def test_marks(tmp_path: Path) -> None:
    """A journal follows every mark that was taken of it, and none of another's or of a later state of it."""
    kept = Journal.create(tmp_path / "a", {}, 1)
    marks = [kept.mark()]
    for step in range(4):
        kept.reserve(step, 9)
        marks.append(kept.mark())
    assert all(kept.follows(mark) for mark in marks)
    path = tmp_path / "a" / NAME
    kept.close()
    path.write_bytes(b"".join(line + b"\n" for line in read(path)[1][:3]))
    older = Journal.reopen(tmp_path / "a", 1)
    assert [older.follows(mark) for mark in marks] == [True, True, True, False, False]
    other = Journal.create(tmp_path / "b", {}, 1)
    assert not other.follows(marks[0])


def test_resumes_differ(tmp_path: Path) -> None:
    """Two copies of a journal that go on apart never read the same, even if they reserve the same steps."""
    worn(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / NAME).write_bytes((tmp_path / "a" / NAME).read_bytes())
    for folder in ("a", "b"):
        again = Journal.reopen(tmp_path / folder, BLOCK)
        again.resumed()
        again.reserve(11, STEPS)
        again.close()
    a, b = (read(tmp_path / folder / NAME) for folder in ("a", "b"))
    assert a[0] == b[0].__class__(a[0].header, 11, 14) and a[1] != b[1] and len(a[1]) == len(b[1])


FAULTS = ("full", "half", "stuck", "unsynced", "interrupted")


@contextmanager
def faulty(fault: str | None, cut: int) -> Iterator[None]:
    """Makes an append go wrong, in one of the ways in which it can: `cut` says where a line is cut."""
    write, truncate = os.write, os.ftruncate

    def bad_write(file: int, line: bytes) -> int:
        if fault == "full":
            raise OSError("no space left")
        return write(file, line[: cut % len(line)] if fault in ("half", "stuck") else line)

    def bad_sync(file: int) -> None:
        if fault == "unsynced":
            raise OSError("input/output error")
        if fault == "interrupted":
            raise KeyboardInterrupt

    def bad_truncate(file: int, size: int) -> None:
        if fault == "stuck":
            raise OSError("input/output error")
        truncate(file, size)

    with mock.patch.multiple("os", write=bad_write, fsync=bad_sync, ftruncate=bad_truncate):
        yield


moves = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.sampled_from((None, None, None, *FAULTS)), st.integers(0, 99)),
        st.tuples(st.just("save"), st.sampled_from((None, None, *FAULTS)), st.integers(0, 99)),
        st.tuples(st.just("crash"), st.sampled_from((None, "half")), st.integers(0, 99)),
        st.tuples(st.just("lost"), st.none(), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(moves=moves, block=st.integers(1, 5))
def test_never_an_under_count(moves: list[tuple[str, str | None, int]], block: int) -> None:
    """Steps, saves, crashes, lines cut at any byte, full disks, failed syncs, Ctrl-C at the sync, in any order.

    The file never says less than was released, and never more than a block for each crash beside it.
    """
    with tempfile.TemporaryDirectory() as name, mock.patch("os.fsync", lambda file: None):
        folder = Path(name)
        kept = Journal.create(folder, {}, block)
        position = releases = losses = 0
        for move, kind, cut in moves:
            fault = faulty(kind, cut)
            if move == "crash":
                kept.close()
                if kind is not None:
                    line = b'{"reserve": [%d, %d]}\n' % (position, position + block)
                    with (folder / NAME).open("ab") as file:
                        file.write(line[: cut % len(line)])
                kept = Journal.reopen(folder, block)
                kept.resumed()
                losses += 1
                position = kept.reserved
            elif move == "save":
                try:
                    with fault:
                        kept.give_back(position)
                except (PrivacyError, KeyboardInterrupt):
                    assert kind is not None
            elif position < STEPS:
                try:
                    with fault:
                        kept.reserve(position, STEPS)
                except (PrivacyError, KeyboardInterrupt):
                    assert kind is not None
                    continue
                position += 1
                if move == "step":
                    releases += 1
                else:
                    losses += 1
            said = read(folder / NAME)[0].reserved
            assert releases <= position <= said <= STEPS
            assert said - releases <= block * (losses + 1)
        kept.give_back(position)
        assert read(folder / NAME)[0].reserved == position == kept.reserved
