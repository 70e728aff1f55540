# mypy: ignore-errors
"""Exponentials of rows on the CPU, their integer terms, and what follows from the sums, where the widths differ.

float16 and bfloat16 take the shorter exponential and a plain reciprocal; float32 and float64 carry the rounding error
of each exponential and of the reciprocal along. `like` is a value of the storage type, for overload resolution alone.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from isograd.numerics import constants as c
from isograd.numerics.numba_memory import load, store, work_one, work_zero
from isograd.numerics.numba_ops import (
    exp,
    exp_shift,
    exp_shifted,
    exp_short,
    exp_short_any,
    fma,
    is_finite,
    log1p_pair,
    two_sum,
)
from isograd.numerics.numba_sum import signed_rest
from isograd.numerics.numba_vectors import select
from isograd.numerics.numba_wide import (
    add_limbs,
    limb_shift,
    scale_pow2,
    split_pair,
    split_term,
    term_bias,
    to_float,
    wide_to_float,
    wide_to_pair,
    word_to_pair,
)
from isograd.runtime.numba_compile import INLINED, device_function

_ONE_32, _ONE_64 = np.float32(1), np.float64(1)
_SHIFT_32 = c.QUANTUM_BITS - c.EXP_SCALE_32
_SHIFT_64 = c.QUANTUM_BITS + c.LIMB_SHIFT_64 - c.EXP_SCALE_64
_TERM_32, _ERROR_32 = np.float32(2.0 ** (_SHIFT_32 - c.LIMB_SHIFT_32)), np.float32(2.0**_SHIFT_32)
_TERM_64, _ERROR_64 = np.float64(2.0 ** (_SHIFT_64 - c.LIMB_SHIFT_64)), np.float64(2.0**_SHIFT_64)
_DOWN_32, _DOWN_64 = np.float32(2.0**-c.EXP_SCALE_32), np.float64(2.0**-c.EXP_SCALE_64)
_SHORT = (types.int16, types.uint16)


# --- what differs between the widths ---------------------------------------------------------------------------------
def is_short(like: Any) -> Any:
    raise NotImplementedError


@overload(is_short, jit_options=INLINED)
def _is_short(like):
    short = like in _SHORT
    return lambda like: short


def row_shift(m: Any, like: Any) -> Any:
    """(base, floor, bias): what `exponential` needs to know of a row's maximum."""
    raise NotImplementedError


@overload(row_shift, jit_options=INLINED)
def _row_shift(m, like):
    if like in _SHORT:
        return lambda m, like: (m, np.float32(0), np.int32(0))
    return lambda m, like: exp_shift(m)


def exponential(x: Any, base: Any, floor: Any, bias: Any, like: Any) -> Any:
    """The scaled exponential of an element, and its rounding error."""
    raise NotImplementedError


@overload(exponential, jit_options=INLINED)
def _exponential(x, base, floor, bias, like):
    if like in _SHORT:
        return lambda x, base, floor, bias, like: (exp_short(x - base), np.float32(0))
    return lambda x, base, floor, bias, like: exp_shifted(x, base, floor, bias)


def probability(y: Any, like: Any) -> Any:
    """exp(y) for a log-probability."""
    raise NotImplementedError


@overload(probability, jit_options=INLINED)
def _probability(y, like):
    if like in _SHORT:
        return lambda y, like: exp_short_any(y)
    return lambda y, like: exp(y)


def term_scale(n: Any, like: Any) -> Any:
    """The factor that split_term needs to cut a scaled exponential into units of the quantum."""
    raise NotImplementedError


@overload(term_scale, jit_options=INLINED)
def _term_scale(n, like):
    if like in _SHORT:
        coarse = np.float32(2.0**-c.LIMB_SHIFT_32)
        fine = np.float32(2.0 ** (c.QUANTUM_BITS - c.SHORT_QUANTUM_BITS - c.LIMB_SHIFT_32))
        return lambda n, like: coarse if n <= c.SHORT_ROW else fine
    return (lambda n, like: _TERM_32) if like == types.float32 else (lambda n, like: _TERM_64)


def exponential_term(e: Any, error: Any, scale: Any, like: Any) -> Any:
    """The integer term of an exponential, in two parts that carry the term bias and the low term bias."""
    raise NotImplementedError


@overload(exponential_term, jit_options=INLINED)
def _exponential_term(e, error, scale, like):
    if like in _SHORT:
        return lambda e, error, scale, like: split_term(e, scale)
    if like == types.float32:
        return lambda e, error, scale, like: split_pair(e, error, scale, _ERROR_32)
    return lambda e, error, scale, like: split_pair(e, error, scale, _ERROR_64)


