"""The product of 16-bit integers: bits against rationals, error against the exact product rounded to bfloat16."""

import math
from fractions import Fraction
from unittest import mock

import ml_dtypes
import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isograd.errors import InvalidProblemError, UnsupportedError
from isograd.numerics import int16, numba_dot, numba_int16
from isograd.numerics.matmul import DEFINITION, matmul, matmul_error_bound
from isograd.numerics.reference import narrow

BFLOAT16 = ml_dtypes.bfloat16
DTYPES = [np.float16, BFLOAT16, np.float32]
EXPONENTS = {"float16": (-26, 6), "bfloat16": (-136, 55), "float32": (-149, 55)}


def bits(x):
    return (x.dtype, x.shape, np.ascontiguousarray(x).tobytes())


def product(a, b, balance=None):
    """The product by its definition, after every engine returned the same bits, in one call and in pieces.

    The engines are those of this machine, and Arm's; of float16 the one that is chosen, and a BLAS. What an engine does
    has no dtype, and tests/products/test_products_plans.py has float16 with all of this machine's, as a thorough test.
    """
    c = matmul(a, b, "int16", balance, DEFINITION)
    engines = numba_int16.engine_names()
    for engine in dict.fromkeys((*engines[:1], *engines[-1:]) if c.dtype == np.float16 else (*engines, "dotprod")):
        for small in (numba_int16._SMALL, 0):
            with mock.patch.object(numba_int16, "_SMALL", small):
                assert bits(matmul(a, b, "int16", balance, engine)) == bits(c), (engine, small)
    return c


def random(rng, shape, dtype, spread=(0, 0)):
    return np.ldexp(rng.standard_normal(shape), rng.integers(*spread, shape, endpoint=True)).astype(dtype)


# --- the definition once more, in rationals -------------------------------------------------------------------------
def integers(values):
    """The integers of a row of rationals, and its exponent."""
    largest = max(abs(v) for v in values)
    exponent = math.frexp(float(largest))[1] if largest else 0
    while largest and round(largest * Fraction(2) ** (15 - exponent)) > 32639:
        exponent += 1
    return [round(v * Fraction(2) ** (15 - exponent)) for v in values], exponent


def balanced(values, balance, sign):
    return [Fraction(float(v)) * Fraction(2) ** (sign * int(d)) for v, d in zip(values, balance, strict=True)]


def defined(a, b, balance):
    rows = [integers(balanced(row, balance, -1)) for row in a]
    columns = [integers(balanced(column, balance, 1)) for column in b.T]
    c = np.empty((len(rows), len(columns)))
    for i, (x, e) in enumerate(rows):
        for j, (y, f) in enumerate(columns):
            t = (sum(p * q for p, q in zip(x, y, strict=True)) + 128) // 256
            c[i, j] = math.ldexp(float(np.float32(t)), e + f - 22)
    return narrow(narrow(c, np.float32), a.dtype)


def assert_within_bound(a, b, balance=None):
    c, bound = product(a, b, balance), matmul_error_bound(a, b, "int16", balance)
    for i, row in enumerate(a.astype(np.float64)):
        for j, column in enumerate(b.T.astype(np.float64)):
            exact = sum((Fraction(x) * Fraction(y) for x, y in zip(row, column, strict=True)), Fraction(0))
            if np.isfinite(bound[i, j]):
                assert abs(Fraction(float(c[i, j])) - exact) <= Fraction(float(bound[i, j])), (i, j)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_bits_and_bound_over_all_exponents(dtype, data):
    m, k, n, seed = (data.draw(st.integers(1, top)) for top in (4, 12, 4, 2**32))
    low, high = EXPONENTS[np.dtype(dtype).name]
    start = data.draw(st.integers(low, high))
    spread = (start, data.draw(st.integers(start, high)))
    rng = np.random.default_rng(seed)
    a, b = random(rng, (m, k), dtype, spread), random(rng, (k, n), dtype, spread)
    a[rng.random((m, k)) < 0.2], b[rng.random(k) < 0.2] = 0, -0.0
    balances = [np.zeros(k, np.int64), rng.integers(-40, 40, k), int16.balance_of(b), int16.balance_between(a, b)]
    assert (numba_int16.balance_of(b) == balances[2]).all()
    assert (numba_int16.balance_between(a, b) == balances[3]).all()
    for balance in balances:
        assert bits(product(a, b, balance)) == bits(defined(a, b, balance))
        assert_within_bound(a, b, balance)


