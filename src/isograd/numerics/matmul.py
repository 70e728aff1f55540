"""The order-free matrix product (rule 10): the same bits from any BLAS, with any number of threads, in any order of K.

Two precisions. "int16" is the product of `numerics/int16.py`. In "wide" every row of a and every column of b is scaled
by a power of two to magnitudes below 1 and cut into integers:

    a_ik = 2^e_i * (s1 / 2^18 + s2 / 2^36 + s3 / 2^54 + ...)      |s1| <= 2^18, |s2|, |s3| <= 2^17

Each slice is the rest of the one before times 2^18, rounded to nearest even. A product of two slices over K <= 2^16
terms stays within 2^52, so a BLAS adds it without a rounding, whatever its order, its blocking and its use of fma. The
slice width does not depend on K: padding with zeros, longer chunks of K and batching change no bit.
"""

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from isograd.errors import InvalidProblemError, UnsupportedError
from isograd.numerics import int16, numba_int16
from isograd.numerics.reference import FORMATS, narrow, pow2, work_dtype
from isograd.numerics.storage import require_array
from isograd.runtime.fenv import default_environment

Floats = NDArray[Any]

SLICE_BITS: Final = 18
CHUNK: Final = 1 << 16  # terms whose slice products add up exactly in binary64: 2 * 18 + 16 = 52 bits
MAX_TERMS: Final = 1 << 26  # beyond, the int64 sums over chunks could overflow
PRECISIONS: Final = ("int16", "wide")
DEFINITION: Final = "numpy"  # the engine that computes int16 as its definition reads
_SLICES: Final = {np.dtype(np.float32): 3, np.dtype(np.float64): 4}
_F64: Final = FORMATS[np.dtype(np.float64)]


def _pow2(k: Any) -> Floats:
    return pow2(np.clip(k, _F64.min_exponent, -_F64.min_exponent), _F64)


def _scale(x: Floats, k: Any) -> Floats:
    """The product x * 2**k for -2044 <= k <= 2044."""
    return np.asarray(x * _pow2(k >> 1) * _pow2(k - (k >> 1)))


def _slices(x: Floats, axis: int, count: int) -> tuple[list[Floats | None], NDArray[np.int64]]:
    """Cut finite binary64 values into integer slices; a slice that is zero throughout is None.

    The second result is the exponent by which each row (axis = -1) or column (axis = -2) was scaled.
    """
    largest = np.max(np.abs(x), axis=axis, keepdims=True, initial=0.0)
    exponent = np.frexp(largest)[1].astype(np.int64)
    rest = _scale(x, SLICE_BITS - exponent)
    slices: list[Floats | None] = []
    for _ in range(count):
        head = np.rint(rest)
        slices.append(head if head.any() else None)
        rest -= head
        rest *= 2.0**SLICE_BITS
    return slices, exponent


def _level_sums(a: list[Floats | None], b: list[Floats | None], shape: tuple[int, ...], terms: int) -> list[Any]:
    """T_l, the exact sum of the products of slices p and q of a and b with p + q = l, from l = 2 on."""
    sums: list[Any] = [0] * len(a)
    for start in range(0, terms, CHUNK):
        part = slice(start, start + CHUNK)
        for p, left in enumerate(a):
            for q, right in enumerate(b[: len(b) - p]):
                if left is None or right is None:
                    continue
                product = np.matmul(left[..., part], right[..., part, :])
                sums[p + q] = sums[p + q] + (product if terms <= CHUNK else product.astype(np.int64))
    return [np.zeros(shape) if isinstance(t, int) else t for t in sums]


def _combine(sums: list[Any]) -> Floats:
    """T_2 + 2^-18 * (T_3 + 2^-18 * (T_4 + ...)), added from the smallest on with one rounding each."""
    # Sums over several chunks may be longer than binary64: round them, and carry what the first one loses.
    heads = [np.asarray(t, np.float64) for t in sums]
    lost = (sums[0] - heads[0].astype(np.int64)).astype(np.float64) if sums[0].dtype == np.int64 else 0.0
    total = heads.pop()
    while len(heads) > 1:
        total = heads.pop() + total * 2.0**-SLICE_BITS
    # Adding zero turns -0 into +0: whether a BLAS returns the one or the other is its own affair.
    return np.asarray(heads[0] + (lost + total * 2.0**-SLICE_BITS) + 0.0)


