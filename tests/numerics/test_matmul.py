"""The order-free matrix product: bits against its definition in exact integers, values against exact rationals."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import threadpoolctl
from hypothesis import given, settings
from hypothesis import strategies as st

from isograd.errors import InvalidProblemError, UnsupportedError
from isograd.numerics import matmul as module
from isograd.numerics.matmul import matmul, matmul_error_bound
from isograd.numerics.reference import narrow
from isograd.runtime import fenv

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
EXPONENTS = {"float16": (-20, 6), "bfloat16": (-60, 50), "float32": (-60, 55), "float64": (-480, 480)}


def bits(x):
    return (x.dtype, x.shape, np.ascontiguousarray(x).tobytes())


def random(rng, shape, dtype, spread=None):
    """Normal numbers, with exponents spread evenly over a range where asked."""
    x = rng.standard_normal(shape)
    if spread is not None:
        x = np.ldexp(x, rng.integers(*spread, shape, endpoint=True))
    return x.astype(dtype)


# --- the definition once more, in rationals -------------------------------------------------------------------------
def sliced(values, count):
    largest = max(abs(float(v)) for v in values)
    exponent = math.frexp(largest)[1]
    cut = []
    for v in values:
        rest, parts = Fraction(float(v)) * Fraction(2) ** (18 - exponent), []
        for _ in range(count):
            parts.append(round(rest))
            rest = (rest - parts[-1]) * 2**18
        cut.append(parts)
    return cut, exponent


def defined_entry(row, column, count):
    a, ea = sliced(row, count)
    b, eb = sliced(column, count)
    total = 0.0
    for level in reversed(range(count)):
        t = sum(x[p] * y[level - p] for x, y in zip(a, b, strict=True) for p in range(level + 1))
        assert abs(t) < 2**53
        total = float(t) + total * 2.0**-18
    exact = Fraction(total) * Fraction(2) ** (ea + eb - 36)
    try:
        return float(exact)
    except OverflowError:
        return math.copysign(math.inf, total)


def defined(a, b):
    count = 4 if a.dtype == np.float64 else 3
    c = np.array([[defined_entry(row, column, count) for column in b.T] for row in a])
    c = narrow(c, np.float64 if a.dtype == np.float64 else np.float32)
    return narrow(c, a.dtype)


def exact(a, b):
    """Rounded to binary64 once, which for the narrower types is far below their bounds."""
    rows, columns = [[Fraction(float(v)) for v in row] for row in a], [[Fraction(float(v)) for v in row] for row in b.T]
    return [[sum((x * y for x, y in zip(r, c, strict=True)), Fraction(0)) for c in columns] for r in rows]


def assert_within_bound(a, b, precision=None):
    c, bound = matmul(a, b, precision), matmul_error_bound(a, b, precision)
    for i, row in enumerate(exact(a, b)):
        for j, value in enumerate(row):
            if np.isfinite(bound[i, j]):
                assert abs(Fraction(float(c[i, j])) - value) <= Fraction(float(bound[i, j])), (i, j)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_bits_and_bound_over_all_exponents(dtype, data):
    m, k, n, seed = (data.draw(st.integers(1, top)) for top in (4, 12, 4, 2**32))
    low, high = EXPONENTS[np.dtype(dtype).name]
    start = data.draw(st.integers(low, high))
    stop = data.draw(st.integers(start, high))
    rng = np.random.default_rng(seed)
    a, b = random(rng, (m, k), dtype, (start, stop)), random(rng, (k, n), dtype, (start, stop))
    assert bits(matmul(a, b, "wide")) == bits(defined(a, b))
    assert_within_bound(a, b, "wide")


@pytest.mark.parametrize("dtype", DTYPES)
def test_cancellation_stays_within_the_bound(dtype):
    rng = np.random.default_rng(1)
    half, column = random(rng, (3, 40), dtype), random(rng, (40, 2), dtype)
    a, b = np.concatenate([half, half], axis=1), np.concatenate([column, -column], axis=0)
    assert not matmul(a, b).any()
    a[:, :40] *= np.array(1 + 2.0**-7, dtype)
    assert_within_bound(a, b)


@pytest.mark.parametrize(("dtype", "slices"), [(np.float32, 2), (np.float64, 3)])
def test_fewer_slices_would_break_the_bound(dtype, slices, monkeypatch):
    # One large element next to small ones, whose last bits the last slice holds.
    rng = np.random.default_rng(2)
    a, b = random(rng, (8, 64), dtype, (-18, -14)), random(rng, (64, 8), dtype, (-18, -14))
    a[:, 0], b[0], a[:, 1], b[1] = 1, 1, 1, -1
    a[:, 1:] += a[:, 1:] / 3
    a[:, 1] = 1
    assert_within_bound(a, b)
    monkeypatch.setitem(module._SLICES, np.dtype(dtype), slices)
    with pytest.raises(AssertionError):
        assert_within_bound(a, b)


def test_extreme_exponents():
    tiny, huge = 5e-324, 1.7976931348623157e308
    a = np.array([[tiny, tiny], [huge, huge], [huge, tiny], [2.0**-600, 0], [0, 0]])
    b = np.array([[tiny, huge, 1.0, 2.0**-474, -(2.0**-475)], [tiny, -huge, 0.0, 0.0, 0.0]])
    assert bits(matmul(a, b)) == bits(defined(a, b))
    assert matmul(a, b)[1, 2] == huge
    assert matmul(a, b)[0, 2] == tiny
    overflow = matmul(np.array([[huge, huge]]), np.array([[4.0], [4.0]]))
    assert overflow[0, 0] == np.inf
    small = np.array([[2.0**-149, 2.0**-140]], np.float32)
    assert matmul(small, np.array([[1.0], [2.0]], np.float32))[0, 0] == np.float32(2.0**-149 + 2.0**-139)


def test_signs_of_zero():
    for a, b in (([[-0.0]], [[1.0]]), ([[1.0, 1.0]], [[1.0], [-1.0]]), ([[-0.0, 0.0]], [[0.0], [-0.0]])):
        c = matmul(np.array(a), np.array(b))
        assert c.tobytes() == np.zeros((1, 1)).tobytes()
    assert np.signbit(matmul(np.array([[-5e-324]]), np.array([[0.25]])))[0, 0]


# --- nothing but the values matters ---------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_order_padding_batches_and_layout(dtype):
    rng = np.random.default_rng(3)
    a, b = random(rng, (96, 300), dtype, (-8, 4)), random(rng, (300, 130), dtype, (-8, 4))
    c = matmul(a, b)
    for threads in (1, 2):
        with threadpoolctl.threadpool_limits(threads):
            assert bits(matmul(a, b)) == bits(c)
    order = rng.permutation(300)
    assert bits(matmul(a[:, order], b[order])) == bits(c)
    zeros_a, zeros_b = np.zeros((96, 700), dtype), np.zeros((700, 130), dtype)
    assert bits(matmul(np.concatenate([a, zeros_a], 1), np.concatenate([b, zeros_b]))) == bits(c)
    assert bits(np.concatenate([matmul(a[:7], b), matmul(a[7:8], b), matmul(a[8:], b)])) == bits(c)
    assert bits(np.stack([matmul(row, b) for row in a])) == bits(c)
    assert bits(np.stack([matmul(a, column) for column in b.T], axis=1)) == bits(c)
    assert bits(matmul(np.asfortranarray(a), np.asfortranarray(b))) == bits(c)
    assert bits(matmul(b.T, a.T).T) == bits(c)
    assert bits(matmul(a[::-1, ::-1], b[::-1])[::-1]) == bits(c)


def test_plain_matmul_does_depend_on_the_order():
    # Without this the test above would show nothing.
    rng = np.random.default_rng(4)
    a, b = rng.standard_normal((20, 300)), rng.standard_normal((300, 20))
    order = rng.permutation(300)
    assert (a[:, order] @ b[order]).tobytes() != (a @ b).tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_chunks_of_the_contracted_axis_leave_no_trace(dtype, monkeypatch):
    rng = np.random.default_rng(5)
    a, b = random(rng, (5, 1000), dtype, (-30, 0)), random(rng, (1000, 4), dtype, (-30, 0))
    c = matmul(a, b)
    for chunk in (1, 7, 512):
        monkeypatch.setattr(module, "CHUNK", chunk)
        assert bits(matmul(a, b)) == bits(c)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_long_contractions(dtype):
    rng = np.random.default_rng(6)
    k = 3 * module.CHUNK + 5
    a = (1 - rng.random((1, k)) * 2.0**-10).astype(dtype)
    b = (1 - rng.random((k, 1)) * 2.0**-10).astype(dtype)
    b[0] = -1
    c = matmul(a, b)
    bound = matmul_error_bound(a, b)[0, 0]
    # Sums of more than 2^53 units appear; their roundings may not.
    assert bound < 2.0 ** (-3 if dtype == np.float32 else -30)
    products = (Fraction(float(x)) * Fraction(float(y)) for x, y in zip(a[0], b[:, 0], strict=True))
    scaled = sum(int(p * 2**106) for p in products)
    assert abs(Fraction(float(c[0, 0])) - Fraction(scaled, 2**106)) <= Fraction(float(bound))
    order = rng.permutation(k)
    assert bits(matmul(a[:, order], b[order])) == bits(c)


# --- special values -------------------------------------------------------------------------------------------------
def ieee_entry(row, column, ordinary):
    with np.errstate(invalid="ignore"):
        products = np.asarray(row, np.float64) * np.asarray(column, np.float64)
    if np.isnan(products).any() or (np.inf in products and -np.inf in products):
        return np.nan
    infinite = products[np.isinf(products)]
    return infinite[0] if infinite.size else ordinary


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_special_values(dtype, data):
    element = st.sampled_from([0.0, -0.0, 1.0, -2.0, 1.5, 1.0, np.inf, -np.inf, np.nan])
    m, k, n = (data.draw(st.integers(1, 4)) for _ in range(3))
    a, b = (
        np.array(data.draw(st.lists(element, min_size=r * s, max_size=r * s)), dtype).reshape(r, s)
        for r, s in ((m, k), (k, n))
    )
    zeroed = matmul(np.where(np.isfinite(a), a, 0).astype(dtype), np.where(np.isfinite(b), b, 0).astype(dtype))
    expected = [[ieee_entry(a[i], b[:, j], zeroed[i, j]) for j in range(n)] for i in range(m)]
    assert bits(matmul(a, b)) == bits(narrow(np.array(expected), dtype))


def test_special_values_stay_where_they_are():
    rng = np.random.default_rng(7)
    a, b = rng.standard_normal((6, 9)), rng.standard_normal((9, 6))
    c = matmul(a, b)
    a[2, 3], b[4, 1] = -np.inf, np.nan
    touched = matmul(a, b)
    assert np.isinf(touched[2, [0, 2, 3, 4, 5]]).all()
    assert np.isnan(touched[:, 1]).all()
    rest = np.ix_([0, 1, 3, 4, 5], [0, 2, 3, 4, 5])
    assert bits(touched[rest]) == bits(c[rest])


# --- shapes and errors ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((3,), (3,)), ((3,), (3, 2)), ((2, 3), (3,)), ((4, 2, 3), (3,)), ((3,), (4, 3, 2)), ((4, 2, 3), (3, 5)),
        ((2, 3), (4, 3, 5)), ((4, 1, 2, 3), (5, 3, 2)), ((0, 3), (3, 2)), ((2, 0), (0, 3)), ((0,), (0,)),
        ((2, 3), (3, 0)), ((0, 2, 3), (3, 2)), ((0, 2, 3), (1, 3, 2)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_shapes_as_in_numpy(a, b, dtype):
    rng = np.random.default_rng(8)
    x, y = rng.integers(-8, 9, a).astype(dtype), rng.integers(-8, 9, b).astype(dtype)
    expected = np.matmul(x.astype(np.float64), y.astype(np.float64))
    c = matmul(x, y)
    assert isinstance(c, np.ndarray)
    assert bits(c) == bits(np.asarray(narrow(np.asarray(expected + 0.0), dtype)))
    assert matmul_error_bound(x, y).shape == c.shape


def test_errors():
    f = np.float32
    for a, b, words in (
        (np.ones((2, 3), f), np.ones((2, 3), f), ["columns of a (3)", "(2)"]),
        (np.ones((2, 3), f), np.ones((3, 2)), ["float32", "float64", "one dtype"]),
        (np.ones((), f), np.ones(3, f), ["a is a scalar"]),
        (np.ones((2, 2, 3), f), np.ones((3, 3, 2), f), ["batch", "(2, 2, 3)"]),
        ([[1.0]], np.ones((1, 1), f), ["a is a list"]),
    ):
        with pytest.raises(InvalidProblemError) as caught:
            matmul(a, b)
        assert all(word in str(caught.value) for word in ["matmul", *words])
    with pytest.raises(UnsupportedError, match=r"matmul: b has dtype int64"):
        matmul(np.ones((1, 1)), np.ones((1, 1), np.int64))
    wide = np.broadcast_to(f(0), (module.MAX_TERMS + 1,))
    with pytest.raises(UnsupportedError, match=r"up to 67108864"):
        matmul(wide, wide)


@pytest.mark.skipif(not fenv._X86, reason="sets MXCSR")
@pytest.mark.parametrize("control", [0x9FC0, 0x5F80], ids=["flush to zero", "round up"])
def test_the_callers_floating_point_environment(control):
    rng = np.random.default_rng(9)
    a, b = random(rng, (40, 50), np.float32, (-70, -60)), random(rng, (50, 30), np.float32, (-75, -60))
    c = matmul(a, b)
    assert (np.abs(c[c != 0]) < 2.0**-126).any()
    previous = fenv.enter()
    try:
        fenv.leave(control)
        changed = matmul(a, b)
    finally:
        fenv.leave(previous)
    assert bits(changed) == bits(c)
