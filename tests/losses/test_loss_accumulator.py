"""LossAccumulator: the exact sum, rounded once, however the losses were split, ordered and merged."""

import pickle
import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import isograd as ig

BITS = {"float32": 40, "float64": 84}


def exact(losses, dtype):
    """The sum of the losses rounded to the quantum, in fractions, rounded once."""
    scale = 1 << BITS[dtype]
    total = Fraction(sum(round(Fraction(float(x)) * scale) for x in losses), scale)
    if dtype == "float64":
        return np.float64(float(total))
    # binary64 is wide enough to find the two neighbours of float32 that matter, not to choose between them.
    near = np.float32(float(total))
    candidates = (near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf)))
    return min(candidates, key=lambda c: (abs(Fraction(float(c)) - total), int(c.view(np.int32)) & 1))


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(["float32", "float64"]),
    st.lists(st.tuples(st.floats(-1, 1, width=32), st.integers(-60, 70)), max_size=30),
    st.integers(0, 2**32),
)
def test_the_sum_is_exact_and_free_of_order(dtype, parts, seed):
    losses = np.array([np.ldexp(m, e) for m, e in parts], dtype)
    rng = np.random.default_rng(seed)
    expected = exact(losses, dtype)
    for _ in range(3):
        shuffled = rng.permutation(losses)
        total, other = ig.LossAccumulator(dtype), ig.LossAccumulator(dtype)
        for piece in np.array_split(shuffled, rng.integers(1, 5)):
            (total if rng.random() < 0.5 else other).add(piece)
        total.merge(other)
        assert np.dtype(dtype).type(total.total()).tobytes() == expected.tobytes()
        assert type(total.total()) is float


def test_a_sum_in_floats_would_differ():
    losses = np.random.default_rng(50).random(1000).astype(np.float32)
    forth, back = np.cumsum(losses)[-1], np.cumsum(losses[::-1])[-1]
    assert forth != back
    total = ig.LossAccumulator()
    for x in losses:
        total.add(np.array(x))
    assert total.total() == np.float32(np.float64(losses).sum())


@pytest.mark.parametrize("dtype", BITS)
def test_special_losses(dtype):
    inf, nan = np.inf, np.nan
    for losses, expected in (
        ([1, inf], inf), ([-inf, 1], -inf), ([inf, -inf], nan), ([nan, 1], nan), ([nan, inf], nan), ([inf, inf], inf),
    ):  # fmt: skip
        total = ig.LossAccumulator(dtype)
        for x in losses:
            total.add(np.array([x], dtype))
        np.testing.assert_equal((total.total(), total.mean(2)), (expected, expected))
    largest = np.finfo(dtype).max
    total = ig.LossAccumulator(dtype)
    total.add(np.full(3, largest, dtype))
    assert total.total() == inf
    total.add(np.full(2, -largest, dtype))
    assert total.total() == largest


def test_nothing_added():
    total = ig.LossAccumulator()
    assert total.total() == 0
    assert not np.signbit(total.total())
    assert np.isnan(total.mean(0))
    total.add(np.empty((0, 3), np.float32))
    assert total.total() == 0


def test_the_mean_is_rounded_twice():
    total = ig.LossAccumulator()
    total.add(np.array([1, 2, 4], np.float32))
    assert total.mean(3) == np.float32(7) / np.float32(3)
    assert total.mean(np.float32(2.5)) == np.float32(7) / np.float32(2.5)


def test_tensors_and_pickles():
    torch = pytest.importorskip("torch", reason="needs torch")
    total = ig.LossAccumulator()
    total.add(torch.arange(6, dtype=torch.float32).view(2, 3).t())
    again = pickle.loads(pickle.dumps(total))
    again.add(np.ones(1, np.float32))
    assert (total.total(), again.total()) == (15, 16)


def test_what_it_refuses():
    with pytest.raises(ig.InvalidProblemError, match="bfloat16"):
        ig.LossAccumulator("bfloat16")
    total = ig.LossAccumulator()
    with pytest.raises(ig.InvalidProblemError, match="float64"):
        total.add(np.ones(2))
    with pytest.raises(ig.InvalidProblemError, match="float"):
        total.add(1.0)
    with pytest.raises(ig.InvalidProblemError, match="float64"):
        total.merge(ig.LossAccumulator("float64"))
    with pytest.raises(ig.InvalidProblemError, match="int"):
        total.merge(3)
    with pytest.raises(ig.InvalidProblemError, match="count"):
        total.mean("many")
    assert total.total() == 0


@pytest.mark.parametrize(("dtype", "step"), [("float32", 2.0**-20), ("float64", 2.0**-30)])
def test_losses_of_both_signs_round_alike(dtype, step):
    half = np.ldexp(1.0, -BITS[dtype] - 1)
    for loss, units in ((half * (1 + step), 1), (half * (1 - step), 0), (half, 0), (3 * half, 2)):
        for sign in (1, -1):
            total = ig.LossAccumulator(dtype)
            total.add(np.array([sign * loss], dtype))
            assert total.total() == sign * units * 2 * half


def test_the_mean_of_nothing_is_the_canonical_nan():
    for dtype in BITS:
        mean = ig.LossAccumulator(dtype).mean(0)
        assert type(mean) is float
        assert struct.pack(">d", mean).hex() == "7ff8000000000000"


def test_names_of_dtypes_only():
    with pytest.raises(ig.InvalidProblemError, match="dtype is"):
        ig.LossAccumulator(["float32"])
