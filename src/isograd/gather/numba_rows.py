# mypy: ignore-errors
"""Sums of whole rows on the CPU: the sources are grouped by destination once, then destinations are independent.

A task is a destination and a tile of at most LANES columns, so that a row with very many sources is shared out too.
"""

import numpy as np

from isograd.gather.numba_steps import (
    FOLD,
    biased_term,
    carry,
    raw_index,
    short_total,
    special_code,
    term,
    term_biases,
    term_scales,
    total,
)
from isograd.numerics.numba_memory import (
    LANES,
    load,
    pointer,
    prefetch_read,
    raise_flag,
    row_offset,
    stack_lanes,
    store,
    work_zero,
)
from isograd.numerics.numba_ops import magnitude_key
from isograd.numerics.numba_storage import narrow, widen
from isograd.numerics.numba_sum import is_finite_key
from isograd.runtime.numba_compile import device_function, kernel

AHEAD = 4  # rows that are asked for before they are read


@kernel
def group_sources(address, kind, count, size, skips, skipped, flag, starts_address, order_address, start, stop):
    """Order the sources by destination: those of d are order[starts[d]:starts[d + 1]]. One call for all of them.

    starts has size + 2 elements, order is zeros. An index that is out of range at one of the two looks is left out and
    sets the byte at `flag`, as does one for whose destination there is no place left, counted as another at first.
    """
    outside = False
    starts, order = pointer(starts_address, np.int64(0)), pointer(order_address, np.int64(0))
    for d in range(size + 2):
        store(starts, d, np.int64(0))
    for j in range(start, stop):
        d = raw_index(address, kind, j)
        if not (skips and d == skipped):
            d += size if d < 0 else np.int64(0)
            if np.uint64(d) < np.uint64(size):
                store(starts, d + 2, load(starts, d + 2) + 1)
            else:
                outside = True
    for d in range(1, size + 1):
        store(starts, d + 1, load(starts, d + 1) + load(starts, d))
    for j in range(start, stop):
        d = raw_index(address, kind, j)
        if not (skips and d == skipped):
            d += size if d < 0 else np.int64(0)
            place = load(starts, d + 1) if np.uint64(d) < np.uint64(size) else count
            if place < count:
                store(order, place, np.int64(j))
                store(starts, d + 1, place + 1)
            else:
                outside = True
    raise_flag(flag, outside)


@device_function
def _store_base(x, xo, x_stride, out, oo, out_stride, width, fill, like):
    """A destination without sources: left as it is, zeros, or the bits of x."""
    if fill == 1:
        zero = narrow(work_zero(like), like)
        if out_stride == 1:
            for i in range(width):
                store(out, oo + i, zero)
        else:
            for i in range(width):
                store(out, oo + i * out_stride, zero)
    elif fill == 2:
        if out_stride == 1 and x_stride == 1:
            for i in range(width):
                store(out, oo + i, load(x, xo + i))
        else:
            for i in range(width):
                store(out, oo + i * out_stride, load(x, xo + i * x_stride))


@device_function
def _store_sums(s, x, xo, x_stride, out, oo, out_stride, width, fill, adds, like):
    if adds:
        if fill == 0 and out_stride == 1:
            # x is out; seen as two pointers the compiler would take an element at a time.
            for i in range(width):
                store(out, oo + i, narrow(widen(load(out, oo + i)) + load(s, i), like))
        elif out_stride == 1 and x_stride == 1:
            for i in range(width):
                store(out, oo + i, narrow(widen(load(x, xo + i)) + load(s, i), like))
        else:
            for i in range(width):
                value = widen(load(x, xo + i * x_stride)) + load(s, i)
                store(out, oo + i * out_stride, narrow(value, like))
    elif out_stride == 1:
        for i in range(width):
            store(out, oo + i, narrow(load(s, i), like))
    else:
        for i in range(width):
            store(out, oo + i * out_stride, narrow(load(s, i), like))


@device_function
def _load_row(v, vo, v_stride, width, s, zero):
    """A row's elements in the work type, zeros positive."""
    if v_stride == 1:
        for i in range(width):
            store(s, i, widen(load(v, vo + i)) + zero)
    else:
        for i in range(width):
            store(s, i, widen(load(v, vo + i * v_stride)) + zero)


