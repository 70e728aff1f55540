# mypy: ignore-errors
"""Building blocks of the order-free sum (rule 4) for kernels that walk through a row in blocks."""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from isograd.numerics import constants as c
from isograd.numerics.numba_memory import load
from isograd.numerics.numba_ops import is_finite, magnitude_key, pow2_32, pow2_64
from isograd.numerics.numba_ops import is_finite_key as is_finite_key
from isograd.numerics.numba_wide import split_term, term_bias
from isograd.runtime.numba_compile import INLINED, device_function

PARTIAL = 256  # terms whose int32 parts (within 2**22) are summed in int32; narrow sums are what vectorises well
_NAN_32, _NAN_64 = np.float32(np.nan), np.float64(np.nan)
_INF_32, _INF_64 = np.float32(np.inf), np.float64(np.inf)


def sum_scale(key: Any) -> Any:
    """(a, b, k) for the largest magnitude's key: terms are split_term(p * a, b), in units of 2**k.

    One factor would leave the range for the smallest exponents, so it is applied in two exact steps.
    """
    raise NotImplementedError


@overload(sum_scale, jit_options=INLINED)
def _sum_scale(key):
    if key == types.int32:

        def scale_32(key):
            exponent = max(np.int64(key >> 23) - 127, np.int64(-126))
            total = c.QUANTUM_BITS - c.LIMB_SHIFT_32 - exponent
            b = min(total, np.int64(100))
            return pow2_32(total - b), pow2_32(b), exponent - c.QUANTUM_BITS

        return scale_32

    def scale_64(key):
        exponent = max((key >> 52) - 1023, np.int64(-1022))
        total = c.QUANTUM_BITS - exponent
        b = min(total, np.int64(1000))
        return pow2_64(total - b), pow2_64(b), exponent - c.QUANTUM_BITS - c.LIMB_SHIFT_64

    return scale_64


@device_function
def block_magnitude(p, count, key):
    """The larger of `key` and the largest magnitude key in a block."""
    for i in range(count):
        k = magnitude_key(load(p, i))
        key = k if k > key else key
    return key


def part_terms(p: Any, start: Any, stop: Any, a: Any, b: Any) -> Any:
    """The sums of the high and the low parts of at most PARTIAL integer terms, as int64."""
    raise NotImplementedError


@overload(part_terms, jit_options=INLINED)
def _part_terms(p, start, stop, a, b):
    integer = np.int32 if a == types.float32 else np.int64

    def terms(p, start, stop, a, b):
        high, low = integer(0), integer(0)
        for i in range(start, stop):
            h, v = split_term(load(p, i) * a, b)
            high = integer(high + h)
            low = integer(low + v)
        # The parts carry the term bias; modulo the integer's width it leaves the exact sums.
        bias = (stop - start) * term_bias(a)
        return np.int64(integer(high - bias)), np.int64(integer(low - bias))

    return terms


@device_function
def block_terms(p, count, a, b):
    """The sums of the high and the low parts of a block's integer terms, as int64."""
    high, low = np.int64(0), np.int64(0)
    for start in range(0, count, PARTIAL):
        h, v = part_terms(p, start, min(start + PARTIAL, count), a, b)
        high += h
        low += v
    return high, low


@device_function
def note_special(x, state):
    """Note a term that is not finite: bit 0 a positive infinity, bit 1 a negative one, both bits also for a NaN."""
    if not is_finite(x):
        state |= 1 if x > 0 else (2 if x < 0 else 3)
    return state


@device_function
def block_special(p, count, state):
    """Note the terms of a block that are not finite."""
    for i in range(count):
        state = note_special(load(p, i), state)
    return state


def special_value(state: Any, like: Any) -> Any:
    """What IEEE addition gives in any order, from the bits that `block_special` collected."""
    raise NotImplementedError


@overload(special_value, jit_options=INLINED)
def _special_value(state, like):
    if like == types.float32:
        return lambda state, like: _NAN_32 if state == 3 else (_INF_32 if state == 1 else -_INF_32)
    return lambda state, like: _NAN_64 if state == 3 else (_INF_64 if state == 1 else -_INF_64)


def signed_rest(total: Any, excess: Any) -> Any:
    """A partial sum of biased parts less the bias, which was added modulo the integer's width."""
    raise NotImplementedError


@overload(signed_rest, jit_options=INLINED)
def _signed_rest(total, excess):
    if total == types.int32:
        return lambda total, excess: np.int64(np.int32(total - excess))
    return lambda total, excess: total - excess
