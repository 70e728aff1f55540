"""Gumbel-softmax on the CPU, one row of the axis after the other: noise, softmax, and the gradient."""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from isograd.core.kernel import launcher
from isograd.numerics.numba_memory import (
    BLOCK,
    empty_work,
    load,
    load_block,
    multiply_part,
    pointer,
    prefetch_read,
    prefetch_write,
    row_offset,
    stack_block,
    store,
    store_block,
    work_nan,
    work_one,
    work_zero,
)
from isograd.numerics.numba_ops import from_key, is_finite, log, lowest_key, magnitude_key
from isograd.numerics.numba_random import philox
from isograd.numerics.numba_storage import narrow, widen
from isograd.numerics.numba_sum import (
    PARTIAL,
    block_magnitude,
    block_special,
    is_finite_key,
    part_terms,
    special_value,
    sum_scale,
)
from isograd.numerics.numba_wide import add_limbs, limb_shift, wide_to_float
from isograd.numerics.random import number_strides
from isograd.numerics.reference import work_dtype
from isograd.ops.gumbel_softmax.reference import LAST_WORD
from isograd.rows.numba_exponentials import largest_quotient, quotient, reciprocal, row_shift, term_scale
from isograd.rows.numba_rows import block_exponentials, block_maximum, fill
from isograd.rows.walk import for_rows
from isograd.runtime.fenv import default_environment
from isograd.runtime.numba_compile import INLINED, device_function, kernel

_LONGEST = (1 << 31) - 1
_MASK, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_LAST, _ALL = np.uint64(LAST_WORD), np.uint64(0xFFFFFFFFFFFFFFFF)
_UNIT_32, _HALF_32 = np.float32(2.0**-23), np.float32(2.0**-24)
_UNIT_64, _HALF_64 = np.float64(2.0**-52), np.float64(2.0**-53)


# --- noise -----------------------------------------------------------------------------------------------------------
@device_function
def _philox(block, seed):
    """The four words of a block, each in 64 bits."""
    return philox(block & _MASK, block >> _HALF, np.uint64(0), _LAST, seed)


def numbers_shift(like: Any) -> Any:
    """How many numbers a block makes, as a power of two."""
    raise NotImplementedError


@overload(numbers_shift, jit_options=INLINED)
def _numbers_shift(like):
    shift = np.uint64(1 if like == types.float64 else 2)
    return lambda like: shift


def variate(bits: Any, like: Any) -> Any:
    """The variate in (0, 1) of some random bits of a block."""
    raise NotImplementedError


@overload(variate, jit_options=INLINED)
def _variate(bits, like):
    if like == types.float64:
        return lambda bits, like: np.float64(np.int64(bits >> np.uint64(12))) * _UNIT_64 + _HALF_64
    return lambda bits, like: np.float32(np.int32(bits >> np.uint64(9))) * _UNIT_32 + _HALF_32


def random_bits(index: Any, seed: Any, like: Any) -> Any:
    """The random bits of one number."""
    raise NotImplementedError


@overload(random_bits, jit_options=INLINED)
def _random_bits(index, seed, like):
    if like == types.float64:

        def pair(index, seed, like):
            a, b, c, d = _philox(index >> np.uint64(1), seed)
            return (d << _HALF) | c if index & np.uint64(1) else (b << _HALF) | a

        return pair

    def word(index, seed, like):
        a, b, c, d = _philox(index >> np.uint64(2), seed)
        part = index & np.uint64(3)
        low, high = (b if part & np.uint64(1) else a), (d if part & np.uint64(1) else c)
        return high if part & np.uint64(2) else low

    return word


def store_variates(out: Any, place: Any, words: Any, like: Any) -> Any:
    """Store the variates of a block, the first one at `place`."""
    raise NotImplementedError


@overload(store_variates, jit_options=INLINED)
def _store_variates(out, place, words, like):
    if like == types.float64:

        def pairs(out, place, words, like):
            store(out, place, variate((words[1] << _HALF) | words[0], like))
            store(out, place + 1, variate((words[3] << _HALF) | words[2], like))

        return pairs

    def each(out, place, words, like):
        store(out, place, variate(words[0], like))
        store(out, place + 1, variate(words[1], like))
        store(out, place + 2, variate(words[2], like))
        store(out, place + 3, variate(words[3], like))

    return each


