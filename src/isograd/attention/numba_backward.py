"""The backward pass of attention on the CPU.

Scores and probabilities are computed again, tile by tile. Every element of dq is summed over tiles of keys, of dk and
dv over the query heads of a group and then tiles of queries, always from the first to the last: whether dq is added up
beside dk and dv (`backward_heads`, five products a tile) or on its own (`backward_keys` and `backward_queries`, seven,
which leaves more to share out among threads) changes no bit.
"""

from typing import NamedTuple

import numpy as np

from isograd.attention.numba_kernels import (
    BATCH,
    K_LENGTH,
    K_START,
    K_TILES,
    OFFSET,
    Q_LENGTH,
    Q_START,
    Q_TILES,
    Sizes,
    find_problem,
    first_tile,
    padded,
    row_start,
)
from isograd.attention.numba_product import PADDING, lanes, multiply, multiply_add
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
    query_range,
)
from isograd.numerics.numba_compile import device_function, kernel, subroutine
from isograd.numerics.numba_memory import (
    empty_work,
    keep_alive,
    load,
    pointer,
    store,
    work_infinity,
    work_one,
    work_zero,
)
from isograd.numerics.numba_ops import exp
from isograd.numerics.numba_storage import narrow

_ROOM = (BLOCK_K + PADDING) * BLOCK_K  # of a tile of scores, whichever way it lies


class Backward(NamedTuple):
    """The operands of the backward pass.

    q (times the scale) and do have room behind them for PADDING rows more; keys and values are transposed tiles; lse
    and delta are contiguous. dq, dk and dv are rows of the work type.
    """

    sizes: Sizes
    q: Rows
    do: Rows
    k: Rows
    keys: int
    values: int
    lse: int
    delta: int
    dq: Rows
    dk: Rows
    dv: Rows
    hidden: Hidden
    dropout: Dropout


class Bias(NamedTuple):
    """Where the gradient of the bias goes, its strides, and the sizes of its axes, 1 where it was broadcast."""

    address: int
    strides: tuple[int, int, int, int]
    batch: int
    heads: int
    queries: int
    keys: int


@device_function
def _rows_at(rows, batch, head, row, zero, itemsize):
    return pointer(rows.address + row_start(rows, batch, head, row) * itemsize, zero)


@subroutine
def _tile(call, bias_like, numbers, problem, p, s, ds, slope, keep, bent, zero, itemsize):
    """P after dropout into s, dS into ds; `bent` says whether dS is that of the scores before the softcap."""
    _, softcap, factor = numbers
    sizes, hidden = call.sizes, call.hidden
    width = lanes(zero)
    tile = first_tile(problem, sizes, p.head) + p.j // BLOCK_K
    row = problem[Q_START] + p.i
    q = _rows_at(call.q, p.batch, p.head, row, zero, itemsize)
    do = _rows_at(call.do, p.batch, p.head, row, zero, itemsize)
    keys = pointer(call.keys + tile * sizes.head_dim * BLOCK_K * itemsize, zero)
    values = pointer(call.values + tile * sizes.v_dim * BLOCK_K * itemsize, zero)
    d, e = sizes.head_dim, sizes.v_dim
    multiply(q, call.q.row, 1, p.rows, keys, d * width, width, p.keys, d, s, BLOCK_K, s)
    multiply(do, call.do.row, 1, p.rows, values, e * width, width, p.keys, e, ds, BLOCK_K, ds)
    finish_scores(s, slope, hidden, bias_like, softcap, p)
    if call.dropout.threshold != 0:
        keep_factors(keep, p, sizes.heads, call.dropout, factor)
        multiply_rows(ds, keep, p.rows)
    at = (p.batch * sizes.heads + p.head) * hidden.q_total + row
    lse, delta = pointer(call.lse, zero), pointer(call.delta, zero)
    for r in range(p.rows):
        base, shift = load(lse, at + r), load(delta, at + r)
        base = base if base != -work_infinity(zero) else work_infinity(zero)  # nothing is visible: P is 0
        for c in range(BLOCK_K):
            probability = exp(load(s, r * BLOCK_K + c) - base)
            store(s, r * BLOCK_K + c, probability)
            store(ds, r * BLOCK_K + c, probability * (load(ds, r * BLOCK_K + c) - shift))
    if bent and softcap > 0:
        multiply_rows(ds, slope, p.rows)
    if call.dropout.threshold != 0:
        multiply_rows(s, keep, p.rows)


