"""Data for the command line: built-in sets, and a user's own .npz or .csv.

How many examples there are and which classes, are public facts that the user states: they are never read from the data.
"""

from __future__ import annotations

import difflib
import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from quietgrad.errors import PrivacyError

BUILT_IN = ("digits",)
FILES = (".npz", ".csv")
HELD_OUT = 1 / 5  # of a file that brings no test part of its own
SMALLEST = 10  # fewer examples than this hold no test part

Array: TypeAlias = np.ndarray[Any, Any]


@final
@dataclass(frozen=True)
class Data:
    """Two parts, (inputs, class numbers) each. `examples` is the public number of training examples."""

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    examples: int
    classes: tuple[str, ...]
    public: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one input."""
        return tuple(self.train[0].shape[1:])


def load(
    name: str,
    *,
    examples: int | None = None,
    classes: str | None = None,
    target: str | None = None,
    bounds: tuple[float, float] | None = None,
) -> Data:
    """A built-in set by name, or a file. What is stated of a built-in set is refused: it is known."""
    path = Path(name)
    if name in BUILT_IN:
        given = {"--examples": examples, "--classes": classes, "--target": target, "--bounds": bounds}
        if stated := [option for option, value in given.items() if value is not None]:
            raise PrivacyError("data", f"{stated[0]} is given for the built-in {name}", "leave it out: it is known")
        return digits()
    if path.suffix not in FILES:
        raise unknown(name)
    if not path.is_file():
        raise PrivacyError("data", f"there is no file {name}", "give the path of a .npz or .csv file")
    missing = [option for option, value in (("--examples N", examples), ("--classes K", classes)) if value is None]
    if missing or examples is None or classes is None:
        raise PrivacyError(
            "data", f"{' and '.join(missing)} must be stated", "public facts are never read from private data"
        )
    if examples < SMALLEST:
        raise PrivacyError("data", f"--examples is {examples}", f"state the number of rows, at least {SMALLEST}")
    if bounds is not None and not -np.inf < bounds[0] < bounds[1] < np.inf:
        raise PrivacyError("data", f"--bounds are {bounds[0]:g} and {bounds[1]:g}", "give the lower, then the upper")
    names = classes_of(classes)
    if path.suffix == ".npz":
        if target is not None:
            raise PrivacyError("data", "--target is given for an .npz", "leave it out: the classes are in array y")
        return from_npz(path, examples, names, bounds)
    if target is None:
        raise PrivacyError("data", f"which column of {name} holds the classes is not said", "name it: --target COLUMN")
    return from_csv(path, examples, names, bounds, target)


def unknown(name: str) -> PrivacyError:
    """What to say of a name that is nothing here."""
    near = difflib.get_close_matches(name, BUILT_IN, n=1)
    guess = f"did you mean {near[0]}? " if near else ""
    return PrivacyError("data", f"{name!r} is unknown", f"{guess}give {', '.join(BUILT_IN)}, or your own .npz or .csv")


def digits() -> Data:
    """1,797 handwritten digits of 8 by 8 pixels (Alpaydin and Kaynak 1998), from scikit-learn. Declared public."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise PrivacyError("data", "digits comes with scikit-learn", "pip install 'quietgrad[app]'") from error
    x, y = load_digits(return_X_y=True)
    inputs, labels = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y, dtype=torch.int64)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    held = round(len(order) * HELD_OUT)
    train, test = order[held:], order[:held]
    parts = (inputs[train], labels[train]), (inputs[test], labels[test])
    return Data("digits", *parts, examples=len(train), classes=tuple("0123456789"), public=True)


def from_npz(path: Path, examples: int, classes: tuple[str, ...], bounds: tuple[float, float] | None) -> Data:
    """Arrays x and y, one row per example; or x_train, y_train, x_test, y_test."""
    wanted = ("x_train", "y_train", "x_test", "y_test")
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            kept = {name: np.asarray(file[name]) for name in ("x", "y", *wanted) if name in file.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, TypeError) as error:
        found = f"{path} cannot be read ({str(error).splitlines()[0][:100]})"
        raise PrivacyError("data", found, "write plain numbers with numpy.savez") from error
    parts = [[kept[name] for name in wanted]] if all(name in kept for name in wanted) else []
    if not parts and not ("x" in kept and "y" in kept):
        raise PrivacyError("data", f"{path} has no arrays x and y", f"name them x and y, or {', '.join(wanted)}")
    if parts:
        x, y, x_test, y_test = parts[0]
        train = numbered(path, inputs_of(path, "x_train", x, bounds), y, classes)
        test = numbered(path, inputs_of(path, "x_test", x_test, bounds), y_test, classes)
        if train[0].shape[1:] != test[0].shape[1:]:
            raise PrivacyError("data", "x_train and x_test differ in shape", "give rows of one shape")
        return Data(path.name, train, test, examples, classes, public=False)
    return split(path, numbered(path, inputs_of(path, "x", kept["x"], bounds), kept["y"], classes), examples, classes)


