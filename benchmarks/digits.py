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
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

import quietgrad as qg
from quietgrad import cli, data

RESULTS = Path(__file__).parent.parent / "results"
EPSILONS = (1.0, 3.0, float("inf"))
METHODS: dict[str, Callable[[qg.Plan], qg.Plan]] = {
    "dp_sgd": lambda plan: plan,
    "dplis": qg.recipes.dplis,
    "dp_lssgd": qg.recipes.dp_lssgd,
    "losing_less": qg.recipes.losing_less,
}


def one(method: str, epsilon: float, seed: int) -> dict[str, Any]:
    """One run of what `quietgrad train digits --epsilon … --recipe …` does, with a seed."""
    digits = data.load("digits")
    plan = qg.dp_sgd(examples=digits.examples, batch_size=cli.BATCH, epochs=cli.EPOCHS, clip=cli.CLIP)
    plan = plan.replace(loss=qg.losses.CrossEntropy()).calibrate(epsilon=epsilon, delta=1e-5)
    plan = METHODS[method](plan)
    began = time.perf_counter()
    done = cli.fit(plan, cli.started("mlp", digits, seed), digits, seed=seed)
    return {
        "data": "digits",
        "method": method,
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
    """Mean and spread by method and epsilon, and the paired difference to DP-SGD with its 95 % t interval."""
    from scipy.stats import t

    lines = [
        "| method | epsilon, proved (delta 1e-5) | accuracy, mean | sd | minus DP-SGD, paired, 95 % | seeds |",
        "|---|---|---|---|---|---|",
    ]
    scores = {(r["method"], r["epsilon"], r["seed"]): 100 * r["accuracy"] for r in rows}
    for epsilon in sorted({r["epsilon"] or float("inf") for r in rows}):
        key = epsilon if epsilon < float("inf") else None
        for method in METHODS:
            seeds = sorted(s for m, e, s in scores if m == method and e == key and ("dp_sgd", e, s) in scores)
            if len(seeds) < 2:
                continue
            got = [scores[method, key, s] for s in seeds]
            apart = [scores[method, key, s] - scores["dp_sgd", key, s] for s in seeds]
            half = t.ppf(0.975, len(seeds) - 1) * stdev(apart) / len(seeds) ** 0.5
            difference = "" if method == "dp_sgd" else f"{mean(apart):+.1f} ± {half:.1f}"
            name = f"{epsilon:g}" if key is not None else "none: clipped, no noise"
            cells = [
                method,
                name,
                f"{mean(got):.1f} %",
                f"{stdev(got):.1f}",
                difference,
                str(len(seeds)),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    commits = sorted({r["commit"] + "+" * r["dirty"] for r in rows})
    return "\n".join([*lines, "", f"Recorded at commit {', '.join(commits)}."]) + "\n"


def main() -> None:
    """Runs what is not recorded yet, then renders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    wanted = parser.parse_args().seeds
    path = RESULTS / "digits.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    kept = {(r["method"], r["epsilon"], r["seed"]) for r in rows}
    cells = [(m, e) for m in METHODS for e in EPSILONS if m == "dp_sgd" or e < float("inf")]
    for (method, epsilon), seed in product(cells, range(1, wanted + 1)):
        if (method, epsilon if epsilon < float("inf") else None, seed) not in kept:
            rows.append(one(method, epsilon, seed) | where())
            with path.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    (RESULTS / "digits.md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
