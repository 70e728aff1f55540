"""Elementwise functions in NumPy: the definition that the kernels return bit for bit.

All but power are computed in the work type (binary32 for the 16-bit types) and rounded to the storage type once. exp
and log are those of `numerics.reference`. silu, its backward and sigmoid take z = exp(-|x|), which cannot overflow, and
d = RN(1 + z):

    silu           x >= 0: RN(x / d)              x < 0: RN(RN(max(x, -1024) * z) / d)
    sigmoid        x >= 0: RN(1 / d)              x < 0: RN(z / d)
    sigmoid_backward  dx = RN(RN(dy * y) * RN(1 - y)), y the result as stored
    silu_backward  dx = RN(dy * g), g = RN(n / RN(d * d)), w = x clamped to [-1024, 1024]
                   x >= 0: n = fma(w, z, d)       x < 0: n = RN(z * RN(d + w))
    tanh           with e = expm1(-2 |x|): RN(-e / RN(2 + e)), with the sign of x
    tanh_backward  dx = RN(dy * fma(-y, y, 1)), y the result as stored

gelu is x * Phi(x). It takes a = min(|x|, reach), E and R of `normal_tail`, and in the derivative
h = fma(-1 / sqrt(2 pi), a, R):

    gelu           x >= 0: RN(x * fma(-E, R, 1))  x < 0: -RN(E * RN(a * R))
    gelu_backward  x >= 0: RN(dy * fma(-E, h, 1)) x < 0: RN(dy * RN(E * h))

Its tanh form is x * sigmoid(v(x)), v(x) = sqrt(8 / pi) (x + 0.044715 x^3) = c0 x + c1 x^3. With a = min(|x|, 64),
p = RN(a * a), z = exp(-RN(a * fma(c1, p, c0))), d = RN(1 + z), w = RN(a * fma(3 c1, p, c0)):

    gelu_tanh      x >= 0: RN(x / d)              x < 0: RN(-RN(a * z) / d)
    gelu_tanh_backward  dx = RN(dy * RN(n / RN(d * d)))
                   x >= 0: n = fma(w, z, d)       x < 0: n = RN(z * RN(d - w))

power(x, y) and its gradients are computed in binary64 for all dtypes, y kept in binary64, and rounded to the work type
and then to the storage type:

    y an integer, |y| <= 64   products from the highest bit of |y| down: r = RN(r * r), and RN(r * x) where a bit is
                              set; RN(1 / r) for y < 0
    y = 0.5, -0.5             sqrt(x), RN(1 / sqrt(x))
    else                      exp(y * log|x|) with both as pairs, with the sign of x where y is odd; NaN for x < 0 and
                              y no integer; values at 0, 1 and infinity as of IEEE 754's pow
    power_backward            dx = RN(dy * RN(y * power(x, y - 1))), 0 where y is 0
    power_backward_exponent   dy = RN(dy * RN(power(x, y) * log(x))), 0 where the power is 0 or x and y are

The clamp changes no finite result, because z is zero long before; it makes silu(-inf) = -0 and gives the slopes 1 and
0 at the infinities, where x * sigmoid(x) as written would be NaN.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from isograd.numerics import reference as ref

Floats = NDArray[Any]

SILU_CLAMP: Final = 1024.0
# Of the tanh form of gelu: beyond the clamp its exponential is zero; sqrt(8 / pi), that times 0.044715, thrice that.
GELU_CLAMP: Final = 64.0
GELU_TANH_32: Final = (1.5957691669464111, 0.07135481387376785, 0.21406444907188416)
GELU_TANH_64: Final = (1.5957691216057308, 0.07135481627260025, 0.21406444881780073)
POWER_PRODUCTS: Final = 64  # the largest integer exponent that is a product
POWER_LOGARITHM: Final = 1024.0  # beyond this a power is 0 or infinite


def exp(x: Floats) -> Floats:
    """The exponential."""
    return ref.narrow(ref.exp(ref.widen(x)), x.dtype)


def log(x: Floats) -> Floats:
    """The natural logarithm, -inf at 0 and NaN below."""
    return ref.narrow(ref.log(ref.widen(x)), x.dtype)


def sigmoid(x: Floats) -> Floats:
    """The logistic function 1 / (1 + exp(-x))."""
    v = ref.widen(x)
    one = v.dtype.type(1)
    with np.errstate(all="ignore"):
        z = ref.exp(-np.abs(v))
        return ref.narrow(np.where(v >= 0, one, z) / (one + z), x.dtype)


def sigmoid_backward(dy: Floats, y: Floats) -> Floats:
    """The gradient dy * y * (1 - y), y = sigmoid(x)."""
    g, s = ref.widen(dy), ref.widen(y)
    with np.errstate(all="ignore"):
        return ref.narrow((g * s) * (s.dtype.type(1) - s), y.dtype)


def silu(x: Floats) -> Floats:
    """The product x * sigmoid(x)."""
    v = ref.widen(x)
    of = v.dtype.type
    with np.errstate(all="ignore"):
        z = ref.exp(-np.abs(v))
        n = np.where(v >= 0, v, np.where(v > of(-SILU_CLAMP), v, of(-SILU_CLAMP)) * z)
        return ref.narrow(n / (of(1) + z), x.dtype)


def silu_backward(dy: Floats, x: Floats) -> Floats:
    """The gradient dy * s * (1 + x * (1 - s)), s = sigmoid(x)."""
    g, v = ref.widen(dy), ref.widen(x)
    of = v.dtype.type
    with np.errstate(all="ignore"):
        z = ref.exp(-np.abs(v))
        d = of(1) + z
        w = np.where(v > of(-SILU_CLAMP), v, of(-SILU_CLAMP))
        w = np.where(w < of(SILU_CLAMP), w, of(SILU_CLAMP))
        n = np.where(v >= 0, ref.fma(w, z, d), z * (d + w))
        return ref.narrow(g * (n / (d * d)), x.dtype)


def tanh(x: Floats) -> Floats:
    """The hyperbolic tangent."""
    return ref.narrow(ref.tanh(ref.widen(x)), x.dtype)


def tanh_backward(dy: Floats, y: Floats) -> Floats:
    """The gradient dy * (1 - y^2), y = tanh(x)."""
    g, t = ref.widen(dy), ref.widen(y)
    with np.errstate(all="ignore"):
        return ref.narrow(g * ref.fma(-t, t, t.dtype.type(1)), y.dtype)


def _normal(v: Floats) -> tuple[Floats, Floats, Floats]:
    """(a, E, R) of `normal_tail` at a = |v|, held within its reach."""
    of, reach = v.dtype.type, ref.FORMATS[v.dtype].normal_reach
    a = np.where(np.abs(v) > of(reach), of(reach), np.abs(v))
    return (a, *ref.normal_tail(a))


def gelu(x: Floats) -> Floats:
    """The product x * Phi(x)."""
    v = ref.widen(x)
    with np.errstate(all="ignore"):
        a, e, r = _normal(v)
        return ref.narrow(np.where(v >= 0, v * ref.fma(-e, r, v.dtype.type(1)), -(e * (a * r))), x.dtype)


def gelu_backward(dy: Floats, x: Floats) -> Floats:
    """The gradient dy * (Phi(x) + x * phi(x))."""
    g, v = ref.widen(dy), ref.widen(x)
    of = v.dtype.type
    with np.errstate(all="ignore"):
        a, e, r = _normal(v)
        h = ref.fma(of(-ref.FORMATS[v.dtype].normal_density), a, r)
        return ref.narrow(g * np.where(v >= 0, ref.fma(-e, h, of(1)), e * h), x.dtype)


def _gelu_tanh(v: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """(a, z, d, w) of the tanh form."""
    of = v.dtype.type
    c0, c1, c2 = (of(c) for c in (GELU_TANH_32 if of is np.float32 else GELU_TANH_64))
    a = np.where(np.abs(v) > of(GELU_CLAMP), of(GELU_CLAMP), np.abs(v))
    p = a * a
    z = ref.exp(-(a * ref.fma(c1, p, c0)))
    return a, z, of(1) + z, a * ref.fma(c2, p, c0)


def gelu_tanh(x: Floats) -> Floats:
    """The tanh form of gelu, x * sigmoid(sqrt(8 / pi) (x + 0.044715 x^3))."""
    v = ref.widen(x)
    with np.errstate(all="ignore"):
        a, z, d, _ = _gelu_tanh(v)
        return ref.narrow(np.where(v >= 0, v, -(a * z)) / d, x.dtype)


def gelu_tanh_backward(dy: Floats, x: Floats) -> Floats:
    """The gradient of the tanh form of gelu."""
    g, v = ref.widen(dy), ref.widen(x)
    with np.errstate(all="ignore"):
        _, z, d, w = _gelu_tanh(v)
        return ref.narrow(g * (np.where(v >= 0, ref.fma(w, z, d), z * (d - w)) / (d * d)), x.dtype)


def _power_product(x: Floats, y: Floats) -> Floats:
    """X to an integer of at most POWER_PRODUCTS."""
    n = np.abs(y).astype(np.int64)
    r, started = np.ones_like(x), np.zeros(x.shape, np.bool_)
    for bit in reversed(range(POWER_PRODUCTS.bit_length())):
        r = np.where(started, r * r, r)
        has = (n >> bit) & 1 == 1
        r = np.where(has, np.where(started, r * x, x), r)
        started |= has
    return np.where(y < 0, 1 / r, r)


def _power_logarithm(x: Floats, y: Floats) -> Floats:
    """exp(y * log|x|), with the sign or the NaN of a negative x."""
    size = np.abs(x)
    inside = (size > 0) & (size < np.inf)
    high, low = ref.log_pair(np.where(inside, size, 1.0))
    high = np.where(inside, high, np.where(size == 0, -np.inf, size))
    p = y * high
    rest = ref.fma(y, low, ref.fma(y, high, -p))
    rest = np.where(inside & (np.abs(p) < POWER_LOGARITHM), rest, 0.0)
    value = np.where(size == 1, 1.0, ref.exp_of_pair(p, rest))
    whole = (np.rint(y) == y) | (np.abs(y) == np.inf)
    odd = whole & (np.rint(y * 0.5) != y * 0.5)
    value = np.where(odd & np.signbit(x), -value, value)
    return np.where((x < 0) & (x > -np.inf) & ~whole, np.nan, np.where(np.isnan(y) & (x != 1), np.nan, value))


def power_binary64(x: Floats, y: Floats) -> Floats:
    """X to the power y, both binary64 and of one shape."""
    with np.errstate(all="ignore"):
        integer = (np.rint(y) == y) & (np.abs(y) <= POWER_PRODUCTS)
        product = _power_product(x, np.where(integer, y, 0.0))
        root = np.sqrt(x)
        general = np.where(y == 0.5, root, np.where(y == -0.5, 1 / root, _power_logarithm(x, y)))
        return np.where(integer, product, general)


def _rounded(value: Floats, dtype: Any) -> Floats:
    with np.errstate(all="ignore"):
        return ref.narrow(ref.narrow(value, ref.work_dtype(dtype)), dtype)


def power(x: Floats, y: Floats) -> Floats:
    """X to the power y, an array of binary64 of x's shape."""
    return _rounded(power_binary64(x.astype(np.float64), y), x.dtype)


def power_backward(dy: Floats, x: Floats, y: Floats) -> Floats:
    """The gradient for x, in the work type."""
    g, b = dy.astype(np.float64), x.astype(np.float64)
    with np.errstate(all="ignore"):
        slope = np.where(y == 0, 0.0, g * (y * power_binary64(b, y - 1.0)))
    return _rounded(slope, ref.work_dtype(x.dtype))


def power_backward_exponent(dy: Floats, x: Floats, y: Floats) -> Floats:
    """The gradient for y, in the work type."""
    g, b = dy.astype(np.float64), x.astype(np.float64)
    with np.errstate(all="ignore"):
        p = power_binary64(b, y)
        none = (p == 0) | ((b == 0) & (y == 0))
        slope = np.where(none, 0.0, g * (p * ref.log(b)))
    return _rounded(slope, ref.work_dtype(x.dtype))
