"""Elementwise functions in NumPy: the definition that the kernels return bit for bit.

All are computed in the work type (binary32 for the 16-bit types) and rounded to the storage type once. exp and log are
those of `numerics.reference`. silu, its backward and sigmoid take z = exp(-|x|), which cannot overflow, and
d = RN(1 + z):

    silu           x >= 0: RN(x / d)              x < 0: RN(RN(max(x, -1024) * z) / d)
    sigmoid        x >= 0: RN(1 / d)              x < 0: RN(z / d)
    sigmoid_backward  dx = RN(RN(dy * y) * RN(1 - y)), y the result as stored
    silu_backward  dx = RN(dy * g), g = RN(n / RN(d * d)), w = x clamped to [-1024, 1024]
                   x >= 0: n = fma(w, z, d)       x < 0: n = RN(z * RN(d + w))

The clamp changes no finite result, because z is zero long before; it makes silu(-inf) = -0 and gives the slopes 1 and
0 at the infinities, where x * sigmoid(x) as written would be NaN.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from isograd.numerics import reference as ref

Floats = NDArray[Any]

SILU_CLAMP: Final = 1024.0


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