def test_the_integers_fit_two_signed_bytes():
    steps = np.array([32639, 32639.49, 32639.5, 32640, 32767.99, 32768, 16384, 16383.99], np.float32)
    expected = [32639, 32639, 16320, 16320, 16384, 16384, 16384, 16384]
    for sign in (1, -1):
        for shift in (-130, -15, 0, 100):
            found, exponent = int16.rounded(np.ldexp(sign * steps[:, None], shift).astype(np.float32), None, -1)
            assert (sign * found.ravel()).tolist() == expected
            assert exponent.ravel().tolist() == [15 + shift + e for e in (0, 0, 1, 1, 1, 1, 0, 0)]
            low = (found + 128) % 256 - 128
            assert np.abs((found - low) / 256).max() <= 127


@pytest.mark.parametrize("sign", [1, -1])
def test_the_bound_is_nearly_reached(sign):
    # Every element is nearly half a step from its integer, on one side.
    k = 512
    a = ((16384 + sign * (0.5 - 2.0**-9)) * 2.0**-15 * np.ones((1, k))).astype(np.float32)
    a[0, 0] = 1 - 2.0**-7
    b = ((8192 + sign * (0.5 - 2.0**-10)) * 2.0**-15 * np.ones((k, 1))).astype(np.float32)
    b[0] = 1 - 2.0**-7
    error = abs(float(product(a, b)[0, 0]) - float((a.astype(np.float64) @ b.astype(np.float64))[0, 0]))
    bound = matmul_error_bound(a, b, "int16")[0, 0]
    assert 0.9 * bound < error <= bound


def test_fewer_bits_would_break_the_bound(monkeypatch):
    rng = np.random.default_rng(1)
    a, b = random(rng, (8, 64), np.float32), random(rng, (64, 8), np.float32)
    assert_within_bound(a, b)
    round_to = np.rint
    monkeypatch.setattr(numba_int16, "engine_names", tuple)
    monkeypatch.setattr(int16.np, "rint", lambda x: 16 * round_to(x / 16))
    with pytest.raises(AssertionError):
        assert_within_bound(a, b)


# --- the error beside that of the exact product rounded to bfloat16 --------------------------------------------------
M, K, N = 24, 4096, 24


def silu(x):
    return x / (1 + np.exp(-x))


def channels(rng, factor, count):
    c = np.ones(K)
    c[rng.choice(K, count, replace=False)] = factor
    return c


def probabilities(rng, rows, columns):
    p = np.exp(2 * rng.standard_normal((rows, columns)))
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(rows), rng.integers(0, columns, rows)] -= 1
    return p


def changed(x, at, value):
    x = x.copy()
    x[at] = value
    return x


def layers(rng):
    """Name, activations, weight, largest ratio."""
    x, w = rng.standard_normal((M, K)), rng.standard_normal((K, N)) / 64
    heavy, outliers = rng.standard_t(3, (M, K)), channels(rng, 60, 20)
    gated = silu(x) * rng.standard_normal((M, K))
    yield "Gaussian", x, w, 1.005
    yield "mean 3", 3 + x, w, 1.005
    yield "Student t3", heavy, w, 1.02
    yield "Student t3, weights too", heavy, rng.standard_t(3, (K, N)) / 64, 1.05
    yield "outlier channels", x * outliers, w, 1.05
    yield "outlier channels, weights small there", x * outliers, w / outliers[:, None], 1.005
    yield "SwiGLU, lognormal channels", gated * np.exp(rng.standard_normal(K)), w, 1.05
    yield "one SwiGLU channel x 3000", gated * channels(rng, 3000, 1), w, 1.4
    yield "massive activation", changed(x, np.s_[:, 5], 1500), w, 1.4
    yield "massive activation, small weight", changed(x, np.s_[:, 5], 1500), changed(w, 5, w[5] * 1e-3), 1.005
    yield "one element 2^20, weight 0", changed(x, np.s_[:, 7], 2.0**20), changed(w, 7, 0), 1.005
    wide = np.exp(2 * rng.standard_normal((M, K))), np.exp(2 * rng.standard_normal((K, N)))
    yield "lognormal", x * wide[0], w * wide[1], 2.5  # by the sample: a few results make up the mean
    yield "weights' rows lognormal", x, w * np.exp(2 * rng.standard_normal((K, 1))), 1.2
    yield "dlogits", probabilities(rng, M, K), w, 1.4


