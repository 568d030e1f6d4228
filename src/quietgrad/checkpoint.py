"""The checkpoint: secret. Weights, optimizer, filters' memory, place; no key and no noise.

Written to a temporary file, synced, renamed: what was there before stays whole until what comes after is whole.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from quietgrad.errors import PrivacyError

NAME = "checkpoint.not-for-release.pt"


def write_whole(path: Path, write: Callable[[IO[bytes]], object], mode: int, slot: str = "checkpoint") -> None:
    """Replaces a file in one move, or leaves it as it was."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        before = "the one that was there is intact" if path.exists() else "nothing was there before"
        raise PrivacyError(slot, f"{path} cannot be written ({error})", f"make room on the disk; {before}") from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save(folder: Path, content: dict[str, Any]) -> Path:
    """Writes the checkpoint, readable by its owner alone."""
    path = folder / NAME
    write_whole(path, lambda file: torch.save(content, file), 0o600)
    return path


def tidy(folder: Path) -> None:
    """Removes what a kill in the middle of a write left behind. Only for the one writer of the folder."""
    for left in folder.glob(f".{NAME}.*.tmp"):
        left.unlink(missing_ok=True)


def load(folder: Path, device: torch.device) -> dict[str, Any]:
    """Reads the checkpoint; a truncated, damaged or foreign file is refused."""
    path = folder / NAME
    if not path.exists():
        raise PrivacyError(
            "checkpoint",
            f"{path} is not there",
            "start anew in another folder; what this run spent counts: qg.compose adds it",
        )
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:  # torch reads on
                raise ValueError("its checksums do not match")
        content = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # whatever a damaged file makes of its readers
        found = f"{path} cannot be read ({' '.join(str(error).split())[:120] or type(error).__name__})"
        raise PrivacyError("checkpoint", found, "restore the file; the journal still knows what was spent") from error
    if not isinstance(content, dict) or content.get("format") != 1:
        raise PrivacyError(
            "checkpoint", f"{path} is not a checkpoint of this version", "read it with the version that wrote it"
        )
    return content


def belongs(kept: Mapping[str, Any], here: Mapping[str, Any], others: Mapping[str, tuple[str, str]]) -> None:
    """Refuses a checkpoint of something else: `others` says of each key that must agree whose another one is, and what
    to do."""
    for key, (whose, remedy) in others.items():
        mine, theirs = here[key], kept[key]
        if theirs == mine:
            continue
        odd = ""
        if isinstance(mine, dict) and isinstance(theirs, dict):
            names = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
            odd = f" ({', '.join(names[:3])} differ)"
        raise PrivacyError("checkpoint", f"it belongs to {whose}{odd}", remedy)
