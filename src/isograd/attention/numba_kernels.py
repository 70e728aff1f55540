"""The forward pass of attention on the CPU, and what forward and backward need besides: rows, transposed tiles, delta.

A step is a tile of BLOCK_Q queries of one head. It goes through the tiles of keys that it sees in their order, with
the running maximum and sum of FlashAttention-2. Tiles start at multiples of their size within a sequence, so that a
row's bits depend on its own sequence alone.
"""

from typing import NamedTuple

import numpy as np

from isograd.attention.numba_product import PADDING, lanes, multiply, multiply_scaled
from isograd.attention.numba_scores import (
    BLOCK_K,
    BLOCK_Q,
    Dropout,
    Hidden,
    Place,
    Rows,
    finish_scores,
    keep_factors,
    key_range,
    multiply_rows,
    row_total,
    soften,
)
from isograd.numerics.numba_compile import device_function, kernel
from isograd.numerics.numba_memory import (
    empty_work,
    keep_alive,
    load,
    load_block,
    multiply_part,
    pointer,
    stack_lanes,
    store,
    store_block,
    work_infinity,
    work_one,
    work_zero,
)
from isograd.numerics.numba_ops import log, magnitude_key
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

# Columns of the table of problems, one row a sequence.
BATCH, Q_START, Q_LENGTH, K_START, K_LENGTH, OFFSET, Q_TILES, K_TILES = range(8)  # tiles of all sequences before


class Sizes(NamedTuple):
    """The sizes that all problems share; v_dim and head_dim are those of q and v, the lines those of padded rows."""

    heads: int
    groups: int
    head_dim: int
    v_dim: int


class Forward(NamedTuple):
    """The operands of the forward pass: rows of the work type, keys as `transpose_tiles` leaves them, lse, sinks."""

    sizes: Sizes
    q: Rows
    keys: int
    v: Rows
    o: Rows
    lse: int
    sinks: int
    hidden: Hidden
    dropout: Dropout


@device_function
def find_problem(table, column, tile):
    """The problem that a tile belongs to."""
    low, high = 0, len(table) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if table[middle, column] <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@device_function
