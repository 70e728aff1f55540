"""tanh, both forms of gelu and powers: kernels against the reference bit for bit, values against wider floats."""

import math

import ml_dtypes
import mpmath
import numpy as np
import pytest
from test_elementwise import bits, boundaries, dense, sample, unit

import isograd as ig
from isograd.elementwise import api, reference
from isograd.errors import InvalidProblemError, UnsupportedError

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
FORMS = {"none": (reference.gelu, reference.gelu_backward), "tanh": (reference.gelu_tanh, reference.gelu_tanh_backward)}
EXPONENTS = [
    *range(-4, 5),
    63,
    64,
    65,
    -63,
    -64,
    -65,
    101,
    0.5,
    -0.5,
    1.5,
    -2.5,
    1 / 3,
    1e-300,
    1e300,
    -1e300,
    2.0**53,
    2.0**53 - 1,
    -0.0,
    math.inf,
    -math.inf,
    math.nan,
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_the_reference(dtype):
    x = sample(dtype)
    assert bits(api.tanh(x)) == bits(reference.tanh(x))
    for form, (value, _) in FORMS.items():
        assert bits(ig.gelu(x, form)) == bits(value(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_bits_of_the_reference(dtype):
    special = boundaries(dtype)
    dy, x = (np.ascontiguousarray(v) for v in np.broadcast_arrays(special[:, None], special))
    assert bits(api.tanh_backward(dy, x)) == bits(reference.tanh_backward(dy, x))
    for form, (_, backward) in FORMS.items():
        assert bits(ig.gelu_backward(dy, x, form)) == bits(backward(dy, x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_powers(dtype):
    x, y = np.broadcast_arrays(np.concatenate([boundaries(dtype), sample(dtype)[::97]])[:, None], EXPONENTS)
    dy = np.random.default_rng(0).standard_normal(x.shape).astype(dtype)
    assert bits(api.power(x, y)) == bits(reference.power(x, y))
    assert bits(api.power_backward(dy, x, y)) == bits(reference.power_backward(dy, x, y))
    assert bits(api.power_backward_exponent(dy, x, y)) == bits(reference.power_backward_exponent(dy, x, y))


def test_special_values():
    for dtype in DTYPES:
        x = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0], dtype)
        one = np.ones(5, dtype)
        assert bits(api.tanh(x)) == bits(np.array([1, -1, np.nan, 0.0, -0.0], dtype))
        assert bits(api.tanh_backward(one, x)[2:]) == bits(np.array([np.nan, 1, 1], dtype))
        for form in FORMS:
            assert bits(ig.gelu(x, form)) == bits(np.array([np.inf, -0.0, np.nan, 0.0, -0.0], dtype))
            assert bits(ig.gelu_backward(one, x, form)) == bits(np.array([1, -0.0, np.nan, 0.5, 0.5], dtype))


def test_powers_of_special_values():
    """As of IEEE 754's pow, but for square roots."""
    values = [0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, math.inf, -math.inf, math.nan]
    exponents = [-math.inf, -101.0, -3.0, -2.5, -2.0, 0.0, 0.25, 2.0, 3.0, 101.0, 102.0, math.inf, math.nan]
    x, y = np.broadcast_arrays(np.array(values)[:, None], exponents)
    with np.errstate(all="ignore"):
        expected = np.power(x, y)
    got = api.power(x, y)
    assert np.array_equal(np.isnan(got), np.isnan(expected))
    assert np.array_equal(np.signbit(got), np.signbit(np.where(np.isnan(expected), np.nan, expected)))
    np.testing.assert_allclose(got, expected, rtol=1e-14)
    roots = np.array([0.0, -0.0, 4.0, math.inf, -math.inf])
    assert bits(api.power(roots, np.array(0.5))) == bits(np.array([0.0, -0.0, 2.0, math.inf, math.nan]))


def test_powers_are_what_products_and_roots_are():
    x = sample(np.float32)
    x = x[np.isfinite(x)]
    with np.errstate(all="ignore"):
        assert bits(api.power(x, np.array(1.0))) == bits(x)
        assert bits(api.power(x, np.array(2.0))) == bits(x * x)
        assert bits(api.power(x, np.array(-1.0))) == bits(1 / x)
        root = np.sqrt(np.abs(x))
        assert bits(api.power(np.abs(x), np.array(0.5))) == bits(root)
    wide = x.astype(np.float64)
    with np.errstate(all="ignore"):
        assert bits(api.power(wide, np.array(3.0))) == bits(wide * wide * wide)
        assert bits(api.power(wide, np.array(5.0))) == bits((wide * wide) * (wide * wide) * wide)


# --- errors ----------------------------------------------------------------------------------------------------------
def exact(function, x):
    """Values of mpmath in binary64 or, where it is wider, longdouble, as a number and its rest."""
    values = [function(mpmath.mpf(float(v))) for v in x]
    heads = np.array([float(v) for v in values])
    return heads, np.array([float(v - h) for v, h in zip(values, heads.tolist(), strict=True)])


def error_of(y, pair):
    return np.abs((y.astype(np.float64) - pair[0]) - pair[1])


def gelu_tanh_argument(v):
    return mpmath.sqrt(8 / mpmath.pi) * (v + mpmath.mpf("0.044715") * v**3)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_within_the_bounds(dtype):
    u, tiny = unit(dtype)
    tiny = float(tiny)
    x = dense(dtype)[::211]
    x = np.concatenate([x[np.abs(x) < 45], -np.linspace(0.01, 40, 150).astype(dtype)])
    one, size = np.ones_like(x), np.abs(x.astype(np.float64))
    with mpmath.workprec(200):
        value = exact(mpmath.tanh, x)
        ratios = {"tanh": error_of(api.tanh(x), value) / (3.5 * u * np.abs(value[0]))}
        value = exact(lambda v: v * mpmath.erfc(-v / mpmath.sqrt(2)) / 2, x)
        ratios["gelu"] = error_of(ig.gelu(x), value) / (8 * u * np.abs(value[0]) + tiny)
        value = exact(lambda v: mpmath.erfc(-v / mpmath.sqrt(2)) / 2 + v * mpmath.npdf(v), x)
        scale = exact(lambda v: mpmath.erfc(-v / mpmath.sqrt(2)) / 2 + abs(v) * mpmath.npdf(v), x)[0]
        bound = 8 * u * scale + 2 * (1 + size) * tiny
        ratios["gelu'"] = error_of(ig.gelu_backward(one, x), value) / bound

        v = exact(gelu_tanh_argument, x)[0]
        w = np.abs(exact(lambda v: v * mpmath.diff(gelu_tanh_argument, v), x)[0])
        s = exact(lambda v: 1 / (1 + mpmath.exp(-gelu_tanh_argument(v))), x)[0]
        rest = exact(lambda v: 1 / (1 + mpmath.exp(gelu_tanh_argument(v))), x)[0]
        value = exact(lambda v: v / (1 + mpmath.exp(-gelu_tanh_argument(v))), x)
        bound = (4 + 3 * np.abs(v) * rest) * u * size * s + (1 + size) * tiny
        ratios["gelu by tanh"] = error_of(ig.gelu(x, "tanh"), value) / bound
        value = exact(lambda v: mpmath.diff(lambda t: t / (1 + mpmath.exp(-gelu_tanh_argument(t))), v), x)
        bound = (4 + 3 * np.abs(v)) * u * s * (1 + w * rest) + 2 * (1 + w) * tiny
        ratios["gelu' by tanh"] = error_of(ig.gelu_backward(one, x, "tanh"), value) / bound
    worst = {name: np.max(r) for name, r in ratios.items()}
    assert all(0.25 < r <= 1 for r in worst.values()), worst


def test_powers_within_their_bounds():
    rng = np.random.default_rng(5)
    x = np.ldexp(rng.uniform(0.5, 1, 1500), rng.integers(-12, 12, 1500))
    y = rng.choice([2, 3, -3, 7, 31, 64, -40, 0.5, -0.5, 1.5, -7.25, 33.3, 66, 0.1], 1500)
    u = 2.0**-53
    with mpmath.workprec(200):
        values = [mpmath.mpf(float(b)) ** mpmath.mpf(float(e)) for b, e in zip(x, y, strict=True)]
        head = np.array([float(v) for v in values])
        rest = np.array([float(v - h) for v, h in zip(values, head.tolist(), strict=True)])
        short = np.array(
            [float(mpmath.mpf(float(b)) ** mpmath.mpf(float(e))) for b, e in zip(x.astype(np.float32), y, strict=True)]
        )
    product = (np.rint(y) == y) & (np.abs(y) <= 64)
    roundings = np.where(product, np.abs(y), np.where(np.abs(y) == 0.5, 2, 3 + np.abs(y * np.log(x))))
    error = error_of(api.power(x, y), (head, rest))
    assert 0.1 < np.max(error / (roundings * u * head)) <= 1
    normal = (short > 2.0**-126) & (short < 2.0**127)
    error = np.abs(api.power(x.astype(np.float32), y).astype(np.float64) - short)[normal]
    assert np.max(error / np.spacing(short[normal].astype(np.float32))) <= 0.5 + 2.0**-20


def test_errors():
    x = np.ones(3, np.float32)
    with pytest.raises(InvalidProblemError, match=r"tanh: x is a list; expected a NumPy array"):
        api.tanh([1.0])
    with pytest.raises(UnsupportedError, match=r"tanh: x has dtype int32; accepted: float16"):
        api.tanh(np.ones(3, np.int32))
    with pytest.raises(InvalidProblemError, match=r"tanh_backward: dy is .* expected dtype and shape of y, float32"):
        api.tanh_backward(np.ones(4, np.float32), x)