@device_function
def _prefetch_source(v, vo, v_row, v_stride, order, e, last, width):
    """Ask for the row that is read some rows later; the sources of one destination lie anywhere."""
    if e + AHEAD < last:
        prefetch_read(v, vo + load(order, e + AHEAD) * v_row, v_stride, width)


@device_function
def _column_keys(v, vo, v_row, v_stride, order, begin, end, last, width, s, key, zero):
    """The largest magnitude's key of every column of some rows; whether all are finite."""
    for i in range(width):
        store(key, i, magnitude_key(zero))
    e = begin
    if v_stride == 1:
        while e + 4 <= end:
            for r in range(e, e + 4):
                _prefetch_source(v, vo, v_row, v_stride, order, r, last, width)
            a, b = vo + load(order, e) * v_row, vo + load(order, e + 1) * v_row
            c, d = vo + load(order, e + 2) * v_row, vo + load(order, e + 3) * v_row
            for i in range(width):
                m = max(magnitude_key(widen(load(v, a + i))), magnitude_key(widen(load(v, b + i))))
                n = max(magnitude_key(widen(load(v, c + i))), magnitude_key(widen(load(v, d + i))))
                store(key, i, max(load(key, i), max(m, n)))
            e += 4
    while e < end:
        _prefetch_source(v, vo, v_row, v_stride, order, e, last, width)
        _load_row(v, vo + load(order, e) * v_row, v_stride, width, s, zero)
        for i in range(width):
            store(key, i, max(load(key, i), magnitude_key(load(s, i))))
        e += 1
    finite = True
    for i in range(width):
        finite &= is_finite_key(load(key, i))
    return finite


@device_function
def _add_finite(v, vo, v_row, v_stride, order, begin, end, last, width, s, scale, step, mid, low, zero):
    """Add the terms of at most FOLD rows, all of them finite; four rows at a time share a pass over the sums."""
    e = begin
    if v_stride == 1:
        while e + 4 <= end:
            for r in range(e, e + 4):
                _prefetch_source(v, vo, v_row, v_stride, order, r, last, width)
            a, b = vo + load(order, e) * v_row, vo + load(order, e + 1) * v_row
            c, d = vo + load(order, e + 2) * v_row, vo + load(order, e + 3) * v_row
            for i in range(width):
                f, g = load(scale, i), load(step, i)
                h1, q1 = biased_term(widen(load(v, a + i)), f, g)
                h2, q2 = biased_term(widen(load(v, b + i)), f, g)
                h3, q3 = biased_term(widen(load(v, c + i)), f, g)
                h4, q4 = biased_term(widen(load(v, d + i)), f, g)
                store(mid, i, load(mid, i) + ((h1 + h2) + (h3 + h4)))
                store(low, i, load(low, i) + ((q1 + q2) + (q3 + q4)))
            e += 4
    while e < end:
        _prefetch_source(v, vo, v_row, v_stride, order, e, last, width)
        _load_row(v, vo + load(order, e) * v_row, v_stride, width, s, zero)
        for i in range(width):
            h, q = biased_term(load(s, i), load(scale, i), load(step, i))
            store(mid, i, load(mid, i) + h)
            store(low, i, load(low, i) + q)
        e += 1
    high_bias, low_bias = term_biases(zero)
    for i in range(width):
        store(mid, i, load(mid, i) - (end - begin) * high_bias)
        store(low, i, load(low, i) - (end - begin) * low_bias)


@device_function
def _add_any(v, vo, v_row, v_stride, order, begin, end, width, s, key, mid, low, zero):
    """The same where some column is not finite: its `low` collects what terms there are."""
    for e in range(begin, end):
        _load_row(v, vo + load(order, e) * v_row, v_stride, width, s, zero)
        for i in range(width):
            if is_finite_key(load(key, i)):
                h, q = term(load(s, i), load(key, i))
                store(mid, i, load(mid, i) + h)
                store(low, i, load(low, i) + q)
            else:
                store(low, i, load(low, i) | special_code(load(s, i)))


