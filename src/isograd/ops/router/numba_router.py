# mypy: ignore-errors
"""top_k, renormalize and the router on the CPU, one row after the other."""

import numpy as np

from isograd.elementwise.numba_kernels import sigmoid_gradient
from isograd.numerics.numba_memory import (
    empty_work,
    load,
    load_block,
    pointer,
    prefetch_read,
    prefetch_write,
    raise_flag,
    row_offset,
    store,
    store_block,
    work_one,
    work_zero,
)
from isograd.numerics.numba_ops import lowest_key
from isograd.numerics.numba_storage import widen
from isograd.ops.router.numba_scores import sigmoid_scores, softmax_scores, sum_row
from isograd.ops.router.numba_select import COUNTS, empty_keys, select_largest, selection_key, store_keys
from isograd.runtime.numba_compile import device_function, kernel


@kernel
def top_k_rows(
    like, x_address, v_address, i_address, shape, x_strides, v_strides, i_strides, n, k,
    x_stride, v_stride, i_stride, start, stop,
):  # fmt: skip
    zero = work_zero(like)
    x, values, indices = pointer(x_address, like), pointer(v_address, like), pointer(i_address, np.int64(0))
    key_array, where_array, counts = empty_keys(n + k, zero), np.empty(2 * n, np.int64), np.empty(COUNTS, np.int64)
    keys, top = pointer(key_array.ctypes.data, lowest_key(zero)), pointer(key_array[n:].ctypes.data, lowest_key(zero))
    where, spare = pointer(where_array.ctypes.data, np.int64(0)), pointer(where_array[n:].ctypes.data, np.int64(0))
    for row in range(start, stop):
        xo = row_offset(row, shape, x_strides)
        vo, io = row_offset(row, shape, v_strides), row_offset(row, shape, i_strides)
        prefetch_read(x, row_offset(min(row + 1, stop - 1), shape, x_strides), x_stride, n)
        if x_stride == 1:
            for j in range(n):
                store(keys, j, selection_key(widen(load(x, xo + j))))
        else:
            for j in range(n):
                store(keys, j, selection_key(widen(load(x, xo + j * x_stride))))
        select_largest(keys, n, k, top, where, spare, counts)
        for j in range(k):
            index = load(where, j)
            store(indices, io + j * i_stride, index)
            store(values, vo + j * v_stride, load(x, xo + index * x_stride))


# --- renormalize -----------------------------------------------------------------------------------------------------
@device_function
def _renormalized(w, n, zero):
    """Divide a row by its sum, in place, and return the sum."""
    total = sum_row(w, n, zero)
    for j in range(n):
        store(w, j, load(w, j) / total if total != zero else zero)
    return total


@device_function
def _renormalized_gradient(g, w, p, n, zero):
    """The gradient of the weights in place of g; w becomes the renormalized weights, p is scratch."""
    total = _renormalized(w, n, zero)
    for j in range(n):
        store(p, j, load(g, j) * load(w, j))
    mean = sum_row(p, n, zero)
    for j in range(n):
        store(g, j, (load(g, j) - mean) / total if total != zero else zero)


@kernel
def renormalize_rows(like, w_address, t_address, shape, w_strides, t_strides, n, w_stride, t_stride, start, stop):
    zero = work_zero(like)
    w, t = pointer(w_address, like), pointer(t_address, like)
    array = empty_work(n, zero)
    kept = pointer(array.ctypes.data, zero)
    for row in range(start, stop):
        load_block(w, row_offset(row, shape, w_strides), w_stride, n, kept)
        _renormalized(kept, n, zero)
        store_block(t, row_offset(row, shape, t_strides), t_stride, n, kept)


