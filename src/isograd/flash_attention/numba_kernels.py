# mypy: ignore-errors
"""The forward pass of attention on the CPU, and what forward and backward need besides: problems, delta.

A step is a few tiles of BLOCK_Q queries each, which read the same head of k and v. It goes through the tiles of keys
that they see in their order, converts each once for all, and keeps for each tile of queries the running maximum and
sum of FlashAttention-2. Tiles start at multiples of their size within a sequence, so that a row's bits depend on its
own sequence alone.
"""

from typing import NamedTuple

import numpy as np

from isograd.flash_attention.numba_product import PADDING, lanes, multiply, multiply_scaled
from isograd.flash_attention.numba_rows import Pages, Rows, load_cached, load_rows, padded, store_rows, transpose
from isograd.flash_attention.numba_scores import (
    BLOCK_K,
    BLOCK_Q,
    Dropout,
    Hidden,
    Place,
    finish_scores,
    keep_factors,
    key_range,
    multiply_rows,
    row_total,
    soften,
)
from isograd.numerics.numba_memory import (
    advance,
    empty_work,
    load,
    multiply_part,
    pointer,
    stack_lanes,
    store,
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
from isograd.runtime.numba_compile import device_function, kernel

# Columns of the table of problems, one row a sequence.
BATCH, Q_START, Q_LENGTH, K_START, K_LENGTH, OFFSET = range(6)
BLOCKS, K_TILES = 6, 7  # for each head of k, of all sequences before: blocks of tiles of queries, tiles of keys


class Sizes(NamedTuple):
    """The sizes that all problems share. together: tiles of queries in a block."""

    heads: int
    groups: int
    head_dim: int
    v_dim: int
    together: int


class Forward(NamedTuple):
    """The operands of the forward pass; lse and sinks are contiguous and of the work type. pages: of k and v."""

    sizes: Sizes
    q: Rows
    k: Rows
    v: Rows
    o: Rows
    lse: int
    sinks: int
    hidden: Hidden
    dropout: Dropout
    pages: Pages


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
def find_block(table, sizes, step):
    """(problem, head of k, first pair, pairs) of a block; a pair is a tile of queries and a query head.

    Long rows of a causal problem are its last ones; they go first, so that threads end together.
    """
    kv_heads = sizes.heads // sizes.groups
    n = find_problem(table, BLOCKS, step // kv_heads)
    inner = step - table[n, BLOCKS] * kv_heads
    first = inner // kv_heads * sizes.together
    pairs = sizes.groups * ((table[n, Q_LENGTH] + BLOCK_Q - 1) // BLOCK_Q)
    return n, inner % kv_heads, first, min(pairs - first, sizes.together)


@device_function
def find_pair(problem, sizes, kv_head, pair):
    """(query head, first row, rows) of a pair."""
    tiles = (problem[Q_LENGTH] + BLOCK_Q - 1) // BLOCK_Q
    i = (tiles - 1 - pair // sizes.groups) * BLOCK_Q
    return kv_head * sizes.groups + pair % sizes.groups, i, min(problem[Q_LENGTH] - i, BLOCK_Q)


@kernel
def forward(like, bias_like, call, numbers, table, start, stop):
    """Fill o and lse. Steps: blocks, heads of k within a problem faster. numbers: scale, softcap, dropout."""
    zero, one = work_zero(like), work_one(like)
    scale, softcap, factor = numbers
    sizes, hidden = call.sizes, call.hidden
    d, e = sizes.head_dim, sizes.v_dim
    width = lanes(zero)
    q_line, v_line = padded(d, width), padded(e, width)
    room, block = BLOCK_Q + PADDING, (BLOCK_Q + PADDING) * BLOCK_K
    own = room * (q_line + v_line + width + 1)  # of a pair: q, acc, sums, m
    scratch = empty_work(sizes.together * own + 2 * room + 2 * block + BLOCK_K * (2 * q_line + v_line), like)
    scratch[:] = zero
    q = pointer(scratch.ctypes.data, zero)
    acc, sums = advance(q, room * q_line), advance(q, room * (q_line + v_line))
    m = advance(sums, room * width)
    base = advance(q, sizes.together * own)
    alpha, s = advance(base, room), advance(base, 2 * room)
    other, keys = advance(s, block), advance(s, 2 * block)
    lines, values = advance(keys, BLOCK_K * q_line), advance(keys, 2 * BLOCK_K * q_line)
    for step in range(start, stop):
        n, kv_head, first_pair, pairs = find_block(table, sizes, step)
        problem = table[n]
        batch, offset = problem[BATCH], problem[OFFSET]
        low, high = problem[K_LENGTH], np.int64(0)
        for x in range(pairs):
            head, i, rows = find_pair(problem, sizes, kv_head, first_pair + x)
            at = x * own
            load_rows(call.q, batch, head, problem[Q_START] + i, rows, d, advance(q, at), q_line, scale)
            for c in range(rows * v_line):
                store(acc, at + c, zero)
            for c in range(rows * width):
                store(sums, at + c, zero)
            sink = load(pointer(call.sinks, zero), head) if call.sinks != 0 else -work_infinity(zero)
            for r in range(rows):
                store(m, at + r, sink)
                store(sums, at + r * width, one if sink != -work_infinity(zero) else zero)
            first, last = key_range(hidden, offset, i, rows, problem[K_LENGTH])
            if first < last:
                low, high = min(low, first), max(high, last)
        for t in range(low, high):
            j = t * BLOCK_K
            count = min(problem[K_LENGTH] - j, BLOCK_K)
            row = problem[K_START] + j
            load_cached(call.k, call.pages, batch, kv_head, row, count, d, lines, q_line, one)
            transpose(lines, q_line, count, keys, zero)
            load_cached(call.v, call.pages, batch, kv_head, row, count, e, values, v_line, one)
            for x in range(pairs):
                head, i, rows = find_pair(problem, sizes, kv_head, first_pair + x)
                first, last = key_range(hidden, offset, i, rows, problem[K_LENGTH])
                if t < first or t >= last:
                    continue
                at = x * own
                p = Place(batch, n, head, i, rows, j, count, offset)
                multiply(advance(q, at), q_line, 1, rows, keys, q_line * width, width, count, d, s, BLOCK_K, alpha)
                finish_scores(s, other, hidden, bias_like, softcap, p)
                soften(s, rows, advance(m, at), base, alpha, advance(sums, at), zero)
                if call.dropout.threshold != 0:
                    keep_factors(other, p, sizes.heads, call.dropout, factor)
                    multiply_rows(s, other, rows)
                to = advance(acc, at)
                multiply_scaled(s, BLOCK_K, 1, rows, values, width, v_line, e, count, to, v_line, alpha)
        for x in range(pairs):
            head, i, rows = find_pair(problem, sizes, kv_head, first_pair + x)
            at, row = x * own, problem[Q_START] + i
            _finish_rows(
                call, advance(acc, at), v_line, advance(m, at), advance(sums, at), batch, head, row, rows, zero
            )
            store_rows(call.o, batch, head, row, rows, e, advance(acc, at), v_line, one)


@device_function
def _finish_rows(call, acc, v_line, m, sums, batch, head, row, rows, zero):
    """Divide by the sums, and write lse; rows that see nothing are 0.

    No element is -0: its sign would be that of products of 0 with values that are hidden, and so of later keys.
    """
    width = lanes(zero)
    lse = pointer(call.lse, zero)
    at = (batch * call.sizes.heads + head) * call.hidden.q_total + row
    for r in range(rows):
        total = row_total(sums, r, width)
        empty = total == zero
        divisor = total if not empty else work_infinity(zero)
        for c in range(call.sizes.v_dim):
            store(acc, r * v_line + c, load(acc, r * v_line + c) / divisor + zero)
        y = load(m, r) + log(total)
        store(lse, at + r, narrow(y, zero) if not empty else -work_infinity(zero))


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
