"""The keystream: RFC 8439's bits, addresses that never meet, normals that are normal, nothing repeated after a fork.

A statistical test states its false-alarm rate (over seeds; the seed is fixed) and its power. A guard has an evil twin.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import io
import math
import os
import pickle
import secrets
import statistics
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import algorithms
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import poisson
from torch import Tensor

from quietgrad import stream as module
from quietgrad.errors import PrivacyError
from quietgrad.stream import BLOCK_WORDS, BLOCKS, TILE_BLOCKS, Purpose, Stream, keystream

WORDS = BLOCKS * BLOCK_WORDS
NOISE = Purpose.NOISE
Draw = Callable[[int, int, int], Tensor]  # (step, start, count)


@contextlib.contextmanager
def on_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for one another are slow on a busy machine, and a forked child has none."""
    with on_threads(1):
        yield


class Words(Protocol):
    def words(self, purpose: Purpose, step: int, start: int, count: int) -> Tensor: ...


# --- RFC 8439 -------------------------------------------------------------------------------------------------------


def chacha20_block(key: bytes, counter: int, nonce: bytes) -> bytes:
    """RFC 8439, section 2.3, word for word."""

    def quarter(x: list[int], a: int, b: int, c: int, d: int) -> None:
        for i, j, k, shift in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[i] = (x[i] + x[j]) % 2**32
            x[k] ^= x[i]
            x[k] = (x[k] << shift | x[k] >> (32 - shift)) % 2**32

    state = list(struct.unpack("<16I", b"expand 32-byte k" + key + struct.pack("<I", counter) + nonce))
    x = state.copy()
    for _ in range(10):
        for a in range(4):
            quarter(x, a, a + 4, a + 8, a + 12)
        for a in range(4):
            quarter(x, a, 4 + (a + 1) % 4, 8 + (a + 2) % 4, 12 + (a + 3) % 4)
    return struct.pack("<16I", *((i + j) % 2**32 for i, j in zip(x, state, strict=True)))


def stream_bytes(key: bytes, nonce: bytes, block: int, blocks: int) -> bytes:
    words = torch.empty(blocks * BLOCK_WORDS, dtype=torch.int64)
    purpose, step = struct.unpack("<IQ", nonce)
    keystream(key, purpose, step, block, words)
    return words.numpy().tobytes()


