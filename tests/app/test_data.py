"""Data: files are read as they are, facts are stated, and what is wrong is refused by row and column."""

import numpy as np
import pytest
import torch

from quietgrad import PrivacyError
from quietgrad.data import load
from quietgrad.models import build

STATED = {"examples": 40, "classes": "no,yes", "target": "ill"}


@pytest.fixture
def table(tmp_path):
    """Writes a .csv of 40 rows, some changed."""

    def write(changes=None, header="age, weight,ill"):
        rows = [f"{20 + k},{60 + k / 7},{'yes' if k % 3 else 'no'}" for k in range(40)]
        for row, text in (changes or {}).items():
            rows[row] = text
        path = tmp_path / "people.csv"
        path.write_text("\n".join([header, *rows]) + "\n")
        return str(path)

    return write


def test_digits_is_split_once_and_for_all():
    first, again = load("digits"), load("digits")
    assert first.public and len(first.classes) == 10 and first.shape == (64,)
    assert len(first.train[0]) == first.examples == 1438 and len(first.test[0]) == 359
    assert torch.equal(first.train[0], again.train[0]) and float(first.train[0].max()) == 1.0


def test_a_table_is_read_with_its_stated_facts(table):
    data = load(table(), **STATED)
    x, y = (torch.cat([a, b]) for a, b in zip(data.train, data.test, strict=True))
    assert not data.public and data.classes == ("no", "yes") and data.examples == 32 and x.shape == (40, 2)
    youngest = x[:, 0].argmin()
    assert x[youngest, 0] == 20 and y[youngest] == 0 and int(y.sum()) == 26
    scaled = load(table(), **STATED, bounds=(30.0, 50.0))
    ages = torch.cat([scaled.train[0], scaled.test[0]])[:, 0].sort().values
    assert torch.allclose(ages, ((20 + torch.arange(40.0)).clamp(30, 50) - 30) / 20)


def test_one_row_less_moves_no_other_between_the_parts(table, tmp_path):
    whole = load(table(), **STATED)
    path = tmp_path / "people.csv"
    lines = path.read_text().splitlines()
    for gone in (1, 17, 40):
        path.write_text("\n".join(lines[:gone] + lines[gone + 1 :]))
        less = load(str(path), **STATED)
        for mine, theirs in ((less.train, whole.train), (less.test, whole.test)):
            kept = {tuple(row.tolist()) for row in theirs[0]} - {tuple(row.tolist()) for row in mine[0]}
            assert len(theirs[0]) - len(mine[0]) == len(kept) <= 1


@pytest.mark.parametrize(
    ("changes", "options", "clue"),
    [
        ({4: "x,70,no"}, {}, "row 5, column 'age'"),
        ({4: "50,,no"}, {}, "row 5, column 'weight'"),
        ({4: "50,nan,no"}, {}, "row 5, column 'weight'"),
        ({4: "50,inf,no"}, {}, "row 5, column 'weight'"),
        ({4: "50,70,maybe"}, {}, "row 5 of .* has class 'maybe'"),
        ({4: "50,70,no,1"}, {}, "is no table"),
        ({}, {"target": "il"}, "perhaps 'ill' is meant"),
        ({}, {"target": "sex"}, "the columns are age, weight, ill"),
        ({}, {"target": None}, "--target COLUMN"),
        ({}, {"classes": "2"}, "has class"),
        ({}, {"classes": "no,no"}, "--classes"),
        ({}, {"classes": None}, "--classes K must be stated"),
        ({}, {"examples": None}, "--examples N must be stated"),
        ({}, {"examples": 400}, "40 rows"),
        ({}, {"examples": -1}, "--examples is -1"),
    ],
)
def test_a_bad_table_is_refused_by_row_and_column(table, changes, options, clue):
    with pytest.raises(PrivacyError, match=clue):
        load(table(changes), **{**STATED, **options})


@pytest.mark.parametrize(
    ("text", "clue"),
    [("", "is empty"), ("age,ill\n", "has no rows"), ("ill\nno\n" + "no\n" * 39, "no column beside"), ("\0\1", ".")],
)
def test_a_file_that_is_no_table(tmp_path, text, clue):
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(PrivacyError, match=clue):
        load(str(path), **STATED)


@pytest.mark.parametrize(
    ("arrays", "clue"),
    [
        ({"x": np.zeros((40, 2))}, "no arrays x and y"),
        ({"x": np.zeros(40), "y": np.zeros(40)}, r"shape \(40,\)"),
        ({"x": np.zeros((40, 2)), "y": np.zeros(39)}, "one class per row"),
        ({"x": np.full((40, 2), np.nan), "y": np.zeros(40)}, "row 0, column 0"),
        ({"x": np.full((40, 2), 1e300), "y": np.zeros(40)}, "float32"),
        ({"x": np.full((40, 2), "a"), "y": np.zeros(40)}, "give numbers"),
        ({"x": np.full((40, 2), None), "y": np.zeros(40)}, "plain numbers"),
        ({"x": np.zeros((40, 2)), "y": np.full(40, 5)}, "has class '5'"),
        ({"x": np.zeros((40, 2)), "y": np.full(40, 0.5)}, "has class '0.5'"),
        ({"x": np.zeros((40, 2)), "y": np.zeros(40)}, "too few distinct rows"),
    ],
)
def test_bad_arrays_are_refused(tmp_path, arrays, clue):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(PrivacyError, match=clue):
        load(str(tmp_path / "a.npz"), examples=40, classes="2")


def test_arrays_are_read(tmp_path):
    x = np.arange(40 * 6, dtype=np.uint8).reshape(40, 2, 3)
    np.savez(tmp_path / "a.npz", x=x, y=(np.arange(40) % 2).astype(bool))
    assert load(str(tmp_path / "a.npz"), examples=40, classes="2").shape == (2, 3)
    np.savez(tmp_path / "b.npz", x_train=x, y_train=np.ones(40), x_test=x[:5], y_test=np.zeros(5))
    data = load(str(tmp_path / "b.npz"), examples=38, classes="2")
    assert (len(data.train[0]), len(data.test[0]), data.examples) == (40, 5, 38)
    (tmp_path / "c.npz").write_bytes(b"PK\x03\x04 not an archive")
    with pytest.raises(PrivacyError, match="cannot be read"):
        load(str(tmp_path / "c.npz"), examples=40, classes="2")


def test_models_have_names():
    assert build("mlp", (8, 8), 3)(torch.zeros(2, 8, 8)).shape == (2, 3)
    assert build("logistic", (64,), 10)(torch.zeros(2, 64)).shape == (2, 10)
    with pytest.raises(PrivacyError, match="did you mean logistic"):
        build("logistics", (64,), 10)
