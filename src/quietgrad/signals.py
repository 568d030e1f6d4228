"""Signals: where Ctrl-C may come between, and where it waits."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def signals_wait() -> Iterator[None]:
    """What a signal's handler would raise (Ctrl-C) comes at the end: torch.func cannot be left between its lines."""
    held: list[int] = []
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        found = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
        handlers = {s: handler for s, handler in found.items() if callable(handler)}
    with ExitStack() as stack:
        for number, handler in handlers.items():
            stack.callback(signal.signal, number, handler)
            signal.signal(number, lambda n, frame: held.append(n))
        yield
    for number in held:
        handlers[number](number, None)  # a frame would keep tensors of torch.func alive beyond its call


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Ctrl-C is noted, so that the step in hand is finished; a second one does not wait."""
    pressed = False

    def note(number: int, frame: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