def batch_shape(a: Floats, b: Floats) -> tuple[int, ...]:
    """The batch of the product of two stacks of matrices; ValueError if they do not broadcast."""
    left, right = a.shape[:-2], b.shape[:-2]
    if left == right or not right:
        return left
    return np.broadcast_shapes(left, right) if left else right


def special_products(a: Floats, b: Floats) -> NDArray[np.int64]:
    """How many products of an entry are infinite, their signs added, how many are NaN: [3, ..., M, N].

    Of a contracted axis that is cut these are added over the parts.
    """
    # Counted by a product of indicators they are exact integers as well.
    a_nan, b_nan = np.isnan(a), np.isnan(b)
    a_inf, b_inf = np.isinf(a), np.isinf(b)
    a_sign, b_sign = np.sign(np.where(a_nan, 0.0, a)), np.sign(np.where(b_nan, 0.0, b))
    count = np.matmul(a_inf * 1.0, np.abs(b_sign)) + np.matmul(np.abs(a_sign), b_inf * 1.0)
    signed = np.matmul(a_inf * a_sign, b_sign) + np.matmul(a_sign, b_inf * b_sign)
    invalid = np.matmul(a_inf * 1.0, (b_sign == 0) * 1.0) + np.matmul((a_sign == 0) * 1.0, b_inf * 1.0)
    invalid = invalid + a_nan.sum(-1, keepdims=True) + b_nan.sum(-2, keepdims=True)
    return np.stack([count, signed, invalid]).astype(np.int64)


def with_special(products: NDArray[np.int64], finite: Floats) -> Floats:
    """`finite` with the entries replaced whose products are not all finite."""
    count, signed, invalid = products
    not_a_number = (invalid > 0) | (np.abs(signed) < count)
    result = np.where(count > 0, np.copysign(np.inf, signed), finite)
    return np.where(not_a_number, np.nan, result)


def _wide(a: Floats, b: Floats) -> Floats:
    """The product of two stacks of matrices."""
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    terms, dtype, work = a.shape[-1], a.dtype, np.dtype(work_dtype(a.dtype))
    slices = _SLICES[work]
    if terms == 0 or 0 in shape:
        return np.zeros(shape, dtype)
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(all="ignore"):
        a_finite, b_finite = np.isfinite(a), np.isfinite(b)
        ordinary = bool(a_finite.all() and b_finite.all())
        left, row_exponent = _slices(a if ordinary else np.where(a_finite, a, 0.0), -1, slices)
        right, column_exponent = _slices(b if ordinary else np.where(b_finite, b, 0.0), -2, slices)
        total = _combine(_level_sums(left, right, shape, terms))
        # Two steps whose factors depend on both exponents: the first is exact, so the second rounds once. Where a
        # factor is clipped the result is zero or infinite with or without it.
        rows, columns = row_exponent - SLICE_BITS, column_exponent - SLICE_BITS
        total *= _pow2((rows >> 1) + (columns >> 1))
        total *= _pow2((rows - (rows >> 1)) + (columns - (columns >> 1)))
        total = narrow(total if ordinary else with_special(special_products(a, b), total), work)
        return total if work == dtype else narrow(total, dtype)