def weight_gradients(rng):
    """Name, activations [K, M], their gradients [K, N], largest ratio; K tokens."""
    x, dy = rng.standard_normal((K, M)), rng.standard_normal((K, N))
    for sigma in (1.5, 3):
        yield f"gradients lognormal {sigma}", x, dy * np.exp(sigma * rng.standard_normal((K, 1))), 1.005
    yield "BOS", changed(x, 0, 300 * x[0]), changed(dy, 0, dy[0] * 1e-3), 1.005
    yield "language model's head", x, probabilities(rng, K, N) / K, 1.05


def assert_error(name, a, b, balance, most):
    a, b = a.astype(BFLOAT16), b.astype(BFLOAT16)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    error = product(a, b, balance(a, b)).astype(np.float64) - exact
    rounding = exact.astype(BFLOAT16).astype(np.float64) - exact
    assert np.sqrt((error**2).mean() / (rounding**2).mean()) <= most, name
    assert (np.abs(error) <= matmul_error_bound(a, b, "int16", balance(a, b))).all(), name


def test_error_on_layers():
    for name, x, w, most in layers(np.random.default_rng(2)):
        assert_error(name, x, w, lambda a, b: int16.balance_of(b), most)


def test_error_of_weight_gradients():
    for name, x, dy, most in weight_gradients(np.random.default_rng(3)):
        assert_error(name, x.T, dy, int16.balance_between, most)


def test_without_a_balance_outliers_cost_more():
    # Without this the two tests above would not show what the balance is for.
    rng = np.random.default_rng(2)
    cases = {name: (x, w) for name, x, w, _ in layers(rng)}
    with pytest.raises(AssertionError):
        assert_error("none", *cases["massive activation, small weight"], lambda a, b: None, 5)


# --- nothing but the values matters ---------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
def test_order_padding_splits_batches_and_layout(dtype):
    rng = np.random.default_rng(4)
    a, b = random(rng, (96, 300), dtype, (-8, 4)), random(rng, (300, 130), dtype, (-8, 4))
    d = int16.balance_of(b)
    c = product(a, b, d)
    order = rng.permutation(300)
    assert (int16.balance_of(b[order]) == d[order]).all()
    assert bits(product(a[:, order], b[order], d[order])) == bits(c)
    more = np.concatenate([a, random(rng, (96, 700), dtype)], 1), np.concatenate([b, np.zeros((700, 130), dtype)])
    assert bits(product(*more, int16.balance_of(more[1]))) == bits(c)
    assert bits(np.concatenate([product(a[:7], b, d), product(a[7:8], b, d), product(a[8:], b, d)])) == bits(c)
    assert bits(np.concatenate([product(a, b[:, :1], d), product(a, b[:, 1:], d)], 1)) == bits(c)
    assert bits(np.stack([product(row, b, d) for row in a])) == bits(c)
    assert bits(product(np.asfortranarray(a), np.asfortranarray(b), d)) == bits(c)
    assert bits(product(b.T, a.T, -d).T) == bits(c)
    assert bits(product(a[::-1, ::-1], b[::-1], d[::-1])[::-1]) == bits(c)
    assert bits(product(np.stack([a, a + a]), b, d)[0]) == bits(c)


def test_tokens_that_are_zero_leave_no_trace_in_weight_gradients():
    rng = np.random.default_rng(5)
    x, dy = random(rng, (40, 6), BFLOAT16, (-6, 6)), random(rng, (40, 5), BFLOAT16, (-6, 6))
    c = product(x.T, dy, int16.balance_between(x.T, dy))
    for left, right in ((0, 2.0**40), (2.0**40, 0), (0, 0)):
        some = np.full((9, 6), left, BFLOAT16), np.full((9, 5), right, BFLOAT16)
        more = [np.concatenate([u, v, u[:0]]) for u, v in zip((x, dy), some, strict=True)]
        assert bits(product(more[0].T, more[1], int16.balance_between(more[0].T, more[1]))) == bits(c)