def from_csv(
    path: Path, examples: int, classes: tuple[str, ...], bounds: tuple[float, float] | None, target: str
) -> Data:
    """A header, then one row per example: numbers, and the class in column `target`."""
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        raise PrivacyError("data", "reading .csv needs pandas", "pip install 'quietgrad[app]'") from error
    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False, skipinitialspace=True)
    except pd.errors.EmptyDataError as error:
        raise PrivacyError("data", f"{path} is empty", "give a header and a row per example") from error
    except (pd.errors.ParserError, UnicodeDecodeError) as error:
        found = f"{path} is no table ({str(error).strip().splitlines()[0][:100]})"
        raise PrivacyError("data", found, "write it as UTF-8, with commas and as many fields in every row") from error
    columns = [str(column) for column in table.columns]
    if target not in columns:
        near = difflib.get_close_matches(target, columns, n=1)
        listed = f"the columns are {', '.join(columns[:8])}{', …' * (len(columns) > 8)}"
        raise PrivacyError(
            "data", f"{path} has no column {target!r}", f"perhaps {near[0]!r} is meant" if near else listed
        )
    if len(columns) < 2:
        raise PrivacyError("data", f"{path} has no column beside {target!r}", "give the numbers to learn from")
    features = table.drop(columns=[target])
    numbers = features.apply(pd.to_numeric, errors="coerce").to_numpy(dtype=np.float64)
    bad = np.argwhere(~np.isfinite(numbers))
    if len(bad):
        row, column = (int(k) for k in bad[0])
        found = f"row {row + 1}, column {features.columns[column]!r} of {path} holds {features.iat[row, column]!r}"
        raise PrivacyError("data", found, "give finite numbers in every column but the target")
    return split(path, numbered(path, mapped(numbers, bounds), table[target].to_numpy(), classes), examples, classes)


def classes_of(stated: str) -> tuple[str, ...]:
    """`3` is classes 0, 1, 2; `no,yes` are their names."""
    names = tuple(name.strip() for name in stated.split(","))
    if len(names) == 1 and names[0].isdecimal():
        names = tuple(str(k) for k in range(int(names[0])))
    if len(names) < 2 or len(set(names)) < len(names) or not all(names):
        raise PrivacyError("data", f"--classes is {stated!r}", "state how many, at least 2, or their names: no,yes")
    return names


def inputs_of(path: Path, name: str, values: Array, bounds: tuple[float, float] | None) -> Tensor:
    """Inputs of an .npz, checked."""
    if values.ndim < 2 or values.dtype.kind not in "buif":
        found = f"{name} of {path} is {values.dtype} of shape {values.shape}"
        raise PrivacyError("data", found, "give numbers, one row per example, the example axis first")
    wide = values.reshape(len(values), -1).astype(np.float64)
    bad = np.argwhere(~np.isfinite(wide))
    if len(bad):
        found = f"row {bad[0][0]}, column {bad[0][1]} of {name} in {path} holds {wide[tuple(bad[0])]}"
        raise PrivacyError("data", found, "give finite numbers")
    return mapped(wide.reshape(values.shape), bounds)


def mapped(values: Array, bounds: tuple[float, float] | None) -> Tensor:
    """float32; with public bounds, cut to them and mapped to 0 … 1, each value by itself."""
    if bounds is not None:
        low, high = bounds
        values = (values.clip(low, high) - low) / (high - low)
    kept = torch.tensor(values, dtype=torch.float32)
    if not bool(kept.isfinite().all()):
        raise PrivacyError("data", "a value is too large for float32", "state --bounds LOW HIGH, or rescale it")
    return kept


def numbered(path: Path, inputs: Tensor, labels: Array, classes: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Inputs with class numbers; a label that is none of the stated classes is refused."""
    if len(inputs) == 0:
        raise PrivacyError("data", f"{path} has no rows", "give one per example")
    if labels.ndim != 1 or len(labels) != len(inputs):
        raise PrivacyError(
            "data", f"y of {path} has shape {labels.shape} beside {len(inputs)} rows", "give one class per row"
        )
    number = {name: k for k, name in enumerate(classes)}
    found = [number.get(plainly(label), -1) for label in labels.tolist()]
    if -1 in found:
        row = found.index(-1)
        raise PrivacyError(
            "data",
            f"row {row + 1} of {path} has class {plainly(labels[row])!r}, stated are {', '.join(classes[:10])}",
            "state --classes K for the numbers 0 to K-1, or all their names",
        )
    return inputs, torch.tensor(found, dtype=torch.int64)


def plainly(label: object) -> str:
    """A label as text: 1, 1.0, True and ' 1' are '1'."""
    text = str(int(label)) if isinstance(label, bool | np.bool_) else str(label).strip()
    return text[:-2] if text.endswith(".0") and text[:-2].lstrip("-").isdecimal() else text


def split(path: Path, whole: tuple[Tensor, Tensor], examples: int, classes: tuple[str, ...]) -> Data:
    """Holds out about a fifth. A row's own digest decides, so that one row more or less moves no other row."""
    inputs, labels = whole
    if abs(len(inputs) - examples) > max(10, examples / 10):
        raise PrivacyError("data", f"{path} has {len(inputs):,} rows, stated are {examples:,}", "state --examples")
    flat = inputs.flatten(1).numpy()
    out = torch.tensor(
        [held_out(row.tobytes() + f" {k}".encode()) for row, k in zip(flat, labels.tolist(), strict=True)]
    )
    if bool(out.all()) or not bool(out.any()):
        raise PrivacyError("data", f"{path} has too few distinct rows to hold some out", "give x_train … y_test")
    parts = (inputs[~out], labels[~out]), (inputs[out], labels[out])
    return Data(path.name, *parts, examples=round(examples * (1 - HELD_OUT)), classes=classes, public=False)


def held_out(row: bytes) -> bool:
    """Whether a row belongs to the test part: a public function of the row alone."""
    return int.from_bytes(hashlib.sha256(row).digest()[:8]) < HELD_OUT * 2**64