@device_function
def _gumbel(u):
    return -log(-log(u))


@device_function
def _add_noise(block, count, first, step, seed, factor, spare, zero):
    """(x + g) * factor for elements whose numbers are `first`, `first` + `step`, ...; `spare` is a block for variates.

    Neighbouring numbers come from blocks of several.
    """
    if step != np.uint64(1):
        for i in range(count):
            u = variate(random_bits(first + np.uint64(i) * step, seed, zero), zero)
            store(block, i, (load(block, i) + _gumbel(u)) * factor)
        return
    shift = numbers_shift(zero)
    each = np.int64(1) << np.int64(shift)
    for start in range(0, count, PARTIAL):
        size = min(count - start, PARTIAL)
        number = first + np.uint64(start)
        lead = np.int64(number & np.uint64(each - 1))
        blocks = (lead + size + each - 1) >> np.int64(shift)
        for b in range(blocks):
            # Numbers count modulo 2^64, and so do their blocks modulo what is left of that.
            index = ((number >> shift) + np.uint64(b)) & (_ALL >> shift)
            store_variates(spare, b * each, _philox(index, seed), zero)
        for i in range(size):
            store(block, start + i, (load(block, start + i) + _gumbel(load(spare, lead + i))) * factor)


# --- forward ---------------------------------------------------------------------------------------------------------
@device_function
def _first_equal(z, n, block, m):
    """The place of the first element that equals m."""
    for j in range(0, n, BLOCK):
        count = min(n - j, BLOCK)
        if n > BLOCK:
            load_block(z, j, 1, count, block)
        for i in range(count):
            if load(block, i) == m:
                return j + i
    return n


@kernel
def gumbel_softmax_rows(
    like, x_address, y_address, shape, numbers, x_strides, y_strides, n, number_stride, x_stride, y_stride, factor,
    hard, seed, offset, start, stop,
):  # fmt: skip
    """Rows of the result; `numbers` and `number_stride` are the strides of the elements' numbers."""
    x, y = pointer(x_address, like), pointer(y_address, like)
    zero = work_zero(like)
    block, spare = stack_block(zero), stack_block(zero)
    step = np.uint64(number_stride)
    # A row that is longer than a block keeps its logits, then its exponentials, here.
    scratch = empty_work(n if n > BLOCK else 0, zero)
    kept = pointer(scratch.ctypes.data, zero)
    for row in range(start, stop):
        xo, yo = row_offset(row, shape, x_strides), row_offset(row, shape, y_strides)
        first = offset + np.uint64(row_offset(row, shape, numbers))
        key = lowest_key(zero)
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            load_block(x, xo + j * x_stride, x_stride, count, block)
            _add_noise(block, count, first + np.uint64(j) * step, step, seed, factor, spare, zero)
            key = block_maximum(block, count, key)
            if n > BLOCK:
                store_block(kept, j, 1, count, block)
        m = from_key(key)
        if not is_finite(m):
            fill(y, yo, y_stride, n, work_nan(zero), load(x, xo))
            continue
        if hard:
            place = _first_equal(kept, n, block, m)
            fill(y, yo, y_stride, n, zero, load(x, xo))
            store(y, yo + place * y_stride, narrow(work_one(zero), load(x, xo)))
            continue
        base, floor, bias = row_shift(m, zero)
        scale = term_scale(n, zero)
        hi, lo = np.int64(0), np.uint64(0)
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            if n > BLOCK:
                load_block(kept, j, 1, count, block)
            hi, lo = block_exponentials(block, count, hi, lo, m, base, floor, bias, scale, zero)
            if n > BLOCK:
                store_block(kept, j, 1, count, block)
        r, r_low = reciprocal(hi, lo, n, zero)
        largest = largest_quotient(r, r_low, m, base, floor, bias, zero)
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            if n > BLOCK:
                load_block(kept, j, 1, count, block)
            for i in range(count):
                store(block, i, quotient(load(block, i), r, r_low, largest, zero))
            store_block(y, yo + j * y_stride, y_stride, count, block)