def low_term_bias(like: Any) -> Any:
    """The bias of the low part of an exponential's term, which holds the error's term as well in wide types."""
    raise NotImplementedError


@overload(low_term_bias, jit_options=INLINED)
def _low_term_bias(like):
    parts = 1 if like in _SHORT else 2
    return lambda like: parts * term_bias(work_zero(like))


def quantum_bits(n: Any, like: Any) -> Any:
    raise NotImplementedError


@overload(quantum_bits, jit_options=INLINED)
def _quantum_bits(n, like):
    if like in _SHORT:
        return lambda n, like: np.int64(c.SHORT_QUANTUM_BITS if n <= c.SHORT_ROW else c.QUANTUM_BITS)
    bits = c.QUANTUM_BITS + (c.LIMB_SHIFT_64 if like == types.float64 else 0)
    return lambda n, like: np.int64(bits)


def reciprocal(hi: Any, lo: Any, n: Any, like: Any) -> Any:
    """1 / sum as an unevaluated pair, with the scale of the exponentials taken out where that is exact."""
    raise NotImplementedError


@device_function
def reciprocal_pair(s, rest, one):
    r = one / s
    return r, fma(-r, rest, fma(-r, s, one)) * r


@overload(reciprocal, jit_options=INLINED)
def _reciprocal(hi, lo, n, like):
    if like in _SHORT:

        def short(hi, lo, n, like):
            s = wide_to_float(hi, lo, c.SHORT_QUANTUM_BITS - quantum_bits(n, like), _ONE_32)
            return _ONE_32 / s, np.float32(0)

        return short
    if like == types.float32:

        def full_32(hi, lo, n, like):
            s, rest = wide_to_pair(hi, lo, -quantum_bits(n, like), _ONE_32)
            r, r_low = reciprocal_pair(s, rest, _ONE_32)
            return r * _DOWN_32, r_low * _DOWN_32

        return full_32

    def full_64(hi, lo, n, like):
        s, rest = wide_to_pair(hi, lo, -quantum_bits(n, like), _ONE_64)
        return reciprocal_pair(s, rest, _ONE_64)

    return full_64


def mark(e: Any, x: Any, m: Any, like: Any) -> Any:
    """The exponential of an element, negative where it is one of the row's largest: `quotient` knows those by it."""
    raise NotImplementedError


@overload(mark, jit_options=INLINED)
def _mark(e, x, m, like):
    if like in _SHORT:
        return lambda e, x, m, like: e
    return lambda e, x, m, like: select(x == m, -e, e)


def largest_quotient(r: Any, r_low: Any, m: Any, base: Any, floor: Any, bias: Any, like: Any) -> Any:
    """The quotient of a row's largest elements, which carry their rounding error: equal ones give exactly 1 / n."""
    raise NotImplementedError


@overload(largest_quotient, jit_options=INLINED)
def _largest_quotient(r, r_low, m, base, floor, bias, like):
    if like in _SHORT:
        return lambda r, r_low, m, base, floor, bias, like: r

    def full(r, r_low, m, base, floor, bias, like):
        e, error = exponential(m, base, floor, bias, like)
        return fma(e, r, fma(error, r, e * r_low))

    return full


def quotient(e: Any, r: Any, r_low: Any, largest: Any, like: Any) -> Any:
    """A marked exponential divided by the sum."""
    raise NotImplementedError


@overload(quotient, jit_options=INLINED)
def _quotient(e, r, r_low, largest, like):
    if like in _SHORT:
        return lambda e, r, r_low, largest, like: e * r
    if like == types.float32:
        return lambda e, r, r_low, largest, like: select(e < 0, largest, fma(e, r, e * r_low))
    return lambda e, r, r_low, largest, like: select(e < 0, largest, fma(e, r, e * r_low)) * _DOWN_64


def log_probability(x: Any, m: Any, top: Any, middle: Any, low: Any, like: Any) -> Any:
    """X - m - log(sum), where (top, middle, low) is m + log(sum) for wide types and top is log(sum) for short ones."""
    raise NotImplementedError


@overload(log_probability, jit_options=INLINED)
def _log_probability(x, m, top, middle, low, like):
    if like in _SHORT:
        return lambda x, m, top, middle, low, like: (x - m) - top

    def full(x, m, top, middle, low, like):
        u, v = two_sum(x, -top)
        # u is infinite where x is -inf or the difference overflows; v is no number there.
        return select(is_finite(u), u + ((v - middle) - low), u)

    return full