@pytest.mark.parametrize("k", [1 << 16, (1 << 16) + 3])
def test_extreme_integers(k):
    # 32639 is two digits of 127, -32384 has the low digit -128; both have the exponent 0.
    for x, y in ((32639, 32639), (-32639, 32639), (-32384, -32384), (32639, -32384)):
        a = np.full((1, k), x * 2.0**-15, np.float32)
        b = np.full((k, 1), y * 2.0**-15, np.float32)
        t = (k * x * y + 128) // 256
        assert product(a, b)[0, 0] == np.ldexp(np.float32(t), -22)
        b[k // 2 :] *= -1
        t = ((k // 2) * x * y - (k - k // 2) * x * y + 128) // 256
        assert product(a, b)[0, 0] == np.ldexp(np.float32(t), -22)


def test_the_order_of_long_contractions_leaves_no_trace():
    rng = np.random.default_rng(6)
    k = (1 << 17) + 5
    a, b = random(rng, (2, k), np.float32), random(rng, (k, 2), np.float32)
    order = rng.permutation(k)
    assert bits(product(a[:, order], b[order])) == bits(product(a, b))


@pytest.mark.parametrize("sign", [1, -1])
def test_more_terms_than_binary64_adds_exactly(sign):
    terms = (1 << 22) + 3
    a = np.full((1, terms), 32639 * 2.0**-15, np.float32)
    a[0, -1] = 2.0**-15  # so that the sum is odd
    b = np.full((terms, 1), sign * 32639 * 2.0**-15, np.float32)
    t = (sign * 32639 * ((terms - 1) * 32639 + 1) + 128) // 256
    assert product(a, b)[0, 0] == np.float32(t) * np.float32(2.0**-22)


# --- engines ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(1, 1, 1), (13, 511, 17), (230, 1018, 150), (3, 40, 400), (12, 508, 16)])
def test_tiles_and_chunks_at_their_ends(shape):
    m, k, n = shape
    rng = np.random.default_rng(7)
    a, b = random(rng, (m, k), np.float32, (-3, 3)), random(rng, (k, n), np.float32, (-3, 3))
    product(a, b)
    product(np.asfortranarray(a), b.T.copy().T, rng.integers(-200, 200, k))


def test_sums_of_a_chunk_stay_within_int32():
    assert numba_dot.TERMS * 32639 * 128 < 2**31
    k = 4 * numba_dot.TERMS
    a, b = np.full((1, k), 32639.0, np.float32), np.full((k, 1), -32384.0, np.float32)
    assert product(a, b)[0, 0] == np.float32(-(32639 * 32384 * k) // 256) * 256


def test_batches_share_and_repeat_operands():
    rng = np.random.default_rng(8)
    shapes = [((2, 3, 4, 5), (5, 6)), ((2, 1, 4, 5), (3, 5, 6)), ((4, 5), (2, 5, 6)), ((0, 4, 5), (5, 6))]
    shapes += [((2, 4, 0), (0, 6)), ((0, 5), (5, 3)), ((5,), (2, 5, 3)), ((2, 4, 5), (5,)), ((5,), (5,))]
    for left, right in shapes:
        product(random(rng, left, np.float16), random(rng, right, np.float16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_products_of_any_layout(dtype):
    rng = np.random.default_rng(8)
    one, three, grid = (), (3,), (2, 3)
    for left, right in ((one, one), (one, three), (three, one), (three, three), ((1,), three), (grid, three)):
        for m, k, n in ((1, 1, 1), (13, 9, 17), (5, 600, 20), (2, 0, 3), (0, 4, 3)):
            a, b = random(rng, (*left, m, k), dtype), random(rng, (*right, k, n), dtype)
            for x in (a, b):
                x.flat[rng.integers(0, max(x.size, 1), x.size // 9)] = rng.choice([0, -0.0, np.inf, -np.inf, np.nan])
            balance = rng.integers(-100, 100, k) if m == 13 else None
            expected = bits(product(a, b, balance))
            for _ in range(2):
                a = np.ascontiguousarray(a.swapaxes(-1, -2)).swapaxes(-1, -2)
                b = np.repeat(b, 2, axis=-1)[..., ::2]
                assert bits(product(a, b, balance)) == expected
            assert bits(product(a[..., ::-1, :], b, balance)[..., ::-1, :]) == expected


def test_a_small_product_is_one_call(monkeypatch):
    """Its steps are called by compiled code."""
    if numba_int16.engine_names() == ("blas",):
        pytest.skip("no engine here")
    calls = []
    for_ranges = numba_int16.for_ranges
    monkeypatch.setattr(numba_int16, "for_ranges", lambda *a: calls.append(a[0]) or for_ranges(*a))
    x = random(np.random.default_rng(9), (8, 64, 64), np.float32)
    matmul(x[0], x, "int16")
    assert calls == [numba_int16.small_products]


def test_a_processor_without_an_engine_multiplies_in_binary64(monkeypatch):
    for name, features, expected in (
        (None, "+avx2,-avx512f", ["avx2"]),
        ("generic", "+avx2", ["avx2"]),
        ("generic", None, []),
        ("haswell", None, []),
    ):
        monkeypatch.setattr(numba.config, "CPU_NAME", name)
        monkeypatch.setattr(numba.config, "CPU_FEATURES", features)
        assert [engine.name for engine in numba_dot.engines()] == expected
    monkeypatch.setattr(numba.config, "CPU_NAME", None)
    monkeypatch.setattr(numba.config, "ENABLE_AVX", 0)
    assert numba_dot.engines() == []
    assert numba_int16.engine_names()[-1] == "blas"


# --- special values, and what is no problem -------------------------------------------------------------------------
def test_balances():
    w = np.array([[1, -3], [0.5, 0.1], [2.0**-6, 0], [2.0**-9, -(2.0**-11)], [0, 0], [np.nan, 1.5]])
    # Exponents 2, 0, -5, -8, none, 1: the upper median of five is 0.
    assert int16.balance_of(w.astype(np.float32)).tolist() == [0, 0, 4, 8, int16.DROPPED, 0]
    assert int16.balance_of(np.zeros((2, 3), np.float32)).tolist() == [int16.DROPPED] * 2
    x, dy = np.array([[8.0, 0, 0, 2.0**-9]]), np.array([[0.25], [0], [1], [4]])
    assert int16.balance_between(x, dy).tolist() == [3, 0, -int16.DROPPED, -5]


def test_special_values_are_those_of_the_operands():
    a = np.array([[np.inf, 1], [1, 2], [np.nan, 0], [0, -np.inf]], np.float32)
    b = np.array([[0, 1, 0], [3, 0, 0]], np.float32)
    c = product(a, b, int16.balance_of(b))
    nan, inf = np.nan, np.inf
    expected = np.array([[nan, inf, nan], [6, 1, 0], [nan, nan, nan], [-inf, nan, nan]], np.float32)
    assert bits(c) == bits(expected)


def test_errors():
    a, b = np.ones((2, 3), np.float32), np.ones((3, 2), np.float32)
    for balance, words in (
        (np.zeros(2, int), r"balance is int64 \(2,\); expected .* \(3,\)"),
        (np.zeros(3), "balance is float64"),
        ([0, 0, 0], "balance is list"),
        (np.array([0, 0, 1025]), "balance has values from 0 to 1025; accepted: -1024 to 1024"),
    ):
        with pytest.raises(InvalidProblemError, match=f"matmul: {words}"):
            product(a, b, balance)
    with pytest.raises(InvalidProblemError, match=r"precision is 'int8'; accepted: int16, wide, None"):
        matmul(a, b, "int8")
    with pytest.raises(InvalidProblemError, match=r"balance is given for precision 'wide'"):
        matmul(a, b, balance=np.zeros(3, int))
    with pytest.raises(UnsupportedError, match=r"precision is 'int16' for float64"):
        product(a.astype(np.float64), b.astype(np.float64))
