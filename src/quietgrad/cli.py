"""The command line. Results on standard output; progress and errors on standard error; exit status 2 for bad input."""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, final

import torch
from torch import Tensor, nn

from quietgrad import account, journal, recipes
from quietgrad.checkpoint import write_whole
from quietgrad.composition import compose, part_of
from quietgrad.data import Data, load
from quietgrad.errors import PrivacyError
from quietgrad.losses import CrossEntropy
from quietgrad.models import MODELS, build
from quietgrad.plan import Plan, default_delta
from quietgrad.progress import bar
from quietgrad.recipes import dp_sgd
from quietgrad.run import Run
from quietgrad.signals import interrupts
from quietgrad.watch import MARK, Watch

try:
    import typer
except ModuleNotFoundError:
    print("quietgrad: the command line needs its extra: pip install 'quietgrad[app]'", file=sys.stderr)
    raise SystemExit(2) from None

RECIPES: Mapping[str, Callable[..., Plan]] = {
    "dp_sgd": lambda plan: plan,
    "dplis": recipes.dplis,
    "dp_lssgd": recipes.dp_lssgd,
    "losing_less": recipes.losing_less,
}
BATCH, EPOCHS, CLIP = 384, 30.0, 1.0  # tuned on digits, which is public
REACH, LARGEST = 0.3, 3.0  # of the usual learning rate
USUAL = {"--epochs": EPOCHS, "--clip": CLIP, "--model": "mlp", "--recipe": "dp_sgd"}
SAVE_EVERY = 30.0  # seconds
INTERRUPTED = 130  # exit status after Ctrl-C
CHOSEN = "chosen: the smaller of 1e-5 and the largest power of ten below 1 / examples"
LEGEND = """multiplier: the noise over the clip
noise per step: its standard deviation in each coordinate of a step's mean gradient, in units of the clip;
less of it and more steps are better, and large batches cost time"""

