"""The gather family on the CPU: indices checked, values copied, and sums along lines that have indices of their own.

`numba_rows.py` has the sums in which one index stands for a whole row.
"""

import numpy as np

from isograd.gather.numba_steps import FOLD, carry, load_indices, row_offsets, special_code, term, total
from isograd.numerics.numba_compile import device_function, kernel
from isograd.numerics.numba_memory import BLOCK, keep, load, pointer, row_offset, store, work_zero
from isograd.numerics.numba_ops import magnitude_key
from isograd.numerics.numba_storage import narrow, widen
from isograd.numerics.numba_sum import is_finite_key


# --- indices ---------------------------------------------------------------------------------------------------------
@kernel
def check_indices(like, address, shape, strides, n, stride, least, size, skips, skipped, flag, start, stop):
    """Set the byte at `flag` if a row has an index below `least` or from `size` on, `skipped` excepted."""
    indices = pointer(address, like)
    found = False
    for row in range(start, stop):
        offset = row_offset(row, shape, strides)
        if stride == 1 and not skips:
            for i in range(n):
                v = np.int64(load(indices, offset + i))
                found |= (v < least) | (v >= size)
        else:
            for i in range(n):
                v = np.int64(load(indices, offset + i * stride))
                found |= ((v < least) | (v >= size)) & (v != skipped or not skips)
    if found:
        store(pointer(flag, np.uint8(0)), 0, np.uint8(1))


# --- copies ----------------------------------------------------------------------------------------------------------
@device_function
def _from_front(index, size):
    v = np.int64(index)
    return v + size if v < 0 else v


@kernel
def gather(
    like, index_like, x_address, indices_address, v_address, shape, x_strides, i_strides, v_strides, n, x_stride,
    i_stride, v_stride, size, axis_stride, pieces, start, stop,
):  # fmt: skip
    """Copy x at the indices into v: rows of n elements in pieces of BLOCK; x's strides are 0 along the axis.

    `like` is an integer of the elements' size. Where the indices have stride 0, a row has one index.
    """
    x, v, indices = pointer(x_address, like), pointer(v_address, like), pointer(indices_address, index_like)
    for item in range(start, stop):
        row = item if pieces == 1 else item // pieces
        first = (item - row * pieces) * BLOCK
        last = min(first + BLOCK, n)
        xo, io, vo, _ = row_offsets(row, shape, x_strides, i_strides, v_strides, v_strides)
        if i_stride == 0:
            xo += _from_front(load(indices, io), size) * axis_stride
            if x_stride == 1 and v_stride == 1:
                for j in range(first, last):
                    store(v, vo + j, load(x, xo + j))
            else:
                for j in range(first, last):
                    store(v, vo + j * v_stride, load(x, xo + j * x_stride))
        elif i_stride == 1 and v_stride == 1 and axis_stride == 1 and x_stride == 0:
            for j in range(first, last):
                store(v, vo + j, load(x, xo + _from_front(load(indices, io + j), size)))
        else:
            for j in range(first, last):
                d = _from_front(load(indices, io + j * i_stride), size)
                store(v, vo + j * v_stride, load(x, xo + j * x_stride + d * axis_stride))


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
            h, q = term(p, load(key, r))
            store(mid, r, load(mid, r) + h)
            store(low, r, load(low, r) + q)
        else:
            store(low, r, load(low, r) | special_code(p))
        if i % (FOLD // 2) == FOLD // 2 - 1:
            for e in range(count):
                r = load(last, load(places, load(repeated, e)))
                if is_finite_key(load(key, r)):
                    a, b, c = carry(load(top, r), load(mid, r), load(low, r))
                    store(top, r, a)
                    store(mid, r, b)
                    store(low, r, c)


@kernel
def scatter_lines(
    like, indices_address, kind, v_address, x_address, out_address, shape, i_strides, v_strides, x_strides, out_strides,
    k, i_stride, v_stride, n, x_stride, out_stride, fill, adds, unique, start, stop,
):  # fmt: skip
    """A base with k values added along every line of n elements, into out.

    fill: 0 if out holds the base already, 1 for zeros, 2 for x. adds: whether the base counts. unique: no line has an
    index twice.
    """
    v, x, out = pointer(v_address, like), pointer(x_address, like), pointer(out_address, like)
    zero = work_zero(like)
    sources = np.empty(6 * k + 1, np.int64)
    places = pointer(sources.ctypes.data, np.int64(0))
    top, mid, low = (
        pointer(sources[k:].ctypes.data, np.int64(0)),
        pointer(sources[2 * k :].ctypes.data, np.int64(0)),
        pointer(sources[3 * k :].ctypes.data, np.int64(0)),
    )
    key = pointer(sources[4 * k :].ctypes.data, magnitude_key(zero))
    repeated = pointer(sources[5 * k :].ctypes.data, np.int64(0))  # one more than k are written
    destinations = np.empty(0 if unique else n, np.int64)
    last = pointer(destinations.ctypes.data, np.int64(0))
    for line in range(start, stop):
        io, vo, xo, oo = row_offsets(line, shape, i_strides, v_strides, x_strides, out_strides)
        load_indices(indices_address, kind, io, i_stride, k, n, places, 0)
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
    keep(sources)
    keep(destinations)