def _down(like: Any) -> Any:
    """What takes the scale out of an exponential near 1 or a reciprocal; exact."""
    raise NotImplementedError


@overload(_down, jit_options=INLINED)
def _down_overload(like):
    down = _DOWN_32 if like == types.float32 else _DOWN_64
    if like in _SHORT:
        down = np.float32(2.0**-c.SHORT_QUANTUM_BITS)
    return lambda like: down


@device_function
def _largest_term(n, m, base, floor, bias, like):
    """(exponential, its error, high and low part of its integer term) of a row's largest element."""
    e, error = exponential(m, base, floor, bias, like)
    high, low = exponential_term(e, error, term_scale(n, like), like)
    return e, error, signed_rest(high, term_bias(m)), signed_rest(low, low_term_bias(like))


@device_function
def _log_ratio(e, error, rest, rest_low, m, like):
    e, error = e * _down(like), error * _down(like)
    t = rest / e
    t_low = ((fma(-t, e, rest) + rest_low) - t * error) / e
    log_high, log_low = log1p_pair(t, t_low)
    if is_short(like):
        return log_high, work_zero(like), work_zero(like)
    top, middle = two_sum(m, log_high)
    return top, middle, log_low


@device_function
def log_sum(hi, lo, n, m, base, floor, bias, like):
    """log(sum / largest term) for short types, m + that logarithm as three parts for the others.

    The largest term leaves the sum as an integer: a float logarithm of the rounded sum would lose every small term
    when one dominates.
    """
    e, error, high, low = _largest_term(n, m, base, floor, bias, like)
    hi, lo = add_limbs(hi, lo, -high, -low, limb_shift(like))
    rest, rest_low = wide_to_pair(hi, lo, -quantum_bits(n, like), m)
    return _log_ratio(e, error, rest, rest_low, m, like)


# --- the same from a sum that fits a word, for rows that advance together --------------------------------------------
def fits_word(n: Any, like: Any) -> Any:
    """Whether sums of n exponentials stay within 62 bits."""
    raise NotImplementedError


@overload(fits_word, jit_options=INLINED)
def _fits_word(n, like):
    if like == types.float64:
        return lambda n, like: False
    longest = 1 << 18 if like in _SHORT else 1 << 17
    return lambda n, like: n <= longest


@device_function
def word_log_sum(total, n, m, base, floor, bias, like):
    """`log_sum` of an int64."""
    e, error, high, low = _largest_term(n, m, base, floor, bias, like)
    rest, rest_low = word_to_pair(total - ((high << limb_shift(like)) + low), -quantum_bits(n, like), m)
    return _log_ratio(e, error, rest, rest_low, m, like)


@device_function
def word_reciprocal(total, n, like):
    """`reciprocal` of an int64."""
    zero = work_zero(like)
    one = work_one(like)
    if is_short(like):
        return one / scale_pow2(to_float(total, zero), np.int64(c.SHORT_QUANTUM_BITS) - quantum_bits(n, like)), zero
    s, rest = word_to_pair(total, -quantum_bits(n, like), zero)
    r, r_low = reciprocal_pair(s, rest, one)
    return r * _down(like), r_low * _down(like)


def exponential_part(block: Any, start: Any, stop: Any, base: Any, floor: Any, bias: Any, scale: Any, like: Any) -> Any:
    """Turn at most PARTIAL elements into scaled exponentials in place.

    Returns the sums of the high and the low parts of their integer terms, as int64.
    """
    raise NotImplementedError


@overload(exponential_part, jit_options=INLINED)
def _exponential_part(block, start, stop, m, base, floor, bias, scale, like):
    integer = np.int64 if like == types.float64 else np.int32

    def implementation(block, start, stop, m, base, floor, bias, scale, like):
        high, low = integer(0), integer(0)
        for i in range(start, stop):
            x = load(block, i)
            e, error = exponential(x, base, floor, bias, like)
            store(block, i, mark(e, x, m, like))
            h, v = exponential_term(e, error, scale, like)
            high = integer(high + h)
            low = integer(low + v)
        # The parts carry the term bias; modulo the integer's width it leaves the exact sums.
        terms = stop - start
        return (
            np.int64(integer(high - terms * term_bias(base))),
            np.int64(integer(low - terms * low_term_bias(like))),
        )

    return implementation