@device_function
def _tiles(base, size, zero):
    """The tiles of scores at the start of scratch memory, whose elements have `size` bytes: s, ds, slope and keep."""
    step = _ROOM * size
    return (
        pointer(base, zero),
        pointer(base + step, zero),
        pointer(base + 2 * step, zero),
        pointer(base + 3 * step, zero),
    )


@device_function
def _clear(x, count, zero):
    for i in range(count):
        store(x, i, zero)


@device_function
def _finish(x, line, count, size, factor, rows, batch, head, row, zero, itemsize):
    """Write sums, times a factor, where the gradient goes."""
    out = _rows_at(rows, batch, head, row, zero, itemsize)
    for r in range(count):
        for c in range(size):
            store(out, r * rows.row + c, narrow(load(x, r * line + c) * factor, zero))


@subroutine
def _key_tile(call, bias_like, numbers, table, n, kv_head, j, s, ds, slope, keep, dk, dv, dq, with_dq, zero, itemsize):
    """Dk and dv of a tile of keys; with_dq adds what it contributes to dq, [groups, tiles of queries, line]."""
    problem, sizes = table[n], call.sizes
    width = lanes(zero)
    k_line, v_line = padded(sizes.head_dim, width), padded(sizes.v_dim, width)
    batch, offset, count = problem[BATCH], problem[OFFSET], min(problem[K_LENGTH] - j, BLOCK_K)
    tiles = (problem[Q_LENGTH] + BLOCK_Q - 1) // BLOCK_Q
    _clear(dk, (BLOCK_K + PADDING) * k_line, zero)
    _clear(dv, (BLOCK_K + PADDING) * v_line, zero)
    first, last = query_range(call.hidden, offset, j, count, problem[Q_LENGTH])
    k = _rows_at(call.k, batch, kv_head, problem[K_START] + j, zero, itemsize)
    for group in range(sizes.groups):
        head = kv_head * sizes.groups + group
        for t in range(first, last):
            i = t * BLOCK_Q
            p = Place(batch, n, head, i, min(problem[Q_LENGTH] - i, BLOCK_Q), j, count, offset)
            _tile(call, bias_like, numbers, problem, p, s, ds, slope, keep, True, zero, itemsize)
            q = _rows_at(call.q, batch, head, problem[Q_START] + i, zero, itemsize)
            do = _rows_at(call.do, batch, head, problem[Q_START] + i, zero, itemsize)
            multiply_add(s, 1, BLOCK_K, count, do, width, call.do.row, sizes.v_dim, p.rows, dv, v_line, dv)
            multiply_add(ds, 1, BLOCK_K, count, q, width, call.q.row, sizes.head_dim, p.rows, dk, k_line, dk)
            if with_dq:
                at = ((group * tiles + t) * BLOCK_Q * k_line) * itemsize
                out = pointer(dq + at, zero)
                multiply_add(ds, BLOCK_K, 1, p.rows, k, width, call.k.row, sizes.head_dim, count, out, k_line, out)
    one = work_one(zero)
    row = problem[K_START] + j
    _finish(dk, k_line, count, sizes.head_dim, one, call.dk, batch, kv_head, row, zero, itemsize)
    _finish(dv, v_line, count, sizes.v_dim, one, call.dv, batch, kv_head, row, zero, itemsize)


