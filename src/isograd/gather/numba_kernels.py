# mypy: ignore-errors
"""The gather family on the CPU: indices checked, values copied, and sums along lines that have indices of their own.

`numba_rows.py` has the sums in which one index stands for a whole row.
"""

import numpy as np

from isograd.gather.numba_steps import (
    add_term,
    clear_sums,
    load_indices,
    row_offsets,
    special_code,
    spread_fits,
    stored_total,
    term,
    total,
)
from isograd.numerics.numba_memory import (
    LANES,
    load,
    pointer,
    prefetch_read,
    raise_flag,
    row_offset,
    store,
    work_zero,
)
from isograd.numerics.numba_ops import magnitude_key
from isograd.numerics.numba_storage import narrow, widen
from isograd.numerics.numba_sum import is_finite_key
from isograd.runtime.numba_compile import device_function, kernel

AHEAD = 256  # elements that are asked for before they are copied; memory takes as long as copying so many


# --- indices ---------------------------------------------------------------------------------------------------------
@kernel
def check_indices(
    like, address, least, size, skips, skipped, flag, shape, strides, run, step, n, stride, cut, start, stop
):  # fmt: skip
    """Set the byte at `flag` if a row has an index below `least` or from `size` on, `skipped` excepted.

    Here and in `gather` a row is counted over (*shape, run) and has n elements; with `cut` the rows of the last
    dimension are pieces of `cut` elements of one row of n.
    """
    indices = pointer(address, like)
    found = False
    for row in range(start, stop):
        major = row // run
        minor = row - major * run
        offset = row_offset(major, shape, strides) + minor * step
        count = min(n - minor * cut, cut) if cut else n
        if stride == 1 and not skips:
            for i in range(count):
                v = np.int64(load(indices, offset + i))
                found |= (v < least) | (v >= size)
        else:
            for i in range(count):
                v = np.int64(load(indices, offset + i * stride))
                found |= ((v < least) | (v >= size)) & (v != skipped or not skips)
    raise_flag(flag, found)


# --- copies; indices are looked at once more when they are used, since another thread may have changed them ----------
@device_function
def _prefetch_elements(x, xo, indices, io, n):
    """Ask for n elements of x; an index that is counted from the end asks for a wrong one, which costs time only."""
    for j in range(n):
        prefetch_read(x, xo + np.int64(load(indices, io + j)), 1, 1)


@device_function
def _gather_elements(x, xo, x_stride, indices, io, i_stride, v, vo, v_stride, n, size, axis_stride):
    """Copy n elements; whether that ended early at an index out of range."""
    # A loop that may end early is not made of the processor's gather instructions, which are slower where elements come
    # from far away.
    for j in range(n):
        d = np.int64(load(indices, io + j * i_stride))
        if np.uint64(d) >= np.uint64(size):
            d += size
            if np.uint64(d) >= np.uint64(size):
                return True
        store(v, vo + j * v_stride, load(x, xo + j * x_stride + d * axis_stride))
    return False


@device_function
def _gather_contiguous(x, xo, indices, io, v, vo, n, size):
    outside = False
    for j in range(0, n, AHEAD):
        rest = n - j - AHEAD
        if rest > 0:
            _prefetch_elements(x, xo, indices, io + j + AHEAD, min(rest, AHEAD))
        outside |= _gather_elements(x, xo, 0, indices, io + j, 1, v, vo + j, 1, min(n - j, AHEAD), size, 1)
    return outside


@device_function
def _copy_row(x, xo, x_stride, v, vo, v_stride, n):
    if x_stride == 1 and v_stride == 1:
        for j in range(n):
            store(v, vo + j, load(x, xo + j))
    else:
        for j in range(n):
            store(v, vo + j * v_stride, load(x, xo + j * x_stride))


@kernel
def gather(
    like, index_like, x_address, indices_address, v_address, flag, size, axis_stride, shape, x_strides, i_strides,
    v_strides, run, x_step, i_step, v_step, n, x_stride, i_stride, v_stride, cut, start, stop,
):  # fmt: skip
    """Copy x at the indices into v; x's strides are 0 along the axis.

    `like` is an integer of the elements' size. Where the indices have stride 0, a row has one index. Here and below the
    byte at `flag` is set if an index turned out of range.
    """
    x, v, indices = pointer(x_address, like), pointer(v_address, like), pointer(indices_address, index_like)
    contiguous = i_stride == 1 and v_stride == 1 and axis_stride == 1 and x_stride == 0
    ahead = AHEAD // n if contiguous and cut == 0 else 0  # rows
    outside = False
    row = start
    while row < stop:
        major = row // run
        first = row - major * run
        last = min(first + stop - row, run)
        xo, io, vo, _ = row_offsets(major, shape, x_strides, i_strides, v_strides, v_strides)
        for r in range(first, last):
            count = min(n - r * cut, cut) if cut else n
            xr, ir, vr = xo + r * x_step, io + r * i_step, vo + r * v_step
            if contiguous:
                if ahead and r + ahead < last:
                    _prefetch_elements(x, xr + ahead * x_step, indices, ir + ahead * i_step, n)
                outside |= _gather_contiguous(x, xr, indices, ir, v, vr, count, size)
            elif i_stride == 0:
                d = np.int64(load(indices, ir))
                d += size if d < 0 else np.int64(0)
                if np.uint64(d) < np.uint64(size):
                    _copy_row(x, xr + d * axis_stride, x_stride, v, vr, v_stride, count)
                else:
                    outside = True
            else:
                outside |= _gather_elements(
                    x, xr, x_stride, indices, ir, i_stride, v, vr, v_stride, count, size, axis_stride
                )
        row += last - first
    raise_flag(flag, outside)