def _int16(a: Floats, b: Floats, balance: int16.Integers | None, engine: str | None) -> Floats:
    """The product of two stacks of matrices."""
    if engine == DEFINITION:
        c = int16.product(a, b, balance)
        ordinary = bool(np.isfinite(a).all() and np.isfinite(b).all())
    else:
        if b.ndim == 2 and a.ndim > 2:
            a = a.reshape(math.prod(a.shape[:-1]), a.shape[-1])
        batch = batch_shape(a, b)
        c = np.empty((*batch, a.shape[-2], b.shape[-1]), a.dtype)
        if len(batch) < 2:
            ordinary = numba_int16.products(a, b, c if batch else c[None], balance, engine)
        else:
            left, right = np.broadcast_to(a, batch + a.shape[-2:]), np.broadcast_to(b, batch + b.shape[-2:])
            outer = [*np.ndindex(batch[:-1])]
            every = [numba_int16.products(left[i], right[i], c[i], balance, engine) for i in outer]
            ordinary = all(every)
    if ordinary:
        return c
    with np.errstate(all="ignore"):
        kinds = special_products(a.astype(np.float64), b.astype(np.float64))
        wide = with_special(kinds, c.astype(np.float64))
        return narrow(wide, a.dtype)


def checked_precision(dtype: Any, precision: str | None) -> str:
    """The precision of a product of operands of a dtype; None stands for the one that goes with it."""
    if precision is None:
        return "int16" if dtype.itemsize == 2 else "wide"
    if precision not in PRECISIONS:
        raise InvalidProblemError(f"matmul: precision is {precision!r}; accepted: {', '.join(PRECISIONS)}, None")
    if precision == "int16" and dtype == np.float64:
        raise UnsupportedError("matmul: precision is 'int16' for float64; accepted for float64: wide")
    return precision


def _checked_balance(balance: Any, terms: int, precision: str) -> int16.Integers | None:
    if balance is None:
        return None
    if precision != "int16":
        raise InvalidProblemError(f"matmul: balance is given for precision {precision!r}; it goes with int16")
    if not isinstance(balance, np.ndarray) or balance.dtype.kind != "i" or balance.shape != (terms,):
        what = f"{balance.dtype} {balance.shape}" if isinstance(balance, np.ndarray) else type(balance).__name__
        raise InvalidProblemError(f"matmul: balance is {what}; expected a NumPy array of signed integers ({terms},)")
    if balance.size and max(-balance.min(), balance.max()) > int16.DROPPED:
        raise InvalidProblemError(
            f"matmul: balance has values from {balance.min()} to {balance.max()}; accepted: {-int16.DROPPED} to "
            f"{int16.DROPPED}"
        )
    return balance.astype(np.int64)


