"""What every stage is: a frozen record of public facts, in a named slot, that can be written down and read back."""

from __future__ import annotations

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from quietgrad.errors import PrivacyError

Record = dict[str, Any]
UNIT = "one example (one row of the data)"  # what is protected
NAMED = {"stage": "inner stage"}  # a field of this name, in a record whose "stage" is the class


@dataclass(frozen=True)
class Stage(ABC):
    """A part of the private step. Its fields are public; data, parameters and generators are call arguments only.

    Every class is abstract or final: a stage that tweaks a finished one would inherit its guarantee unproved.
    """

    slot: ClassVar[str]

    def __init_subclass__(cls) -> None:
        for base in cls.__mro__[1:]:
            fixed = [name for name in vars(cls) if getattr(vars(base).get(name), "__final__", False)]
            if fixed:
                found = f"{cls.__name__} overrides {fixed[0]}, which {base.__name__} keeps for itself"
                raise PrivacyError(cls.slot, found, "write the stage in the methods that are left open")
            if issubclass(base, Stage) and not inspect.isabstract(base):
                found = f"{cls.__name__} subclasses the finished stage {base.__name__}"
                kind = next(b.__name__ for b in base.__mro__[1:] if inspect.isabstract(b))
                raise PrivacyError(base.slot, found, f"write it as a stage of its own, from {kind}")

    @property
    @abstractmethod
    def says(self) -> str:
        """One line for the printed plan."""

    @property
    def ours(self) -> bool:
        """Whether this stage's guarantee is quietgrad's own (in GUARANTEES.md), not its user's."""
        return type(self).__module__.startswith("quietgrad.")


def record(value: object) -> Any:
    """A stage, an event, or a field of one, as JSON: numbers, names and digests, never a pickle."""
    if isinstance(value, Stage):
        kept = {NAMED.get(f.name, f.name): record(getattr(value, f.name)) for f in fields(value) if f.repr}
        return {"stage": type(value).__name__ if value.ours else qualified(type(value)), **kept}
    if isinstance(value, list | tuple):
        return [record(v) for v in value]
    if type(value).__module__ == "dp_accounting.dp_event":
        given = {a.name: getattr(value, a.name) for a in getattr(type(value), "__attrs_attrs__", ())}
        return {"dp_event": type(value).__name__, **{name: record(v) for name, v in given.items()}}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise PrivacyError(
        "plan", f"{type(value).__name__} cannot be written as JSON", "use numbers, names and stages as fields"
    )


def rebuild(value: Any, known: Mapping[str, type[Stage]]) -> Any:
    """The stage that `record` wrote; `known` maps names to classes."""
    if isinstance(value, list):
        return tuple(rebuild(v, known) for v in value)
    if not isinstance(value, dict):
        return value
    if "dp_event" in value:
        return _event({key: rebuild(v, known) for key, v in value.items()})
    named = {short: name for name, short in NAMED.items()}
    given: Record = {named.get(str(key), str(key)): rebuild(v, known) for key, v in value.items() if key != "stage"}
    cls = known.get(value.get("stage", ""))
    if cls is None:
        raise PrivacyError("plan", f"no stage is called {value.get('stage')!r}", "pass its class in `stages`")
    unknown = given.keys() - {f.name for f in fields(cls)}
    if unknown:
        raise PrivacyError(
            "plan",
            f"{cls.__name__} has no field {', '.join(sorted(unknown))}",
            "read it with the version that wrote it",
        )
    return cls(**given)


def _event(given: Record) -> Any:
    import dp_accounting

    name = given.pop("dp_event")
    cls = getattr(dp_accounting, name) if name in dir(dp_accounting) else None
    if not (isinstance(cls, type) and issubclass(cls, dp_accounting.DpEvent)):
        raise PrivacyError("plan", f"no event is called {name!r}", "read it with the version that wrote it")
    return cls(**given)


def finished(base: type[Stage]) -> Iterator[type[Stage]]:
    """Every finished stage of quietgrad under `base`."""
    for cls in base.__subclasses__():
        if inspect.isabstract(cls):
            yield from finished(cls)
        elif cls.__module__.startswith("quietgrad."):
            yield cls


def qualified(thing: Any) -> str:
    """The module and name of a class or function."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}.{named.__qualname__}"


def digest(function: Callable[..., Any]) -> str:
    """SHA-256 of a callable's source (with what it prints as, for an object with settings)."""
    named = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    try:
        source = inspect.getsource(named)
    except (OSError, TypeError):
        source = ""
    code = getattr(function, "__code__", None)
    if not source and code is not None:
        source = (
            f"{code.co_code.hex()} {code.co_names} {[c for c in code.co_consts if isinstance(c, int | float | str)]}"
        )
    shown = "" if named is function else repr(function)
    if not source or " at 0x" in shown:
        raise PrivacyError("loss", f"{qualified(function)} has no source to take a digest of", "state one: digest='…'")
    return hashlib.sha256((source + shown).encode()).hexdigest()


def positive(slot: str, name: str, number: float) -> None:
    """Refuses a number that is not positive and finite."""
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < float("inf"):
        raise PrivacyError(slot, f"{name} is {number!r}", f"give a positive, finite {name}")


def counted(slot: str, name: str, number: int) -> None:
    """Refuses what is not a whole number above zero."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise PrivacyError(slot, f"{name} is {number!r}", f"give a whole number of at least 1 for {name}")