# --- sums along lines ------------------------------------------------------------------------------------------------
@device_function
def _prepare_line(x, xo, x_stride, out, oo, out_stride, n, fill, like):
    """What the destinations without sources hold: nothing (they are there), zeros, or the elements of x."""
    if fill == 1:
        zero = narrow(work_zero(like), like)
        if out_stride == 1:
            for i in range(n):
                store(out, oo + i, zero)
        else:
            for i in range(n):
                store(out, oo + i * out_stride, zero)
    elif fill == 2:
        for i in range(n):
            store(out, oo + i * out_stride, load(x, xo + i * x_stride))


@device_function
def _store_sum(s, d, x, xo, x_stride, out, oo, out_stride, adds, like):
    value = widen(load(x, xo + d * x_stride)) + s if adds else s
    store(out, oo + d * out_stride, narrow(value, like))


@device_function
def _find_repeated(places, last, repeated, k):
    """Note in last[d] the last source of destination d, and list the others; their number is returned.

    No element of `last` is read before it was written for this line, so it needs no preparation.
    """
    for j in range(k):
        store(last, load(places, j), np.int64(j))
    count = 0
    for j in range(k):
        store(repeated, count, np.int64(j))
        count += 1 if load(last, load(places, j)) != j else 0
    return count


@device_function
def _sum_repeated(v, vo, v_stride, places, last, repeated, count, key, top, mid, low, zero):
    """Sum the destinations of the repeated sources; the sums stand at the place of each destination's last source.

    Every step but the additions may be done several times over, once for each repeated source.
    """
    for i in range(count):
        r = load(last, load(places, load(repeated, i)))
        store(key, r, magnitude_key(widen(load(v, vo + r * v_stride))))
    for i in range(count):
        j = load(repeated, i)
        r = load(last, load(places, j))
        store(key, r, max(load(key, r), magnitude_key(widen(load(v, vo + j * v_stride)))))
    for i in range(count):
        r = load(last, load(places, load(repeated, i)))
        p = widen(load(v, vo + r * v_stride))
        if is_finite_key(load(key, r)):
            h, q = term(p, load(key, r))
        else:
            h, q = np.int64(0), special_code(p)
        store(top, r, np.int64(0))
        store(mid, r, h)
        store(low, r, q)
    for i in range(count):
        j = load(repeated, i)
        r = load(last, load(places, j))
        p = widen(load(v, vo + j * v_stride))
        if is_finite_key(load(key, r)):
            add_term(p, load(key, r), top, mid, low, r, 0, True)
        else:
            store(low, r, load(low, r) | special_code(p))


@kernel
def scatter_lines(
    like, indices_address, kind, v_address, x_address, out_address, flag, k, i_stride, v_stride, n, x_stride,
    out_stride, fill, adds, unique, shape, i_strides, v_strides, x_strides, out_strides, run, i_step, v_step, x_step,
    out_step, start, stop,
):  # fmt: skip
    """A base with k values added along every line of n elements, into out; for lines with few sources.

    fill: 0 if out holds the base already, 1 for zeros, 2 for x. adds: whether the base counts. unique: no line has an
    index twice. Lines are counted over (*shape, run).
    """
    v, x, out = pointer(v_address, like), pointer(x_address, like), pointer(out_address, like)
    zero = work_zero(like)
    sources, keys = np.empty((5, k + 1), np.int64), np.empty(k, np.int64)
    places, repeated = pointer(sources[0].ctypes.data, np.int64(0)), pointer(sources[1].ctypes.data, np.int64(0))
    top, mid = pointer(sources[2].ctypes.data, np.int64(0)), pointer(sources[3].ctypes.data, np.int64(0))
    low, key = pointer(sources[4].ctypes.data, np.int64(0)), pointer(keys.ctypes.data, magnitude_key(zero))
    destinations = np.empty(0 if unique else n, np.int64)
    last = pointer(destinations.ctypes.data, np.int64(0))
    outside = False
    for line in range(start, stop):
        major = line // run
        minor = line - major * run
        io, vo, xo, oo = row_offsets(major, shape, i_strides, v_strides, x_strides, out_strides)
        io, vo, xo, oo = io + minor * i_step, vo + minor * v_step, xo + minor * x_step, oo + minor * out_step
        outside |= load_indices(indices_address, kind, io, i_stride, k, n, places)
        _prepare_line(x, xo, x_stride, out, oo, out_stride, n, fill, like)
        count = 0 if unique else _find_repeated(places, last, repeated, k)
        if count == 0:
            for j in range(k):
                s = widen(load(v, vo + j * v_stride)) + zero  # the sum of one term: itself, a zero positive
                _store_sum(s, load(places, j), x, xo, x_stride, out, oo, out_stride, adds, like)
            continue
        _sum_repeated(v, vo, v_stride, places, last, repeated, count, key, top, mid, low, zero)
        for i in range(count):
            d = load(places, load(repeated, i))
            r = load(last, d)
            if r >= 0:
                s = total(load(top, r), load(mid, r), load(low, r), load(key, r), zero)
                _store_sum(s, d, x, xo, x_stride, out, oo, out_stride, adds, like)
                store(last, d, np.int64(-1))
        for j in range(k):
            d = load(places, j)
            if load(last, d) == j:
                s = widen(load(v, vo + j * v_stride)) + zero
                _store_sum(s, d, x, xo, x_stride, out, oo, out_stride, adds, like)
    raise_flag(flag, outside)