@kernel
def renormalize_backward_rows(
    like, dt_address, w_address, dw_address, shape, dt_strides, w_strides, dw_strides, n,
    dt_stride, w_stride, dw_stride, start, stop,
):  # fmt: skip
    zero = work_zero(like)
    dt, w, dw = pointer(dt_address, like), pointer(w_address, like), pointer(dw_address, like)
    array = empty_work(3 * n, zero)
    g, kept = pointer(array.ctypes.data, zero), pointer(array[n:].ctypes.data, zero)
    p = pointer(array[2 * n :].ctypes.data, zero)
    for row in range(start, stop):
        load_block(dt, row_offset(row, shape, dt_strides), dt_stride, n, g)
        load_block(w, row_offset(row, shape, w_strides), w_stride, n, kept)
        _renormalized_gradient(g, kept, p, n, zero)
        store_block(dw, row_offset(row, shape, dw_strides), dw_stride, n, g)


# --- the router ------------------------------------------------------------------------------------------------------
@device_function
def _scores(x, n, softmax, zero):
    if softmax:
        softmax_scores(x, n, zero)
    else:
        sigmoid_scores(x, n, zero)


@device_function
def _group_key(c, first, size, zero):
    """The key of the sum of a group's two largest selection scores."""
    best, second = np.int64(-1), np.int64(-1)
    for j in range(first, first + size):
        key = selection_key(load(c, j))
        if best < 0 or key > selection_key(load(c, best)):
            second, best = best, np.int64(j)
        elif second < 0 or key > selection_key(load(c, second)):
            second = np.int64(j)
    return selection_key(load(c, best) + load(c, second) if second >= 0 else load(c, best))


@device_function
def _mask_groups(c, keys, n, groups, group_k, group_keys, top, where, spare, counts, zero):
    """Set the keys of all experts outside the best groups below every other."""
    size = n // groups
    for i in range(groups):
        store(group_keys, i, _group_key(c, i * size, size, zero))
    select_largest(group_keys, groups, group_k, top, where, spare, counts)
    for i in range(groups):
        store(group_keys, i, lowest_key(zero))
    for i in range(group_k):
        store(group_keys, load(where, i), selection_key(zero))
    for i in range(groups):
        if load(group_keys, i) == lowest_key(zero):
            for j in range(i * size, i * size + size):
                store(keys, j, lowest_key(zero))


@kernel
def router_rows(
    like, x_address, w_address, i_address, shape, x_strides, b_strides, w_strides, i_strides, n, k, x_stride, b_stride,
    w_stride, i_stride, bias_address, softmax, renormalize, groups, group_k, scale, start, stop,
):  # fmt: skip
    zero = work_zero(like)
    key_zero = lowest_key(zero)
    x, weights, experts = pointer(x_address, like), pointer(w_address, zero), pointer(i_address, np.int64(0))
    bias = pointer(bias_address, zero)
    most = max(k, group_k)
    array, key_array = empty_work(2 * n + k, zero), empty_keys(n + groups + most, zero)
    where_array, counts = np.empty(2 * n, np.int64), np.empty(COUNTS, np.int64)
    s, c = pointer(array.ctypes.data, zero), pointer(array[n:].ctypes.data, zero)
    w = pointer(array[2 * n :].ctypes.data, zero)
    keys, group_keys = pointer(key_array.ctypes.data, key_zero), pointer(key_array[n:].ctypes.data, key_zero)
    top = pointer(key_array[n + groups :].ctypes.data, key_zero)
    where, spare = pointer(where_array.ctypes.data, np.int64(0)), pointer(where_array[n:].ctypes.data, np.int64(0))
    for row in range(start, stop):
        xo = row_offset(row, shape, x_strides)
        wo, io = row_offset(row, shape, w_strides), row_offset(row, shape, i_strides)
        prefetch_read(x, row_offset(min(row + 1, stop - 1), shape, x_strides), x_stride, n)
        load_block(x, xo, x_stride, n, s)
        _scores(s, n, softmax, zero)
        chosen_by = s
        if bias_address != 0:
            bo = row_offset(row, shape, b_strides)
            for j in range(n):
                store(c, j, load(s, j) + load(bias, bo + j))
            chosen_by = c
        store_keys(chosen_by, n, keys)
        if groups > 1:
            _mask_groups(chosen_by, keys, n, groups, group_k, group_keys, top, where, spare, counts, zero)
        select_largest(keys, n, k, top, where, spare, counts)
        for j in range(k):
            store(experts, io + j * i_stride, load(where, j))
            store(w, j, load(s, load(where, j)))
        if renormalize:
            _renormalized(w, k, zero)
        if scale != work_one(zero):
            for j in range(k):
                store(w, j, load(w, j) * scale)
        store_block(weights, wo, w_stride, k, w)


