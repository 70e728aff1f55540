"""The exact integer sums: device functions against Python integers and against the reference."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from isograd.numerics import constants as c
from isograd.numerics import numba_ops as ops
from isograd.numerics import numba_sum as sums
from isograd.numerics import numba_wide as wide
from isograd.numerics import reference as ref
from isograd.rows.reference import rounded_pair
from isograd.runtime.numba_compile import kernel

FLOATS = [np.float32, np.float64]
SHIFT = {np.float32: c.LIMB_SHIFT_32, np.float64: c.LIMB_SHIFT_64}
BIAS = {np.float32: int(np.float32(c.MAGIC_32).view(np.int32)), np.float64: int(np.float64(c.MAGIC_64).view(np.int64))}


@kernel
def run_scale(p, a, b, k):
    for i in range(p.size):
        a[i], b[i], k[i] = sums.sum_scale(ops.magnitude_key(p[i]))


@kernel
def run_split_term(p, a, b, high, low):
    for i in range(p.size):
        high[i], low[i] = wide.split_term(p[i] * a, b)


@kernel
def run_split_pair(p, error, scale, error_scale, high, low):
    for i in range(p.size):
        high[i], low[i] = wide.split_pair(p[i], error[i], scale, error_scale)


@kernel
def run_add_wide(hi, lo, value):
    for i in range(hi.size):
        hi[i], lo[i] = wide.add_wide(hi[i], lo[i], value[i])


@kernel
def run_add_limbs(hi, lo, high, low, shift):
    for i in range(hi.size):
        hi[i], lo[i] = wide.add_limbs(hi[i], lo[i], high[i], low[i], shift)


@kernel
def run_compress(hi, lo, n, e):
    for i in range(hi.size):
        n[i], e[i] = wide.compress(hi[i], lo[i])


@kernel
def run_wide(hi, lo, k, whole, head, rest):
    for i in range(hi.size):
        whole[i] = wide.wide_to_float(hi[i], lo[i], k, whole[i])
        head[i], rest[i] = wide.wide_to_pair(hi[i], lo[i], k, whole[i])


# --- 128-bit integers -----------------------------------------------------------------------------------------------
def limbs(values):
    """Python integers as (hi: int64, lo: uint64)."""
    hi = np.array([v >> 64 for v in values], np.int64)
    return hi, np.array([v & (2**64 - 1) for v in values], np.uint64)


def whole(hi, lo):
    return [(int(h) << 64) + int(v) for h, v in zip(hi, lo, strict=True)]


def wide_cases(top):
    """Integers of every length up to `top` bits: random ones, powers of two, their neighbours, and rounding ties."""
    rng = np.random.default_rng(7)
    cases = [0, 1, -1]
    for length in range(1, top + 1):
        power = 1 << (length - 1)
        drawn = [power | (int.from_bytes(rng.bytes(16), "little") % power) for _ in range(12)]
        near = [power + d for d in (-2, -1, 0, 1, 2)]
        for precision in (24, 53):
            for extra in (0, 1, -1):  # a tie of even and odd last bits, and just beside it
                if length > precision + 1:
                    unit = 1 << (length - precision)
                    near += [power + unit * j + unit // 2 + extra for j in (0, 1, 2, 3)]
        cases += drawn + near
    # The bits that a faulty test for "fits 63 bits" mistook for a sign: bit 62 of the low word under a high word of 1.
    cases += [(1 << 64) | (1 << 62) | v for v in (0, 1, 12345, (1 << 62) - 1)]
    cases += [(1 << 64) | v for v in (0, 1, (1 << 62) - 1, 1 << 63, (1 << 64) - 1)]
    cases += [(1 << 62) + v for v in (-1, 0, 1)] + [(1 << 63) + v for v in (-1, 0, 1)]
    return [v for v in [*cases, *(-v for v in cases)] if abs(v).bit_length() <= top]


def test_add_wide_is_exact():
    rng = np.random.default_rng(8)
    start = wide_cases(120)
    edge = [0, 1, -1, 2**63 - 1, -(2**63), 2**62, -(2**62)]
    value = np.concatenate(
        [np.resize(np.array(edge, np.int64), len(start) // 2), rng.integers(-(2**63), 2**63 - 1, len(start))]
    )
    value = value[: len(start)]
    hi, lo = limbs(start)
    run_add_wide(hi, lo, value)
    assert whole(hi, lo) == [s + int(v) for s, v in zip(start, value, strict=True)]


@pytest.mark.parametrize("dtype", FLOATS)
def test_add_limbs_is_exact(dtype):
    rng = np.random.default_rng(9)
    start = wide_cases(118)
    # Sums over a block of terms, and the extremes of int64 that fit the 128-bit sum.
    high, low = rng.integers(-(2**62), 2**62, (2, len(start)))
    high[::7], low[::5], high[::11] = -(2**62), 2**63 - 1, -1
    if dtype == np.float64:
        high >>= 1
    hi, lo = limbs(start)
    run_add_limbs(hi, lo, high, low, SHIFT[dtype])
    expected = [s + (int(h) << SHIFT[dtype]) + int(v) for s, h, v in zip(start, high, low, strict=True)]
    assert whole(hi, lo) == expected


def test_compress_keeps_63_bits_and_a_sticky_one():
    # 2**37 terms of 88 bits: more than any memory holds.
    cases = wide_cases(125)
    hi, lo = limbs(cases)
    n, e = np.empty(len(cases), np.int64), np.empty(len(cases), np.int64)
    run_compress(hi, lo, n, e)
    truncated = 0
    for value, kept, shift in zip(cases, n.tolist(), e.tolist(), strict=True):
        assert abs(kept) <= 2**62
        if shift == 0:
            assert kept == value
            continue
        truncated += kept != value >> shift
        # Enough bits for one rounding to 53 with guard and sticky; an inexact remainder leaves the last bit set.
        assert abs(kept).bit_length() >= 59
        assert kept == value >> shift if value % (1 << shift) == 0 else kept == (value >> shift) | 1

    # The cases can tell a sticky bit from none, and a test of both words from one of the low word.
    assert truncated > 1000
    assert any(h == 1 and v >> 62 == 1 for h, v in zip(hi.tolist(), lo.tolist(), strict=True))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("k", [0, -44, -88, 5, -1100, -200])
def test_wide_integers_are_rounded_once(dtype, k):
    form = ref.FORMATS[np.dtype(dtype)]
    k = max(k, form.min_exponent - form.quantum_bits)
    # What is left of a float64 sum has to fit 63 bits, which 2**28 exponentials guarantee.
    cases = wide_cases(form.quantum_bits + 28)
    with np.errstate(over="ignore"):
        expected = np.array([ref.round_integer(v, k, form) for v in cases], dtype)
    hi, lo = limbs(cases)
    y, head, rest = (np.empty(len(cases), dtype) for _ in range(3))
    run_wide(hi, lo, k, y, head, rest)
    np.testing.assert_array_equal(y.view(f"i{y.itemsize}"), expected.view(f"i{y.itemsize}"))
    np.testing.assert_array_equal(head, expected)
    if k in (-44, -88):
        pairs = [rounded_pair(v, k, form) for v in cases]
        np.testing.assert_array_equal(rest, np.array([low for _, low in pairs], dtype))


def test_the_rest_of_the_longest_binary64_rows():
    form = ref.FORMATS[np.dtype(np.float64)]
    term = int(np.random.default_rng(13).integers(1 << 62)) << 26 | 1 << 88 | 12345
    cases = [term * n for n in range(1 << 28, 1 << 33, 123_456_789)]
    hi, lo = limbs(cases)
    y, head, rest = (np.empty(len(cases)) for _ in range(3))
    run_wide(hi, lo, -form.quantum_bits, y, head, rest)
    pairs = [rounded_pair(v, -form.quantum_bits, form) for v in cases]
    np.testing.assert_array_equal(head, [high for high, _ in pairs])
    np.testing.assert_array_equal(rest, [low for _, low in pairs])


@settings(max_examples=150, deadline=None)
@given(st.integers(-(2**126), 2**126), st.integers(-300, 40), st.sampled_from(FLOATS))
@example((1 << 64) | (1 << 62), -44, np.float32)
@example(-(1 << 25) - 1, 0, np.float32)
def test_round_integer_is_the_nearest(value, exponent, dtype):
    form = ref.FORMATS[np.dtype(dtype)]
    exponent = max(exponent, form.min_exponent - form.precision + 1)  # no second rounding among the subnormals
    with np.errstate(over="ignore"):
        y = ref.round_integer(value, exponent, form)
    exact = Fraction(value) * Fraction(2) ** exponent
    limit = Fraction(2) ** (form.bias + 1)
    if not np.isfinite(y):
        assert abs(exact) >= limit - limit / 2 ** (form.precision + 1)
        return
    below, above = np.nextafter(y, dtype(-np.inf)), np.nextafter(y, dtype(np.inf))
    distance = abs(Fraction(float(y)) - exact)
    for other in (below, above):
        if np.isfinite(other):
            gap = abs(Fraction(float(other)) - exact)
            odd = int(np.array(y).view(f"i{y.itemsize}")) & 1
            assert distance < gap or (distance == gap and not odd)


# --- terms ----------------------------------------------------------------------------------------------------------
def scale_of(largest, dtype):
    """(a, b, k) of a row with this largest magnitude, from the device function."""
    p = np.array([largest], dtype)
    a, b, k = np.empty(1, dtype), np.empty(1, dtype), np.empty(1, np.int64)
    run_scale(p, a, b, k)
    return a[0], b[0], int(k[0])


@pytest.mark.parametrize("dtype", FLOATS)
def test_sum_scale_is_the_quantum_for_every_exponent(dtype):
    form, info = ref.FORMATS[np.dtype(dtype)], np.finfo(dtype)
    exponents = range(form.min_exponent - form.precision + 1, form.bias + 1)
    p = np.array([np.ldexp(dtype(1.5 if e > form.min_exponent else 1), e) for e in exponents] + [info.max, 0], dtype)
    a, b, k = np.empty_like(p), np.empty_like(p), np.empty(p.size, np.int64)
    run_scale(p, a, b, k)
    top = np.maximum([*exponents, form.bias, form.min_exponent], form.min_exponent)
    np.testing.assert_array_equal(k, top - form.quantum_bits)
    product = [Fraction(float(v)) * Fraction(float(w)) for v, w in zip(a, b, strict=True)]
    assert product == [Fraction(2) ** int(-e - SHIFT[dtype]) for e in k]


@pytest.mark.parametrize("dtype", FLOATS)
def test_split_terms_are_the_rounded_integers(dtype):
    form, info = ref.FORMATS[np.dtype(dtype)], np.finfo(dtype)
    rng = np.random.default_rng(10)
    integer = np.int32 if dtype == np.float32 else np.int64
    tops = [info.max, 1.0, 1.999, info.tiny, info.smallest_subnormal, info.tiny * 3, info.tiny * 2.0**40, info.max / 8]
    for largest in [dtype(v) for v in tops]:
        a, b, k = scale_of(largest, dtype)
        p = np.ldexp(rng.uniform(0.5, 1, 3000), -rng.integers(0, form.quantum_bits + 4, 3000)).astype(dtype) * largest
        # k + 1/2 quanta: ties, of even and of odd k, that round away from what truncation would give.
        odd = (2 * rng.integers(0, 1 << (form.precision - 2), 2000) + 1).astype(dtype)
        with np.errstate(under="ignore"):
            ties = ref.scale_pow2(odd, k - 1, form)
        p = np.concatenate([p, ties[np.abs(ties) <= largest], [0, largest]]).astype(dtype)
        p = np.concatenate([p, -p])
        high, low = np.empty(p.size, integer), np.empty(p.size, integer)
        run_split_term(p, a, b, high, low)
        high, low = high.astype(object) - BIAS[dtype], low.astype(object) - BIAS[dtype]
        limit = 1 << (22 if dtype == np.float32 else 45)
        assert max(abs(high)) <= limit
        assert max(abs(low)) <= limit
        terms = list((high << SHIFT[dtype]) + low)
        assert terms == ref.integer_terms(p[None], -k)[0]
        # The definition: round() of a Fraction takes ties to even as well.
        exact = [round(Fraction(float(v)) * Fraction(2) ** -k) for v in p[:600].tolist()]
        assert terms[:600] == exact


@pytest.mark.parametrize("dtype", FLOATS)
def test_split_pairs_add_the_rounding_error(dtype):
    form = ref.FORMATS[np.dtype(dtype)]
    rng = np.random.default_rng(11)
    integer = np.int32 if dtype == np.float32 else np.int64
    e = np.exp2(rng.uniform(-100, 0.5, 20_000)).astype(dtype) * dtype(2.0**form.exp_scale)
    error = (e * rng.uniform(-1, 1, e.size) * 2.0**-form.precision).astype(dtype)
    shift = form.quantum_bits - form.exp_scale
    high, low = np.empty(e.size, integer), np.empty(e.size, integer)
    run_split_pair(e, error, dtype(2.0 ** (shift - SHIFT[dtype])), dtype(2.0**shift), high, low)
    width = 8 * e.itemsize
    low = (low.astype(object) - 2 * BIAS[dtype] + (1 << (width - 1))) % (1 << width) - (1 << (width - 1))
    terms = list(((high.astype(object) - BIAS[dtype]) << SHIFT[dtype]) + low)
    whole_terms, errors = (ref.integer_terms(v[None], shift)[0] for v in (e, error))
    assert terms == [a + b for a, b in zip(whole_terms, errors, strict=True)]
    assert any(errors)


@pytest.mark.parametrize("dtype", FLOATS)
def test_order_free_sum_of_the_reference_is_the_definition(dtype):
    # rint(p / q) in rationals, summed, rounded once; in any order, and however many zeros are added.
    form = ref.FORMATS[np.dtype(dtype)]
    rng = np.random.default_rng(12)
    for exponent in (0, form.min_exponent - 3, form.bias - 6, -20):
        p = np.ldexp(rng.standard_normal(40), exponent + rng.integers(-30, 0, 40)).astype(dtype)
        top = max(int(np.frexp(np.abs(p).max())[1]) - 1, form.min_exponent)
        quantum = Fraction(2) ** (top - form.quantum_bits)
        total = sum(round(Fraction(float(v)) / quantum) for v in p)
        expected = ref.round_integer(total, top - form.quantum_bits, form)
        padded = np.concatenate([np.zeros(100, dtype), p[::-1], -np.zeros(3, dtype)])
        assert ref.order_free_sum(p[None])[0] == ref.order_free_sum(padded[None])[0] == expected
        error = abs(Fraction(float(expected)) - sum(Fraction(float(v)) for v in p))
        assert error <= len(p) * quantum / 2 + Fraction(float(np.spacing(np.abs(expected)))) / 2


def test_special_sums():
    inf, nan = np.inf, np.nan
    rows = np.array([[1, inf, 2], [inf, -inf, 0], [nan, inf, inf], [-inf, -1, -inf], [0, -0.0, 0]], np.float32)
    s = ref.order_free_sum(rows)
    np.testing.assert_array_equal(s, np.array([inf, nan, nan, -inf, 0], np.float32))
    assert not np.signbit(s[4])
