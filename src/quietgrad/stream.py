"""The keystream: secure random numbers, each a pure function of (key, purpose, step, coordinate).

A number is read, never generated: no position is kept, so any slice of a draw is that slice of the whole, bit for bit.
ChaCha20 (RFC 8439) with a key of 256 bits gives, for every purpose and step, 2^32 blocks of 64 bytes:

    nonce, 96 bits       purpose (32 bits, little-endian) | step (64 bits, little-endian)
    counter, 32 bits     block b
    word w, 64 bits      bytes 8 (w mod 8) to 8 (w mod 8) + 7 of block w div 8, little-endian; 0 <= w < 2^35
    uniform u            (k + 1) 2^-53, with k the top 53 bits of word u, unsigned: in (0, 1]
    normals 2j, 2j + 1   r cos(a) and r sin(a), with r = sqrt(-2 ln u), u = (k + 1) 2^-63, k the top 63 bits of word
                         2j, and a = 2 pi k 2^-64, k word 2j + 1, read as signed: a in [-pi, pi]

A block is eight words and eight normals, in pairs that need nothing else. Words, uniforms and normals are readings of
the same bits: what must be independent differs in purpose or in step. Nothing wraps: what lies beyond 32 bits of
purpose, 64 of step or 2^32 blocks is refused. Another device gives the same words and uniforms bit for bit, and the
same normals to the rounding of its logarithm, cosine, sine and square root.
"""

from __future__ import annotations

import enum
import hashlib
import math
import operator
import os
import secrets
import struct
import weakref
from collections.abc import Iterator
from typing import NoReturn, SupportsIndex, final

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

from quietgrad.errors import PrivacyError

BLOCK_WORDS = 8
BLOCKS = 2**32  # of one (purpose, step)
STATE = 3 * 624  # words of 32 bits
TILE_BLOCKS = 2**15  # drawn at a time: 2 MiB of words
LOW_53, LOW_63 = 2**53 - 1, 2**63 - 1
ULP_53 = 2.0**-53
ZEROS = bytes(2**18)


@final
class Purpose(enum.IntEnum):
    """What numbers are for: streams that are independent of each other under one key."""

    NOISE = 1
    SAMPLE = 2
    ORDER = 3
    SMOOTH = 4
    FORWARD = 5