@kernel
def backward_heads(like, bias_like, call, numbers, table, start, stop):
    """All gradients. Steps: heads of k and v, problems slower."""
    zero, sizes = work_zero(like), call.sizes
    width = lanes(zero)
    k_line, v_line = padded(sizes.head_dim, width), padded(sizes.v_dim, width)
    room = BLOCK_K + PADDING
    kv_heads = sizes.heads // sizes.groups
    longest = np.max(table[:, Q_LENGTH])
    most = sizes.groups * ((longest + BLOCK_Q - 1) // BLOCK_Q) * BLOCK_Q * k_line
    scratch = empty_work(4 * _ROOM + room * (k_line + v_line) + most, like)
    size = scratch.itemsize
    base = scratch.ctypes.data
    s, ds, slope, keep = _tiles(base, size, zero)
    dk = pointer(base + 4 * _ROOM * size, zero)
    dv = pointer(base + (4 * _ROOM + room * k_line) * size, zero)
    dq = base + (4 * _ROOM + room * (k_line + v_line)) * size
    scratch[: 4 * _ROOM] = zero
    for step in range(start, stop):
        n, kv_head = step // kv_heads, step % kv_heads
        problem = table[n]
        tiles = (problem[Q_LENGTH] + BLOCK_Q - 1) // BLOCK_Q
        _clear(pointer(dq, zero), sizes.groups * tiles * BLOCK_Q * k_line, zero)
        for j in range(0, problem[K_LENGTH], BLOCK_K):
            _key_tile(call, bias_like, numbers, table, n, kv_head, j, s, ds, slope, keep, dk, dv, dq, True, zero, size)
        for group in range(sizes.groups):
            x = pointer(dq + group * tiles * BLOCK_Q * k_line * size, zero)
            head = kv_head * sizes.groups + group
            _finish(
                x, k_line, problem[Q_LENGTH], sizes.head_dim, numbers[0], call.dq, problem[BATCH], head,
                problem[Q_START], zero, size,
            )  # fmt: skip
    keep_alive(scratch)


@kernel
def backward_keys(like, bias_like, call, numbers, table, start, stop):
    """Dk and dv. Steps: tiles of keys, numbered as `transpose_tiles` does."""
    zero, sizes = work_zero(like), call.sizes
    width = lanes(zero)
    k_line, v_line = padded(sizes.head_dim, width), padded(sizes.v_dim, width)
    room = BLOCK_K + PADDING
    kv_heads = sizes.heads // sizes.groups
    scratch = empty_work(4 * _ROOM + room * (k_line + v_line), like)
    size = scratch.itemsize
    base = scratch.ctypes.data
    s, ds, slope, keep = _tiles(base, size, zero)
    dk = pointer(base + 4 * _ROOM * size, zero)
    dv = pointer(base + (4 * _ROOM + room * k_line) * size, zero)
    scratch[: 4 * _ROOM] = zero
    for step in range(start, stop):
        n = find_problem(table, K_TILES, step // kv_heads)
        tiles = (table[n, K_LENGTH] + BLOCK_K - 1) // BLOCK_K
        inner = step - table[n, K_TILES] * kv_heads
        j = inner % tiles * BLOCK_K
        _key_tile(
            call, bias_like, numbers, table, n, inner // tiles, j, s, ds, slope, keep, dk, dv, 0, False, zero, size
        )
    keep_alive(scratch)


@kernel
def backward_queries(like, bias_like, call, numbers, table, start, stop):
    """Dq. Steps: tiles of queries, heads within a problem faster."""
    zero, sizes = work_zero(like), call.sizes
    width = lanes(zero)
    line = padded(sizes.head_dim, width)
    scratch = empty_work(4 * _ROOM + (BLOCK_Q + PADDING) * line, like)
    size = scratch.itemsize
    base = scratch.ctypes.data
    s, ds, slope, keep = _tiles(base, size, zero)
    dq = pointer(base + 4 * _ROOM * size, zero)
    scratch[: 4 * _ROOM] = zero
    for step in range(start, stop):
        n = find_problem(table, Q_TILES, step // sizes.heads)
        problem = table[n]
        inner = step - problem[Q_TILES] * sizes.heads
        head, i = inner % sizes.heads, inner // sizes.heads * BLOCK_Q
        batch, offset, rows = problem[BATCH], problem[OFFSET], min(problem[Q_LENGTH] - i, BLOCK_Q)
        _clear(dq, (BLOCK_Q + PADDING) * line, zero)
        first, last = key_range(call.hidden, offset, i, rows, problem[K_LENGTH])
        for t in range(first, last):
            j = t * BLOCK_K
            p = Place(batch, n, head, i, rows, j, min(problem[K_LENGTH] - j, BLOCK_K), offset)
            _tile(call, bias_like, numbers, problem, p, s, ds, slope, keep, True, zero, size)
            k = _rows_at(call.k, batch, head // sizes.groups, problem[K_START] + j, zero, size)
            multiply_add(ds, BLOCK_K, 1, rows, k, width, call.k.row, sizes.head_dim, p.keys, dq, line, dq)
        row = problem[Q_START] + i
        _finish(dq, line, rows, sizes.head_dim, numbers[0], call.dq, batch, head, row, zero, size)
    keep_alive(scratch)


# --- bias and sinks --------------------------------------------------------------------------------------------------
@kernel
def bias_gradient(like, bias_like, call, numbers, table, bias, start, stop):
    """The gradient of the bias: dS summed over the axes that it was broadcast over, from their first element on.

    Steps: tiles of the bias, an axis of size 1 counting as one tile.
    """
    zero, sizes = work_zero(like), call.sizes
    scratch = empty_work(5 * _ROOM, like)
    size = scratch.itemsize
    base = scratch.ctypes.data
    s, ds, slope, keep = _tiles(base, size, zero)
    total = pointer(base + 4 * _ROOM * size, zero)
    scratch[: 4 * _ROOM] = zero
    out = pointer(bias.address, bias_like)
    q_tiles = (table[0, Q_LENGTH] + BLOCK_Q - 1) // BLOCK_Q
    k_tiles = (table[0, K_LENGTH] + BLOCK_K - 1) // BLOCK_K
    by_q, by_k = bias.queries != 1, bias.keys != 1
    q_steps, k_steps = (q_tiles if by_q else 1), (k_tiles if by_k else 1)
    for step in range(start, stop):
        k_step, rest = step % k_steps, step // k_steps
        q_step, rest = rest % q_steps, rest // q_steps
        h, b = rest % bias.heads, rest // bias.heads
        _clear(total, _ROOM, zero)
        for batch in range(b if bias.batch != 1 else 0, b + 1 if bias.batch != 1 else len(table)):
            for head in range(h if bias.heads != 1 else 0, h + 1 if bias.heads != 1 else sizes.heads):
                problem = table[batch]
                for q_tile in range(q_step if by_q else 0, q_step + 1 if by_q else q_tiles):
                    i = q_tile * BLOCK_Q
                    rows = min(problem[Q_LENGTH] - i, BLOCK_Q)
                    first, last = key_range(call.hidden, problem[OFFSET], i, rows, problem[K_LENGTH])
                    low, high = (k_step, k_step + 1) if by_k else (0, k_tiles)
                    for k_tile in range(max(first, low), min(last, high)):
                        j = k_tile * BLOCK_K
                        p = Place(batch, batch, head, i, rows, j, min(problem[K_LENGTH] - j, BLOCK_K), problem[OFFSET])
                        _tile(call, bias_like, numbers, problem, p, s, ds, slope, keep, False, zero, size)
                        _add_tile(total, ds, p, by_q, by_k)
        i, j = q_step * BLOCK_Q, k_step * BLOCK_K
        for r in range(min(bias.queries - i, BLOCK_Q) if by_q else 1):
            for c in range(min(bias.keys - j, BLOCK_K) if by_k else 1):
                at = b * bias.strides[0] + h * bias.strides[1] + (i + r) * bias.strides[2] + (j + c) * bias.strides[3]
                store(out, at, narrow(load(total, r * BLOCK_K + c), load(out, at)))
    keep_alive(scratch)


@device_function
def _add_tile(total, ds, p, by_q, by_k):
    for r in range(p.rows):
        row = r * BLOCK_K if by_q else 0
        if by_k:
            for c in range(p.keys):
                store(total, row + c, load(total, row + c) + load(ds, r * BLOCK_K + c))
        else:
            for c in range(p.keys):
                store(total, row, load(total, row) + load(ds, r * BLOCK_K + c))


@kernel
def sink_terms(like, sinks, heads, length, lse, delta, out, start, stop):
    """What every row adds to the gradient of its head's sink: -exp(sink - lse) times delta; all contiguous."""
    zero = work_zero(like)
    sink, sums, rows, terms = pointer(sinks, zero), pointer(lse, zero), pointer(delta, zero), pointer(out, zero)
    for row in range(start, stop):
        y = load(sums, row)
        y = y if y != -work_infinity(zero) else work_infinity(zero)
        store(terms, row, -exp(load(sink, row // length % heads) - y) * load(rows, row))
