"""The certificate: what is guaranteed, to whom, at what price, on which assumptions. What a reviewer reads.

It follows what NIST SP 800-226 and "How to DP-fy ML" (Ponomareva et al. 2023, section 5.3) ask of a stated guarantee.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, final

from quietgrad import account
from quietgrad.errors import PrivacyError
from quietgrad.plan import Plan, default_delta
from quietgrad.sample import FixedOrder, Poisson, Sample
from quietgrad.stage import UNIT

NOT_ACCOUNTED = (
    "not accounted: runs on the same data that chose the hyper-parameters cost as well (qg.compose adds them)"
)


@final
@dataclass(frozen=True)
class Certificate:
    """The keys are a contract. `epsilon` is None when `status` is `none` or `seeded`."""

    epsilon: float | None
    delta: float
    status: str  # proved | seeded | claimed by user | none
    adjacency: str
    unit: str
    accountant: str
    sampling: str
    event: str
    steps: int
    expected_batch_size: float
    examples: int
    randomness: str  # secure | seeded
    covers: str
    epsilon_without_sampling: float | None  # every example in every step: right for any choice of batches
    epsilon_once_per_epoch: float | None  # hypothetical: each example in one batch per epoch
    gdp_mu: float | None
    delta_curve: tuple[tuple[float, float], ...]
    public_data: str
    tuning: str
    assumptions: tuple[str, ...]
    claimed_epsilon: float | None
    rounding: str
    audit: str | None
    plan: dict[str, Any]
    versions: dict[str, str]
    created: str
    run: str | None

    def to_json(self) -> str:
        """All keys; infinite or unknown figures are null."""
        return json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Certificate:
        """The certificate that `to_json` wrote."""
        try:
            read = json.loads(text)
            if read["status"] not in ("proved", "seeded", "claimed by user", "none"):
                raise ValueError(f"status {read['status']!r}")
            read["delta_curve"] = tuple((float(e), float(d)) for e, d in read["delta_curve"])
            read["assumptions"] = tuple(read["assumptions"])
            return cls(**read)
        except (ValueError, KeyError, TypeError) as error:
            raise PrivacyError(
                "certificate", f"this is not a certificate ({error})", "give the JSON that a run exported"
            ) from error

    def to_html(self, path: str | Path) -> Path:
        """One page for a person."""
        from quietgrad.report import certificate_page

        path = Path(path)
        path.write_text(certificate_page(self))
        return path

    @property
    def headline(self) -> str:
        """The guarantee in a sentence."""
        if self.status == "none":
            return "NO GUARANTEE (status none): trained for study"
        if self.status == "seeded":
            figure = math.inf if self.claimed_epsilon is None else self.claimed_epsilon
            claim = f"epsilon {account.up(figure)} at delta {account.up(self.delta)} is claimed only"
            return f"NOT FOR PUBLICATION (status seeded): {claim}, since whoever knows the seed can undo the noise"
        if self.epsilon is None:
            return f"NO GUARANTEE: epsilon is infinite at delta {account.up(self.delta)} ({self.status})"
        return f"({account.up(self.epsilon)}, {account.up(self.delta)})-differentially private, {self.status}"

    def __str__(self) -> str:
        def shown(figure: float | None) -> str:
            return "infinite or unknown" if figure is None else account.up(figure)

        facts = {
            "protects": f"{self.unit}; neighbours: {self.adjacency.replace('-', ' ')}",
            "covers": self.covers,
            "sampling": self.sampling,
            "releases": f"{self.steps:,}, of about {self.expected_batch_size:g} among {self.examples:,} examples each",
            "accountant": self.accountant,
            "without sampling": f"epsilon {shown(self.epsilon_without_sampling)}, if every example were in every step",
            "once an epoch": f"epsilon {shown(self.epsilon_once_per_epoch)} (hypothetical: in one batch an epoch)",
            "randomness": self.randomness,
            "rounding": self.rounding,
            "tuning": self.tuning,
            "public data": self.public_data,
            "audit": self.audit or "none ran",
        }
        lines = [self.headline, *(f"  {name:17} {text}" for name, text in facts.items()), "  assumes"]
        return "\n".join([*lines, *(f"    - {line}" for line in self.assumptions)])


def certify(
    plan: Plan,
    releases: int,
    delta: float | None,
    *,
    secure: bool,
    run: str | None = None,
) -> Certificate:
    """The certificate of the first `releases` releases of a plan."""
    delta = plan.delta(delta)
    sample, event = plan.sample, plan.event(releases)
    status = plan.status if plan.status == "none" or secure else "seeded"
    priced = account.price(event, delta, plan.adjacency)
    proved = status in ("proved", "claimed by user")
    always = Poisson(sample.examples, sample.examples, sample.steps)
    once = FixedOrder(sample.examples, sample.batch_size, sample.steps)

    def under(other: Poisson | FixedOrder) -> float | None:
        if not proved:
            return None
        return finite(account.price(plan.noise.account(other, releases), delta, plan.adjacency).epsilon)

    rounding = rounding_share(sample)
    delta_note = (
        (f"delta {account.up(delta)} is the library's default: 1e-5, or a power of ten below 1/examples",)
        if delta == default_delta(sample.examples)
        else ()
    )
    folder_note = () if run is None else ("no copy of the run's folder was resumed elsewhere",)
    return Certificate(
        epsilon=finite(priced.epsilon) if proved else None,
        delta=delta,
        status=status,
        adjacency=plan.adjacency,
        unit=UNIT,
        accountant=priced.accountant,
        sampling=sample.says,
        event=str(event),
        steps=releases,
        expected_batch_size=sample.divisor,
        examples=sample.examples,
        randomness="secure" if secure else "seeded",
        covers="the final model and every iterate; never metrics on private data",
        epsilon_without_sampling=under(always),
        epsilon_once_per_epoch=under(once),
        gdp_mu=account.gaussian_mu(event) if proved else None,
        delta_curve=tuple((e, d) for e, d in account.delta_curve(event, plan.adjacency) if e < math.inf)
        if proved
        else (),
        public_data="none stated",
        tuning=NOT_ACCOUNTED,
        assumptions=(
            f"{sample.examples:,} examples, the shape of a row, the model and every setting are public facts",
            "the initial weights, the optimizer's state and the learning rates do not depend on the data",
            "one row of the data holds all that one protected unit contributes",
            "model and loss treat examples independently, as the test before the first release found",
            "an item of the data, as the data set and its transforms give it, comes from one unit alone: not tested",
            "dropout and random transforms draw from the process's generators, whose output is taken as uniform",
            *sample.assumes,
            *(f"{stage.says} is the user's, and reads nothing but its arguments" for stage in plan.guests),
            "what was refused before the first release (bad data, a bad model) is not published",
            f"when one example leaves, the rounding of the others' sum moves too: {rounding}",
            "how an example's own gradient is rounded does not follow its place in a chunk",
            *delta_note,
            *folder_note,
            *(f"claimed by the user: {claim}" for claim in plan.claims),
        ),
        claimed_epsilon=finite(priced.epsilon) if status == "seeded" else None,
        rounding=rounding,
        audit=None,
        plan=json.loads(plan.to_json()),
        versions=versions(),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        run=run,
    )


def rounding_share(sample: Sample) -> str:
    """Rule 16 (b): when one example leaves, rounding moves the others' sum by at most 2 B u of the radius.

    Shares are formed in the parameters' precision, each by itself, and added in float64, so u is 2^-53.
    """
    most = sample.examples * 1.1 + 10  # more rows than these are refused
    return f"at most {account.up(2 * most * 2.0**-53)} of the bound (2 B u, u = 2^-53), not added to the noise"


def finite(figure: float) -> float | None:
    """JSON has no infinity."""
    return figure if math.isfinite(figure) else None


def versions() -> dict[str, str]:
    """Of what the guarantee rests on."""
    names = ("quietgrad", "torch", "dp-accounting", "cryptography")
    return {"python": platform.python_version()} | {name: version(name) for name in names}


def version(name: str) -> str:
    """Of an installed package; a source tree on the path has none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