@device_function
def _carry_columns(top, mid, low, key, width):
    for i in range(width):
        if is_finite_key(load(key, i)):
            a, b, c = carry(load(top, i), load(mid, i), load(low, i))
            store(top, i, a)
            store(mid, i, b)
            store(low, i, c)


@device_function
def _sum_columns(v, vo, v_row, v_stride, order, begin, end, last, width, s, key, scale, step, top, mid, low, zero):
    """The sums of several rows, column by column, into s."""
    finite = _column_keys(v, vo, v_row, v_stride, order, begin, end, last, width, s, key, zero)
    for i in range(width):
        store(top, i, np.int64(0))
        store(mid, i, np.int64(0))
        store(low, i, np.int64(0))
    if finite:
        for i in range(width):
            f, g = term_scales(load(key, i))
            store(scale, i, f)
            store(step, i, g)
    for first in range(begin, end, FOLD):
        stop = min(first + FOLD, end)
        if finite:
            _add_finite(v, vo, v_row, v_stride, order, first, stop, last, width, s, scale, step, mid, low, zero)
        else:
            _add_any(v, vo, v_row, v_stride, order, first, stop, width, s, key, mid, low, zero)
        if stop < end:
            _carry_columns(top, mid, low, key, width)
    if finite and end - begin <= FOLD:
        for i in range(width):
            store(s, i, short_total(load(mid, i), load(low, i), load(key, i), zero))
    else:
        for i in range(width):
            store(s, i, total(load(top, i), load(mid, i), load(low, i), load(key, i), zero))


@kernel
def sum_rows(
    like, starts_address, order_address, v_address, x_address, out_address, shape, v_strides, x_strides, out_strides, n,
    v_stride, x_stride, out_stride, v_row, x_row, out_row, size, tiles, fill, adds, start, stop,
):  # fmt: skip
    """The base with the rows of the sources of d added, into out[d], for tasks of a destination and a tile of columns.

    shape and the strides are those of the dimensions of a row but the innermost, which has n elements. Tasks count
    destinations fastest. fill, adds: as for `scatter_lines`.
    """
    starts, order = pointer(starts_address, np.int64(0)), pointer(order_address, np.int64(0))
    v, x, out = pointer(v_address, like), pointer(x_address, like), pointer(out_address, like)
    zero = work_zero(like)
    s, key = stack_lanes(zero), stack_lanes(magnitude_key(zero))
    scale, step = stack_lanes(np.float64(0)), stack_lanes(np.float64(0))
    top, mid, low = stack_lanes(np.int64(0)), stack_lanes(np.int64(0)), stack_lanes(np.int64(0))
    last = load(starts, size)
    task = start
    while task < stop:
        tile = task // size
        part = tile // tiles
        first = (tile - part * tiles) * LANES
        width = min(n - first, LANES)
        vo = row_offset(part, shape, v_strides) + first * v_stride
        xo = row_offset(part, shape, x_strides) + first * x_stride
        oo = row_offset(part, shape, out_strides) + first * out_stride
        top_row = min(task - tile * size + stop - task, size)
        for d in range(task - tile * size, top_row):
            begin, end = load(starts, d), load(starts, d + 1)
            xd, od = xo + d * x_row, oo + d * out_row
            if adds and d + 2 < top_row and (fill == 2 or load(starts, d + 2) < load(starts, d + 3)):
                prefetch_read(x, xd + 2 * x_row, x_stride, width)
            if begin == end:
                _store_base(x, xd, x_stride, out, od, out_stride, width, fill, like)
                continue
            if end - begin == 1:
                _prefetch_source(v, vo, v_row, v_stride, order, begin, last, width)
                _load_row(v, vo + load(order, begin) * v_row, v_stride, width, s, zero)
            else:
                _sum_columns(
                    v, vo, v_row, v_stride, order, begin, end, last, width, s, key, scale, step, top, mid, low, zero
                )  # fmt: skip
            _store_sums(s, x, xd, x_stride, out, od, out_stride, width, fill, adds, like)
        task = tile * size + top_row
