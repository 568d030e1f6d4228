"""Docs are code: what README shows runs, and prints what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import quietgrad as qg

HOME = Path(__file__).parent.parent
README = (HOME / "README.md").read_text()


def test_the_snippets_of_readme_run_in_order(capsys) -> None:
    """Every Python block, one after the other in one namespace; the last prints a joint guarantee."""
    torch.manual_seed(0)
    space: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        exec(compile(block, "README.md", "exec"), space)
    shown = capsys.readouterr().out
    assert "-differentially private, proved" in shown
    assert "together (" in shown


def test_the_printed_plan_is_the_one_of_the_snippet() -> None:
    """The privacy statement in README is what print(plan) gives."""
    plan = qg.dp_sgd(examples=1438, batch_size=256, epochs=15).calibrate(epsilon=3.0, delta=1e-5)
    assert str(plan.replace(loss=qg.losses.CrossEntropy())) in README


def test_the_tree_in_readme_names_every_room() -> None:
    """A room that README does not name, or names and is not there."""
    tree = README.split("    src/quietgrad/\n")[1].split("    tests/")[0]
    named = set()
    for line in tree.splitlines():
        names = re.split(r"   +", line.strip())[0]
        named |= set(re.findall(r"[a-z]+\.py|[a-z]+/", names)) | set(re.findall(r"and ([a-z]+\.py):", line))
    there = {p.name for p in (HOME / "src/quietgrad").glob("*.py")} - {"__init__.py", "__main__.py"}
    there |= {p.parent.name + "/" for p in (HOME / "src/quietgrad").glob("*/__init__.py")}
    assert there <= named, there - named
    assert named <= there, named - there


def test_guarantees_names_tests_that_exist() -> None:
    """Each guard that GUARANTEES.md names is a file or a folder of tests."""
    for name in set(re.findall(r"`(tests/[^`]*)`", (HOME / "GUARANTEES.md").read_text())):
        assert (HOME / name).exists(), name


def test_links_and_calls_in_docs_hold() -> None:
    """Relative links lead somewhere, and no table is left to be filled in."""
    for page in (HOME / "README.md", *sorted((HOME / "docs").rglob("*.md"))):
        text = page.read_text()
        assert not re.search(r"^[A-Z]{4,}$", text, flags=re.MULTILINE), page
        for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
            assert (page.parent / link).exists(), (page, link)
        for name in re.findall(r"\bqg\.([A-Za-z_]+)", text):
            assert hasattr(qg, name), (page, name)


def test_the_readme_table_is_the_recorded_one() -> None:
    """The figures in README are those of results/digits.md, which the benchmark renders from the recorded runs."""
    assert (HOME / "results" / "digits.md").read_text().strip() in README
