"""Digits (public) at a proved epsilon, over seeds: one JSON line a run, and the table that README shows.

    python benchmarks/digits.py --seeds 10          appends to results/digits.jsonl, renders results/digits.md
    python benchmarks/digits.py --seeds 0           renders only

Runs are seeded so that they can be repeated; the epsilon is the plan's, proved for the same plan with a secure key.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

import quietgrad as qg
from quietgrad import cli, data

RESULTS = Path(__file__).parent.parent / "results"
EPSILONS = (1.0, 3.0, float("inf"))


def one(epsilon: float, seed: int) -> dict[str, Any]:
    """One run of what `quietgrad train digits --epsilon …` does, with a seed."""
    digits = data.load("digits")
    plan = qg.dp_sgd(examples=digits.examples, batch_size=cli.BATCH, epochs=cli.EPOCHS, clip=cli.CLIP)
    plan = plan.replace(loss=qg.losses.CrossEntropy()).calibrate(epsilon=epsilon, delta=1e-5)
    began = time.perf_counter()
    done = cli.fit(plan, cli.started("mlp", digits, seed), digits, seed=seed)
    return {
        "data": "digits",
        "method": "dp_sgd",
        "epsilon": epsilon if epsilon < float("inf") else None,
        "delta": 1e-5,
        "seed": seed,
        "accuracy": done.accuracy,
        "seconds": round(time.perf_counter() - began, 2),
    }


def where() -> dict[str, Any]:
    """Command, commit and machine of a run."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=False).stdout.strip()

    return {
        "command": "python benchmarks/digits.py",
        "commit": git("rev-parse", "--short", "HEAD"),
        "dirty": bool(git("status", "--porcelain", "src")),
        "torch": torch.__version__,
        "device": platform.machine(),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Mean, spread and 95 % interval by epsilon."""
    lines = [
        "| data | method | epsilon, proved (delta 1e-5) | accuracy, mean | standard deviation | seeds | commit |",
        "|---|---|---|---|---|---|---|",
    ]
    for epsilon in sorted({r["epsilon"] or float("inf") for r in rows}):
        same = [r for r in rows if (r["epsilon"] or float("inf")) == epsilon]
        scores = [100 * r["accuracy"] for r in same]
        name = f"{epsilon:g}" if epsilon < float("inf") else "none: clipped, no noise"
        seeds = f"{len(same)} ({min(r['seed'] for r in same)} to {max(r['seed'] for r in same)})"
        commits = ", ".join(sorted({r["commit"] + "+" * r["dirty"] for r in same}))
        spread = f"{stdev(scores):.1f}" if len(scores) > 1 else "-"
        figures = f"{mean(scores):.1f} % | {spread} | {seeds} | {commits}"
        lines.append(f"| digits | DP-SGD, MLP 64-64-10 | {name} | {figures} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs what is not recorded yet, then renders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    wanted = parser.parse_args().seeds
    path = RESULTS / "digits.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    kept = {(r["epsilon"], r["seed"]) for r in rows}
    for epsilon in EPSILONS:
        for seed in range(1, wanted + 1):
            if (epsilon if epsilon < float("inf") else None, seed) not in kept:
                rows.append(one(epsilon, seed) | where())
                with path.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    (RESULTS / "digits.md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
