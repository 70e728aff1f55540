"""The error bounds of silu_mul, gelu_mul and their gradients.

The errors e of an activation and e' of its slope are those of rule 8 in `docs/arithmetic.md`, in the type computed in.
A product of computed factors adds u of its value, and η where it is subnormal; that of a rounded dy * up, once more
each. Where a product overflows, the bound is infinite.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.numerics.bounds import LARGEST, limits, stored_error
from isograd.ops.gated import reference

Floats = NDArray[Any]
_WIDE = np.longdouble


def errors(form: str, gate: Floats, dtype: str) -> tuple[Floats, Floats]:
    """(e, e') of an activation and its slope."""
    u, _, eta, _ = limits(dtype)
    t = 2 * eta
    if form == "none":
        x, share, density = reference.normal_parts(gate)
        size = np.abs(x)
        return 8 * u * size * share + t, 8 * u * (share + size * density) + 2 * (1 + size) * t
    x, v, dv, s, rest = reference.sigmoid_parts(form, gate)
    size, w = np.abs(x), np.abs(x) * dv
    small = 2 * (1 + np.minimum(w, 2.0**11)) * t
    if form == "silu":
        return 5.2 * u * size * s + (1 + size) * t, 10 * u * s * (1 + w * rest) + small
    size_v = np.abs(v)
    of_value = (4 + 3 * size_v * rest) * u * size * s + (1 + size) * t
    # Beyond the clamp the exponential is 0, and what of |v| grows there belongs to no error.
    return of_value, (4 + 3 * np.minimum(size_v, 2.0**15)) * u * s * (1 + w * rest) + small


def product(dtype: str, factor: Floats, error: Floats, result: Floats, roundings: int) -> Floats:
    """Of a product of a factor and a value with an error, after some roundings."""
    u, _, eta, largest = limits(dtype)
    bound = np.abs(factor) * error + (roundings + 1) * (u * np.abs(result) + eta) + stored_error(result, dtype)
    past = ~np.isfinite(factor) | (np.abs(factor) > largest) | (np.abs(result) * (1 + 2.0**-10) > LARGEST[dtype])
    return np.where(past & ~np.isnan(result), np.inf, bound)


def _gated(form: str, dtype: str, gate: Floats, up: Floats) -> Floats:
    with np.errstate(all="ignore"):
        y = reference.oracle_silu_mul(gate, up) if form == "silu" else reference.oracle_gelu_mul(gate, up, form)
        return product(dtype, up.astype(_WIDE), errors(form, gate, dtype)[0], y, 1)


def _backward(form: str, dtype: str, dy: Floats, gate: Floats, up: Floats) -> tuple[Floats, Floats]:
    given = (dy, gate, up)
    with np.errstate(all="ignore"):
        dgate, dup = (
            reference.oracle_silu_mul_backward(*given)
            if form == "silu"
            else reference.oracle_gelu_mul_backward(*given, form)
        )
        of_value, of_slope = errors(form, gate, dtype)
        wide = dy.astype(_WIDE)
        return product(dtype, wide * up.astype(_WIDE), of_slope, dgate, 2), product(dtype, wide, of_value, dup, 1)


def silu_mul(dtype: str, gate: Floats, up: Floats) -> Floats:
    """Of y."""
    return _gated("silu", dtype, gate, up)


def silu_mul_backward(dtype: str, dy: Floats, gate: Floats, up: Floats) -> tuple[Floats, Floats]:
    """Of (dgate, dup)."""
    return _backward("silu", dtype, dy, gate, up)


def gelu_mul(dtype: str, gate: Floats, up: Floats, approximate: str = "none") -> Floats:
    """Of y."""
    return _gated(approximate, dtype, gate, up)


def gelu_mul_backward(
    dtype: str, dy: Floats, gate: Floats, up: Floats, approximate: str = "none"
) -> tuple[Floats, Floats]:
    """Of (dgate, dup)."""
    return _backward(approximate, dtype, dy, gate, up)


def swiglu(dtype: str, x: Floats) -> Floats:
    """Of y."""
    return silu_mul(dtype, *reference.halves(x))


def swiglu_backward(dtype: str, dy: Floats, x: Floats) -> Floats:
    """Of dx."""
    return np.concatenate(silu_mul_backward(dtype, dy, *reference.halves(x)), -1)


def geglu(dtype: str, x: Floats, approximate: str = "none") -> Floats:
    """Of y."""
    return gelu_mul(dtype, *reference.halves(x), approximate)


def geglu_backward(dtype: str, dy: Floats, x: Floats, approximate: str = "none") -> Floats:
    """Of dx."""
    return np.concatenate(gelu_mul_backward(dtype, dy, *reference.halves(x), approximate), -1)
