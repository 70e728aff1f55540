"""kl_div on the CPU: pieces of a block, so that the two passes of a sum find their threads in any shape."""

from typing import Any

import numpy as np

from isograd.core.kernel import launcher
from isograd.numerics.losses import divisor
from isograd.numerics.numba_memory import (
    BLOCK,
    load,
    load_block,
    pointer,
    row_offset,
    stack_block,
    store,
    store_block,
    work_one,
)
from isograd.numerics.numba_ops import exp, log, magnitude_key
from isograd.numerics.numba_storage import narrow
from isograd.numerics.numba_sum import (
    block_magnitude,
    block_special,
    block_terms,
    is_finite_key,
    special_value,
    sum_scale,
)
from isograd.numerics.numba_wide import add_limbs, limb_shift, wide_to_float
from isograd.numerics.storage import address, kernel_type
from isograd.rows.numba_rows import piece
from isograd.rows.walk import element_strides, piece_walk, work_zero
from isograd.runtime import parallel
from isograd.runtime.fenv import default_environment
from isograd.runtime.numba_compile import device_function, kernel


@device_function
def _known(p, x, value, zero):
    """The value where there is a probability; 0 where it is 0, whatever the input is, unless that is no number."""
    return value if p != zero else (zero if x == x else x)


@device_function
def _kl_block(x, x_offset, x_stride, t, t_offset, t_stride, count, log_target, a, b, zero):
    """The terms of a piece of a row, in block b."""
    load_block(x, x_offset, x_stride, count, a)
    load_block(t, t_offset, t_stride, count, b)
    if log_target:
        for i in range(count):
            x_i, t_i = load(a, i), load(b, i)
            p = exp(t_i)
            store(b, i, _known(p, x_i, p * (t_i - x_i), zero))
    else:
        for i in range(count):
            x_i, p = load(a, i), load(b, i)
            store(b, i, _known(p, x_i, p * (log(p) - x_i), zero))


@kernel
def kl_terms(
    like, zero, x_address, t_address, loss_address, shape, x_strides, t_strides, loss_strides, n,
    x_stride, t_stride, loss_stride, log_target, start, stop,
):  # fmt: skip
    """Every term by itself."""
    x, t, loss = pointer(x_address, like), pointer(t_address, like), pointer(loss_address, zero)
    a, b = stack_block(zero), stack_block(zero)
    for index in range(start, stop):
        row, j, count = piece(index, n)
        xo, to = row_offset(row, shape, x_strides), row_offset(row, shape, t_strides)
        _kl_block(x, xo + j * x_stride, x_stride, t, to + j * t_stride, t_stride, count, log_target, a, b, zero)
        store_block(loss, row_offset(row, shape, loss_strides) + j * loss_stride, loss_stride, count, b)


@kernel
def kl_try(
    like, zero, x_address, t_address, shape, x_strides, t_strides, n, x_stride, t_stride, log_target,
    keys, highs, lows, done, shared, pieces, size, start, stop,
):  # fmt: skip
    """The largest magnitude key of some pieces, and the exact sum of their terms as far as its unit was known.

    A slot has `size` of all the pieces. The unit follows the largest term of all, which is known at the end only; but
    once a term of its size was met, what follows is summed in the right unit. `done[slot]` is the first piece of the
    slot whose terms are in its sum. `shared` hands the largest key on to later slots; whether another thread sees it in
    time changes how much `kl_sum` has to do over again, and no result.
    """
    x, t = pointer(x_address, like), pointer(t_address, like)
    a, b = stack_block(zero), stack_block(zero)
    for slot in range(start, stop):
        key = max(shared[0], magnitude_key(zero))
        first, second, exponent = sum_scale(key)
        hi, lo, fit = np.int64(0), np.uint64(0), slot * size
        for index in range(slot * size, min((slot + 1) * size, pieces)):
            row, j, count = piece(index, n)
            xo, to = row_offset(row, shape, x_strides), row_offset(row, shape, t_strides)
            _kl_block(x, xo + j * x_stride, x_stride, t, to + j * t_stride, t_stride, count, log_target, a, b, zero)
            larger = block_magnitude(b, count, key)
            if larger > key:
                key = larger
                first, second, unit = sum_scale(key)
                if unit != exponent:
                    hi, lo, fit, exponent = np.int64(0), np.uint64(0), index, unit
            if is_finite_key(key):
                high, low = block_terms(b, count, first, second)
                hi, lo = add_limbs(hi, lo, high, low, limb_shift(zero))
        shared[0] = max(shared[0], key)
        keys[slot], highs[slot], lows[slot], done[slot] = key, hi, lo, fit


@kernel
def kl_sum(
    like, zero, x_address, t_address, shape, x_strides, t_strides, n, x_stride, t_stride, log_target,
    keys, highs, lows, done, specials, key, pieces, size, start, stop,
):  # fmt: skip
    """Finish what `kl_try` began, now that the largest key of all is known."""
    x, t = pointer(x_address, like), pointer(t_address, like)
    a, b = stack_block(zero), stack_block(zero)
    finite = is_finite_key(key)
    first, second, exponent = sum_scale(key)
    for slot in range(start, stop):
        hi, lo, special, end = highs[slot], lows[slot], np.int64(0), done[slot]
        if not finite or sum_scale(keys[slot])[2] != exponent:
            hi, lo, end = np.int64(0), np.uint64(0), min((slot + 1) * size, pieces)
        for index in range(slot * size, end):
            row, j, count = piece(index, n)
            xo, to = row_offset(row, shape, x_strides), row_offset(row, shape, t_strides)
            _kl_block(x, xo + j * x_stride, x_stride, t, to + j * t_stride, t_stride, count, log_target, a, b, zero)
            if finite:
                high, low = block_terms(b, count, first, second)
                hi, lo = add_limbs(hi, lo, high, low, limb_shift(zero))
            else:
                special = block_special(b, count, special)
        highs[slot], lows[slot], specials[slot] = hi, lo, special


