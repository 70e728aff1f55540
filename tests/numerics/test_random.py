"""The counter-based generator: known answers, bits that must never change, and the shape of the distributions."""

import hashlib
import math

import numpy as np
import pytest

import isograd as ig
from isograd.numerics import random

# From the known-answer tests of the Random123 distribution.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_known_answers(counter, key, expected):
    block = random.philox(np.array(words(counter), np.uint32), tuple(words(key)))
    assert block.tolist() == words(expected)


def test_philox_counters_are_independent_of_each_other():
    counters = np.array([words(counter) for counter, _, _ in VECTORS], np.uint32)
    together = random.philox(counters, (1, 2))
    alone = [random.philox(c, (1, 2)) for c in counters]
    assert np.array_equal(together, alone)


def digest(array):
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]


def test_bits_never_change():
    assert digest(random.integers(1000, seed=3, stream=4)) == "eab22fad9ad5774d"
    assert digest(random.uniform(1000, seed=3, stream=4)) == "5a1ccda27480e6d3"
    assert digest(random.normal(1000, seed=3, stream=4, dtype=np.float64)) == "d92ebb27cfc3ea5f"
    assert digest(random.permutation(1000, seed=3, stream=4)) == "f510ae103a59c6ac"


@pytest.mark.parametrize("make", [random.integers, random.uniform, random.normal])
def test_numbers_depend_on_their_position_only(make, monkeypatch):
    whole = make((3, 40000), 5, 6)
    assert np.array_equal(whole.ravel()[:7], make(7, 5, 6))
    monkeypatch.setattr(random, "_CHUNK", 1000)
    assert np.array_equal(whole, make((3, 40000), 5, 6))


@pytest.mark.parametrize("make", [random.integers, random.uniform, random.normal])
def test_seeds_and_streams_differ(make):
    base = make(100, 1, 1)
    for other in (make(100, 2, 1), make(100, 1, 2), make(100, 1 << 40, 1)):
        assert not np.any(base == other)
    assert make((0, 3), 1).shape == (0, 3)
    assert make((), 1).shape == ()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_uniform(dtype):
    x = random.uniform(100_000, seed=1, dtype=dtype)
    assert x.dtype == dtype
    assert x.min() >= 0
    assert x.max() < 1
    # The Kolmogorov-Smirnov distance of a right generator exceeds 2 / sqrt(n) once in 1500 seeds.
    gap = np.abs(np.sort(x) - (np.arange(x.size) + 0.5) / x.size).max()
    assert gap < 2 / math.sqrt(x.size)


def test_float32_uniform_is_the_cut_float64_one():
    wide = random.uniform(1000, seed=1, dtype=np.float64)
    assert np.array_equal(random.uniform(1000, seed=1), np.floor(wide * 2**24) / 2**24)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_normal(dtype):
    x = random.normal(100_000, seed=1, dtype=dtype)
    assert x.dtype == dtype
    cumulative = np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in np.sort(x.astype(np.float64))])
    assert np.abs(cumulative - (np.arange(x.size) + 0.5) / x.size).max() < 2 / math.sqrt(x.size)
    assert 4 < np.abs(x).max() < 6


def test_normal_under_another_floating_point_environment():
    torch = pytest.importorskip("torch")
    expected = random.normal(1000, 0, dtype=np.float64)
    torch.set_flush_denormal(True)
    try:
        assert np.array_equal(random.normal(1000, 0, dtype=np.float64), expected)
    finally:
        torch.set_flush_denormal(False)


def test_permutation():
    p = random.permutation(1000, seed=9)
    assert sorted(p.tolist()) == list(range(1000))
    assert np.count_nonzero(p == np.arange(1000)) < 10


@pytest.mark.parametrize("seed", [-1, 1 << 64, 1.0, True])
def test_wrong_seed(seed):
    with pytest.raises(ig.InvalidProblemError, match="seed"):
        random.normal(3, seed=seed)


def test_wrong_stream_and_dtype():
    with pytest.raises(ig.InvalidProblemError, match="stream"):
        random.uniform(3, 0, stream=1 << 32)
    with pytest.raises(ig.InvalidProblemError, match="float16"):
        random.uniform(3, 0, dtype=np.float16)
    with pytest.raises(ig.InvalidProblemError, match="int64"):
        random.normal(3, 0, dtype=np.int64)
