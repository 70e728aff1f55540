"""The table of rotary embeddings, with the same bits on every machine."""

from decimal import ROUND_HALF_EVEN, Context, Decimal, localcontext
from math import factorial, isfinite, tau

import numpy as np
from numpy.typing import NDArray

from isograd.errors import InvalidProblemError

_TAU = Decimal("6.28318530717958647692528676655900576839433879875021164194989")
_SINE = [(-1) ** k / factorial(2 * k + 1) for k in range(9)]
_COSINE = [(-1) ** k / factorial(2 * k) for k in range(10)]


def _polynomial(x: NDArray[np.float64], coefficients: list[float]) -> NDArray[np.float64]:
    """Horner's scheme: a product and a sum are rounded on their own, as NumPy's ufuncs do."""
    total = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total


def _steps(dim: int, base: float) -> NDArray[np.uint64]:
    """base^(-2i / dim) radians in units of 2^-64 turn; exp and ln of decimal are rounded correctly."""
    with localcontext(Context(prec=60, rounding=ROUND_HALF_EVEN)):
        log = Decimal(base).ln()
        turns = [(-log * (2 * i) / dim).exp() / _TAU for i in range(dim // 2)]
        return np.array([int((t * 2**64).to_integral_value()) for t in turns], np.uint64)


def rotary_table(length: int, dim: int, *, base: float = 10000.0) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Tabulate cos and sin of p base^(-2i / dim), float32 of shape [length, dim / 2] each.

    p < length and i < dim / 2. An angle is a whole number of 2^-64 turns: a product of integers modulo 2^64
    reduces it exactly.
    The error is at most half a unit in the last place of float32, and 2^-50 + p 2^-62.

    Raises InvalidProblemError unless 0 <= length <= 2^31, dim is even and positive, and base is finite and at least 1.
    """
    if not 0 <= length <= 2**31:
        raise InvalidProblemError(f"length must be between 0 and 2^31, got {length}")
    if dim <= 0 or dim % 2:
        raise InvalidProblemError(f"dim must be even and positive, got {dim}")
    if not (isfinite(base) and base >= 1):
        raise InvalidProblemError(f"base must be finite and at least 1, got {base}")
    turns = np.arange(length, dtype=np.uint64)[:, None] * _steps(dim, base)
    quadrant = (turns + np.uint64(2**61)) >> np.uint64(62)
    rest = (turns - (quadrant << np.uint64(62))).view(np.int64)
    angle = rest.astype(np.float64) * (tau * 2.0**-64)
    square = angle * angle
    sine, cosine = angle * _polynomial(square, _SINE), _polynomial(square, _COSINE)
    odd = quadrant & np.uint64(1) == 1
    cos = np.where(odd, sine, cosine)
    sin = np.where(odd, cosine, sine)
    cos = np.where((quadrant == 1) | (quadrant == 2), -cos, cos)
    sin = np.where((quadrant == 2) | (quadrant == 3), -sin, sin)
    return cos.astype(np.float32), sin.astype(np.float32)