# --- backward --------------------------------------------------------------------------------------------------------
@device_function
def _gradient_part(dy, dy_offset, dy_stride, y, y_offset, y_stride, start, stop, s, factor, block):
    if dy_stride == 1 and y_stride == 1:
        for i in range(start, stop):
            v = widen(load(y, y_offset + i))
            store(block, i, (v * (widen(load(dy, dy_offset + i)) - s)) * factor)
    else:
        for i in range(start, stop):
            v = widen(load(y, y_offset + i * y_stride))
            store(block, i, (v * (widen(load(dy, dy_offset + i * dy_stride)) - s)) * factor)


@kernel
def gumbel_softmax_backward_rows(
    like, dy_address, y_address, dx_address, shape, dy_strides, y_strides, dx_strides, n, dy_stride, y_stride,
    dx_stride, factor, start, stop,
):  # fmt: skip
    """Rows of the gradient; dx may be dy or y. As in the softmax family, each pass asks for one stream ahead."""
    dy, y, dx = pointer(dy_address, like), pointer(y_address, like), pointer(dx_address, like)
    zero = work_zero(like)
    block = stack_block(zero)
    for row in range(start, stop):
        after = min(row + 1, stop - 1)
        dyo, dy_ahead = row_offset(row, shape, dy_strides), row_offset(after, shape, dy_strides)
        yo, y_ahead = row_offset(row, shape, y_strides), row_offset(after, shape, y_strides)
        dxo = row_offset(row, shape, dx_strides)
        key = magnitude_key(zero)
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            for i in range(0, count, PARTIAL):
                end = min(i + PARTIAL, count)
                prefetch_write(dx, dxo + (j + i) * dx_stride, dx_stride, end - i)
                multiply_part(dy, dyo + j * dy_stride, dy_stride, y, yo + j * y_stride, y_stride, i, end, block)
            key = block_magnitude(block, count, key)
        finite = is_finite_key(key)
        first, second, exponent = sum_scale(key)
        hi, lo, special = np.int64(0), np.uint64(0), np.int64(0)
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            if n > BLOCK:
                multiply_part(dy, dyo + j * dy_stride, dy_stride, y, yo + j * y_stride, y_stride, 0, count, block)
            if not finite:
                special = block_special(block, count, special)
                continue
            for i in range(0, count, PARTIAL):
                end = min(i + PARTIAL, count)
                prefetch_read(dy, dy_ahead + (j + i) * dy_stride, dy_stride, end - i)
                high, low = part_terms(block, i, end, first, second)
                hi, lo = add_limbs(hi, lo, high, low, limb_shift(zero))
        s = wide_to_float(hi, lo, exponent, zero) if finite else special_value(special, zero)
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            dyj, yj = dyo + j * dy_stride, yo + j * y_stride
            for i in range(0, count, PARTIAL):
                end = min(i + PARTIAL, count)
                prefetch_read(y, y_ahead + (j + i) * y_stride, y_stride, end - i)
                _gradient_part(dy, dyj, dy_stride, y, yj, y_stride, i, end, s, factor, block)
            store_block(dx, dxo + j * dx_stride, dx_stride, count, block)


# --- launches --------------------------------------------------------------------------------------------------------
def _too_long(problem: Any) -> str | None:
    """Rows are counted in 31 bits."""
    n = problem.shape[problem.axis]
    return f"a row has {n} elements; at most {_LONGEST}" if n > _LONGEST else None


def _factor(tau: float, dtype: Any) -> Any:
    """1 / tau in the type that is computed in."""
    of = work_dtype(dtype)
    with default_environment():
        return of(1) / of(tau)


@launcher("gumbel_softmax", _too_long)
def gumbel_softmax(problem: Any, logits: Any, y: Any) -> None:
    """Compute y; it may be the logits."""
    if y.size:
        numbers = number_strides(y.shape, problem.batched)
        settings = (_factor(problem.tau, y.dtype), problem.hard, np.uint64(problem.seed), np.uint64(problem.offset))
        for_rows(gumbel_softmax_rows, problem.axis, (logits, y), *settings, counted=(numbers,))


@launcher("gumbel_softmax_backward", _too_long)
def gumbel_softmax_backward(problem: Any, dy: Any, y: Any, dx: Any) -> None:
    """Compute dx; it may be dy or y."""
    if dx.size:
        for_rows(gumbel_softmax_backward_rows, problem.axis, (dy, y, dx), _factor(problem.tau, dx.dtype))
