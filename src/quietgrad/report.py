"""Report: a certificate as one page of HTML, for the person who must approve it. Nothing is loaded from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from quietgrad.account import up

if TYPE_CHECKING:
    from quietgrad.certificate import Certificate

MEANING = {  # status: colour, what it says to a reader
    "proved": ("#1a7f4b", "The figure is an upper bound that was proved, for the randomness that was used."),
    "claimed by user": ("#9a6700", "The figure holds if what the user claims holds: see the assumptions."),
    "seeded": ("#b35900", "Whoever knows the seed can undo the noise. Not for publication."),
    "none": ("#b42318", "There is no guarantee. Trained for study; do not publish the model."),
}
ABOVE = (
    ("sample", "which examples take part"),
    ("loss", "one value per example"),
    ("smooth", "where gradients are taken"),
    ("bound", "how far one example reaches"),
)
BELOW = (("denoise", "what is done to releases"),)

STYLE = """
:root { --ink: #1c2024; --soft: #60646c; --line: #e0e3e7; --page: #f6f7f9; --card: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #edeef0; --soft: #a0a6ae; --line: #33383f; --page: #14171a; --card: #1c2024; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 56rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
header { border-left: 6px solid var(--status); padding: .1rem 0 .1rem 1.25rem; margin-bottom: 2rem; }
header p { margin: .35rem 0 0; color: var(--soft); }
h1 { font-size: 1.65rem; line-height: 1.25; margin: .4rem 0 0; font-weight: 650; }
h2 { font-size: 1.02rem; margin: 0 0 .9rem; font-weight: 650; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 1.25rem 1.4rem;
  margin: 1rem 0; }
.status { display: inline-block; background: var(--status); color: #fff; border-radius: 99px; padding: .1rem .8rem;
  font-size: .8rem; font-weight: 600; letter-spacing: .02em; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: 1.1rem; }
.figures b { display: block; font-size: 1.6rem; line-height: 1.2; font-weight: 600;
  font-variant-numeric: tabular-nums; }
.figures span, .note, figcaption { color: var(--soft); font-size: .86rem; }
table { border-collapse: collapse; width: 100%; font-size: .93rem; }
th, td { text-align: left; vertical-align: top; padding: .42rem .9rem .42rem 0; border-bottom: 1px solid var(--line); }
tr:last-child > * { border-bottom: 0; }
th { color: var(--soft); font-weight: 500; white-space: nowrap; width: 1%; padding-right: 1.4rem; }
td { overflow-wrap: anywhere; }
.side { white-space: nowrap; width: 1%; color: var(--soft); padding-right: 0; text-align: right; }
.noise > * { background: color-mix(in srgb, var(--status) 12%, transparent); border-bottom-color: var(--status); }
.noise > :first-child, .noise > :last-child { padding-left: .6rem; padding-right: .6rem; }
code { font: .86em/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
ul { margin: 0; padding-left: 1.15rem; } li { margin: .28rem 0; }
figure { margin: 0; } svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font-size: 12px; font-family: inherit; }
details pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .82rem; }
summary { cursor: pointer; font-weight: 650; font-size: 1.02rem; }
@media print { body { background: #fff; } section { break-inside: avoid; } }
"""


def certificate_page(certificate: Certificate) -> str:
    """The whole page."""
    c = certificate
    colour, meaning = MEANING[c.status]
    created = c.created.replace("T", " ").replace("+00:00", " UTC")
    figures = {
        "epsilon" if c.status != "seeded" else "epsilon, claimed only": shown(
            c.claimed_epsilon if c.status == "seeded" else c.epsilon, "none" if c.status == "none" else "infinite"
        ),
        "delta": up(c.delta),
        "releases, each with noise": f"{c.steps:,}",
        "examples, as stated": f"{c.examples:,}",
    }
    facts = {
        "Protects": f"{c.unit}; neighbours: {c.adjacency.replace('-', ' ')}",
        "Covers": c.covers,
        "Sampling": c.sampling,
        "Batch": f"about {c.expected_batch_size:g} examples a step",
        "Accountant": c.accountant,
        "Without sampling": f"epsilon {shown(c.epsilon_without_sampling)}, if every example were in every step",
        "Once an epoch": f"epsilon {shown(c.epsilon_once_per_epoch)} (hypothetical), each in one batch an epoch",
        "Gaussian mu": "no exact one" if c.gdp_mu is None else up(c.gdp_mu),
        "Randomness": "secure: a key from the operating system" if c.randomness == "secure" else c.randomness,
        "Rounding": c.rounding,
        "Tuning": c.tuning,
        "Public data": c.public_data,
        "Audit": c.audit or "none ran",
    }
    made = {**c.versions, "created": created, "run": c.run or "not kept"}
    parts = [
        f"<section><div class=figures>{''.join(figure(k, v) for k, v in figures.items())}</div></section>",
        section("The private step", stages(c.plan)),
        section("The guarantee", table(facts)),
        section("It assumes", f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in c.assumptions)}</ul>"),
        section("Delta at other epsilons", curve(c)) if c.delta_curve else "",
        section("Made with", table(made)),
        f"<section><details><summary>The accounted event</summary><pre>{escape(c.event)}</pre></details></section>",
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Privacy certificate: {escape(c.headline)}</title>\n"
        f"<style>{STYLE}:root {{ --status: {colour}; }}</style>\n"
        "</head>\n<body>\n<main>\n"
        f"<header><span class=status>{escape(c.status)}</span><h1>{escape(c.headline)}</h1>"
        f"<p>{escape(meaning)}</p></header>\n" + "\n".join(parts) + "\n</main>\n</body>\n</html>\n"
    )


def stages(plan: Mapping[str, Any]) -> str:
    """The slots in order, and the line that the noise draws between them."""
    rows = [row(slot, what, plan.get(slot), "sees data") for slot, what in ABOVE]
    rows.append(row("noise", "what makes it a release", plan.get("noise"), "the noise", "noise"))
    rows += [row(slot, what, plan.get(slot), "sees releases only") for slot, what in BELOW]
    rows.append(f"<tr><th>optimizer</th><td>{escape('any')}</td><td class=side>sees releases only</td></tr>")
    return f"<table>{''.join(rows)}</table>"


def row(slot: str, what: str, stage: object, side: str, mark: str = "") -> str:
    """One stage."""
    kind = f' class="{mark}"' if mark else ""
    return (
        f'<tr{kind}><th>{escape(slot)}</th><td><code>{escape(said(stage))}</code><br><span class="note">{escape(what)}'
        f'</span></td><td class="side">{escape(side)}</td></tr>'
    )


def said(stage: object) -> str:
    """A stage's record as it would be written: Clip(radius=1)."""
    match stage:
        case {"stage": name, **fields}:
            return f"{name}({', '.join(f'{key}={said(value)}' for key, value in fields.items())})"
        case None:
            return "none"
        case float():
            return f"{stage:.6g}"
        case list():
            return f"[{', '.join(said(part) for part in stage)}]"
        case _:
            return str(stage)


def curve(c: Certificate) -> str:
    """Delta against epsilon as a drawing, with the stated pair marked."""
    points = sorted((e, d) for e, d in c.delta_curve if 0 <= e < math.inf and 0 < d <= 1)
    if len(points) < 2 or points[-1][0] == points[0][0]:
        return '<p class="note">The same epsilon holds at every delta.</p>'
    left, right, top, bottom = 62.0, 700.0, 30.0, 236.0
    ticks = nice(0.0, points[-1][0])
    lows = [math.floor(math.log10(min(d for _, d in points))), math.ceil(math.log10(max(d for _, d in points)))]

    def x(epsilon: float) -> float:
        return left + (right - left) * epsilon / ticks[-1]

    def y(delta: float) -> float:
        return top + (bottom - top) * (lows[1] - math.log10(delta)) / max(lows[1] - lows[0], 1)

    grid = [
        f'<line x1="{left:.1f}" x2="{right:.1f}" y1="{y(10.0**k):.1f}" y2="{y(10.0**k):.1f}" stroke="var(--line)"/>'
        f'<text x="{left - 8:.1f}" y="{y(10.0**k) + 4:.1f}" text-anchor="end">1e{k}</text>'
        for k in range(lows[0], lows[1] + 1)
    ] + [
        f'<line x1="{x(t):.1f}" x2="{x(t):.1f}" y1="{bottom:.1f}" y2="{bottom + 4:.1f}" stroke="var(--soft)"/>'
        f'<text x="{x(t):.1f}" y="{bottom + 19:.1f}" text-anchor="middle">{t:g}</text>'
        for t in ticks
    ]
    line = " ".join(f"{x(e):.1f},{y(d):.1f}" for e, d in points)
    dots = "".join(
        f'<circle cx="{x(e):.1f}" cy="{y(d):.1f}" r="3.5" fill="var(--card)" stroke="var(--status)" stroke-width="2">'
        f"<title>epsilon {up(e)} at delta {d:g}</title></circle>"
        for e, d in points
    )
    stated = c.epsilon if c.epsilon is not None and c.epsilon <= ticks[-1] and lows[0] <= math.log10(c.delta) else None
    mark = (
        ""
        if stated is None
        else f'<circle cx="{x(stated):.1f}" cy="{y(c.delta):.1f}" r="6" fill="var(--status)"/>'
        f'<text x="{x(stated) + 11:.1f}" y="{y(c.delta) - 9:.1f}">this certificate</text>'
    )
    return (
        f'<figure><svg viewBox="0 0 720 282" role="img" aria-label="delta against epsilon">{"".join(grid)}'
        f'<polyline points="{line}" fill="none" stroke="var(--status)" stroke-width="2"/>{dots}{mark}'
        f'<text x="{right:.1f}" y="{bottom + 36:.1f}" text-anchor="end">epsilon</text>'
        f'<text x="{left - 44:.1f}" y="{top - 16:.1f}">delta</text></svg>'
        "<figcaption>Each marked pair holds: the same training, stated at another delta.</figcaption></figure>"
    )


def nice(low: float, high: float) -> list[float]:
    """Round ticks from `low` to `high` or a little beyond."""
    unit = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(unit * k for k in (1, 2, 2.5, 5, 10) if unit * k * 5 >= high - low)
    return [low + step * k for k in range(math.ceil((high - low) / step) + 1)]


def section(title: str, body: str) -> str:
    """A card; `body` is HTML."""
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def table(facts: Mapping[str, str]) -> str:
    """Names and texts."""
    return f"<table>{''.join(cells(item) for item in facts.items())}</table>"


def cells(texts: Iterable[str]) -> str:
    """A row of a table of facts."""
    name, text = texts
    return f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>"


def figure(name: str, value: str) -> str:
    """A large figure over its name."""
    return f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>"


def shown(epsilon: float | None, otherwise: str = "infinite or unknown") -> str:
    """Rounded up, or why there is none."""
    return otherwise if epsilon is None else up(epsilon)
