"""The examples run as they stand, and say what they should."""

import ast
import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("name", ["dplis.py", "dp_lssgd.py", "losing_less.py"])
def test_a_method_is_one_line_beside_base(name):
    """Docstrings and comments apart, an example adds one line to base.py, or changes one."""

    def lines(path):
        tree = ast.parse(path.read_text())
        tree.body = tree.body[1:]
        return ast.unparse(tree).splitlines()

    changes = [d for d in difflib.ndiff(lines(EXAMPLES / "base.py"), lines(EXAMPLES / name)) if d[0] in "+-"]
    assert sum(d[0] == "+" for d in changes) == 1 and sum(d[0] == "-" for d in changes) <= 1, changes
