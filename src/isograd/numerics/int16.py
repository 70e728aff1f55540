"""The matrix product of 16-bit integers (rule 10): what every engine that adds integers exactly computes alike.

    A_ik = rint(a_ik 2^(15 - E_i - d_k)),  B_kj = rint(b_kj 2^(15 - F_j + d_k)),  Z = Σ_k A_ik B_kj
    c_ij = RN(⌊(Z + 128) / 256⌋) 2^(E_i + F_j - 22), RN to binary32, the result to the storage type

E_i is the least integer for which the row's integers stay within 127 · 256 + 127, so that two signed bytes hold each;
F_j is the same of a column. d is the balance: any integers that a's columns are divided by, as powers of two, and b's
rows multiplied with, which changes no product, only what the roundings cost. Z is exact, so neither the order of K nor
how it is cut, padding with zeros, tiles or batches leave a trace.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from isograd.numerics.reference import narrow

Floats = NDArray[Any]
Integers = NDArray[np.int64]

LARGEST: Final = 127 * 256 + 127  # the magnitude of an integer
ZERO: Final = -(1 << 14)  # stands for the exponent of an element that has none: 0, NaN, an infinity
DROPPED: Final = 1024  # a balance below whose power nothing else of a row can be
EXACT: Final = 1 << 22  # terms whose sum binary64 holds exactly: 2 * 15 + 22 = 52 bits


def exponents(x: Floats) -> Integers:
    """The least e with rint(|x| 2^(15 - e)) <= LARGEST, of each element."""
    size = np.abs(x.astype(np.float64))
    fraction, exponent = np.frexp(np.where(np.isfinite(size), size, 0.0))
    return np.where(fraction == 0, ZERO, exponent + (fraction * 2.0**15 >= LARGEST + 0.5)).astype(np.int64)


def largest_exponents(x: Floats, axis: int) -> Integers:
    """The greatest of the exponents along an axis; ZERO where nothing has one."""
    return np.asarray(exponents(x).max(axis=axis, initial=ZERO))


def balance_of(weight: Floats) -> Integers:
    """The balance d [K] that a weight b [K, N] asks for, whatever it is multiplied with.

    With w_k the greatest exponent of row k and W the median of the rows that are not zero (of an even number the upper
    one), d_k = max(0, 4⌊(W - w_k) / 4⌋): rows at least 16 times weaker than most are raised, so that a column of a is
    measured by what it can do to the result. A zero row of b takes its column of a out of the rounding.
    """
    return balance_from(largest_exponents(weight, -1))


def balance_from(w: Integers) -> Integers:
    """The same from the greatest exponents of its rows."""
    some = np.sort(w[w > ZERO])
    middle = some[some.size // 2] if some.size else 0
    return np.where(w > ZERO, np.maximum(0, (middle - w) // 4 * 4), DROPPED)


def balance_between(a: Floats, b: Floats) -> Integers:
    """The balance d [K] of a product over tokens, a [M, K] and b [K, N], that gives both one scale for each token.

    With x_k and y_k the greatest exponents of a token in a and in b, d_k = x_k - ⌊(x_k + y_k) / 2⌋. A token that is
    zero in one of them is taken out of the other's rounding.
    """
    return balance_from_tokens(largest_exponents(a, -2), largest_exponents(b, -1))


def balance_from_tokens(x: Integers, y: Integers) -> Integers:
    """The same from the greatest exponents of the tokens in a and in b."""
    level = x - (x + y) // 2
    return np.where(x == ZERO, np.where(y == ZERO, 0, -DROPPED), np.where(y == ZERO, DROPPED, level))


def rounded(x: Floats, balance: Integers | None, axis: int) -> tuple[Floats, Integers]:
    """The integers, as binary64, and the exponents of rows (axis -1) or columns (axis -2); not finite gives 0."""
    elements = exponents(x)
    if balance is not None:
        shift = -balance if axis == -1 else balance[:, None]
        elements = np.where(elements == ZERO, ZERO, elements + shift)
    greatest = elements.max(axis=axis, keepdims=True, initial=ZERO)
    exponent = np.where(greatest == ZERO, 0, greatest)
    power = 15 - exponent + (0 if balance is None else shift)
    # Wide first: NumPy before 2.1.3 ends the process where it chooses between bfloat16 and a number.
    finite = np.where(np.isfinite(x), x.astype(np.float64), 0.0)
    return np.rint(np.ldexp(finite, power.astype(np.int32))), exponent


def exact_sums(a: Floats, b: Floats) -> Integers:
    """Z, by a BLAS of binary64, which rounds no such sum whatever its order; longer ones are added in int64."""
    total = np.zeros((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]), np.int64)
    for start in range(0, a.shape[-1], EXACT):
        part = slice(start, start + EXACT)
        total += np.matmul(a[..., part], b[..., part, :]).astype(np.int64)
    return total


def scaled(z: Integers, e: Integers, f: Integers, dtype: Any) -> Floats:
    """The result from the exact sums."""
    t = ((z + 128) >> 8).astype(np.float32).astype(np.float64)
    return narrow(narrow(np.ldexp(t, (e + f - 22).astype(np.int32)), np.float32), dtype)


def product(a: Floats, b: Floats, balance: Integers | None = None) -> Floats:
    """The bits of the product of finite matrices [..., M, K] and [..., K, N], up to K = 2^26, in a's dtype."""
    with np.errstate(all="ignore"):
        left, e = rounded(a, balance, -1)
        right, f = rounded(b, balance, -2)
        return scaled(exact_sums(left, right), e, f, a.dtype)


def error_bound(a: Floats, b: Floats, balance: Integers | None = None) -> Floats:
    """How far the result may be from the exact product, but for the last rounding to the storage type; in binary64.

    2^-16 (2^E Σ|b'| + 2^F Σ|a'|) + (2^-32 K + 2^-23) 2^(E + F) + 2^-24 |c|, with a' and b' the balanced operands: the
    roundings of A and of B, both at once, that of T to a multiple of 256 and that of T to binary32.
    """
    with np.errstate(all="ignore"):
        wide = np.longdouble
        shift = np.zeros(a.shape[-1], np.int32) if balance is None else balance.astype(np.int32)
        left = np.ldexp(np.abs(a.astype(wide)), -shift)
        right = np.ldexp(np.abs(b.astype(wide)), shift[:, None])
        e = np.ldexp(wide(1), rounded(a, balance, -1)[1].astype(np.int32))
        f = np.ldexp(wide(1), rounded(b, balance, -2)[1].astype(np.int32))
        bound = 2.0**-16 * (e * right.sum(axis=-2, keepdims=True) + f * left.sum(axis=-1, keepdims=True))
        bound += (a.shape[-1] * 2.0**-32 + 2.0**-23) * e * f
        exact = np.abs(np.matmul(a.astype(wide), b.astype(wide)))
        return np.asarray(bound + 2.0**-24 * (exact + bound), np.float64)
