"""sum and mean: kernels against the reference bit for bit, sums against exact rationals."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isograd.errors import InvalidProblemError, UnsupportedError
from isograd.reduction import api, reference
from isograd.runtime import fenv, parallel

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def bits(x):
    return (x.dtype, x.shape, np.ascontiguousarray(x).tobytes())


@st.composite
def problems(draw):
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    step = draw(st.sampled_from([1, 2, -1, -2]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    x = rng.standard_normal([n * abs(step) for n in shape]) * 2.0 ** draw(st.integers(-20, 12))
    x = np.asarray(x)[(..., *(slice(None, None, step) for _ in shape))]
    x = x.transpose(rng.permutation(x.ndim))
    axes = draw(st.sets(st.integers(0, x.ndim - 1))) if x.ndim else set()
    signed = [a - x.ndim if draw(st.booleans()) else a for a in axes]
    axis = draw(st.sampled_from([None, tuple(signed), *(signed[:1])]))
    return x, axis, draw(st.booleans())


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=40, deadline=None)
@given(problem=problems())
def test_bits_of_the_reference(dtype, problem):
    x, axis, keepdims = problem
    x = x.astype(dtype)
    before = x.copy()
    assert bits(api.sum(x, axis, keepdims)) == bits(reference.sum(x, axis, keepdims))
    assert bits(api.mean(x, axis, keepdims)) == bits(reference.mean(x, axis, keepdims))
    with np.errstate(all="ignore"):
        assert api.sum(x, axis, keepdims).shape == np.sum(x.astype(np.float64), axis, keepdims=keepdims).shape
    assert bits(x) == bits(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [255, 256, 257, 1000])
def test_blocks_and_exponents(dtype, length):
    rng = np.random.default_rng(length)
    top = {"float16": 3, "bfloat16": 100, "float32": 100, "float64": 1000}[np.dtype(dtype).name]
    rows = np.ldexp(rng.standard_normal((12, length)), rng.integers(-30, 3, (12, length)))
    x = np.ldexp(rows, np.linspace(-1.3 * top - 20, top, 12).astype(int)[:, None]).astype(dtype)
    assert bits(api.sum(x, 1)) == bits(reference.sum(x, 1))
    assert bits(api.mean(x, 1)) == bits(reference.mean(x, 1))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sum_within_its_bound(dtype):
    rng = np.random.default_rng(1)
    x = np.ldexp(rng.standard_normal((8, 3000)), rng.integers(-60, 10, (8, 3000))).astype(dtype)
    x[4:, 1500:] = -x[4:, :1500]  # everything cancels but a little
    x[4:, 7] *= 1 + 2.0**-10
    for row in x:
        exact = sum((Fraction(float(v)) for v in row), Fraction(0))
        got = api.sum(row)
        quantum = 2.0 ** (math.frexp(float(np.abs(row).max()))[1] - 1 - (44 if dtype == np.float32 else 88))
        bound = row.size * Fraction(quantum) / 2 + Fraction(float(np.spacing(np.abs(got)))) / 2
        assert abs(Fraction(float(got)) - exact) <= bound


def test_a_sum_in_floats_would_miss_the_bits():
    # What the order-free sum is for: NumPy's own sum depends on the order of the terms, this one does not.
    rng = np.random.default_rng(2)
    x = rng.standard_normal(5000).astype(np.float32) * 1000
    orders = [rng.permutation(5000) for _ in range(20)]
    assert len({api.sum(x[order]).tobytes() for order in orders}) == 1
    assert len({np.sum(x[order]).tobytes() for order in orders}) > 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_and_layout_leave_no_trace(dtype):
    x = np.random.default_rng(3).standard_normal((6, 5, 70)).astype(dtype)
    expected = api.sum(x, (0, 2))
    padded = np.concatenate([x, np.zeros((6, 5, 300), dtype)], axis=2)
    assert bits(api.sum(padded, (0, 2))) == bits(expected)
    assert bits(api.sum(np.asfortranarray(x), (0, 2))) == bits(expected)
    assert bits(np.concatenate([api.sum(x[:, i : i + 1], (0, 2)) for i in range(5)])) == bits(expected)
    assert bits(api.sum(x.reshape(6, 350)[:, ::-1])) == bits(api.sum(x))


def test_threads_leave_no_trace(monkeypatch):
    x = np.random.default_rng(4).standard_normal((300, 40)).astype(np.float32)
    expected = api.mean(x, 1)
    before = parallel.get_num_threads()
    try:
        for threads, grain in ((1, 1), (2, 400), (3, 4000)):
            parallel.set_num_threads(threads)
            monkeypatch.setattr(parallel, "grain", lambda count, work, chosen=grain: max(1, chosen // work))
            assert bits(api.mean(x, 1)) == bits(expected)
    finally:
        parallel.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(dtype):
    inf, nan = np.inf, np.nan
    rows = [
        ([1, inf, 2], inf),
        ([-inf, -inf, 0], -inf),
        ([inf, -inf, 1], nan),
        ([inf, nan, 1], nan),
        ([-0.0, -0.0, -0.0], 0.0),
        ([0.0, 0.0, 0.0], 0.0),
    ]
    x, expected = np.array([r for r, _ in rows], dtype), np.array([e for _, e in rows], dtype)
    assert bits(api.sum(x, 1)) == bits(expected)
    assert bits(api.mean(x, 1)) == bits(expected)
    long = np.ones(600, dtype)
    long[599] = -inf
    assert api.sum(long) == -inf
    payload = np.array([-nan, 1], dtype)
    assert api.sum(payload).tobytes() == np.array(nan, dtype).tobytes()
    largest = ml_dtypes.finfo(dtype).max
    assert api.sum(np.array([largest, largest], dtype)) == inf
    assert api.sum(np.array([largest, largest, -largest], dtype)) == largest
    smallest = np.array([ml_dtypes.finfo(dtype).smallest_subnormal] * 3, dtype)
    assert float(api.sum(smallest)) == 3 * float(smallest[0])


def test_no_terms():
    x = np.ones((2, 0, 3), np.float32)
    assert bits(api.sum(x, 1)) == bits(np.zeros((2, 3), np.float32))
    assert bits(api.mean(x, 1)) == bits(np.full((2, 3), np.nan, np.float32))
    assert api.sum(x, 2).shape == (2, 0)
    assert bits(api.sum(x)) == bits(np.zeros((), np.float32))
    assert bits(api.sum(x, ())) == bits(x)


def test_mean_is_rounded_once():
    # 16-bit means: the sum stays in binary32 until the division is done.
    x = np.full(3000, 60.0, np.float16)
    assert api.sum(x) == np.inf
    assert api.mean(x) == 60
    assert api.mean(np.array([1, 2], ml_dtypes.bfloat16)) == 1.5


@pytest.mark.skipif(not fenv._X86, reason="sets MXCSR")
@pytest.mark.parametrize("control", [0x9FC0, 0x5F80], ids=["flush to zero", "round up"])
def test_the_callers_floating_point_environment(control):
    rng = np.random.default_rng(5)
    x = np.ldexp(rng.standard_normal((40, 60)), -rng.integers(120, 149, (40, 60))).astype(np.float32)
    expected = api.mean(x, 1)
    previous = fenv.enter()
    try:
        fenv.leave(control)
        changed = api.mean(x, 1)
    finally:
        fenv.leave(previous)
    assert bits(changed) == bits(expected)


def test_errors():
    x = np.ones((2, 3), np.float32)
    for axis, words in (
        (2, "axis 2 is out of range"),
        (-3, "axis -3"),
        ((0, -2), "twice"),
        (1.0, "1.0"),
        (True, "True"),
    ):
        with pytest.raises(InvalidProblemError, match=words):
            api.sum(x, axis)
    with pytest.raises(InvalidProblemError, match=r"mean: x is a list"):
        api.mean([1.0])
    with pytest.raises(UnsupportedError, match=r"sum: x has dtype int64"):
        api.sum(np.ones(2, np.int64))
