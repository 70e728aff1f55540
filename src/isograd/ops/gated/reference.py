"""silu_mul, gelu_mul and their gradients in NumPy: the definition that every kernel returns bit for bit.

With s the activation of the gate and k its slope, both of `elementwise/reference.py` in the work type:

    y = RN(s * up)      dgate = RN(RN(dy * up) * k)      dup = RN(dy * s)

and each rounded to the storage type once.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.elementwise import reference as activations
from isograd.numerics import reference as ref

Floats = NDArray[Any]
ACTIVATIONS = {
    "silu": (activations.silu, activations.silu_backward),
    "none": (activations.gelu, activations.gelu_backward),
    "tanh": (activations.gelu_tanh, activations.gelu_tanh_backward),
}


def _gated(form: str, gate: Floats, up: Floats) -> Floats:
    with np.errstate(all="ignore"):
        return ref.narrow(ACTIVATIONS[form][0](ref.widen(gate)) * ref.widen(up), up.dtype)


def _backward(form: str, dy: Floats, gate: Floats, up: Floats) -> tuple[Floats, Floats]:
    value, slope = ACTIVATIONS[form]
    g, v = ref.widen(dy), ref.widen(gate)
    with np.errstate(all="ignore"):
        dgate = (g * ref.widen(up)) * slope(np.ones_like(v), v)
        return ref.narrow(dgate, up.dtype), ref.narrow(g * value(v), up.dtype)


def silu_mul(gate: Floats, up: Floats) -> Floats:
    """The bits of y."""
    return _gated("silu", gate, up)


def silu_mul_backward(dy: Floats, gate: Floats, up: Floats) -> tuple[Floats, Floats]:
    """The bits of (dgate, dup)."""
    return _backward("silu", dy, gate, up)


def gelu_mul(gate: Floats, up: Floats, approximate: str = "none") -> Floats:
    """The bits of y."""
    return _gated(approximate, gate, up)


def gelu_mul_backward(dy: Floats, gate: Floats, up: Floats, approximate: str = "none") -> tuple[Floats, Floats]:
    """The bits of (dgate, dup)."""
    return _backward(approximate, dy, gate, up)


def halves(x: Floats) -> tuple[Floats, Floats]:
    """The gate and what it is multiplied with, of an array that has both."""
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def swiglu(x: Floats) -> Floats:
    """The bits of y, of a gate and a factor behind it."""
    return silu_mul(*halves(x))


def swiglu_backward(dy: Floats, x: Floats) -> Floats:
    """The bits of dx."""
    return np.concatenate(silu_mul_backward(dy, *halves(x)), -1)


def geglu(x: Floats, approximate: str = "none") -> Floats:
    """The bits of y, of a gate and a factor behind it."""
    return gelu_mul(*halves(x), approximate)


def geglu_backward(dy: Floats, x: Floats, approximate: str = "none") -> Floats:
    """The bits of dx."""
    return np.concatenate(gelu_mul_backward(dy, *halves(x), approximate), -1)


# --- the oracle: the same formulas in the widest float of the machine ------------------------------------------------
_WIDE = np.longdouble
_PI = 4 * np.arctan(_WIDE(1))
_TANH_SCALE, _TANH_CUBE = np.sqrt(8 / _PI), _WIDE("0.044715")
_erfc = np.vectorize(math.erfc, otypes=[np.float64])
_FAR = _WIDE(30000)  # stands for infinity: every exponential is 0 there


def _finite(gate: Floats) -> Floats:
    wide = gate.astype(_WIDE)
    return np.where(np.isinf(wide), np.copysign(_FAR, wide), wide)


def sigmoid_parts(form: str, gate: Floats) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """(x, v, dv/dx, sigmoid(v), 1 - sigmoid(v)) of silu or gelu's tanh form."""
    x = _finite(gate)
    v, dv = x, np.ones_like(x)
    if form != "silu":
        v, dv = _TANH_SCALE * (x + _TANH_CUBE * x**3), _TANH_SCALE * (1 + 3 * _TANH_CUBE * x * x)
    z = np.exp(-np.abs(v))
    return x, v, dv, np.where(v >= 0, 1, z) / (1 + z), np.where(v >= 0, z, 1) / (1 + z)


