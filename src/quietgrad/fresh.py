"""Fresh: the process's generators, filled from the keystream while user code draws from them, and put back after.

Dropout and transforms draw by place, not by example: one row less shifts what the rows after it get. That costs nothing
only if the draws are as good as secret and alike, so all bits of a generator's state come from the keystream.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from quietgrad.stream import STATE

PUBLIC = torch.arange(STATE)  # for trials before the first release, which see no more than shapes
WORDS = STATE // 3  # of one Mersenne twister
PLACE = 24  # of its state in torch's


def fill(words: Tensor) -> None:
    """Sets all of torch's CPU generator, NumPy's and Python's from words of 32 bits; what was seeded is gone."""
    own, rest = words[:WORDS], words[WORDS:].tolist()
    torch.default_generator.manual_seed(0)
    state = torch.default_generator.get_state()
    state[PLACE : PLACE + WORDS * 8].view(torch.int64).copy_(own)
    torch.default_generator.set_state(state)
    np.random.set_state({"bit_generator": "MT19937", "state": {"key": np.array(rest[:WORDS], np.uint32), "pos": WORDS}})
    random.setstate((3, (*rest[WORDS:], WORDS), None))


def others() -> tuple[object, ...]:
    """Where Python's and NumPy's generators stand. vmap draws from torch's for each example, from these once."""
    theirs = np.random.get_state(legacy=False)["state"]
    return random.getstate(), theirs["key"].tobytes(), theirs["pos"]


@contextmanager
def drawing(words: Tensor, device: torch.device) -> Iterator[None]:
    """Inside, everything draws from `words`; the user's generators are left as they were."""
    theirs, own = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            if device.type == "cuda":
                with torch.cuda.device(device):
                    torch.cuda.manual_seed((int(words[0]) << 31) ^ int(words[1]))
            fill(words)
            yield
    finally:
        np.random.set_state(theirs)
        random.setstate(own)