def _checked(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    a, b = require_array("matmul", "a", a), require_array("matmul", "b", b)
    if a.dtype != b.dtype:
        raise InvalidProblemError(f"matmul: a is {a.dtype} and b is {b.dtype}; expected one dtype")
    for name, operand in (("a", a), ("b", b)):
        if operand.ndim == 0:
            raise InvalidProblemError(f"matmul: {name} is a scalar; expected at least one dimension")
    terms, other = a.shape[-1], b.shape[max(b.ndim - 2, 0)]
    if terms != other:
        raise InvalidProblemError(
            f"matmul: a has shape {a.shape} and b {b.shape}; expected as many columns of a ({terms}) as rows of b "
            f"({other})"
        )
    try:
        batch_shape(a, b)
    except ValueError:
        raise InvalidProblemError(
            f"matmul: the batch dimensions of a {a.shape} and b {b.shape} do not broadcast"
        ) from None
    if terms > MAX_TERMS:
        raise UnsupportedError(f"matmul: the contracted axis has {terms} elements; supported: up to {MAX_TERMS}")
    return a, b


def matmul(
    a: Floats, b: Floats, precision: str | None = None, balance: Any = None, engine: str | None = None
) -> Floats:
    """The matrix product of two arrays of one dtype (float16, bfloat16, float32, float64), order-free.

    Shapes as in `numpy.matmul`: `[..., M, K] @ [..., K, N]` with broadcast batches; a 1-D operand is a row on the left
    and a column on the right, and its axis disappears. K = 0 gives zeros. An exact zero is +0. `matmul_error_bound`
    says how far off an entry may be.

    precision: "int16" rounds every row of a and every column of b to 16-bit integers; the 16-bit types have it by
    default, and float32 may. "wide" keeps some 50 bits of a row (67 for float64), at six to ten times the cost; it is
    the default of float32 and float64. balance: signed integers d [K] for "int16": column k of a counts as divided by
    2^d_k and row k of b as multiplied by it, which changes what is rounded (`int16.balance_of`,
    `int16.balance_between`). engine: what multiplies integers, one of `numba_int16.engine_names()`, by default the
    first, or DEFINITION; the bits are the same.

    An entry with a product that is not finite because an operand is not is what IEEE addition gives in any order: NaN
    if a product is NaN or both infinities occur, else the infinity. Other entries of the same row or column do not
    feel it.

    The integers take up to 8 bytes an element of a and b besides the result, those of "wide" 24 or 32.

    Raises InvalidProblemError for shapes or dtypes that do not match, another precision and a balance that does not
    fit, UnsupportedError for other dtypes, for int16 with float64 and for K beyond 2^26.
    """
    a, b = _checked(a, b)
    precision = checked_precision(a.dtype, precision)
    balance = _checked_balance(balance, a.shape[-1], precision)
    left = a[None, :] if a.ndim == 1 else a
    right = b[:, None] if b.ndim == 1 else b
    with default_environment():
        c = _int16(left, right, balance, engine) if precision == "int16" else _wide(left, right)
    c = c.reshape(*batch_shape(left, right), left.shape[-2], right.shape[-1])
    if b.ndim == 1:
        c = c[..., 0]
    if a.ndim == 1:
        c = c[..., 0] if b.ndim == 1 else c[..., 0, :]
    return c


def matmul_error_bound(a: Floats, b: Floats, precision: str | None = None, balance: Any = None) -> Floats:
    """How far each entry of `matmul(a, b)` may be from the exact product, as binary64; infinite where it is not finite.

    In "int16" it is that of `int16.error_bound` plus half an ulp, in "wide"
    K * max_k |a_ik| * max_k |b_kj| * 2^-50 (float64: 2^-67) plus half an ulp of the entry. The first part holds what
    the slices leave out, at most 8 * 2^-(18 * slices) * K * max |a| * max |b|, and the roundings of the smaller level
    sums, at most 5 * 2^-71 of the same; the second is the rounding to the storage type.
    """
    # Half an ulp relative to the value, and half the smallest subnormal.
    half_ulp, tiny = {
        "float16": (2.0**-11, 2.0**-25),
        "bfloat16": (2.0**-8, 2.0**-134),
        "float32": (2.0**-24, 2.0**-150),
        "float64": (2.0**-53, 2.0**-1074),
    }[a.dtype.name]
    precision = checked_precision(a.dtype, precision)
    product = matmul(a, b, precision, balance, DEFINITION)
    with default_environment(), np.errstate(all="ignore"):
        if precision == "int16":
            left = a[None, :] if a.ndim == 1 else a
            right = b[:, None] if b.ndim == 1 else b
            error = int16.error_bound(left, right, balance).reshape(product.shape)
            c = np.abs(product.astype(np.longdouble))
            half_ulp = 0 if a.dtype == np.float32 else half_ulp
            bound = error + half_ulp * (1 + 2.0**-8) * c + tiny
            return np.where(np.isfinite(c), bound, np.inf).astype(np.float64)
        # Two factors far apart: what their product is made of may leave the range of binary64 on the way.
        c = np.abs(product.astype(np.longdouble))
        rows = np.max(np.abs(a.astype(np.longdouble)), axis=-1, initial=0)
        columns = np.max(np.abs(b.astype(np.longdouble)), axis=max(b.ndim - 2, 0), initial=0)
        if a.ndim > 1 and b.ndim > 1:
            rows, columns = rows[..., :, None], columns[..., None, :]
        level = 2.0**-67 if a.dtype == np.float64 else 2.0**-50
        # A 16-bit result passes through binary32, which makes half an ulp a little longer.
        bound = a.shape[-1] * level * rows * columns + half_ulp * (1 + 2.0**-8) * c + tiny
        return np.where(np.isfinite(c), bound, np.inf).astype(np.float64)
