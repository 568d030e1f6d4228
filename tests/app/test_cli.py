"""The command line: what it writes and where, what it refuses, how it stops and goes on."""

import json
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from quietgrad import PrivacyError, cli, journal

QUICK = ("--epochs", "1", "--epsilon", "3")
STATED = ("--examples", "400", "--classes", "2")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def people(folder):
    """A private file: 400 rows, two classes."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 400)
    np.savez(folder / "people.npz", x=rng.normal(size=(400, 5)) + 2 * y[:, None], y=y)
    return "people.npz"


def quietgrad(*arguments):
    """Exit status of a command, through the entry point."""
    with pytest.raises(SystemExit) as ended:
        cli.main([str(a) for a in arguments])
    return ended.value.code


def test_train_writes_what_may_be_published_and_what_may_not(capsys):
    assert quietgrad("train", "digits", *QUICK, "--out", "here") == 0
    out, err = capsys.readouterr()
    assert "quietgrad plan: 4 steps" in out and "-differentially private, proved" in out and err == ""
    assert re.search(r"accuracy +\d+\.\d % of 359 held-out examples \(public data", out)
    assert "delta      1e-05 (chosen" in out
    assert sorted(p.name for p in Path("here/publish").iterdir()) == [
        "certificate.html",
        "certificate.json",
        "model.safetensors",
    ]
    certificate = json.loads(Path("here/publish/certificate.json").read_text())
    assert certificate["status"] == "proved" and 2.9 < certificate["epsilon"] <= 3
    assert any(line.startswith("delta 1e-05 is the library's default") for line in certificate["assumptions"])
    assert stat.S_IMODE(Path("here/private").stat().st_mode) == 0o700
    assert stat.S_IMODE(Path("here/private/metrics.json").stat().st_mode) == 0o600
    assert Path("here/private/run", journal.NAME).exists()


def test_the_default_folder_is_a_new_one(capsys):
    for _ in range(2):
        assert CliRunner().invoke(cli.app, ["train", "digits", *QUICK, "--batch-size", "1438"]).exit_code == 0
    assert sorted(p.name for p in Path("runs").iterdir()) == ["digits", "digits-2"]


def test_private_figures_are_marked_and_not_published(people, capsys):
    assert quietgrad("train", people, *QUICK, *STATED, "--out", "here") == 0
    (line,) = (li for li in capsys.readouterr().out.splitlines() if li.startswith("accuracy"))
    assert "PRIVATE" in line and "not for release" in line
    metrics = json.loads(Path("here/private/metrics.json").read_text())
    assert metrics["private"] and metrics["mark"].startswith("PRIVATE")
    for name in ("certificate.json", "certificate.html", "model.safetensors"):
        content = Path("here/publish", name).read_bytes()
        assert (
            b"accuracy" not in content
            and b"loss_" not in content
            and str(metrics["held_out_accuracy"]).encode() not in content
        )


def test_json_is_all_of_stdout(people, capsys):
    assert quietgrad("train", people, *QUICK, *STATED, "--out", "here", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["certificate"]["status"] == "proved" and shown["certificate"]["examples"] == 320
    assert shown["metrics"]["mark"].startswith("PRIVATE") and shown["files"]["publish"] == "here/publish"
    assert quietgrad("plan", "--examples", 1000, "--epsilon", 2, "--batch-size", 100, "--epochs", 3, "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)["plans"]
    assert row["steps"] == 30 and row["noise_per_step"] == pytest.approx(row["noise_multiplier"] / 100)
    assert 1.97 < row["epsilon"] <= 2
    assert quietgrad("compose", "here", "here/publish", "--json") == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] == pytest.approx(shown["certificate"]["epsilon"])


def test_plan_is_a_table(capsys):
    assert (
        quietgrad("plan", "--examples", 1000, "--epsilon", 2, "--batch-size", 100, "--batch-size", 1000, "--epochs", 3)
        == 0
    )
    out = capsys.readouterr().out
    head, rule, *rows = out.splitlines()[2:6]
    assert head.split() == ["batch", "size", "epochs", "steps", "multiplier", "noise", "per", "step", "epsilon"]
    assert set(rule) == {"-", " "} and [r.split()[:3] for r in rows] == [["100", "3", "30"], ["1,000", "3", "3"]]
    assert "delta 1e-05 (chosen" in out


def test_compose_adds_runs_up(people, capsys):
    for name in ("a", "b"):
        assert quietgrad("train", people, *QUICK, *STATED, "--out", name, "--json") == 0
    capsys.readouterr()
    assert quietgrad("compose", "a", "b") == 0
    together = float(re.search(r"together \(([\d.]+), 1e-05\)", capsys.readouterr().out).group(1))
    assert 3.2 < together < 6


def test_without_noise_there_is_nothing_to_publish(people, capsys):
    assert quietgrad("train", people, "--epochs", 1, "--no-noise", *STATED, "--out", "here") == 0
    out = capsys.readouterr().out
    assert "NO GUARANTEE" in out and not Path("here/publish").exists()
    kept = json.loads(Path("here/private/model-not-for-release/certificate.json").read_text())
    assert kept["status"] == "none" and kept["epsilon"] is None


def test_a_seed_repeats_and_is_not_published(people, capsys):
    weights = []
    for name in ("a", "b"):
        assert quietgrad("train", people, *QUICK, *STATED, "--seed", 7, "--out", name) == 0
        assert "NOT FOR PUBLICATION" in capsys.readouterr().out and not Path(name, "publish").exists()
        weights.append(load_file(Path(name, "private/model-not-for-release/model.safetensors")))
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


BAD = {
    "an unknown name": (("train", "digit", *QUICK), "did you mean digits"),
    "a later name": (("train", "mnist", *QUICK), "give digits"),
    "no budget": (("train", "digits"), "--epsilon is not given"),
    "an unknown setting": (("train", "digits", "--epsilon", "3", "--recipe", "dplis", "--set", "r=3"), "radius="),
    "a setting that is no number": (
        ("train", "digits", "--epsilon", "3", "--recipe", "dplis", "--set", "samples=x"),
        "number",
    ),
    "a setting that is out of range": (
        ("train", "digits", "--epsilon", "3", "--recipe", "dp_lssgd", "--set", "sigma=-1"),
        "sigma",
    ),
    "a budget and none": (("train", "digits", "--epsilon", "3", "--no-noise"), "--no-noise to debug"),
    "a negative epsilon": (("train", "digits", "--epsilon", "-1"), "positive"),
    "epsilon nan": (("train", "digits", "--epsilon", "nan"), "positive"),
    "no number": (("train", "digits", "--epsilon", "three"), "number"),
    "a large delta": (("train", "digits", *QUICK, "--delta", "0.01"), "delta is 0.01"),
    "no epochs": (("train", "digits", "--epsilon", "3", "--epochs", "0"), "epochs"),
    "a batch too large": (("train", "digits", *QUICK, "--batch-size", "5000"), "exceeds examples"),
    "a batch of none": (("train", "digits", *QUICK, "--batch-size", "0"), "batch_size"),
    "a clip of zero": (("train", "digits", *QUICK, "--clip", "0"), "radius"),
    "an lr of zero": (("train", "digits", *QUICK, "--lr", "0"), "--lr"),
    "a model": (("train", "digits", *QUICK, "--model", "mpl"), "did you mean mlp"),
    "a recipe": (("train", "digits", *QUICK, "--recipe", "dp-sgd"), "did you mean dp_sgd"),
    "facts of a built-in": (("train", "digits", *QUICK, "--classes", "10"), "it is known"),
    "an option": (("train", "digits", *QUICK, "--epoch", "3"), "--epoch"),
    "a verb": (("trian", "digits"), "trian"),
    "a run to go on with": (("train", "digits", *QUICK, "--resume"), "--out DIR"),
    "no run there": (("train", "digits", *QUICK, "--resume", "--out", "none"), "holds no run"),
    "a missing file": (("train", "none.csv", *QUICK, *STATED), "no file"),
    "facts not stated": (("train", "people.npz", *QUICK), "--examples N and --classes K must be stated"),
    "far from stated": (("train", "people.npz", *QUICK, "--examples", "4000", "--classes", "2"), "400 rows"),
    "too few classes": (("train", "people.npz", *QUICK, "--examples", "400", "--classes", "1"), "--classes"),
    "a class too many": (("train", "people.npz", *QUICK, "--examples", "400", "--classes", "a,b"), "has class"),
    "bounds upside down": (("train", "people.npz", *QUICK, *STATED, "--bounds", "1", "0"), "--bounds"),
    "a table of nothing": (("plan", "--examples", "0", "--epsilon", "1"), "positive"),
    "no budget to meet": (("plan", "--examples", "100", "--epsilon", "0"), "epsilon"),
    "nothing to compose": (("compose", "people.npz"), "people.npz"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_leaves_nothing(case, people, folder, capsys):
    arguments, clue = BAD[case]
    assert quietgrad(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("quietgrad: ") and err.count("\n") == 1 and clue in err
    assert "Traceback" not in err and [p.name for p in folder.iterdir()] == ["people.npz"]


def test_a_refusal_before_the_first_release_leaves_nothing(folder, capsys):
    """The number of rows of a part is only seen when the run is about to begin."""
    x, y = np.zeros((50, 3)), np.arange(50) % 2
    np.savez(folder / "parts.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    (folder / "mine").mkdir()
    (folder / "mine" / "notes.txt").write_text("kept")
    for out in ("deep/er", "mine"):
        assert quietgrad("train", "parts.npz", *QUICK, *STATED, "--out", out) == 2
        assert "the data has 50 rows" in capsys.readouterr().err
    assert sorted(p.name for p in folder.rglob("*")) == ["mine", "notes.txt", "parts.npz"]


def test_debug_shows_the_traceback():
    with pytest.raises(PrivacyError):
        cli.main(["train", "digit", *QUICK, "--debug"])


def test_a_run_is_not_overwritten(people, capsys):
    assert quietgrad("train", people, *QUICK, *STATED, "--out", "here") == 0
    books = Path("here/private/run", journal.NAME)
    before = books.read_bytes()
    assert quietgrad("train", people, *QUICK, *STATED, "--out", "here") == 2
    assert "--resume" in capsys.readouterr().err and books.read_bytes() == before
    assert quietgrad("train", people, "--epochs", 2, "--epsilon", 3, *STATED, "--out", "here", "--resume") == 2
    assert "another plan" in capsys.readouterr().err and books.exists()


def test_ctrl_c_saves_and_says_how_to_go_on(people, folder, capsys):
    here = ("--out", "my runs/one", "--epochs", "16", "--batch-size", "16", "--model", "logistic", "--epsilon", "3")
    command = [sys.executable, "-m", "quietgrad.cli", "train", people, *here, *STATED]
    books = folder / "my runs/one/private/run" / journal.NAME
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + 60
        while not (books.exists() and books.read_bytes().count(b"\n") > 3) and time.monotonic() < until:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    said, how = err.splitlines()
    reached = int(re.search(r"stopped after step ([\d,]+) of 320", said).group(1).replace(",", ""))
    assert 0 < reached < 320 and "epsilon" in said and "Traceback" not in err
    assert not (folder / "my runs/one/publish").exists()

    words = shlex.split(how)
    assert words[0] == "quietgrad" and words[-1] == "--resume"
    assert quietgrad(*words[1:], "--json") == 0
    shown = json.loads(capsys.readouterr().out)["certificate"]
    assert shown["steps"] == 320 and shown["status"] == "proved" and shown["epsilon"] <= 3


def test_ctrl_c_before_the_first_step_leaves_nothing(people, folder, monkeypatch, capsys):
    def pressed(self, data):
        signal.raise_signal(signal.SIGINT)
        yield from ()

    monkeypatch.setattr("quietgrad.run.Run.batches", pressed)
    assert quietgrad("train", people, *QUICK, *STATED) == 130
    assert [p.name for p in folder.iterdir()] == ["people.npz"]
