"""Device functions against the reference, bit for bit, and exp, log and log1p against exact values.

The samples are dense in the bit patterns and hold every boundary; `test_exhaustive.py` takes all patterns.
"""

import decimal
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from isograd.numerics import constants as c
from isograd.numerics import numba_ops as ops
from isograd.numerics import numba_storage as storage
from isograd.numerics import reference as ref
from isograd.runtime.numba_compile import kernel

FLOATS = [np.float32, np.float64]
MAX_ULP = 1.05
WIDE_LONGDOUBLE = np.finfo(np.longdouble).nmant > 60


# --- loops around the device functions ------------------------------------------------------------------------------
@kernel
def run_exp(x, y):
    for i in range(x.size):
        y[i] = ops.exp(x[i])


@kernel
def run_log(x, y):
    for i in range(x.size):
        y[i] = ops.log(x[i])


@kernel
def run_log1p(x, y):
    for i in range(x.size):
        y[i] = ops.log1p(x[i])


@kernel
def run_log1p_pair(x, low, y, z):
    for i in range(x.size):
        y[i], z[i] = ops.log1p_pair(x[i], low[i])


@kernel
def run_exp_shift(m, base, floor, bias):
    for i in range(m.size):
        base[i], floor[i], bias[i] = ops.exp_shift(m[i])


@kernel
def run_exp_shifted(x, base, floor, bias, e, error):
    for i in range(x.size):
        e[i], error[i] = ops.exp_shifted(x[i], base[i], floor[i], bias[i])


@kernel
def run_exp_short(x, y):
    for i in range(x.size):
        y[i] = ops.exp_short(x[i])


@kernel
def run_fma(a, b, d, y):
    for i in range(a.size):
        y[i] = ops.fma(a[i], b[i], d[i])


@kernel
def run_widen(v, y):
    for i in range(v.size):
        y[i] = storage.widen(v[i])


@kernel
def run_narrow(x, y):
    for i in range(x.size):
        y[i] = storage.narrow(x[i], y[i])


@kernel
def run_keys(x, key, back, magnitude):
    for i in range(x.size):
        key[i] = ops.max_key(x[i])
        back[i] = ops.from_key(key[i])
        magnitude[i] = ops.magnitude_key(x[i])


# --- samples --------------------------------------------------------------------------------------------------------
def integer_of(dtype):
    return np.int32 if dtype == np.float32 else np.int64


def bits(x):
    return np.ascontiguousarray(x).view(integer_of(x.dtype))


def around(values, dtype, reach=6):
    """The values and their neighbours on both sides, by bit pattern."""
    patterns = np.array(values, dtype).view(integer_of(dtype))
    return (patterns[:, None] + np.arange(-reach, reach + 1, dtype=patterns.dtype)).ravel().view(dtype)


def boundaries(dtype):
    form, info = ref.FORMATS[np.dtype(dtype)], np.finfo(dtype)
    overflow = (form.bias + 1) * math.log(2)
    underflow = (form.min_exponent - form.precision) * math.log(2)
    values = [0.0, info.smallest_subnormal, info.tiny, 1.0, math.sqrt(0.5), math.sqrt(2), 2.0, info.max, math.inf]
    values += [overflow, overflow - math.log(2), underflow, underflow + math.log(2), form.min_exponent * math.log(2)]
    values += [form.exp_floor, form.exp_ceil, form.exp_direct, 0.29, 0.41, 1e-4, info.eps]
    values += [(k + 0.5) * math.log(2) for k in range(-8, 9)]  # where the reduction of exp changes its integer
    sample = around([*values, *(-v for v in values)], dtype)
    mantissa, sign = 1 << (form.precision - 1), 1 << (form.bits - 1)
    quiet = ((1 << (form.bits - form.precision)) - 1) << (form.precision - 1)
    payloads = [quiet | 1, quiet | (mantissa >> 1), quiet | (mantissa - 1), quiet | (mantissa >> 2)]
    nans = np.array([p | s for p in payloads for s in (0, sign)], f"u{form.bits // 8}").view(dtype)
    assert np.isnan(nans).all()
    return np.concatenate([sample, nans])