def keystream(key: bytes, purpose: int, step: int, block: int, words: Tensor) -> None:
    """Fill `words` (int64, contiguous, whole blocks) with the ChaCha20 keystream from `block` on."""
    blocks = -(-len(words) // BLOCK_WORDS)
    if not (0 <= purpose < 2**32 and 0 <= step < 2**64 and 0 <= block <= BLOCKS - blocks):
        found = f"purpose {purpose}, step {step}, blocks {block} to {block + blocks} are beyond 32, 64 and 32 bits"
        raise PrivacyError("stream", found, "start a new run, with a new key")
    cipher = Cipher(algorithms.ChaCha20(key, struct.pack("<IIQ", block, purpose, step)), mode=None).encryptor()
    room = words.numpy().data.cast("B")
    for at in range(0, len(room), len(ZEROS)):
        piece = room[at : at + len(ZEROS)]
        cipher.update_into(memoryview(ZEROS)[: len(piece)], piece)


@final
class _Tile:
    """Buffers for one tile. They are overwritten by the next draw and never leave the stream."""

    __slots__ = ("angle", "cosine", "inverse", "words")

    def __init__(self) -> None:
        count = TILE_BLOCKS * BLOCK_WORDS
        with torch.inference_mode(False):
            self.words = torch.empty(count, dtype=torch.int64, device="cpu")
            self.inverse = torch.empty(count // 2, dtype=torch.float64, device="cpu")
            self.angle, self.cosine = torch.empty_like(self.inverse), torch.empty_like(self.inverse)


@final
class Stream:
    """Random numbers addressed by (purpose, step, coordinate), under one key.

    **Guarantee**: without a seed the key is fresh from the operating system and is stored nowhere else; a process that
    was forked has a key of its own. A seeded stream says so (`secure` is False) and is refused after a fork.
    **Caller's duty**: never two different uses of one (purpose, step, coordinate). Asking again is allowed: correlated
    noise regenerates what it drew before.
    """

    __slots__ = ("__weakref__", "_idle", "_key", "_process", "_secure")

    _idle: list[_Tile]
    _key: bytes | None

    def __init__(self, seed: int | None = None) -> None:
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise PrivacyError("stream", f"a seed that is a {type(seed).__name__}", "give an int, or none at all")
        self._secure = seed is None
        self._renew()
        if seed is not None:
            self._key = hashlib.sha256(b"quietgrad.stream.seed.1:" + f"{seed:x}".encode()).digest()
        _live.add(self)

    @property
    def secure(self) -> bool:
        """Whether the key came from the operating system."""
        return self._secure

    def words(self, purpose: Purpose, step: int, start: int, count: int) -> Tensor:
        """Words `start` to `start + count`: int64, every bit random."""
        drawn = torch.empty(_size(count), dtype=torch.int64, device="cpu")
        for tile, piece, place in self._tiles(purpose, step, start, count):
            drawn[place] = tile.words[piece]
        return drawn

    def uniforms(self, purpose: Purpose, step: int, start: int, count: int) -> Tensor:
        """Uniforms `start` to `start + count`: float64 in (0, 1], multiples of 2^-53."""
        drawn = torch.empty(_size(count), dtype=torch.float64, device="cpu")
        for tile, piece, place in self._tiles(purpose, step, start, count):
            drawn[place] = tile.words[piece].bitwise_right_shift_(11).bitwise_and_(LOW_53)
        return drawn.add_(1).mul_(ULP_53)

    def normals(self, purpose: Purpose, step: int, start: int, count: int, out: Tensor | None = None) -> Tensor:
        """Standard normals of coordinates `start` to `start + count`: float64, by Box and Muller, to 9.34 sigma.

        63 bits in the radius: with 53 the largest radii lie so far apart that a point would tell its own centre with
        probability 6e-14 per pair, which over many coordinates and steps is not small beside a delta.

        With `out` (float64, contiguous, on the CPU, of `count` elements in any shape) they are written there.
        """
        if out is None:
            out = torch.empty(_size(count), dtype=torch.float64, device="cpu")
        elif not (out.dtype == torch.float64 and out.is_contiguous() and out.is_cpu and out.numel() == count):
            found = f"out is {out.dtype} of shape {tuple(out.shape)} on {out.device}"
            raise PrivacyError("stream", found, f"give {count} contiguous float64 elements on the CPU")
        drawn = out.detach().view(-1)
        for tile, piece, place in self._tiles(purpose, step, start, count):
            words = tile.words[: -(-piece.stop // BLOCK_WORDS) * BLOCK_WORDS]
            whole = piece.stop - piece.start == len(words)
            pairs = words.view(-1, 2)
            inverse, angle, cosine = (half[: len(pairs)] for half in (tile.inverse, tile.angle, tile.cosine))
            angle.copy_(pairs[:, 1]).mul_(2 * math.pi * 2.0**-64)
            words.bitwise_right_shift_(1).bitwise_and_(LOW_63)
            inverse.copy_(pairs[:, 0]).add_(1).mul_(2.0**-63).log_().mul_(-2).rsqrt_()  # u; ln u; 1 / r
            normals = drawn[place] if whole else words.view(torch.float64)  # the words have served
            torch.cos(angle, out=cosine)
            torch.div(cosine, inverse, out=normals.view(-1, 2)[:, 0])
            torch.div(angle.sin_(), inverse, out=normals.view(-1, 2)[:, 1])
            if not whole:
                drawn[place] = normals[piece]
        return out

    def state_for(self, purpose: Purpose, step: int, index: int) -> Tensor:
        """The whole state of three generators (torch's, NumPy's, Python's), for dropout and transforms: see `fresh`.

        Never for noise or sampling: their outputs reveal such a state. And never a seed instead: torch's CPU generator
        keeps 32 bits of one, which can be tried out.
        """
        if purpose in (Purpose.NOISE, Purpose.SAMPLE):
            raise PrivacyError("stream", f"a torch generator for {purpose.name}", "draw from the stream itself")
        return self.words(purpose, step, index * STATE, STATE).bitwise_and_(2**32 - 1)

    def _tiles(self, purpose: Purpose, step: int, start: int, count: int) -> Iterator[tuple[_Tile, slice, slice]]:
        """Filled tiles, the piece of each that was asked for, and its place in the draw."""
        if not isinstance(purpose, Purpose):
            raise PrivacyError("stream", f"{purpose!r} is not a purpose", "give a Purpose")
        start, count, step = operator.index(start), operator.index(count), operator.index(step)
        if start < 0 or start + count > BLOCKS * BLOCK_WORDS or not 0 <= step < 2**64:
            found = f"step {step}, coordinates {start} to {start + count}"
            raise PrivacyError("stream", found, "stay below step 2^64 and coordinate 2^35: a counter never wraps")
        key = self._current_key()
        try:
            tile = self._idle.pop()
        except IndexError:
            tile = _Tile()
        first, last = start // BLOCK_WORDS, -(-(start + count) // BLOCK_WORDS)
        for block in range(first, last, TILE_BLOCKS):
            words = tile.words[: min(TILE_BLOCKS, last - block) * BLOCK_WORDS]
            keystream(key, purpose, step, block, words)
            origin = block * BLOCK_WORDS
            low, high = max(start - origin, 0), min(start + count - origin, len(words))
            yield tile, slice(low, high), slice(origin + low - start, origin + high - start)
        self._idle.append(tile)

    def _renew(self) -> None:
        """Drop key and buffers; a secure stream takes a new key. The process id comes last: a failure is seen again."""
        self._key, self._idle = None, []
        if self._secure:
            self._key = secrets.token_bytes(32)
        self._process = os.getpid()

    def _current_key(self) -> bytes:
        if self._process != os.getpid():
            self._renew()
        if self._key is None:
            raise PrivacyError("stream", "a seeded stream in a forked process", "make a stream in the new process")
        return self._key

    def __repr__(self) -> str:
        return f"Stream({'secure' if self._secure else 'seeded'})"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise PrivacyError("stream", "a stream was copied or pickled", "pass the stream itself: a key is never stored")


def _size(count: int) -> int:
    if not 0 <= count <= BLOCKS * BLOCK_WORDS:
        raise PrivacyError("stream", f"a draw of {count} numbers", "ask for 0 to 2^35 of them")
    return count


_live: weakref.WeakSet[Stream] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for stream in list(_live):
        stream._renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
