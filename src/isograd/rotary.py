"""The table of rotary embeddings, with the same bits on every machine."""

from decimal import ROUND_HALF_EVEN, Context, Decimal, localcontext
from math import factorial, isfinite, tau

import numpy as np
from numpy.typing import NDArray

from isograd.core.checks import integer_within, real_number
from isograd.errors import InvalidProblemError
from isograd.runtime.fenv import default_environment

_TAU = Decimal("6.28318530717958647692528676655900576839433879875021164194989")
_SINE = [(-1) ** k / factorial(2 * k + 1) for k in range(9)]
_COSINE = [(-1) ** k / factorial(2 * k) for k in range(10)]


def _polynomial(x: NDArray[np.float64], coefficients: list[float]) -> NDArray[np.float64]:
    """By Horner's scheme; NumPy's ufuncs round a product and a sum on their own."""
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
    """The cosines and sines of rotary embeddings: of the angle p base^(-2i / dim), for position p and pair i.

    length: positions, p < length. dim: elements of a head that are rotated, even; i < dim / 2. Both results are float32
    of shape [length, dim / 2], with the same bits on every machine; `torch.from_numpy` and a copy take them to a GPU.

    The error is at most half a unit in the last place, and 2^-50 + p 2^-62: angles are whole numbers of 2^-64 turns,
    and products of integers modulo 2^64 reduce them exactly (rule 21 of `docs/arithmetic.md`). The angle is that of
    RoFormer (Su et al., 2021, arXiv 2104.09864).

    Raises InvalidProblemError unless 0 <= length <= 2^31, dim is even and positive, and base is finite and at least 1.
    """
    name = "rotary_table"
    length, dim = integer_within(name, "length", length, 0, 2**31), integer_within(name, "dim", dim, 2)
    if dim % 2:
        raise InvalidProblemError(f"{name}: dim is {dim}; accepted: even numbers from 2")
    base = real_number(name, "base", base)
    with default_environment():
        if not (isfinite(base) and base >= 1):
            raise InvalidProblemError(f"{name}: base is {base}; accepted: finite numbers from 1")
        return _table(np.arange(length, dtype=np.uint64)[:, None] * _steps(dim, base))


def _table(turns: NDArray[np.uint64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cos and sin of angles in units of 2^-64 turn."""
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