def normal_parts(gate: Floats) -> tuple[Floats, Floats, Floats]:
    """(x, the normal distribution up to x, its density)."""
    x = _finite(gate)
    root = np.abs(x) / np.sqrt(_WIDE(2))
    near = root.astype(np.float64)
    tail = _erfc(near) / 2 - (root - near) * np.exp(-root * root) / np.sqrt(_PI)  # a step to the wide root
    density = np.exp(-x * x / 2) / np.sqrt(2 * _PI)
    fraction = np.maximum(np.abs(x), 6)  # of Laplace: binary64's erfc becomes subnormal in the far tail
    ratio = fraction
    for k in range(80, 0, -1):
        ratio = fraction + k / ratio
    tail = np.where(np.abs(x) > 6, density / ratio, tail)
    return x, np.where(x >= 0, 1 - tail, tail), density


def activation(form: str, gate: Floats) -> tuple[Floats, Floats]:
    """The activation and its slope."""
    wide = gate.astype(_WIDE)
    if form == "none":
        x, share, density = normal_parts(gate)
        value, slope = x * share, share + x * density
    else:
        x, _, dv, s, rest = sigmoid_parts(form, gate)
        value, slope = x * s, s + x * s * rest * dv
    return np.where(np.abs(wide) < np.inf, value, np.where(wide < 0, -0.0, wide)), slope


def _oracle(form: str, gate: Floats, up: Floats) -> Floats:
    with np.errstate(all="ignore"):
        return activation(form, gate)[0] * up.astype(_WIDE)


def _oracle_backward(form: str, dy: Floats, gate: Floats, up: Floats) -> tuple[Floats, Floats]:
    with np.errstate(all="ignore"):
        value, slope = activation(form, gate)
        g = dy.astype(_WIDE)
        return g * up.astype(_WIDE) * slope, g * value


def oracle_silu_mul(gate: Floats, up: Floats) -> Floats:
    """The exact y, but for the rounding of the wide type."""
    return _oracle("silu", gate, up)


def oracle_silu_mul_backward(dy: Floats, gate: Floats, up: Floats) -> tuple[Floats, Floats]:
    """The exact gradients, but for the rounding of the wide type."""
    return _oracle_backward("silu", dy, gate, up)


def oracle_gelu_mul(gate: Floats, up: Floats, approximate: str = "none") -> Floats:
    """The exact y, but for the rounding of the wide type."""
    return _oracle(approximate, gate, up)


def oracle_gelu_mul_backward(dy: Floats, gate: Floats, up: Floats, approximate: str = "none") -> tuple[Floats, Floats]:
    """The exact gradients, but for the rounding of the wide type."""
    return _oracle_backward(approximate, dy, gate, up)


def oracle_swiglu(x: Floats) -> Floats:
    """The exact y, but for the rounding of the wide type."""
    return oracle_silu_mul(*halves(x))


def oracle_swiglu_backward(dy: Floats, x: Floats) -> Floats:
    """The exact gradient, but for the rounding of the wide type."""
    return np.concatenate(oracle_silu_mul_backward(dy, *halves(x)), -1)


def oracle_geglu(x: Floats, approximate: str = "none") -> Floats:
    """The exact y, but for the rounding of the wide type."""
    return oracle_gelu_mul(*halves(x), approximate)


def oracle_geglu_backward(dy: Floats, x: Floats, approximate: str = "none") -> Floats:
    """The exact gradient, but for the rounding of the wide type."""
    return np.concatenate(oracle_gelu_mul_backward(dy, *halves(x), approximate), -1)