app = typer.Typer(
    help="Private PyTorch training: the best accuracy a privacy budget can buy, and a guarantee that holds.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Json = Annotated[bool, typer.Option("--json", help="JSON on standard output.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback where something is refused.")]
Delta = Annotated[float | None, typer.Option(help="Below 1 / examples. Default: 1e-5, or a smaller power of ten.")]


@final
@dataclass(frozen=True)
class Trained:
    """What a training run leaves. `accuracy` is on held-out data: private, unless the data is public."""

    run: Run
    accuracy: float
    seconds: float
    stopped: bool = False


# The verbs.


@app.command()
def train(
    data: Annotated[str, typer.Argument(help="digits, or your own .npz or .csv file.")],
    epsilon: Annotated[float | None, typer.Option(help="The privacy budget: needed, unless --no-noise.")] = None,
    delta: Delta = None,
    epochs: Annotated[float, typer.Option(help="Passes over the data.")] = EPOCHS,
    batch_size: Annotated[
        int | None, typer.Option(help=f"Expected. Default: {BATCH}, or all examples if fewer.")
    ] = None,
    clip: Annotated[float, typer.Option(help="How far one example's gradient may reach.")] = CLIP,
    lr: Annotated[float | None, typer.Option(help="Of plain SGD. Default: what suits the noise.")] = None,
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "mlp",
    recipe: Annotated[str, typer.Option(help=f"One of {', '.join(RECIPES)}.")] = "dp_sgd",
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="Of the recipe: name=value; may be given several times.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A folder for this run. Default: a new one in runs/.")] = None,
    seed: Annotated[int | None, typer.Option(help="Repeatable, so not for publication: status seeded.")] = None,
    examples: Annotated[
        int | None, typer.Option(help="Of a file: its rows, a public fact (a fifth is held out).")
    ] = None,
    classes: Annotated[str | None, typer.Option(help="Of a file: how many, or their names: no,yes.")] = None,
    target: Annotated[str | None, typer.Option(help="Of a .csv: the column that holds the class.")] = None,
    bounds: Annotated[
        tuple[float, float] | None, typer.Option(help="Of a file: public bounds of all inputs, mapped to 0 … 1.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    no_noise: Annotated[bool, typer.Option("--no-noise", help="No noise, no guarantee: to debug.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a classifier within a budget. Writes what may be published to OUT/publish, all else to OUT/private."""
    if (epsilon is None) != no_noise:
        found = "both --epsilon and --no-noise are given" if no_noise else "--epsilon is not given"
        raise PrivacyError("plan", found, "give --epsilon E, or --no-noise to debug without a guarantee")
    if epsilon is not None and not 0 < epsilon < float("inf"):
        raise PrivacyError("plan", f"--epsilon is {epsilon:g}", "give a positive, finite budget")
    if lr is not None and not 0 < lr < float("inf"):
        raise PrivacyError("optimizer", f"--lr is {lr:g}", "give a positive learning rate")
    made_by = chosen(recipe, setting or ())
    folder = where(out, Path(data).stem, resume)
    found_data = load(data, examples=examples, classes=classes, target=target, bounds=bounds)
    network = started(model, found_data, seed)
    base = dp_sgd(
        examples=found_data.examples,
        batch_size=min(BATCH, found_data.examples) if batch_size is None else batch_size,
        epochs=epochs,
        clip=clip,
    ).replace(loss=CrossEntropy())
    used = base.delta(delta)
    plan = made_by(base.calibrate(epsilon=float("inf") if epsilon is None else epsilon, delta=used))
    rate = usual_lr(plan) if lr is None else lr
    if not as_json:
        shown_as = "seeded" if seed is not None and plan.status != "none" else plan.status
        print(f"{plan.statement(shown_as)}\ntrains   {model} by plain SGD, learning rate {rate:g}\n", flush=True)

    with new_folders(folder / "private" / "run", keep=resume):
        done = fit(plan, network, found_data, lr=rate, folder=folder / "private" / "run", resume=resume, seed=seed)
    if done.stopped:
        given: dict[str, object] = {
            "--epsilon": epsilon, "--delta": delta, "--epochs": epochs, "--batch-size": batch_size, "--clip": clip,
            "--lr": lr, "--model": model, "--recipe": recipe, "--set": setting, "--out": folder, "--seed": seed,
            "--examples": examples,
            "--classes": classes, "--target": target, "--bounds": bounds, "--no-noise": no_noise, "--json": as_json,
        }  # fmt: skip
        interrupted(done.run, ["quietgrad", "train", data, *options(given), "--resume"])

    certificate = done.run.certificate()
    metrics = measured(done, found_data)
    files = published(done.run, folder, metrics)
    if as_json:
        shown = {
            "data": found_data.name,
            "model": model,
            "lr": rate,
            "metrics": metrics,
            "certificate": json.loads(certificate.to_json()),
        }
        print(json.dumps({**shown, "files": {name: str(path) for name, path in files.items()}}, indent=1))
        return
    rows = {
        "accuracy": f"{100 * done.accuracy:.1f} % of {len(found_data.test[0]):,} held-out examples ({metrics['mark']})",
        "guarantee": certificate.headline,
        "delta": account.up(used) + f" ({CHOSEN})" * (delta is None),
        "took": f"{done.seconds:.1f} s for {done.run.position:,} steps",
        **{name: told(path) for name, path in files.items()},
    }
    if not found_data.public and certificate.epsilon is not None:
        rows["note"] = f"all runs on this data cost together: quietgrad compose {shlex.quote(str(folder))} …"
    print(listed(rows))


@app.command("plan")
def plan_(
    examples: Annotated[int, typer.Option(help="How many there are, a public fact.")],
    epsilon: Annotated[float, typer.Option(help="The privacy budget.")],
    delta: Delta = None,
    batch_size: Annotated[list[int] | None, typer.Option(help="Expected; may be given several times.")] = None,
    epochs: Annotated[list[float] | None, typer.Option(help="May be given several times.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """What noise a budget asks for, over batch sizes and epochs. Touches no data."""
    sizes = sorted(set(batch_size or usual_sizes(examples)))
    lengths = sorted(set(epochs or (5.0, 15.0, 50.0)))
    rows: list[dict[str, float]] = []
    for size in sizes:
        for length in lengths:
            plan = dp_sgd(examples=examples, batch_size=size, epochs=length)
            used = plan.delta(delta)
            plan = plan.calibrate(epsilon=epsilon, delta=used)
            rows.append(
                {
                    "batch_size": size,
                    "epochs": length,
                    "steps": plan.steps,
                    "noise_multiplier": plan.noise_scale,
                    "noise_per_step": plan.noise_scale / plan.sample.divisor,
                    "epsilon": plan.epsilon(),
                }
            )
    if as_json:
        print(json.dumps({"examples": examples, "epsilon": epsilon, "delta": used, "plans": rows}, indent=1))
        return
    head = ("batch size", "epochs", "steps", "multiplier", "noise per step", "epsilon")
    body = [
        (
            f"{r['batch_size']:,}", f"{r['epochs']:g}", f"{r['steps']:,}", f"{r['noise_multiplier']:.4g}",
            f"{r['noise_per_step']:.3g}", account.up(r["epsilon"]),
        )
        for r in rows
    ]  # fmt: skip
    chose = f" ({CHOSEN})" if delta is None else ""
    print(f"DP-SGD on {examples:,} examples at epsilon {epsilon:g}, delta {used:g}{chose}\n")
    print(table(head, body))
    print(f"\n{LEGEND}")


@app.command("compose")
def compose_(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or certificates (JSON).")],
    delta: Delta = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """What several runs on the same data cost together: tuning, seeds, retries."""
    used = default_delta(max(part_of(run).plan.sample.examples for run in runs)) if delta is None else delta
    joint = compose(*runs, delta=used)
    print(joint.to_json() if as_json else joint)
    if delta is None and not as_json:
        print(f"  delta {used:g} ({CHOSEN})")


# Training, in parts that a script may use.


def started(model: str, data: Data, seed: int | None) -> nn.Module:
    """The model, its first weights from the seed if there is one. On small tensors threads wait for each other."""
    torch.set_num_threads(1)
    if seed is not None:
        torch.manual_seed(seed)
    return build(model, data.shape, len(data.classes))


def fit(
    plan: Plan,
    model: nn.Module,
    data: Data,
    *,
    lr: float | None = None,
    folder: Path | None = None,
    resume: bool = False,
    seed: int | None = None,
) -> Trained:
    """The whole plan, with a progress bar. Ctrl-C stops it between two steps, with its checkpoint saved."""
    optimizer = torch.optim.SGD(model.parameters(), lr=usual_lr(plan) if lr is None else lr)
    watch = None if folder is None else Watch(max(1, plan.steps // 20))
    run = plan.start(model, optimizer, folder=folder, resume=resume, watch=watch, seed=seed)
    stepped, began = resume, time.perf_counter()
    saved = began
    try:
        with interrupts() as stopped, bar(run) as tick:
            for batch in run.batches(data.train):
                if stopped():
                    break
                stepped = True
                run.step(batch)
                tick()
                if folder is not None and time.perf_counter() - saved > SAVE_EVERY:
                    run.save()
                    saved = time.perf_counter()
            halted = stopped() and run.position < plan.steps
        if folder is not None and stepped:
            run.save()
        if halted and not stepped:
            raise KeyboardInterrupt
    except BaseException:
        if folder is not None and not stepped:
            shutil.rmtree(folder, ignore_errors=True)  # it holds a journal of no release
        raise
    finally:
        run.close()
    return Trained(run, accuracy(model, data.test), time.perf_counter() - began, halted)


def usual_lr(plan: Plan) -> float:
    """The noise of all steps together then moves a weight by about REACH. From public facts alone."""
    noise = plan.noise_scale / plan.sample.divisor * math.sqrt(plan.steps)
    most = LARGEST / plan.bound.reach
    return most if noise * most <= REACH else float(f"{REACH / noise:.2g}")


@torch.no_grad()
def accuracy(model: nn.Module, part: tuple[Tensor, Tensor]) -> float:
    """The share of right answers. Private if the data is."""
    model.eval()
    right = sum(
        int((model(x).argmax(1) == y).sum()) for x, y in zip(part[0].split(4096), part[1].split(4096), strict=True)
    )
    return right / len(part[1])


def measured(done: Trained, data: Data) -> dict[str, Any]:
    """Metrics with a mark that says whether they may be shown."""
    return {
        "mark": "public data: may be shown" if data.public else MARK,
        "private": not data.public,
        "held_out_accuracy": done.accuracy,
        "held_out_examples": len(data.test[0]),
    }


def published(run: Run, folder: Path, metrics: Mapping[str, Any]) -> dict[str, Path]:
    """Writes metrics, model and certificate. Without a guarantee to publish with, all of it stays private."""
    private = folder / "private"
    write_whole(private / "metrics.json", lambda file: file.write(json.dumps(metrics, indent=1).encode()), 0o600)
    if run.certificate().status in ("none", "seeded"):
        return {"model": run.export(private / "model-not-for-release"), "private": private}
    return {"publish": run.export(folder / "publish"), "private": private}


# What the verbs need.


def chosen(recipe: str, settings: Sequence[str] = ()) -> Callable[[Plan], Plan]:
    """A recipe by name, with its settings as name=value."""
    if recipe not in RECIPES:
        near = difflib.get_close_matches(recipe, RECIPES, n=1)
        guess = f"did you mean {near[0]}? " if near else ""
        raise PrivacyError("recipe", f"{recipe!r} is unknown", f"{guess}give one of {', '.join(RECIPES)}")
    made = RECIPES[recipe]
    kinds = {n: p.annotation for n, p in inspect.signature(made, eval_str=True).parameters.items() if n != "plan"}
    given: dict[str, Any] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in kinds or not value:
            known = ", ".join(f"{n}=…" for n in kinds) or "none"
            raise PrivacyError("recipe", f"{recipe} has no setting {setting!r}", f"its settings are: {known}")
        try:
            given[name] = kinds[name](value)
        except ValueError:
            found = f"{name}={value} is not {kinds[name].__name__}"
            raise PrivacyError("recipe", found, "give a number" if kinds[name] in (int, float) else "mend it") from None
    return functools.partial(made, **given)


def where(out: Path | None, name: str, resume: bool) -> Path:
    """The folder of this run; one that holds a run is refused, unless it is to go on."""
    if out is None:
        if resume:
            raise PrivacyError("out", "which run to go on with is not said", "name its folder: --out DIR --resume")
        return fresh(Path("runs") / name)
    if out.exists() and not out.is_dir():
        raise PrivacyError("out", f"{out} is a file", "name a folder")
    if holds_run(out) and not resume:
        raise PrivacyError("out", f"{out} holds a run already", "go on with it: --resume, or name another folder")
    if resume and not holds_run(out):
        raise PrivacyError("out", f"{out} holds no run", "leave out --resume, or name the folder of a run")
    return out


def fresh(folder: Path) -> Path:
    """The folder, or the first of folder-2, folder-3, … that is not there."""
    number, free = 1, folder
    while free.exists():
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
    return free


def holds_run(folder: Path) -> bool:
    """Whether a journal is where `train` keeps it."""
    return (folder / "private" / "run" / journal.NAME).exists()


@contextmanager
def new_folders(folder: Path, keep: bool) -> Iterator[None]:
    """Makes the folders above `folder`, and removes them again if what follows fails and leaves them empty."""
    above = [] if keep else [p for p in folder.parents if not p.exists()]
    if not keep:
        folder.parent.parent.mkdir(parents=True, exist_ok=True)
        folder.parent.mkdir(mode=0o700, exist_ok=True)
    try:
        yield
    except BaseException:
        for made in above:
            if made.is_dir() and not any(made.iterdir()):
                made.rmdir()
        raise


def interrupted(run: Run, command: Sequence[str]) -> NoReturn:
    """Says how to go on, and ends."""
    spent = run.spent().epsilon
    cost = (
        ""
        if run.plan.status == "none"
        else f", epsilon {account.up(spent)} at delta {account.up(run.plan.delta())} is spent"
    )
    say(f"stopped after step {run.position:,} of {run.plan.steps:,}{cost}; saved. To go on:\n  {shlex.join(command)}")
    raise typer.Exit(INTERRUPTED)


def options(given: Mapping[str, object]) -> list[str]:
    """Settings as they are typed, but for the usual."""
    typed: list[str] = []
    for name, value in given.items():
        match value:
            case None | False:
                continue
            case _ if value == USUAL.get(name):
                continue
            case True:
                typed.append(name)
            case list():
                typed += [word for part in value for word in (name, str(part))]
            case tuple():
                typed += [name, *(str(part).removesuffix(".0") for part in value)]
            case _:
                typed += [name, str(value).removesuffix(".0")]
    return typed


def usual_sizes(examples: int) -> list[int]:
    """Batch sizes worth a look: powers of two from about a hundredth of the data to a quarter, and all of it."""
    if examples < 1:
        raise PrivacyError("sample", f"--examples is {examples}", "give a positive number")
    powers = [2**k for k in range(4, 16, 2) if examples / 500 <= 2**k <= examples / 2]
    return [*powers, examples] if examples <= 10_000 else powers or [256]


def told(folder: Path) -> str:
    """A folder and what is in it."""
    names = [p.name + "/" * p.is_dir() for p in sorted(folder.iterdir())]
    mark = "" if folder.name == "publish" else " (not for release)"
    return f"{folder}{os.sep}  {', '.join(names)}{mark}"


def listed(rows: Mapping[str, str]) -> str:
    """Names and texts, aligned."""
    width = max(len(name) for name in rows)
    return "\n".join(f"{name:{width}}  {text}" for name, text in rows.items())


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Columns of figures under their names, aligned to the right."""
    widths = [max(len(row[k]) for row in (head, *body)) for k in range(len(head))]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in (head, *body)]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def say(text: str) -> None:
    """To standard error."""
    print(f"quietgrad: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The entry point: one clear line for bad input, and its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = app(given, prog_name="quietgrad", standalone_mode=False)
    except Exception as error:
        usage = getattr(error, "format_message", None)
        if "--debug" in given and usage is None:
            raise
        if usage is not None:
            message = usage()
        elif isinstance(error, OSError):
            message = f"{error.filename or 'a file'}: {error.strerror or error}"
        elif isinstance(error, PrivacyError):
            message = str(error)
        else:
            message = f"unexpected {type(error).__name__}: {error} (--debug shows where)"
        if str(message).strip():
            say(" ".join(str(message).split()))
        expected = usage is not None or isinstance(error, OSError | PrivacyError)
        sys.exit(2 if expected else 1)
    sys.exit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main()