@device_function
def _line_keys(v, vo, v_stride, k, zero):
    """The largest magnitude's key of a line's values, and the smallest one that is not zero."""
    largest, least = magnitude_key(zero), magnitude_key(zero) - 1
    for j in range(k):
        m = magnitude_key(widen(load(v, vo + j * v_stride)))
        largest = max(largest, m)
        least = m if m > 0 and (least < 0 or m < least) else least
    return largest, least


@device_function
def _store_line(x, xo, x_stride, out, oo, out_stride, key, top, mid, low, n, ready, adds, zero, like):
    """The sums, or with `adds` x and the sums; destinations without sources have key -1 and the sum 0."""
    if adds:
        for d in range(n):
            s = stored_total(top, mid, low, d, load(key, d), ready, zero)
            old = load(x, xo + d * x_stride)
            new = narrow(widen(old) + s, like)
            store(out, oo + d * out_stride, new if load(key, d) >= 0 else old)
    else:
        for d in range(n):
            s = stored_total(top, mid, low, d, load(key, d), ready, zero)
            store(out, oo + d * out_stride, narrow(s, like))


@kernel
def scatter_dense_lines(
    like, indices_address, kind, v_address, x_address, out_address, flag, k, i_stride, v_stride, n, x_stride,
    out_stride, adds, shape, i_strides, v_strides, x_strides, out_strides, run, i_step, v_step, x_step, out_step, start,
    stop,
):  # fmt: skip
    """As `scatter_lines`, for lines with so many sources that an integer sum for every destination costs little."""
    v, x, out = pointer(v_address, like), pointer(x_address, like), pointer(out_address, like)
    zero = work_zero(like)
    sums, block = np.empty((3, n), np.int64), np.empty(LANES, np.int64)
    places = pointer(block.ctypes.data, np.int64(0))
    top, mid = pointer(sums[0].ctypes.data, np.int64(0)), pointer(sums[1].ctypes.data, np.int64(0))
    low = pointer(sums[2].ctypes.data, np.int64(0))
    keys = np.empty(n, np.int64)
    key = pointer(keys.ctypes.data, magnitude_key(zero))
    none = magnitude_key(zero) - 1
    outside = False
    for line in range(start, stop):
        major = line // run
        minor = line - major * run
        io, vo, xo, oo = row_offsets(major, shape, i_strides, v_strides, x_strides, out_strides)
        io, vo, xo, oo = io + minor * i_step, vo + minor * v_step, xo + minor * x_step, oo + minor * out_step
        for d in range(n):
            store(key, d, none)
        clear_sums(mid, low, n, zero)
        largest, least = _line_keys(v, vo, v_stride, k, zero)
        # Where every value is a multiple of the line's largest quantum, no destination's own quantum rounds anything:
        # the sums are the same in units of that one, and its key may stand for all keys.
        even = is_finite_key(largest) and spread_fits(largest, least)
        if not even:
            for first in range(0, k, LANES):
                count = min(k - first, LANES)
                outside |= load_indices(indices_address, kind, io + first * i_stride, i_stride, count, n, places)
                for j in range(count):
                    d = load(places, j)
                    m = magnitude_key(widen(load(v, vo + (first + j) * v_stride)))
                    store(key, d, max(load(key, d), m))
        ready = False
        for first in range(0, k, LANES):
            count = min(k - first, LANES)
            outside |= load_indices(indices_address, kind, io + first * i_stride, i_stride, count, n, places)
            for j in range(count):
                d = load(places, j)
                p = widen(load(v, vo + (first + j) * v_stride))
                if even:
                    store(key, d, largest)
                    ready = add_term(p, largest, top, mid, low, d, n, ready)
                elif is_finite_key(load(key, d)):
                    ready = add_term(p, load(key, d), top, mid, low, d, n, ready)
                else:
                    store(low, d, load(low, d) | special_code(p))
        _store_line(x, xo, x_stride, out, oo, out_stride, key, top, mid, low, n, ready, adds, zero, like)
    raise_flag(flag, outside)