def dense(dtype, count=120_000):
    """Bit patterns spread over the whole type, ordinary numbers, and every boundary."""
    rng = np.random.default_rng(1)
    top = 1 << ref.FORMATS[np.dtype(dtype)].bits
    patterns = np.arange(count, dtype=np.uint64) * np.uint64(top // count | 1) + np.uint64(12345)
    spread = patterns.astype(np.uint32 if dtype == np.float32 else np.uint64).view(dtype)
    usual = np.concatenate([rng.uniform(-110, 95, count // 4), rng.uniform(-1, 1, count // 4)])
    if dtype == np.float64:
        usual = np.concatenate([usual, rng.uniform(-760, 715, count // 4)])
    return np.concatenate([spread, usual.astype(dtype), boundaries(dtype)])


SAMPLE = {dtype: dense(dtype) for dtype in FLOATS}
UNARY = {"exp": (run_exp, ref.exp), "log": (run_log, ref.log), "log1p": (run_log1p, ref.log1p)}


# --- device functions and reference ---------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", UNARY)
def test_elementary_functions_have_the_bits_of_the_reference(name, dtype):
    run, reference = UNARY[name]
    x = SAMPLE[dtype]
    y, stored = np.empty_like(x), np.empty_like(x)
    run(x, y)
    expected = reference(x)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(bits(y)[number], bits(expected)[number])
    assert np.isnan(y[~number]).all()
    assert np.isnan(y[np.isnan(x)]).all()
    # Stored, every NaN is the canonical one.
    run_narrow(y, stored)
    np.testing.assert_array_equal(bits(stored), bits(expected))


@pytest.mark.parametrize("dtype", FLOATS)
def test_elementary_functions_at_their_exact_points(dtype):
    zeros = np.array([0.0, -0.0, np.inf, -np.inf, 1.0, -1.0], dtype)
    results = {name: np.empty_like(zeros) for name in UNARY}
    for name, (run, _) in UNARY.items():
        run(zeros, results[name])
    np.testing.assert_array_equal(results["exp"][:4], np.array([1, 1, np.inf, 0], dtype))
    np.testing.assert_array_equal(results["log"], np.array([-np.inf, -np.inf, np.inf, np.nan, 0, np.nan], dtype))
    np.testing.assert_array_equal(results["log1p"][[2, 3, 5]], np.array([np.inf, np.nan, -np.inf], dtype))
    assert list(np.signbit(results["log1p"][:2])) == [False, True]
    assert not np.any(results["log1p"][:2])


@pytest.mark.parametrize("dtype", FLOATS)
def test_log1p_pair_has_the_bits_of_the_reference(dtype):
    rng = np.random.default_rng(2)
    x = np.concatenate([SAMPLE[dtype][:60_000:4], rng.uniform(-1, 4, 30_000).astype(dtype), boundaries(dtype)])
    x = x[(x > -1) & np.isfinite(x)]
    low = (x * rng.uniform(-1, 1, x.size) * np.finfo(dtype).eps).astype(dtype)
    y, z = np.empty_like(x), np.empty_like(x)
    run_log1p_pair(x, low, y, z)
    expected, rest = ref.log1p_pair(x, low)
    np.testing.assert_array_equal(bits(y), bits(expected))
    np.testing.assert_array_equal(bits(z), bits(rest))


def shifted_sample(dtype):
    """(x, m): elements of rows and the rows' maxima, on both sides of the limit where m is subtracted."""
    form, info = ref.FORMATS[np.dtype(dtype)], np.finfo(dtype)
    rng = np.random.default_rng(3)
    limit = form.exp_direct
    m = np.concatenate(
        [
            around([0.0, 1.0, limit, limit / 2, info.tiny, -1.0, -limit, -info.tiny], dtype, 2),
            rng.uniform(-limit, limit, 60).astype(dtype),
            (limit * np.exp2(rng.uniform(0, 100, 60)) * rng.choice([-1, 1], 60)).astype(dtype),
            np.array([info.max, -info.max], dtype),
        ]
    )
    m = m[np.isfinite(m)]
    below = np.concatenate([[0.0], rng.uniform(0, 1, 200), rng.uniform(0, -1.01 * form.exp_floor, 600)])
    with np.errstate(over="ignore"):
        x = (m.astype(np.longdouble)[:, None] - below).astype(dtype)
    tail = np.broadcast_to(np.array([-np.inf, -info.max, 0, info.tiny], dtype), (len(m), 4))
    x = np.concatenate([x, np.minimum(tail, m[:, None])], axis=1)
    return x.ravel(), np.repeat(m, x.shape[1])


@pytest.mark.parametrize("dtype", FLOATS)
def test_shifted_exponentials_have_the_bits_of_the_reference(dtype):
    form = ref.FORMATS[np.dtype(dtype)]
    x, m = shifted_sample(dtype)
    base, floor, bias = np.empty_like(m), np.empty_like(m), np.empty(m.size, integer_of(dtype))
    run_exp_shift(m, base, floor, bias)
    expected_base, expected_floor, exponent = ref.exp_shift(m)
    np.testing.assert_array_equal(bits(base), bits(expected_base))
    np.testing.assert_array_equal(bits(floor), bits(expected_floor))
    field = (form.bias + form.exp_scale - exponent).astype(object) << (form.precision - 1)
    wrapped = (field + (1 << (form.bits - 1))) % (1 << form.bits) - (1 << (form.bits - 1))
    np.testing.assert_array_equal(bias, wrapped.astype(bias.dtype))

    e, error = np.empty_like(x), np.empty_like(x)
    run_exp_shifted(x, base, floor, bias, e, error)
    expected_e, expected_error = ref.exp_shifted(x, expected_base, expected_floor, exponent)
    np.testing.assert_array_equal(bits(e), bits(expected_e))
    np.testing.assert_array_equal(bits(error), bits(expected_error))


def test_short_exponential_has_the_bits_of_the_reference_and_its_accuracy():
    rng = np.random.default_rng(4)
    x = SAMPLE[np.float32]
    x = np.concatenate([-np.abs(x[~np.isnan(x)]), rng.uniform(-109, 0, 100_000).astype(np.float32)])
    y = np.empty_like(x)
    run_exp_short(x, y)
    np.testing.assert_array_equal(bits(y), bits(ref.exp_short(x)))
    usual = x > -87
    exact = np.exp(x[usual].astype(np.float64))
    relative = np.abs(y[usual] / 2.0**30 - exact) / exact
    assert 2.0**-20 < relative.max() < 2.0**-16


# --- storage --------------------------------------------------------------------------------------------------------
HALVES = [(np.float16, np.int16), (ml_dtypes.bfloat16, np.uint16)]


@pytest.mark.parametrize(("dtype", "carrier"), HALVES)
def test_widen_is_exact_for_every_pattern(dtype, carrier):
    v = np.arange(1 << 16, dtype=np.uint16)
    y = np.empty(v.size, np.float32)
    run_widen(v.view(carrier), y)
    expected = v.view(dtype).astype(np.float32)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(bits(y)[number], bits(expected)[number])
    assert np.isnan(y[~number]).all()


@pytest.mark.parametrize(("dtype", "carrier"), HALVES)
def test_narrow_rounds_to_nearest_even(dtype, carrier):
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float32)
    every = every[np.isfinite(every)]
    # Halfway between neighbours, and one pattern to either side of it; the sum of two halves is exact in binary32.
    ordered = np.unique(every).astype(np.float64)
    middle = ((ordered[1:] + ordered[:-1]) / 2).astype(np.float32)
    x = np.concatenate([SAMPLE[np.float32], every, around(middle, np.float32, 1)])
    y = np.empty(x.size, carrier)
    run_narrow(x, y)
    np.testing.assert_array_equal(y.view(np.uint16), ref.narrow(x, dtype).view(np.uint16))
    canonical = np.array([np.nan], dtype).view(np.uint16)[0]
    assert (y.view(np.uint16)[np.isnan(x)] == canonical).all()
    # The definition itself: no storage value is nearer, and a tie goes to the even pattern.
    index = np.searchsorted(ordered, middle.astype(np.float64))
    for chosen, tie, at in zip(ref.narrow(middle, dtype), middle, index, strict=True):
        assert float(chosen) in (ordered[at - 1], ordered[at])
        assert chosen.view(np.uint16) % 2 == 0 or abs(tie) == 0


@pytest.mark.parametrize("dtype", FLOATS)
def test_narrow_of_the_work_type_only_makes_nans_canonical(dtype):
    x = SAMPLE[dtype]
    y = np.empty_like(x)
    run_narrow(x, y)
    np.testing.assert_array_equal(bits(y), bits(np.where(np.isnan(x), dtype(np.nan), x)))


# --- keys -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", FLOATS)
def test_keys_keep_the_order_and_put_nan_first(dtype):
    x = SAMPLE[dtype]
    key, magnitude = np.empty(x.size, integer_of(dtype)), np.empty(x.size, integer_of(dtype))
    back = np.empty_like(x)
    run_keys(x, key, back, magnitude)
    np.testing.assert_array_equal(bits(back), bits(np.where(np.isnan(x), dtype(np.nan), x)))
    nan = np.isnan(x)
    assert key[nan].min() == key[nan].max() == np.iinfo(key.dtype).max > key[~nan].max()
    numbers, keys = x[~nan], key[~nan]
    ordered = numbers[np.argsort(keys, kind="stable")]
    assert (ordered[1:] >= ordered[:-1]).all()
    zeros = ordered[ordered == 0]
    assert (np.diff(np.signbit(zeros).astype(int)) <= 0).all()  # -0 below +0
    assert len(np.unique(keys)) == len(np.unique(bits(numbers)))
    np.testing.assert_array_equal(magnitude, bits(np.abs(x)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_reference_takes_the_positive_zero_whatever_its_place(dtype):
    # np.max returns either zero.
    for n in range(1, 41):
        rows = np.full((n + 1, n), -0.0, dtype)
        rows[np.arange(n), np.arange(n)] = 0.0  # one a row; the last has none
        assert np.signbit(ref.row_maximum(rows)).tolist() == [False] * n + [True]
        rows[rows.view(integer_of(dtype)) < 0] = -1
        assert np.signbit(ref.row_maximum(rows)).tolist() == [False] * n + [True]


# --- fma in the reference against exact fractions -------------------------------------------------------------------
def nearest(q, form):
    """A fraction rounded once to the format, ties to even, as an exact float of it."""
    if q == 0:
        return 0.0
    exponent = abs(q.numerator).bit_length() - q.denominator.bit_length()
    exponent -= abs(q) < Fraction(2) ** exponent
    step = max(exponent, form.min_exponent) - form.precision + 1
    n = round(q / Fraction(2) ** step)
    return math.copysign(math.inf, q) if abs(n).bit_length() + step > form.bias + 1 else math.ldexp(n, step)


def fma_sample(dtype, count):
    """Operands whose sum cancels, ties, or lies at any distance, subnormal results included."""
    rng = np.random.default_rng(5)
    reach = 32 if dtype == np.float32 else 300
    a, b = (np.ldexp(rng.uniform(1, 2, count), rng.integers(-reach, reach, count)).astype(dtype) for _ in range(2))
    product = a.astype(np.longdouble) * b
    d = np.where(rng.random(count) < 0.5, -product, product * np.exp2(rng.integers(-60, 60, count))).astype(dtype)
    few = np.trunc(rng.uniform(1, 4096, (3, count // 4))).astype(dtype)  # products of few bits: ties
    few[2] = np.ldexp(few[2], rng.integers(-24, 60, count // 4))
    # Each subnormal of binary32 comes out as the sum of small products.
    tiny = np.ldexp(rng.uniform(1, 2, (3, count // 4)), rng.integers(-76, -70, (3, count // 4))).astype(dtype)
    tiny[2] = np.ldexp(tiny[2], -70)
    return (np.concatenate(parts) for parts in zip((a, b, d), few, tiny, strict=True))


@pytest.mark.parametrize("dtype", FLOATS)
def test_reference_fma_rounds_once(dtype):
    form = ref.FORMATS[np.dtype(dtype)]
    a, b, d = fma_sample(dtype, 6000)
    y = ref.fma(a, b, d)
    exact = [Fraction(float(p)) * Fraction(float(q)) + Fraction(float(r)) for p, q, r in zip(a, b, d, strict=True)]
    expected = np.array([nearest(q, form) for q in exact], dtype)
    np.testing.assert_array_equal(y, expected)
    # Multiplying and adding with two roundings gives something else often enough for the comparison to mean something.
    assert np.mean(a * b + d != expected) > 0.05


@pytest.mark.parametrize("dtype", FLOATS)
def test_device_fma_has_the_bits_of_the_reference(dtype):
    a, b, d = fma_sample(dtype, 60_000)
    y = np.empty_like(a)
    run_fma(a, b, d, y)
    np.testing.assert_array_equal(bits(y), bits(ref.fma(a, b, d)))


# --- accuracy -------------------------------------------------------------------------------------------------------
def ulp_errors(y, exact, dtype):
    """|y - exact| in spacings of `dtype` around the exact value; an infinity counts as the first number too large."""
    form = ref.FORMATS[np.dtype(dtype)]
    top = np.ldexp(exact.dtype.type(1), form.bias + 1)
    y = np.clip(y.astype(exact.dtype), -top, top)
    exact = np.clip(exact, -top, top)
    exponent = np.minimum(np.maximum(np.frexp(exact)[1] - 1, form.min_exponent), form.bias)
    return np.abs(y - exact) / np.ldexp(exact.dtype.type(1), exponent - form.precision + 1)


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("dtype", FLOATS)
def test_elementary_functions_within_their_bound(name, dtype):
    if dtype == np.float64 and not WIDE_LONGDOUBLE:
        pytest.skip("longdouble is no wider than binary64 here; the decimal spot check remains")
    x = SAMPLE[dtype]
    y = np.empty_like(x)
    UNARY[name][0](x, y)
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64 if dtype == np.float32 else np.longdouble)
        exact = getattr(np, name)(wide)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(exact))
    finite = np.isfinite(exact) | (np.isfinite(wide) & np.isinf(exact) & (name == "exp"))
    errors = ulp_errors(y[finite], exact[finite], dtype)
    assert 0.5 <= errors.max() <= MAX_ULP
    np.testing.assert_array_equal(y[~finite & ~np.isnan(y)], exact[~finite & ~np.isnan(y)].astype(dtype))
    # A result one place off is found.
    assert ulp_errors(np.nextafter(y, dtype(np.inf))[finite], exact[finite], dtype).max() > MAX_ULP


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("dtype", FLOATS)
def test_elementary_functions_against_decimal_arithmetic(name, dtype):
    # The decimal module's exp and ln are correctly rounded at any precision: an oracle without a libm in it.
    form = ref.FORMATS[np.dtype(dtype)]
    rng = np.random.default_rng(6)
    x = np.concatenate([rng.uniform(-80, 80, 100), rng.uniform(-1, 1, 100), np.exp2(rng.uniform(-40, 60, 60))])
    x = np.concatenate([x.astype(dtype), boundaries(dtype)])
    x = x[np.isfinite(x) & ((x > 0) | (name != "log")) & ((x > -1) | (name != "log1p"))]
    x = x[(np.abs(x) < 700) | (name != "exp")]
    y = np.empty_like(x)
    UNARY[name][0](x, y)
    decimal.getcontext().prec = 60
    worst = Fraction(0)
    for argument, result in zip(x.tolist(), y.tolist(), strict=True):
        if name == "log1p" and abs(argument) < 1e-12:
            d = decimal.Decimal(argument)
            exact = d - d * d / 2 + d * d * d / 3
        else:
            d = decimal.Decimal(argument)
            exact = d.exp() if name == "exp" else (d if name == "log" else 1 + d).ln()
        exact = Fraction(exact)
        if exact == 0 or abs(exact) >= Fraction(2) ** (form.bias + 1):
            continue
        exponent = max(math.frexp(float(exact))[1] - 1, form.min_exponent)
        limit = Fraction(2) ** (form.bias + 1)
        value = Fraction(result) if math.isfinite(result) else limit
        worst = max(worst, abs(value - exact) / Fraction(2) ** (exponent - form.precision + 1))
    assert 0.4 < worst <= MAX_ULP


@pytest.mark.parametrize("dtype", FLOATS)
def test_shifted_exponentials_are_as_accurate_as_the_two_ulp_of_softmax_need(dtype):
    # y = e / S with e off by at most 1.05 u and S, whose terms are e + error, by at most 0.3 u (u half an ulp of 1).
    if dtype == np.float64 and not WIDE_LONGDOUBLE:
        pytest.skip("longdouble is no wider than binary64 here")
    form = ref.FORMATS[np.dtype(dtype)]
    wide = np.float64 if dtype == np.float32 else np.longdouble
    u = wide(2.0**-form.precision)
    x, m = shifted_sample(dtype)
    keep = x.astype(np.longdouble) - m > (form.exp_floor + 2)
    x, m = x[keep], m[keep]
    base, floor, exponent = ref.exp_shift(m)
    e, error = (v.astype(wide) for v in ref.exp_shifted(x, base, floor, exponent))
    exact = np.ldexp(np.exp(x.astype(wide) - base.astype(wide)), (form.exp_scale - exponent).astype(np.int32))
    for regime in (np.abs(m) < form.exp_direct, np.abs(m) >= form.exp_direct):
        assert regime.sum() > 10_000
        alone = (np.abs(e - exact) / exact)[regime].max()
        together = (np.abs(e + error - exact) / exact)[regime].max()
        assert 0.7 * u < alone <= 1.05 * u
        assert together <= 0.3 * u


def test_a_wrong_constant_is_noticed(monkeypatch):
    # What the tests above would see if one polynomial coefficient were off in its last place.
    x = SAMPLE[np.float32]
    y = np.empty_like(x)
    run_exp(x, y)
    form = ref.FORMATS[np.dtype(np.float32)]
    last = float(np.nextafter(np.float32(form.exp_poly[0]), np.float32(1)))
    changed = form._replace(exp_poly=(last, *form.exp_poly[1:]))
    monkeypatch.setitem(ref.FORMATS, np.dtype(np.float32), changed)
    assert (bits(ref.exp(x)) != bits(y)).any()
    assert c.EXP_POLY_32[0] == form.exp_poly[0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_fma_that_is_exactly_zero_has_the_sign_of_ieee(dtype):
    # log_softmax backward of a single -0.0: -exp(y) * 0 + (-0.0) is -0.0.
    zeros = [dtype(0), -dtype(0)]
    for a in (dtype(0.83), -dtype(0.83), dtype(2)):
        for b in zeros:
            for d in zeros:
                assert np.signbit(ref.fma(a, b, d)) == np.signbit(a * b + d), (a, b, d)
    assert not np.signbit(ref.fma(dtype(3), dtype(5), -dtype(15)))


def test_a_binary64_fma_rounds_once_where_the_product_leaves_the_range():
    # 2**1030 - 2**1030 (1 + 2**-52) is finite though the product is not; splitting a factor of 2**1000 overflows.
    assert ref.fma(2.0**515, 2.0**515, np.float64(-1.5 * 2.0**1023)) == np.inf
    assert ref.fma(np.float64(2.0**1000), 1 + 2.0**-52, np.float64(-(2.0**1000))) == 2.0**948
    assert ref.fma(np.float64(2.0**512), np.float64(2.0**512), np.float64(-(2.0**1023))) == 2.0**1023