@kernel
def finish_sum(zero, key, highs, lows, specials, divisor, loss_address, start, stop):
    """The sum over all slots, divided and stored."""
    _, _, exponent = sum_scale(key)
    hi, lo, special = np.int64(0), np.uint64(0), np.int64(0)
    for slot in range(len(highs)):
        low = np.uint64(lo + lows[slot])
        hi += highs[slot] + (np.int64(1) if low < lo else np.int64(0))
        lo = low
        special |= specials[slot]
    s = wide_to_float(hi, lo, exponent, zero) if is_finite_key(key) else special_value(special, zero)
    store(pointer(loss_address, zero), 0, narrow(s / divisor, zero))


@kernel
def kl_gradient(
    like, zero, g_address, x_address, t_address, dx_address, shape, g_strides, x_strides, t_strides, dx_strides, n,
    g_stride, x_stride, t_stride, dx_stride, divisor, log_target, for_input, start, stop,
):  # fmt: skip
    """The gradient for the input or the target."""
    g, x, t = pointer(g_address, zero), pointer(x_address, like), pointer(t_address, like)
    dx = pointer(dx_address, like)
    one = work_one(zero)
    a, b, c = stack_block(zero), stack_block(zero), stack_block(zero)
    for index in range(start, stop):
        row, j, count = piece(index, n)
        xo = row_offset(row, shape, x_strides) + j * x_stride
        load_block(t, row_offset(row, shape, t_strides) + j * t_stride, t_stride, count, b)
        if for_input:
            if log_target:
                for i in range(count):
                    store(b, i, -exp(load(b, i)))
            else:
                for i in range(count):
                    store(b, i, -load(b, i))
        else:
            load_block(x, xo, x_stride, count, a)
            if log_target:
                for i in range(count):
                    x_i, t_i = load(a, i), load(b, i)
                    p = exp(t_i)
                    store(b, i, _known(p, x_i, p * ((t_i - x_i) + one), zero))
            else:
                for i in range(count):
                    x_i, p = load(a, i), load(b, i)
                    store(b, i, _known(p, x_i, (log(p) - x_i) + one, zero))
        go = row_offset(row, shape, g_strides) + j * g_stride
        if g_stride == 0:
            upstream = load(g, go) / divisor
            for i in range(count):
                store(b, i, upstream * load(b, i))
        else:
            load_block(g, go, g_stride, count, c)
            for i in range(count):
                store(b, i, (load(c, i) / divisor) * load(b, i))
        store_block(dx, row_offset(row, shape, dx_strides) + j * dx_stride, dx_stride, count, b)


# --- launches --------------------------------------------------------------------------------------------------------
_NOTHING: Any = (0, (), 1, ())


def _share(problem: Any, zero: Any) -> Any:
    """What the sum of the losses is divided by."""
    with default_environment():
        return type(zero)(1 if problem.reduction == "none" else divisor(problem.reduction, problem.shape))


@launcher("kl_div")
def kl_div(problem: Any, input: Any, target: Any, loss: Any) -> None:  # noqa: A002
    """Compute the loss."""
    x, t, shape, log_target = input, target, problem.shape, problem.log_target
    like, zero = kernel_type(x.dtype), work_zero(problem.dtype)
    if problem.reduction == "none":
        if x.size:
            count, outer, n, steps = piece_walk(shape, tuple(map(element_strides, (x, t, loss))), BLOCK)
            tail = (*map(address, (x, t, loss)), *outer, n, *steps, log_target)
            parallel.for_ranges(kl_terms, count, parallel.grain(count, BLOCK), like, zero, *tail)
        return
    count, outer, n, steps = piece_walk(shape, tuple(map(element_strides, (x, t))), BLOCK) if x.size else _NOTHING
    # Sums of whole numbers and maxima: which pieces share a slot leaves no trace.
    size = parallel.grain(count, min(n, BLOCK))
    slots = -(-count // size)
    keys = np.zeros(slots + 1, np.int64 if problem.dtype == "float64" else np.int32)
    highs, lows, done, specials = (np.zeros(slots, of) for of in (np.int64, np.uint64, np.int64, np.int64))
    head = (like, zero, address(x), address(t), *outer, n, *steps, log_target, keys, highs, lows, done)
    if slots:
        parallel.for_ranges(kl_try, slots, 1, *head, np.zeros_like(keys[:1]), count, size)
    key = keys.max()
    if slots:
        parallel.for_ranges(kl_sum, slots, 1, *head, specials, key, count, size)
    parallel.for_ranges(finish_sum, 1, 1, zero, key, highs, lows, specials, _share(problem, zero), address(loss))


@launcher("kl_div_backward")
def kl_div_backward(problem: Any, dloss: Any, input: Any, target: Any, dx: Any) -> None:  # noqa: A002
    """Compute dx; it may be the input or the target."""
    if dx.size == 0:
        return
    zero, operands = work_zero(problem.dtype), (np.broadcast_to(dloss, problem.shape), input, target, dx)
    count, outer, n, steps = piece_walk(problem.shape, tuple(map(element_strides, operands)), BLOCK)
    parallel.for_ranges(
        kl_gradient, count, parallel.grain(count, min(n, BLOCK)), kernel_type(dx.dtype), zero, *map(address, operands),
        *outer, n, *steps, _share(problem, zero), problem.log_target, problem.wrt == "input",
    )  # fmt: skip
