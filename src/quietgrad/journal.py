"""The journal: how many releases a run may have made, on disk before it makes them.

An append-only file beside the checkpoint, one JSON object a line, written and synced before the first release of the
block that it reserves. A crash costs at most a block and is never an under-count: what was reserved and lost counts as
spent. One process writes at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from quietgrad import checkpoint
from quietgrad.errors import PrivacyError

NAME = "journal.jsonl"


@final
@dataclass(frozen=True)
class Tally:
    """What the lines of a journal add up to: `reserved` releases are spent, those since `begun` may be given back."""

    header: dict[str, Any] = field(default_factory=dict)
    begun: int = 0
    reserved: int = 0

    def after(self, entry: Any) -> Tally:
        """The tally with one more line; ValueError for a line that does not follow."""
        match list(entry.items()) if isinstance(entry, dict) else ():
            case [("open", dict() as header)] if not self.header and header.get("format") == 1 and "run" in header:
                return replace(self, header=header)
            case [("reserve", [int(first), int(end)])] if self.header and first == self.reserved < end:
                return replace(self, begun=first, reserved=end)
            case [("back", [int(first), int(end)])] if first == self.reserved and self.begun <= end < first:
                return replace(self, reserved=end)
            case [("resume", [int(first), str()])] if self.header and first == self.reserved:
                return replace(self, begun=first)
        raise ValueError("an entry that does not follow")


@final
class Journal:
    """An open journal, locked. `reserved` releases count as spent, whatever became of them."""

    def __init__(self, path: Path, flags: int, block: int) -> None:
        self.path, self._block = path, block
        self._tally, self._size, self._sure = Tally(), 0, True
        self._file = os.open(path, flags | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._lock()
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, folder: Path, facts: dict[str, Any], block: int) -> Journal:
        """A new run in `folder`."""
        path, made = folder / NAME, not folder.exists()
        journal: Journal | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _clear(folder)
            journal = cls(path, os.O_CREAT | os.O_EXCL, block)
            journal._append({"open": {"format": 1, "run": secrets.token_hex(16), **facts}})
            for place in (folder, folder.parent):
                _sync_folder(place)
        except BaseException as error:
            if journal is not None:
                path.unlink(missing_ok=True)
                journal.close()
            if made:
                with contextlib.suppress(OSError):
                    folder.rmdir()
            if isinstance(error, OSError):
                raise PrivacyError(
                    "journal", f"{folder} cannot be used ({error})", "give a folder that can be written"
                ) from error
            raise
        return journal

    @classmethod
    def reopen(cls, folder: Path, block: int) -> Journal:
        """The journal of a run that goes on; nothing is written yet."""
        path = folder / NAME
        try:
            journal = cls(path, 0, block)
        except FileNotFoundError:
            raise PrivacyError(
                "journal",
                f"{folder} has no {NAME}, so what it spent is unknown",
                "take the whole folder of the run, or start anew",
            ) from None
        except OSError as error:
            raise PrivacyError("journal", f"{path} cannot be opened ({error})", "make it writable") from error
        try:
            journal._tally, journal._size = parse(journal._bytes(), path)
        except BaseException:
            journal.close()
            raise
        return journal

    @property
    def header(self) -> dict[str, Any]:
        """The run's id and what it began with."""
        return self._tally.header

    @property
    def reserved(self) -> int:
        """Releases that count as spent."""
        return self._tally.reserved

    def reserve(self, step: int, steps: int) -> None:
        """Makes sure that the release of `step` is on disk as spent; reserves a block if it is not."""
        self._settle()
        if not self._tally.begun <= step <= self.reserved:
            raise PrivacyError(
                "journal", f"step {step} is not the next release ({self.reserved} are spent)", "resume the run"
            )
        if step == self.reserved:
            self._append({"reserve": [step, min(step + self._block, steps)]})

    def give_back(self, step: int) -> None:
        """Returns the unused part of the last block, when a clean save has been written."""
        self._settle()
        if not self._tally.begun <= step <= self.reserved:
            raise PrivacyError("journal", f"{step} releases are not within the last block", "resume the run")
        if step < self.reserved:
            self._append({"back": [self.reserved, step]})

    def resumed(self) -> None:
        """Notes that a process goes on from here. The mark is its own: copies that go on apart can be told apart."""
        self._settle()
        self._append({"resume": [self.reserved, secrets.token_hex(8)]})

    def mark(self) -> tuple[int, str]:
        """The journal up to here: its length and digest, for the checkpoint."""
        self._settle()
        return self._size, hashlib.sha256(self._bytes()[: self._size]).hexdigest()

    def follows(self, mark: tuple[int, str]) -> bool:
        """Whether this journal began as the one that was marked."""
        size, digest = mark
        begun = self._bytes()[:size]
        return len(begun) == size <= self._size and hashlib.sha256(begun).hexdigest() == digest

    def close(self) -> None:
        """Unlocks and closes."""
        file, self._file = getattr(self, "_file", -1), -1
        if file >= 0:
            os.close(file)

    __del__ = close  # a run that is dropped lets go of its folder

    def _append(self, entry: dict[str, Any]) -> None:
        tally, line = self._tally.after(entry), (json.dumps(entry) + "\n").encode()
        self._open()
        self._sure = False  # whatever interrupts from here on, the next use reads the file first
        try:
            status = os.fstat(self._file)
            if status.st_nlink == 0:
                raise OSError("it was removed")
            if status.st_size != self._size:  # half a line, from a crash: never synced, so it reserved nothing
                os.ftruncate(self._file, self._size)
            if os.write(self._file, line) != len(line):
                raise OSError("the disk took only part of a line")
            os.fsync(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise PrivacyError(
                "journal",
                f"{self.path} cannot be written ({error})",
                "make room on the disk; nothing was released, and the run can go on",
            ) from error
        self._tally, self._size, self._sure = tally, self._size + len(line), True

    def _settle(self) -> None:
        """After an interrupted append: what the file says counts, once it is on disk."""
        self._open()
        if not self._sure:
            tally, size = parse(self._bytes(), self.path)
            try:
                os.ftruncate(self._file, size)
                os.fsync(self._file)
            except OSError as error:
                raise PrivacyError(
                    "journal", f"{self.path} cannot be written ({error})", "make room on the disk"
                ) from error
            self._tally, self._size, self._sure = tally, size, True

    def _bytes(self) -> bytes:
        return os.pread(self._file, os.fstat(self._file).st_size, 0)

    def _open(self) -> None:
        if self._file < 0:
            raise PrivacyError("journal", "the journal is closed", "resume the run")

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PrivacyError(
                "journal", f"another run writes {self.path}", "close it, or wait until it ends: one run has one writer"
            ) from None
        except OSError as error:
            raise PrivacyError(
                "journal", f"{self.path} cannot be locked ({error})", "take a folder on a disk that has locks"
            ) from error


def read(path: Path) -> tuple[Tally, list[bytes]]:
    """What a journal says, and its lines. Refuses a damaged file."""
    raw = path.read_bytes()
    tally, whole = parse(raw, path)
    return tally, raw[:whole].splitlines()


def parse(raw: bytes, path: Path) -> tuple[Tally, int]:
    """What the whole lines say, and their length. Half a line at the end is a crash's: it was not synced."""
    whole = raw.rfind(b"\n") + 1
    tally = Tally()
    for number, line in enumerate(raw[:whole].splitlines(), 1):
        try:
            tally = tally.after(json.loads(line))
        except ValueError as error:
            raise PrivacyError(
                "journal",
                f"line {number} of {path} is damaged ({error})",
                "restore the file: what was spent cannot be known without it",
            ) from error
    if not tally.header:
        raise PrivacyError("journal", f"{path} is empty", "restore the file, or start anew in another folder")
    return tally, whole


def _clear(folder: Path) -> None:
    """Makes way for a new run: one that was begun here and never took a step may be replaced, any other is refused."""
    path = folder / NAME
    if not path.exists() and not (folder / checkpoint.NAME).exists():
        return
    held = PrivacyError(
        "journal", f"{folder} holds a run already", "go on with it: start(…, resume=True), or take another folder"
    )
    if (folder / checkpoint.NAME).exists():
        raise held
    unused = Journal.reopen(folder, 1)
    try:
        same = os.fstat(unused._file).st_nlink > 0
        if not same or unused._bytes().count(b"\n") > 1:
            raise held
        path.unlink()
    finally:
        unused.close()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