COUNTING = bytes(range(32))
BLOCK_VECTORS = {
    "2.3.2": (
        COUNTING,
        "000000090000004a00000000",
        1,
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    "A.1 1": (
        bytes(32),
        "00" * 12,
        0,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    "A.1 2": (
        bytes(32),
        "00" * 12,
        1,
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    "A.1 3": (
        bytes(31) + b"\1",
        "00" * 12,
        1,
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
    "A.1 4": (
        b"\0\xff" + bytes(30),
        "00" * 12,
        2,
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
        "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096",
    ),
    "A.1 5": (
        bytes(32),
        "00" * 11 + "02",
        0,
        "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
        "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d",
    ),
}
PLAIN = (
    b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip "
    b"for the future, sunscreen would be it."
)
SECRET = bytes.fromhex(
    "6e2e359a2568f98041ba0728dd0d6981e97e7aec1d4360c20a27afccfd9fae0bf91b65c5524733ab8f593dabcd62b357"
    "1639d624e65152ab8f530c359f0861d807ca0dbf500d6a6156a38e088a22b65e52bc514d16ccf806818ce91ab7793736"
    "5af90bbf74a35be6b40b8eedf2785e42874d"
)


@pytest.mark.parametrize("section", BLOCK_VECTORS)
def test_block_function_is_rfc_8439s(section: str) -> None:
    key, nonce, counter, expected = BLOCK_VECTORS[section]
    assert stream_bytes(key, bytes.fromhex(nonce), counter, 1).hex() == expected
    assert chacha20_block(key, counter, bytes.fromhex(nonce)).hex() == expected


def test_keystream_encrypts_as_rfc_8439_section_2_4_2() -> None:
    pad = stream_bytes(COUNTING, bytes.fromhex("000000000000004a00000000"), 1, 2)
    assert bytes(a ^ b for a, b in zip(PLAIN, pad, strict=False)) == SECRET


@pytest.mark.parametrize("block", [0, 2**31 - 1, 2**31, BLOCKS - 2])
@pytest.mark.parametrize("step", [0, 2**32, 2**64 - 1])
def test_keystream_at_high_counters(block: int, step: int) -> None:
    nonce = struct.pack("<IQ", 2**32 - 1, step)
    expected = b"".join(chacha20_block(COUNTING, block + i, nonce) for i in range(2))
    assert stream_bytes(COUNTING, nonce, block, 2) == expected


def reference_words(key: bytes, purpose: int, step: int, start: int, count: int) -> list[int]:
    """The address layout of the module's docstring, by the reference block function."""
    nonce = struct.pack("<IQ", purpose, step)
    places = range(start, start + count)
    blocks = {w // 8: struct.unpack("<8Q", chacha20_block(key, w // 8, nonce)) for w in places}
    return [blocks[w // 8][w % 8] for w in places]


def seed_key(seed: int) -> bytes:
    return hashlib.sha256(f"quietgrad.stream.seed.1:{seed:x}".encode()).digest()


@pytest.mark.parametrize("start", [0, 3, 8 * 5 + 7, WORDS - 21])
@pytest.mark.parametrize("step", [0, 7, 2**64 - 1])
@pytest.mark.parametrize("purpose", Purpose)
def test_words_uniforms_and_normals_are_the_layout(purpose: Purpose, step: int, start: int) -> None:
    expected = reference_words(seed_key(5), purpose, step, start, 21)
    stream = Stream(5)
    assert [w % 2**64 for w in stream.words(purpose, step, start, 21).tolist()] == expected
    uniforms = [((w >> 11) + 1) * 2.0**-53 for w in expected]
    assert stream.uniforms(purpose, step, start, 21).tolist() == uniforms

    even = start % 2
    normals = []
    for v, w in zip(expected[even::2], expected[even + 1 :: 2], strict=False):
        angle = 2 * math.pi * (w * 2.0**-64)
        radius = math.sqrt(-2 * math.log(((v >> 1) + 1) * 2.0**-63))
        normals += [radius * math.cos(angle), radius * math.sin(angle)]
    got = stream.normals(purpose, step, start + even, len(normals))
    torch.testing.assert_close(got, torch.tensor(normals, dtype=torch.float64), rtol=1e-13, atol=1e-13)


def test_the_tail_reaches_as_far_as_63_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """All bits zero: the smallest uniform, 2^-53, and the longest radius, sqrt(126 ln 2) = 9.34; all ones: 1 and 0."""

    def constant(value: int) -> Callable[[bytes, int, int, int, Tensor], None]:
        def fill(key: bytes, purpose: int, step: int, block: int, words: Tensor) -> None:
            words.fill_(value)

        return fill

    monkeypatch.setattr(module, "keystream", constant(0))
    assert Stream(0).uniforms(NOISE, 0, 0, 8).tolist() == [2.0**-53] * 8
    longest = math.sqrt(126 * math.log(2))
    assert Stream(0).normals(NOISE, 0, 0, 4).tolist() == pytest.approx([longest, 0, longest, 0])
    monkeypatch.setattr(module, "keystream", constant(-1))
    assert Stream(0).uniforms(NOISE, 0, 0, 8).tolist() == [1.0] * 8
    assert Stream(0).normals(NOISE, 0, 0, 4).abs().tolist() == [0.0] * 4


# --- slices, buffers, threads ---------------------------------------------------------------------------------------

WHOLE = 3 * 2**18 + 100  # three tiles and a part


@pytest.fixture(scope="module")
def whole() -> dict[str, Tensor]:
    stream = Stream(11)
    return {kind: getattr(stream, kind)(NOISE, 3, 0, WHOLE) for kind in ("words", "uniforms", "normals")}


@pytest.mark.parametrize("kind", ["words", "uniforms", "normals"])
@given(start=st.integers(0, WHOLE - 1), count=st.integers(0, 300) | st.integers(0, WHOLE))
@settings(max_examples=60, deadline=None)
def test_a_slice_is_the_draw_of_the_slice(whole: dict[str, Tensor], kind: str, start: int, count: int) -> None:
    count = min(count, WHOLE - start)
    assert torch.equal(getattr(Stream(11), kind)(NOISE, 3, start, count), whole[kind][start : start + count])


@given(start=st.integers(0, WHOLE // 2), count=st.integers(1, WHOLE // 2), threads=st.integers(2, 4))
@settings(max_examples=30, deadline=None)
def test_out_and_the_number_of_threads_change_nothing(
    whole: dict[str, Tensor], start: int, count: int, threads: int
) -> None:
    into = torch.full((count + 3,), 7.0, dtype=torch.float64)
    with on_threads(threads):
        assert Stream(11).normals(NOISE, 3, start, count, out=into[1 : count + 1]).data_ptr() == into[1:].data_ptr()
    assert torch.equal(into[1 : count + 1], whole["normals"][start : start + count])
    assert into[0] == 7 and into[count + 1 :].tolist() == [7, 7]


def test_out_is_float64_contiguous_and_of_the_right_size() -> None:
    stream = Stream(0)
    shaped = torch.empty(3, 5, dtype=torch.float64)
    assert stream.normals(NOISE, 0, 0, 15, out=shaped) is shaped
    assert torch.equal(shaped.view(-1), stream.normals(NOISE, 0, 0, 15))
    for out in (torch.empty(15), torch.empty(14, dtype=torch.float64), torch.empty(5, 3, dtype=torch.float64).t()):
        with pytest.raises(PrivacyError, match="contiguous float64"):
            stream.normals(NOISE, 0, 0, 15, out=out)


@pytest.mark.parametrize("kind", ["words", "uniforms", "normals"])
def test_what_was_handed_out_never_changes(kind: str) -> None:
    stream = Stream(1)
    draws = [getattr(stream, kind)(NOISE, step, start, 1000) for step in range(4) for start in (0, 3)]
    kept = [draw.clone() for draw in draws]
    for step in range(4, 40):
        stream.normals(NOISE, step, step, 5000)
    assert all(torch.equal(a, b) for a, b in zip(draws, kept, strict=True))
    assert len({draw.untyped_storage().data_ptr() for draw in draws}) == len(draws)
    assert all(draw.untyped_storage().nbytes() == 8000 for draw in draws)


def test_threads_draw_what_one_thread_draws() -> None:
    stream, expected = Stream(2), [Stream(2).normals(NOISE, step, step, 20_000) for step in range(8)]
    wrong: list[int] = []

    def draw(step: int) -> None:
        for _ in range(10):
            if not torch.equal(stream.normals(NOISE, step, step, 20_000), expected[step]):
                wrong.append(step)

    threads = [threading.Thread(target=draw, args=(step,)) for step in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_ambient_modes_of_torch_change_nothing(whole: dict[str, Tensor]) -> None:
    stream = Stream(11)
    with torch.inference_mode(), torch.device("meta"):
        inside = stream.normals(NOISE, 3, 5, 100)
    assert torch.equal(inside, whole["normals"][5:105])
    assert torch.equal(stream.normals(NOISE, 3, 5, 100), whole["normals"][5:105])


# --- addresses ------------------------------------------------------------------------------------------------------

STEPS = st.sampled_from([0, 1, 255, 256, 2**32 - 1, 2**32, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)
BLOCK = st.sampled_from([0, 1, 2, 2**16, 2**31, BLOCKS - 3]) | st.integers(0, BLOCKS - 3)
ADDRESSES = st.lists(st.tuples(st.sampled_from(Purpose), STEPS, BLOCK, st.integers(1, 2)), min_size=2, max_size=12)


@pytest.fixture
def ciphers(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Counter and nonce of each ChaCha20 that a stream starts."""
    used: list[bytes] = []
    real = algorithms.ChaCha20

    def spy(key: bytes, nonce: bytes) -> algorithms.ChaCha20:
        used.append(nonce)
        return real(key, nonce)

    monkeypatch.setattr(algorithms, "ChaCha20", spy)
    return used


def test_no_nonce_and_counter_serve_two_addresses(ciphers: list[bytes]) -> None:
    """Over all examples together: each (counter, nonce) belongs to one block of one step of one purpose."""
    owner: dict[tuple[bytes, int], tuple[int, int, int]] = {}
    stream = Stream(3)

    @given(ADDRESSES)
    @settings(max_examples=200, deadline=None)
    def check(addresses: list[tuple[Purpose, int, int, int]]) -> None:
        for purpose, step, block, blocks in addresses:
            ciphers.clear()
            stream.words(purpose, step, block * BLOCK_WORDS, blocks * BLOCK_WORDS)
            (used,) = ciphers
            for i in range(blocks):
                pair = used[4:], int.from_bytes(used[:4], "little") + i
                assert pair[1] < BLOCKS
                assert owner.setdefault(pair, (purpose, step, block + i)) == (purpose, step, block + i)

    check()
    assert len(set(owner.values())) == len(owner) > 100


def test_tiles_of_one_draw_follow_one_another(ciphers: list[bytes]) -> None:
    Stream(3).normals(NOISE, 9, 5, 3 * TILE_BLOCKS * BLOCK_WORDS)
    assert [struct.unpack("<IIQ", used) for used in ciphers] == [(i * TILE_BLOCKS, 1, 9) for i in range(4)]


def repeats(stream: Words) -> bool:
    """Whether a 64-bit word comes twice among the 2^21.2 words of 600 draws that share no address.

    False alarm n^2 / 2^65 = 2e-7. Power 1 against any address served twice.
    """
    steps = [0, 1, 2, 3, 255, 256, 2**31, 2**32, 2**32 + 1, 2**40, 2**63, 2**64 - 1]
    starts = [0, 8192, 2**18, 2**20 + 3, 2**31, 2**32, 2**32 + 8192, 2**34 + 5, WORDS - 16384, WORDS - 8192]
    draws = [stream.words(p, s, start, 4096) for p in Purpose for s in steps for start in starts]
    count = sum(len(draw) for draw in draws)
    return len(np.unique(torch.cat(draws).numpy())) < count


def test_no_word_comes_twice_at_distinct_addresses() -> None:
    assert not repeats(Stream(4))


class Truncating:
    """Evil twins: an address that keeps too few bits of the step, of the block, or nothing of the purpose."""

    def __init__(self, *, purpose: int = 2**32, step: int = 2**64, start: int = WORDS) -> None:
        self.stream, self.limits = Stream(4), (purpose, step, start)

    def words(self, purpose: Purpose, step: int, start: int, count: int) -> Tensor:
        purpose_limit, step_limit, start_limit = self.limits
        kept = Purpose(1 if purpose_limit == 1 else purpose)
        return self.stream.words(kept, step % step_limit, start % start_limit, count)


@pytest.mark.parametrize("twin", [{"purpose": 1}, {"step": 2**32}, {"step": 1}, {"start": 2**32}, {"start": 2**18}])
def test_twin_with_a_reused_counter_is_caught(twin: dict[str, int]) -> None:
    assert repeats(Truncating(**twin))


def test_the_last_counter_is_drawn_and_nothing_beyond() -> None:
    stream = Stream(0)
    assert len(stream.words(NOISE, 2**64 - 1, WORDS - 8, 8)) == 8
    assert len(stream.normals(NOISE, 0, WORDS - 1, 1)) == 1
    assert len(stream.words(NOISE, 0, WORDS, 0)) == 0
    for step, start, count in [
        (0, WORDS - 8, 9),
        (0, WORDS, 1),
        (0, WORDS + 1, 0),
        (0, -1, 1),
        (0, 0, -1),
        (0, 0, WORDS + 1),
        (2**64, 0, 1),
        (-1, 0, 1),
    ]:
        for draw in (stream.words, stream.uniforms, stream.normals):
            with pytest.raises(PrivacyError, match="stream"):
                draw(NOISE, step, start, count)
    for purpose in (0, 1, 6, 2**32 + 1, -1):
        with pytest.raises(PrivacyError, match="not a purpose"):
            stream.words(purpose, 0, 0, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(("purpose", "step", "block"), [(2**32, 0, 0), (0, 2**64, 0), (0, 0, BLOCKS - 1), (0, 0, -1)])
def test_the_keystream_itself_never_wraps(purpose: int, step: int, block: int) -> None:
    with pytest.raises(PrivacyError, match="beyond"):
        keystream(COUNTING, purpose, step, block, torch.empty(16, dtype=torch.int64))


# --- goodness of fit ------------------------------------------------------------------------------------------------


def fits(draw: Tensor, cdf: Callable[[Tensor], Tensor]) -> bool:
    """Kolmogorov and Smirnov, at sup |F_n - F| <= 2.7 / sqrt(n)."""
    n = len(draw)
    expected, grid = cdf(draw.sort().values), torch.arange(n + 1, dtype=torch.float64) / n
    return float(torch.maximum((grid[1:] - expected).max(), (expected - grid[:-1]).max())) * math.sqrt(n) <= 2.7


@pytest.mark.parametrize("start", [0, 12_345])
def test_normals_are_standard_normals(start: int) -> None:
    """Scale 1 is accepted, 2/3 and 3/2 are rejected.

    False alarm 2 exp(-2 * 2.7^2) = 9e-7. Power against 2/3 and 3/2 (sup of the difference 0.097, n = 262,144): a miss
    has probability below exp(-4000). A shift or a scale off by 3 % (0.0072 of sup against 0.0053) is found too, 95 %.
    """
    draw = Stream(6).normals(NOISE, 0, start, 2**18)
    assert fits(draw, torch.special.ndtr)
    for wrong in (2 / 3, 3 / 2, 1.03, 0.97):
        assert not fits(draw * wrong, torch.special.ndtr)
    for parity in (0, 1):
        assert fits(draw[parity::2], torch.special.ndtr)


def test_uniforms_are_uniform() -> None:
    """Kolmogorov and Smirnov, false alarm 9e-7; a shift of 0.6 % is rejected."""
    draw = Stream(6).uniforms(Purpose.SAMPLE, 0, 0, 2**18)
    assert fits(draw, lambda u: u)
    assert not fits(draw * 0.994, lambda u: u)
    assert draw.min() > 0 and draw.max() <= 1


def tails_fit(draw: Draw) -> bool:
    """Counts beyond 4, 4.5 and 5 sigma, on either side, among 2^26 normals: means 2125, 228, 19.2 a side.

    Six two-sided Poisson tests at 1e-7 each: false alarm below 6e-7. Power above 1 - 1e-6 against a scale off by 5 %
    (3,300 beyond 4 instead of 2,125 or fewer), and against tails that end before 4.5 sigma.
    """
    edges = torch.tensor([4.0, 4.5, 5.0], dtype=torch.float64)
    counts = torch.zeros(2, 3, dtype=torch.int64)
    for i in range(32):
        z = draw(i, 0, 2**21)
        z = z[z.abs() > 4]
        counts += torch.stack([(z > e).sum() for e in edges] + [(z < -e).sum() for e in edges]).view(2, 3)
    means = 2**26 * torch.special.ndtr(-edges)
    below, above = poisson.cdf(counts.numpy(), means.numpy()), poisson.sf(counts.numpy() - 1, means.numpy())
    return bool(np.minimum(below, above).min() >= 0.5e-7)


def test_tails_to_five_sigma() -> None:
    stream, room = Stream(7), torch.empty(2**21, dtype=torch.float64)
    assert tails_fit(lambda step, start, count: stream.normals(NOISE, step, start, count, out=room))


@pytest.mark.parametrize("wrong", [lambda z: z * 1.05, lambda z: z / 1.05, lambda z: z.clamp(-4.5, 4.5)])
def test_twin_with_wrong_tails_is_caught(wrong: Callable[[Tensor], Tensor]) -> None:
    stream, room = Stream(7), torch.empty(2**21, dtype=torch.float64)
    assert not tails_fit(lambda step, start, count: wrong(stream.normals(NOISE, step, start, count, out=room)))


def correlated(draw: Draw) -> list[str]:
    """Pairs of draws whose correlation, or that of their squares, exceeds 5.5 / sqrt(n), n = 2^19 or more.

    36 statistics, each standard normal if independent: false alarm 36 * 3.8e-8 = 1.4e-6. A correlation of 0.015 is
    found with probability above 1 - 1e-7 (10.9 - 5.5 = 5.4 standard deviations).
    """
    n = 2**20
    z = draw(10, 0, n + 16)
    tile = TILE_BLOCKS * BLOCK_WORDS
    pairs = {f"coordinates {lag} apart": (z[:n], z[lag : n + lag]) for lag in (1, 2, 3, 4, 7, 8, 16)}
    pairs |= {f"coordinates a tile and {lag} apart": (z[: n - tile], z[tile + lag :][: n - tile]) for lag in (0, 1)}
    pairs |= {f"steps {lag} apart": (z[:n], draw(10 + lag, 0, n)) for lag in (1, 2, 256, 2**32)}
    pairs |= {f"a step and {lag} coordinates apart": (z[:n], draw(11, lag, n)) for lag in (1, 8)}
    pairs |= {f"a step and {-lag} coordinates apart": (z[lag : n + lag], draw(11, 0, n)) for lag in (1, 8)}
    pairs["cosine and sine"] = (z[0:n:2], z[1:n:2])
    found = []
    for name, (a, b) in pairs.items():
        for power in (1, 2):
            x, y = a**power - float(power == 2), b**power - float(power == 2)
            if abs(float((x @ y) / (x.norm() * y.norm()))) * math.sqrt(len(x)) > 5.5:
                found.append(f"{name}, power {power}")
    return found


def test_coordinates_and_steps_are_independent() -> None:
    stream = Stream(8)
    assert correlated(lambda step, start, count: stream.normals(NOISE, step, start, count)) == []


def test_twins_with_dependent_numbers_are_caught() -> None:
    stream = Stream(8)
    assert correlated(lambda step, start, count: stream.normals(NOISE, 0, start, count))
    assert correlated(lambda step, start, count: stream.normals(NOISE, 0, start + step, count))
    assert correlated(lambda step, start, count: stream.normals(NOISE, step, 0, TILE_BLOCKS * 8).repeat(9)[:count])

    def one_radius_a_block(step: int, start: int, count: int) -> Tensor:
        z = stream.normals(NOISE, step, start, count).view(-1, 2)
        radius: Tensor = torch.linalg.vector_norm(z, dim=1)
        first: Tensor = radius[::4].repeat_interleave(4)[: len(z)]
        return z.mul((first / radius).unsqueeze(1)).view(-1)

    found = correlated(one_radius_a_block)
    assert found and all(name.endswith("power 2") for name in found)


def test_purposes_are_independent() -> None:
    """Ten correlations of n = 2^19 normals at 5.5 / sqrt(n): false alarm 4e-7; a shared purpose has correlation 1."""
    draws = [Stream(9).normals(purpose, 0, 0, 2**19) for purpose in Purpose]
    table = torch.corrcoef(torch.stack(draws)) - torch.eye(len(draws), dtype=torch.float64)
    assert float(table.abs().max()) * math.sqrt(2**19) < 5.5


# --- keys -----------------------------------------------------------------------------------------------------------


def test_a_seed_is_a_key_and_no_seed_is_a_new_one() -> None:
    assert torch.equal(Stream(0).words(NOISE, 0, 0, 64), Stream(0).words(NOISE, 0, 0, 64))
    streams = [Stream(seed) for seed in (0, 1, -1, 16, 2**64, 2**64 + 1, 10**5000)] + [Stream() for _ in range(8)]
    assert len({tuple(stream.words(NOISE, 0, 0, 2).tolist()) for stream in streams}) == len(streams)
    assert [stream.secure for stream in streams] == [False] * 7 + [True] * 8
    for seed in (True, 1.0, "1", np.int64(1)):
        with pytest.raises(PrivacyError, match="seed"):
            Stream(seed)  # type: ignore[arg-type]


def test_a_secure_key_is_256_bits_of_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def from_system(size: int) -> bytes:
        asked.append(size)
        return COUNTING

    monkeypatch.setattr(secrets, "token_bytes", from_system)
    words = Stream().words(Purpose.ORDER, 1, 0, 3).tolist()
    assert asked == [32]
    assert [w % 2**64 for w in words] == reference_words(COUNTING, Purpose.ORDER, 1, 0, 3)


@pytest.mark.parametrize("seed", [None, 12])
def test_a_stream_is_neither_copied_nor_pickled_nor_shown(seed: int | None) -> None:
    stream = Stream(seed)
    stream.normals(NOISE, 0, 0, 10)
    for store in (copy.copy, copy.deepcopy, pickle.dumps, lambda s: torch.save({"s": s}, io.BytesIO())):
        with pytest.raises(PrivacyError, match="copied or pickled"):
            store(stream)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(PrivacyError, match="copied or pickled"):
            pickle.dumps([stream], protocol)
    assert repr(stream) == str(stream) == ("Stream(secure)" if seed is None else "Stream(seeded)")
    assert not hasattr(stream, "__dict__")


def test_nothing_but_the_stream_holds_the_key() -> None:
    stream = Stream()
    stream.normals(NOISE, 0, 0, 10)
    assert [holder for holder in gc.get_referrers(stream._key) if holder is not stream] == []


def test_a_state_is_words_of_their_own_and_none_for_noise() -> None:
    """Three generators' states, each word in one of them alone; noise and sampling never come from such a state."""
    stream = Stream(13)
    words = stream.words(Purpose.FORWARD, 4, 0, 2 * module.STATE)
    states = torch.cat([stream.state_for(Purpose.FORWARD, 4, index) for index in (0, 1)])
    assert torch.equal(states, words & (2**32 - 1))
    for purpose in (Purpose.NOISE, Purpose.SAMPLE):
        with pytest.raises(PrivacyError, match="draw from the stream itself"):
            stream.state_for(purpose, 0, 0)


def test_a_torch_generator_from_a_secure_seed_is_not_secure_noise() -> None:
    """Torch's CPU generator keeps the low 32 bits of a seed, so all its noises can be tried."""
    seed = 0x1234_5678_9ABC
    other = seed ^ 1 << 40
    first, second = (torch.randn(64, generator=torch.Generator().manual_seed(s)) for s in (seed, other))
    assert torch.equal(first, second)
    assert not torch.equal(Stream(seed).normals(NOISE, 0, 0, 64), Stream(other).normals(NOISE, 0, 0, 64))


# --- forks ----------------------------------------------------------------------------------------------------------


def in_child(work: Callable[[], bytes]) -> bytes:
    """What `work` gives in a forked child; an error gives its message."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on: a fork of a process with threads
        child = os.fork()
    if child == 0:
        try:
            os.close(read)
            try:
                answer = work()
            except PrivacyError as error:
                answer = str(error).encode()
            with os.fdopen(write, "wb") as pipe:
                pipe.write(answer)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


def draw_bytes(stream: Words) -> bytes:
    return stream.words(NOISE, 0, 5, 100).numpy().tobytes()


def repeats_after_a_fork(stream: Words) -> bool:
    """Whether parent, two children and a grandchild, the parent having drawn ahead, share a word.

    False alarm 400^2 / 2^65 = 4e-15; power 1.
    """
    ahead = draw_bytes(stream)
    draws = [ahead, in_child(lambda: draw_bytes(stream)), in_child(lambda: draw_bytes(stream))]
    draws.append(in_child(lambda: in_child(lambda: draw_bytes(stream))))
    assert [len(draw) for draw in draws] == [800] * 4
    assert draw_bytes(stream) == ahead
    return len(np.unique(np.frombuffer(b"".join(draws), dtype=np.int64))) < 400


class Unforked:
    """Evil twin: a stream that does not know of forks."""

    def __init__(self) -> None:
        self.key = secrets.token_bytes(32)

    def words(self, purpose: Purpose, step: int, start: int, count: int) -> Tensor:
        words = torch.empty(start + count + -(start + count) % BLOCK_WORDS, dtype=torch.int64)
        keystream(self.key, purpose, step, 0, words)
        return words[start : start + count]


def test_a_forked_child_draws_with_a_key_of_its_own() -> None:
    assert not repeats_after_a_fork(Stream())


def test_twin_that_repeats_after_a_fork_is_caught() -> None:
    assert repeats_after_a_fork(Unforked())


@contextlib.contextmanager
def unhooked(stream: Stream) -> Iterator[None]:
    module._live.discard(stream)
    yield
    module._live.add(stream)


def test_hook_and_process_id_each_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream()
    with unhooked(stream):
        assert not repeats_after_a_fork(stream)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    stream = Stream()
    assert not repeats_after_a_fork(stream)
    with unhooked(stream):
        assert repeats_after_a_fork(stream)


def test_a_child_inherits_neither_key_nor_buffers() -> None:
    stream = Stream()
    stream.normals(NOISE, 0, 0, 10)
    key = stream._key
    assert stream._idle
    assert in_child(lambda: bytes([stream._key == key, len(stream._idle)])) == b"\0\0"
    assert stream._key == key


def test_a_seeded_stream_is_refused_in_a_child() -> None:
    stream = Stream(14)
    before = draw_bytes(stream)
    assert b"a seeded stream in a forked process" in in_child(lambda: draw_bytes(stream))
    with unhooked(stream):
        assert b"a seeded stream in a forked process" in in_child(lambda: draw_bytes(stream))
    assert in_child(lambda: draw_bytes(Stream(14))) == before == draw_bytes(stream)


# --- speed ----------------------------------------------------------------------------------------------------------


def times(draw: Callable[[], object], torchs: Callable[[], object], clock: Callable[[], float]) -> tuple[float, float]:
    """Medians of 9, drawn in turn."""
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(9):
        for work, spent in zip((draw, torchs), taken, strict=True):
            start = clock()
            work()
            spent.append(clock() - start)
    return statistics.median(taken[0]), statistics.median(taken[1])


@pytest.mark.alone
def test_normals_cost_at_most_three_times_torchs() -> None:
    """469,000 normals (float64) against torch's (float32): least median of three to eight tries against least median.

    On two threads by the clock; or on one thread, which is all that torch uses, by its processor time: where others
    keep a core busy, threads wait for one another and the clock counts the others' work. Each side has its own least,
    so that a disturbance of torch's draws helps nobody.
    """
    stream, count = Stream(), 469_000
    ways = {2: time.perf_counter, 1: time.thread_time}
    tries: dict[int, list[tuple[float, float]]] = {threads: [] for threads in ways}
    ratios: dict[int, float] = {}
    for attempt in range(8):
        for threads, clock in ways.items():
            with on_threads(threads):
                tries[threads].append(
                    times(
                        lambda: stream.normals(NOISE, 0, 0, count),
                        lambda: torch.empty(count, dtype=torch.float32).normal_(),
                        clock,
                    )
                )
            ours, torchs = (min(side) for side in zip(*tries[threads], strict=True))
            ratios[threads] = ours / torchs
        if attempt >= 2 and min(ratios.values()) <= 3:
            return
    pytest.fail(f"ratio by number of threads: {ratios}")