@device_function
def _softmax_gradient(s, n, g, p, owner, where, k, zero):
    """Turn the probabilities into the gradient of the logits."""
    for i in range(k):
        y = load(s, load(where, i))
        # An expert that occurs again later counts there.
        store(p, i, y * load(g, i) if load(owner, load(where, i)) == i else y * zero)
    total = sum_row(p, k, zero)
    # One probability of NaN means that all are.
    rest = zero - total
    for i in range(k):
        index = load(where, i)
        if load(owner, index) == i:
            store(p, i, load(s, index) * (load(g, i) - total))
    for j in range(n):
        store(s, j, load(s, j) * rest)
    for i in range(k):
        if load(owner, load(where, i)) == i:
            store(s, load(where, i), load(p, i))


@device_function
def _sigmoid_gradient(s, n, g, p, owner, where, k, zero):
    for i in range(k):
        if load(owner, load(where, i)) == i:
            store(p, i, sigmoid_gradient(load(g, i), load(s, load(where, i))))
    for j in range(n):
        store(s, j, zero)
    for i in range(k):
        if load(owner, load(where, i)) == i:
            store(s, load(where, i), load(p, i))


@kernel
def router_backward_rows(
    like, index_like, x_address, d_address, i_address, out_address, shape, x_strides, d_strides, i_strides, out_strides,
    n, k, x_stride, d_stride, i_stride, out_stride, softmax, renormalize, scale, flag, start, stop,
):  # fmt: skip
    zero = work_zero(like)
    x, out = pointer(x_address, like), pointer(out_address, like)
    dweights, experts = pointer(d_address, zero), pointer(i_address, index_like)
    outside = False
    array, index_array = empty_work(n + 3 * k, zero), np.empty(n + k, np.int64)
    s, g = pointer(array.ctypes.data, zero), pointer(array[n:].ctypes.data, zero)
    w, p = pointer(array[n + k :].ctypes.data, zero), pointer(array[n + 2 * k :].ctypes.data, zero)
    owner, where = pointer(index_array.ctypes.data, np.int64(0)), pointer(index_array[n:].ctypes.data, np.int64(0))
    for row in range(start, stop):
        xo, do = row_offset(row, shape, x_strides), row_offset(row, shape, d_strides)
        io, oo = row_offset(row, shape, i_strides), row_offset(row, shape, out_strides)
        prefetch_read(x, row_offset(min(row + 1, stop - 1), shape, x_strides), x_stride, n)
        prefetch_write(out, oo, out_stride, n)
        load_block(x, xo, x_stride, n, s)
        _scores(s, n, softmax, zero)
        load_block(dweights, do, d_stride, k, g)
        for i in range(k):
            expert = np.int64(load(experts, io + i * i_stride))
            if not 0 <= expert < n:  # checked before, and changed since
                expert, outside = np.int64(0), True
            store(where, i, expert)
            store(owner, expert, np.int64(i))
        if scale != work_one(zero):
            for i in range(k):
                store(g, i, load(g, i) * scale)
        if renormalize:
            for i in range(k):
                store(w, i, load(s, load(where, i)))
            _renormalized_gradient(g, w, p, k, zero)
        if softmax:
            _softmax_gradient(s, n, g, p, owner, where, k, zero)
        else:
            _sigmoid_gradient(s, n, g, p, owner, where, k, zero)
        store_block(out, oo, out_stride, n, s)
    raise_flag(flag, outside)
