"""The examples run as they stand, and say what they should."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name, folder):
    done = subprocess.run(
        [sys.executable, EXAMPLES / name], cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout


def test_base_is_private_and_learns(tmp_path):
    out = run("base.py", tmp_path)
    assert "-differentially private, proved" in out and "secure" in out
    assert float(re.search(r"accuracy ([\d.]+)%", out).group(1)) > 85  # 93.6 on average, standard deviation 1.3
    assert list(tmp_path.iterdir()) == []


def test_dplis_is_private_and_learns(tmp_path):
    out = run("dplis.py", tmp_path)
    assert "-differentially private, proved" in out
    assert float(re.search(r"accuracy ([\d.]+)%", out).group(1)) > 85


def test_losing_less_is_private_and_learns(tmp_path):
    out = run("losing_less.py", tmp_path)
    assert "-differentially private, proved" in out
    assert float(re.search(r"accuracy ([\d.]+)%", out).group(1)) > 80  # 90.4 in two runs


def test_the_demo_shows_plan_accuracy_certificate_and_spread(tmp_path):
    out = run("demo.py", tmp_path)
    at = [
        out.index(part) for part in ("quietgrad plan:", "accuracy ", "\n  assumes\n", "seed 1 ", "seed 3 ", "together ")
    ]
    assert at == sorted(at) and (tmp_path / "demo/digits/publish/certificate.html").exists()
    assert all(float(score) > 85 for score in re.findall(r"seed \d +([\d.]+) %", out))
