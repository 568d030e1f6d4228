"""Compose: what several runs on the same data cost together: tuning, seeds, retries."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from quietgrad import account, journal
from quietgrad.certificate import Certificate, finite
from quietgrad.errors import PrivacyError
from quietgrad.plan import Plan
from quietgrad.stage import UNIT, Stage

ORDER = ("none", "seeded", "claimed by user", "proved")  # from the weakest


@dataclass(frozen=True)
class Part:
    """One run: where it was found, its plan, the releases that count."""

    source: str
    run: str | None
    plan: Plan
    releases: int
    status: str
    adjacency: str
    unit: str
    lines: tuple[bytes, ...] = dataclasses.field(default=(), repr=False)  # of its journal


@final
@dataclass(frozen=True)
class Composition:
    """The joint guarantee of all runs composed. `epsilon` is None where a part has none."""

    epsilon: float | None
    delta: float
    status: str
    adjacency: str
    unit: str
    accountant: str
    claimed_epsilon: float | None
    runs: tuple[dict[str, Any], ...]

    def to_json(self) -> str:
        """All keys."""
        return json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False)

    def __str__(self) -> str:
        if self.epsilon is not None:
            head = (
                f"together ({account.up(self.epsilon)}, {account.up(self.delta)})-differentially private, {self.status}"
            )
        elif self.claimed_epsilon is not None:
            claim = f"epsilon {account.up(self.claimed_epsilon)} at {account.up(self.delta)} is claimed only"
            head = f"NOT FOR PUBLICATION ({self.status}): {claim}"
        else:
            head = "NO GUARANTEE: a part has none"
        runs = [f"  {r['releases']:>9,} releases  {r['status']:15} {r['source']}" for r in self.runs]
        return "\n".join([head, *runs, f"  {self.adjacency.replace('-', ' ')}; {self.unit}; {self.accountant}"])


def compose(
    *certificates_or_run_folders: Certificate | str | Path, delta: float, stages: tuple[type[Stage], ...] = ()
) -> Composition:
    """The joint epsilon of runs on one data set, from their events. What is found twice of one run counts once.

    A run is given by its certificate (object or JSON file) or its folder, whose journal also knows what a crash lost.
    Stages of the user's own are given as classes in `stages`.
    """
    if not certificates_or_run_folders:
        raise PrivacyError("compose", "no run was given", "give certificates or folders of runs")
    parts = without_repeats([part_of(given, stages) for given in certificates_or_run_folders])
    for name, kinds in (("adjacency", {p.adjacency for p in parts}), ("unit", {p.unit for p in parts})):
        if len(kinds) > 1:
            raise PrivacyError(
                "compose", f"the runs differ in {name}: {', '.join(sorted(kinds))}", "compose runs of one kind"
            )
    smallest = min(p.plan.sample.examples for p in parts)
    largest = max(p.plan.sample.examples for p in parts)
    if not 0 < delta < 1 / largest:
        raise PrivacyError("compose", f"delta is {delta!r}", f"give one between 0 and 1/{largest}")
    if largest > smallest * 1.2:
        raise PrivacyError(
            "compose", f"the runs speak of {smallest:,} and {largest:,} examples", "compose runs on one data set"
        )
    status = min((p.status for p in parts), key=ORDER.index)
    event = account.together(*(p.plan.event(p.releases) for p in parts))
    adjacency = parts[0].adjacency
    priced = account.price(event, delta, adjacency)
    return Composition(
        epsilon=finite(priced.epsilon) if status in ("proved", "claimed by user") else None,
        delta=delta,
        status=status,
        adjacency=adjacency,
        unit=parts[0].unit,
        accountant=priced.accountant,
        claimed_epsilon=finite(priced.epsilon) if status == "seeded" else None,
        runs=tuple({"source": p.source, "run": p.run, "releases": p.releases, "status": p.status} for p in parts),
    )


def part_of(given: Certificate | str | Path, stages: tuple[type[Stage], ...] = ()) -> Part:
    """One run, from its certificate or its folder."""
    if isinstance(given, Certificate):
        plan = Plan.from_json(json.dumps(given.plan), stages=stages)
        return Part("certificate", given.run, plan, given.steps, given.status, given.adjacency, given.unit)
    path = Path(given)
    found = [p for p in (path, path / "certificate.json", path / "publish" / "certificate.json") if p.is_file()]
    books = [p for p in (path / journal.NAME, path / "private" / "run" / journal.NAME) if p.is_file()]
    if books:
        tally, lines = journal.read(books[0])
        plan = Plan.from_json(tally.header["plan"], stages=stages)
        status = plan.status if tally.header["randomness"] == "secure" or plan.status == "none" else "seeded"
        return Part(str(path), tally.header["run"], plan, tally.reserved, status, plan.adjacency, UNIT, tuple(lines))
    if not found:
        raise PrivacyError(
            "compose", f"{path} is neither a certificate nor the folder of a run", "give a folder with a journal"
        )
    try:
        text = found[0].read_text()
    except UnicodeDecodeError as error:
        raise PrivacyError(
            "compose", f"{found[0]} is not a certificate", "give the JSON that a run exported"
        ) from error
    return dataclasses.replace(part_of(Certificate.from_json(text), stages), source=str(path))


def without_repeats(parts: list[Part]) -> list[Part]:
    """One run found twice counts once, at its longest; journals of one run that went apart count in full, both."""
    kept: list[Part] = []
    for part in sorted(parts, key=lambda p: (-len(p.lines), -p.releases)):
        same = [k for k in kept if part.run is not None and k.run == part.run]
        if part.lines:  # an earlier copy: what it reserved and the run then gave back was never released
            inside = [k for k in same if k.lines[: len(part.lines)] == part.lines]
        else:
            inside = [k for k in same if k.releases >= part.releases]
        if not inside:
            kept.append(part)
    return [p for p in parts if any(p is k for k in kept)]