def first_tile(problem, sizes, head):
    """The number of the first transposed tile that a query head reads."""
    tiles = (problem[K_LENGTH] + BLOCK_K - 1) // BLOCK_K
    return problem[K_TILES] * (sizes.heads // sizes.groups) + head // sizes.groups * tiles


@device_function
def padded(size, width):
    """A length of rows that holds whole vectors."""
    return (size + width - 1) // width * width


@device_function
def row_start(rows, batch, head, row):
    """The offset of a row's first element."""
    return batch * rows.batch + head * rows.head + row * rows.row


@device_function
def copy_rows(base, offset, row, count, size, out, line, factor):
    """Copy rows into scratch, each element times a factor."""
    for r in range(count):
        for c in range(size):
            store(out, r * line + c, load(base, offset + r * row + c) * factor)


@kernel
def forward(like, bias_like, call, numbers, table, start, stop):
    """Fill o and lse. Steps: tiles of queries, heads within a problem faster. numbers: scale, softcap, dropout."""
    zero = work_zero(like)
    scale, softcap, factor = numbers
    sizes, hidden = call.sizes, call.hidden
    width = lanes(zero)
    q_line, v_line = padded(sizes.head_dim, width), padded(sizes.v_dim, width)
    room, block = BLOCK_Q + PADDING, (BLOCK_Q + PADDING) * BLOCK_K
    scratch = empty_work(room * (q_line + v_line + width + 4) + 2 * block, like)
    q = pointer(scratch.ctypes.data, zero)
    acc = pointer(scratch[room * q_line :].ctypes.data, zero)
    sums = pointer(scratch[room * (q_line + v_line) :].ctypes.data, zero)
    state = scratch[room * (q_line + v_line + width) :]
    m, base = pointer(state.ctypes.data, zero), pointer(state[room:].ctypes.data, zero)
    alpha = pointer(state[2 * room :].ctypes.data, zero)
    s, other = pointer(state[4 * room :].ctypes.data, zero), pointer(state[4 * room + block :].ctypes.data, zero)
    q_rows, o_rows, lse = pointer(call.q.address, zero), pointer(call.o.address, zero), pointer(call.lse, zero)
    scratch[:] = zero
    for step in range(start, stop):
        n = find_problem(table, Q_TILES, step // sizes.heads)
        problem = table[n]
        # Long rows of a causal problem are its last ones; they go first, so that threads end together.
        tiles = (problem[Q_LENGTH] + BLOCK_Q - 1) // BLOCK_Q
        inner = step - problem[Q_TILES] * sizes.heads
        head, i = inner % sizes.heads, (tiles - 1 - inner // sizes.heads) * BLOCK_Q
        batch, offset = problem[BATCH], problem[OFFSET]
        rows = min(problem[Q_LENGTH] - i, BLOCK_Q)
        at = row_start(call.q, batch, head, problem[Q_START] + i)
        copy_rows(q_rows, at, call.q.row, rows, sizes.head_dim, q, q_line, scale)
        for x in range(rows * v_line):
            store(acc, x, zero)
        for x in range(rows * width):
            store(sums, x, zero)
        for r in range(rows):
            store(m, r, -work_infinity(zero))
        if call.sinks != 0:
            sink = load(pointer(call.sinks, zero), head)
            for r in range(rows):
                store(m, r, sink)
                store(sums, r * width, work_one(zero) if sink != -work_infinity(zero) else zero)
        first, last = key_range(hidden, offset, i, rows, problem[K_LENGTH])
        k_start = first_tile(problem, sizes, head)
        v_start = row_start(call.v, batch, head // sizes.groups, problem[K_START])
        for t in range(first, last):
            j = t * BLOCK_K
            p = Place(batch, n, head, i, rows, j, min(problem[K_LENGTH] - j, BLOCK_K), offset)
            b = pointer(call.keys + (k_start + t) * sizes.head_dim * BLOCK_K * scratch.itemsize, zero)
            multiply(q, q_line, 1, rows, b, sizes.head_dim * width, width, p.keys, sizes.head_dim, s, BLOCK_K, alpha)
            finish_scores(s, other, hidden, bias_like, softcap, p)
            soften(s, rows, m, base, alpha, sums, zero)
            if call.dropout.threshold != 0:
                keep_factors(other, p, sizes.heads, call.dropout, factor)
                multiply_rows(s, other, rows)
            b = pointer(call.v.address + (v_start + j * call.v.row) * scratch.itemsize, zero)
            multiply_scaled(s, BLOCK_K, 1, rows, b, width, call.v.row, sizes.v_dim, p.keys, acc, v_line, alpha)
        _finish_rows(call, acc, v_line, m, sums, batch, head, problem[Q_START] + i, rows, o_rows, lse, zero)
    keep_alive(scratch)


@device_function
def _finish_rows(call, acc, v_line, m, sums, batch, head, i, rows, o, lse, zero):
    """Divide by the sums; rows that see nothing are 0."""
    width = lanes(zero)
    at = row_start(call.o, batch, head, i)
    for r in range(rows):
        total = row_total(sums, r, width)
        empty = total == zero
        divisor = total if not empty else work_infinity(zero)
        for c in range(call.sizes.v_dim):
            store(o, at + r * call.o.row + c, narrow(load(acc, r * v_line + c) / divisor, zero))
        y = load(m, r) + log(total)
        store(
            lse,
            (batch * call.sizes.heads + head) * call.hidden.q_total + i + r,
            narrow(y, zero) if not empty else -work_infinity(zero),
        )


# --- preparation -----------------------------------------------------------------------------------------------------
@kernel
def transpose_tiles(like, rows, size, heads, out, table, start, stop):
    """Tiles of BLOCK_K rows as vectors: out[tile, rows // lanes, size, lanes], zero beyond the last row.

    Steps: tiles. Those of a head follow each other, so do the heads of a problem.
    """
    zero = work_zero(like)
    width = lanes(zero)
    x, y = pointer(rows.address, zero), pointer(out, zero)
    for step in range(start, stop):
        n = find_problem(table, K_TILES, step // heads)
        length = table[n, K_LENGTH]
        tiles = (length + BLOCK_K - 1) // BLOCK_K
        inner = step - table[n, K_TILES] * heads
        j = inner % tiles * BLOCK_K
        at = row_start(rows, table[n, BATCH], inner // tiles, table[n, K_START] + j)
        first = step * BLOCK_K * size
        for group in range(BLOCK_K // width):
            count = min(max(length - j - group * width, 0), width)
            to, source = first + group * width * size, at + group * width * rows.row
            for c in range(size):
                for r in range(count):
                    store(y, to + c * width + r, load(x, source + r * rows.row + c))
                for r in range(count, width):
                    store(y, to + c * width + r, zero)


@kernel
def widen_rows(like, x, heads, length, x_strides, size, y, line, factor, start, stop):
    """Rows of an array [B, H, L, D] of any strides, widened, times a factor, in lines whose rest is 0."""
    zero = work_zero(like)
    source, out = pointer(x, like), pointer(y, zero)
    block = stack_lanes(zero)
    for row in range(start, stop):
        b, rest = row // (heads * length), row % (heads * length)
        at = b * x_strides[0] + rest // length * x_strides[1] + rest % length * x_strides[2]
        load_block(source, at, x_strides[3], size, block)
        for c in range(size):
            store(out, row * line + c, load(block, c) * factor)
        for c in range(size, line):
            store(out, row * line + c, zero)


@kernel
def narrow_rows(like, y, heads, length, y_strides, size, x, line, factor, start, stop):
    """Contiguous lines of the work type, times a factor, rounded into rows of an array [B, H, L, D] of any strides."""
    zero = work_zero(like)
    source, out = pointer(x, zero), pointer(y, like)
    block = stack_lanes(zero)
    for row in range(start, stop):
        b, rest = row // (heads * length), row % (heads * length)
        at = b * y_strides[0] + rest // length * y_strides[1] + rest % length * y_strides[2]
        for c in range(size):
            store(block, c, load(source, row * line + c) * factor)
        store_block(out, at, y_strides[3], size, block)


# --- delta -----------------------------------------------------------------------------------------------------------
@kernel
def delta_rows(like, o, do, heads, length, o_strides, do_strides, size, out, out_strides, start, stop):
    """The order-free sums of the rows of o · do, every product rounded."""
    zero = work_zero(like)
    first, second, sums = pointer(o, like), pointer(do, like), pointer(out, zero)
    block = stack_lanes(zero)
    for row in range(start, stop):
        b, rest = row // (heads * length), row % (heads * length)
        h, i = rest // length, rest % length
        a = b * o_strides[0] + h * o_strides[1] + i * o_strides[2]
        g = b * do_strides[0] + h * do_strides[1] + i * do_strides[2]
        multiply_part(first, a, o_strides[3], second, g, do_strides[3], 0, size, block)
        key = block_magnitude(block, size, magnitude_key(zero))
        at = b * out_strides[0] + h * out_strides[1] + i * out_strides[2]
        if is_finite_key(key):
            one, two, exponent = sum_scale(key)
            high, low = block_terms(block, size, one, two)
            hi, lo = add_limbs(np.int64(0), np.uint64(0), high, low, limb_shift(like))
            total = wide_to_float(hi, lo, exponent, zero)
        else:
            total = special_value(block_special(block, size, np.int64(0)), zero)
        store(sums, at, narrow(total, zero))
