# mypy: ignore-errors
"""The backward pass of attention on the CPU.

Scores and probabilities are computed again, tile by tile. Every element of dq is summed over tiles of keys, of dk and
dv over the query heads of a group and then tiles of queries, always from the first to the last: whether dq is added up
beside dk and dv (`backward_heads`, five products a tile) or on its own (`backward_keys` and `backward_queries`, seven,
which leaves more to share out among threads) changes no bit. Operands are converted a tile at a time.
"""

from typing import Any, NamedTuple

import numpy as np

from isograd.flash_attention.numba_kernels import (
    BATCH,
    K_LENGTH,
    K_START,
    K_TILES,
    OFFSET,
    Q_LENGTH,
    Q_START,
    Sizes,
    find_block,
    find_pair,
    find_problem,
)
from isograd.flash_attention.numba_product import PADDING, lanes, multiply, multiply_add
from isograd.flash_attention.numba_rows import Rows, load_rows, load_transposed, padded, store_rows
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
    query_range,
)
from isograd.numerics.numba_memory import (
    advance,
    empty_work,
    load,
    pointer,
    store,
    work_infinity,
    work_one,
    work_zero,
)
from isograd.numerics.numba_ops import exp
from isograd.numerics.numba_storage import narrow
from isograd.runtime.numba_compile import device_function, kernel, subroutine

_ROOM = (BLOCK_K + PADDING) * BLOCK_K  # of a tile of scores, whichever way it lies


class Backward(NamedTuple):
    """The operands of the backward pass; lse and delta are contiguous and of the work type."""

    sizes: Sizes
    q: Rows
    do: Rows
    k: Rows
    v: Rows
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


class _Scratch(NamedTuple):
    """Tiles of scores, and converted tiles of the operands: keys and values as vectors of rows, k as lines."""

    s: Any
    ds: Any
    slope: Any
    keep: Any
    q: Any
    do: Any
    k: Any
    keys: Any
    values: Any


@device_function
def _lines(sizes, width):
    return padded(sizes.head_dim, width), padded(sizes.v_dim, width)


@device_function
def _scratch_size(sizes, width):
    k_line, v_line = _lines(sizes, width)
    own = (BLOCK_Q + PADDING) * (k_line + v_line)
    return 4 * _ROOM + own + BLOCK_K * (max(k_line, v_line) + k_line + v_line)


@device_function
def _scratch(base, sizes, width):
    """The places in scratch memory of `_scratch_size` elements."""
    k_line, v_line = _lines(sizes, width)
    q = advance(base, 4 * _ROOM)
    do = advance(q, (BLOCK_Q + PADDING) * k_line)
    k = advance(do, (BLOCK_Q + PADDING) * v_line)
    keys = advance(k, BLOCK_K * max(k_line, v_line))
    values = advance(keys, BLOCK_K * k_line)
    return _Scratch(
        base, advance(base, _ROOM), advance(base, 2 * _ROOM), advance(base, 3 * _ROOM), q, do, k, keys, values
    )


@device_function
def _load_queries(call, scale, batch, head, row, rows, q, do):
    """Convert a tile of queries, times the scale, and of gradients."""
    k_line, v_line = _lines(call.sizes, lanes(scale))
    load_rows(call.q, batch, head, row, rows, call.sizes.head_dim, q, k_line, scale)
    load_rows(call.do, batch, head, row, rows, call.sizes.v_dim, do, v_line, work_one(scale))


@device_function
def _load_keys(call, batch, kv_head, row, count, tiles, zero):
    """Convert a tile of keys and of values."""
    one = work_one(zero)
    load_transposed(call.v, batch, kv_head, row, count, call.sizes.v_dim, tiles.k, tiles.values, one)
    load_transposed(call.k, batch, kv_head, row, count, call.sizes.head_dim, tiles.k, tiles.keys, one)


@subroutine
def _tile(call, bias_like, numbers, row, p, q, do, tiles, bent, zero):
    """P after dropout into s, dS into ds; `bent` says whether dS is that of the scores before the softcap."""
    _, softcap, factor = numbers
    sizes, hidden = call.sizes, call.hidden
    width = lanes(zero)
    k_line, v_line = _lines(sizes, width)
    d, e = sizes.head_dim, sizes.v_dim
    s, ds, slope, keep = tiles.s, tiles.ds, tiles.slope, tiles.keep
    multiply(q, k_line, 1, p.rows, tiles.keys, k_line * width, width, p.keys, d, s, BLOCK_K, s)
    multiply(do, v_line, 1, p.rows, tiles.values, v_line * width, width, p.keys, e, ds, BLOCK_K, ds)
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
def _clear(x, count, zero):
    for i in range(count):
        store(x, i, zero)


@subroutine
def _key_tile(call, bias_like, numbers, table, n, kv_head, j, tiles, dk, dv, dq, with_dq, zero):
    """Dk and dv of a tile of keys; with_dq adds what it contributes to dq, [groups, tiles of queries, line]."""
    problem, sizes = table[n], call.sizes
    width = lanes(zero)
    k_line, v_line = _lines(sizes, width)
    batch, offset, count = problem[BATCH], problem[OFFSET], min(problem[K_LENGTH] - j, BLOCK_K)
    q_tiles = (problem[Q_LENGTH] + BLOCK_Q - 1) // BLOCK_Q
    _clear(dk, (BLOCK_K + PADDING) * k_line, zero)
    _clear(dv, (BLOCK_K + PADDING) * v_line, zero)
    first, last = query_range(call.hidden, offset, j, count, problem[Q_LENGTH])
    _load_keys(call, batch, kv_head, problem[K_START] + j, count, tiles, zero)
    s, ds, q, do = tiles.s, tiles.ds, tiles.q, tiles.do
    for group in range(sizes.groups):
        head = kv_head * sizes.groups + group
        for t in range(first, last):
            i = t * BLOCK_Q
            row = problem[Q_START] + i
            p = Place(batch, n, head, i, min(problem[Q_LENGTH] - i, BLOCK_Q), j, count, offset)
            _load_queries(call, numbers[0], batch, head, row, p.rows, q, do)
            _tile(call, bias_like, numbers, row, p, q, do, tiles, True, zero)
            multiply_add(s, 1, BLOCK_K, count, do, width, v_line, sizes.v_dim, p.rows, dv, v_line, dv)
            multiply_add(ds, 1, BLOCK_K, count, q, width, k_line, sizes.head_dim, p.rows, dk, k_line, dk)
            if with_dq:
                out = advance(dq, (group * q_tiles + t) * BLOCK_Q * k_line)
                multiply_add(ds, BLOCK_K, 1, p.rows, tiles.k, width, k_line, sizes.head_dim, count, out, k_line, out)
    one = work_one(zero)
    row = problem[K_START] + j
    store_rows(call.dk, batch, kv_head, row, count, sizes.head_dim, dk, k_line, one)
    store_rows(call.dv, batch, kv_head, row, count, sizes.v_dim, dv, v_line, one)


@kernel
def backward_heads(like, bias_like, call, numbers, table, start, stop):
    """All gradients. Steps: heads of k and v, problems slower."""
    zero, sizes = work_zero(like), call.sizes
    width = lanes(zero)
    k_line, v_line = _lines(sizes, width)
    room = BLOCK_K + PADDING
    kv_heads = sizes.heads // sizes.groups
    longest = np.max(table[:, Q_LENGTH])
    most = sizes.groups * ((longest + BLOCK_Q - 1) // BLOCK_Q) * BLOCK_Q * k_line
    size = _scratch_size(sizes, width)
    scratch = empty_work(size + room * (k_line + v_line) + most, like)
    scratch[:size] = zero
    base = pointer(scratch.ctypes.data, zero)
    tiles = _scratch(base, sizes, width)
    dk = advance(base, size)
    dv = advance(dk, room * k_line)
    dq = advance(dv, room * v_line)
    for step in range(start, stop):
        n, kv_head = step // kv_heads, step % kv_heads
        problem = table[n]
        rows = (problem[Q_LENGTH] + BLOCK_Q - 1) // BLOCK_Q * BLOCK_Q
        _clear(dq, sizes.groups * rows * k_line, zero)
        for j in range(0, problem[K_LENGTH], BLOCK_K):
            _key_tile(call, bias_like, numbers, table, n, kv_head, j, tiles, dk, dv, dq, True, zero)
        for group in range(sizes.groups):
            x = advance(dq, group * rows * k_line)
            head = kv_head * sizes.groups + group
            store_rows(
                call.dq, problem[BATCH], head, problem[Q_START], problem[Q_LENGTH], sizes.head_dim, x, k_line,
                numbers[0],
            )  # fmt: skip


@kernel
def backward_keys(like, bias_like, call, numbers, table, start, stop):
    """Dk and dv. Steps: tiles of keys, those of a head of a problem after the other."""
    zero, sizes = work_zero(like), call.sizes
    width = lanes(zero)
    k_line, v_line = _lines(sizes, width)
    room = BLOCK_K + PADDING
    kv_heads = sizes.heads // sizes.groups
    size = _scratch_size(sizes, width)
    scratch = empty_work(size + room * (k_line + v_line), like)
    scratch[:size] = zero
    base = pointer(scratch.ctypes.data, zero)
    tiles = _scratch(base, sizes, width)
    dk = advance(base, size)
    dv = advance(dk, room * k_line)
    for step in range(start, stop):
        n = find_problem(table, K_TILES, step // kv_heads)
        k_tiles = (table[n, K_LENGTH] + BLOCK_K - 1) // BLOCK_K
        inner = step - table[n, K_TILES] * kv_heads
        j = inner % k_tiles * BLOCK_K
        _key_tile(call, bias_like, numbers, table, n, inner // k_tiles, j, tiles, dk, dv, dk, False, zero)


@kernel
def backward_queries(like, bias_like, call, numbers, table, start, stop):
    """Dq. Steps: as those of the forward pass."""
    zero, sizes = work_zero(like), call.sizes
    width = lanes(zero)
    k_line, v_line = _lines(sizes, width)
    room = BLOCK_Q + PADDING
    own = room * (2 * k_line + v_line)  # of a pair: q, do, dq
    size = _scratch_size(sizes, width)
    scratch = empty_work(size + sizes.together * own, like)
    scratch[:] = zero
    base = pointer(scratch.ctypes.data, zero)
    tiles = _scratch(base, sizes, width)
    q = advance(base, size)
    do, dq = advance(q, room * k_line), advance(q, room * (k_line + v_line))
    for step in range(start, stop):
        n, kv_head, first_pair, pairs = find_block(table, sizes, step)
        problem = table[n]
        batch, offset = problem[BATCH], problem[OFFSET]
        low, high = problem[K_LENGTH], np.int64(0)
        for x in range(pairs):
            head, i, rows = find_pair(problem, sizes, kv_head, first_pair + x)
            at = x * own
            _load_queries(call, numbers[0], batch, head, problem[Q_START] + i, rows, advance(q, at), advance(do, at))
            _clear(advance(dq, at), room * k_line, zero)
            first, last = key_range(call.hidden, offset, i, rows, problem[K_LENGTH])
            if first < last:
                low, high = min(low, first), max(high, last)
        for t in range(low, high):
            j = t * BLOCK_K
            count = min(problem[K_LENGTH] - j, BLOCK_K)
            _load_keys(call, batch, kv_head, problem[K_START] + j, count, tiles, zero)
            for x in range(pairs):
                head, i, rows = find_pair(problem, sizes, kv_head, first_pair + x)
                first, last = key_range(call.hidden, offset, i, rows, problem[K_LENGTH])
                if t < first or t >= last:
                    continue
                at = x * own
                p = Place(batch, n, head, i, rows, j, count, offset)
                own_q, own_do, out = advance(q, at), advance(do, at), advance(dq, at)
                _tile(call, bias_like, numbers, problem[Q_START] + i, p, own_q, own_do, tiles, True, zero)
                multiply_add(
                    tiles.ds, BLOCK_K, 1, rows, tiles.k, width, k_line, sizes.head_dim, count, out, k_line, out
                )  # fmt: skip
        for x in range(pairs):
            head, i, rows = find_pair(problem, sizes, kv_head, first_pair + x)
            row = problem[Q_START] + i
            store_rows(
                call.dq, batch, head, row, rows, sizes.head_dim, advance(dq, x * own), k_line, numbers[0]
            )  # fmt: skip


# --- bias and sinks --------------------------------------------------------------------------------------------------
@kernel
def bias_gradient(like, bias_like, call, numbers, table, bias, start, stop):
    """The gradient of the bias: dS summed over the axes that it was broadcast over, from their first element on.

    Steps: tiles of the bias, an axis of size 1 counting as one tile.
    """
    zero, sizes = work_zero(like), call.sizes
    width = lanes(zero)
    size = _scratch_size(sizes, width)
    scratch = empty_work(size + _ROOM, like)
    scratch[:size] = zero
    base = pointer(scratch.ctypes.data, zero)
    tiles = _scratch(base, sizes, width)
    total = advance(base, size)
    loaded = (np.int64(-1), np.int64(-1), np.int64(-1))  # the tile of keys that is converted
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
                    row = problem[Q_START] + i
                    first, last = key_range(call.hidden, problem[OFFSET], i, rows, problem[K_LENGTH])
                    low, high = (k_step, k_step + 1) if by_k else (0, k_tiles)
                    if max(first, low) < min(last, high):
                        _load_queries(call, numbers[0], batch, head, row, rows, tiles.q, tiles.do)
                    for k_tile in range(max(first, low), min(last, high)):
                        j = k_tile * BLOCK_K
                        count = min(problem[K_LENGTH] - j, BLOCK_K)
                        kv_head = head // sizes.groups
                        if loaded != (batch, kv_head, j):
                            _load_keys(call, batch, kv_head, problem[K_START] + j, count, tiles, zero)
                            loaded = (batch, kv_head, j)
                        p = Place(batch, batch, head, i, rows, j, count, problem[OFFSET])
                        _tile(call, bias_like, numbers, row, p, tiles.q, tiles.do, tiles, False, zero)
                        _add_tile(total, tiles.ds, p, by_q, by_k)
        i, j = q_step * BLOCK_Q, k_step * BLOCK_K
        for r in range(min(bias.queries - i, BLOCK_Q) if by_q else 1):
            for c in range(min(bias.keys - j, BLOCK_K) if by_k else 1):
                at = b * bias.strides[0] + h * bias.strides[1] + (i + r) * bias.strides[2] + (j + c) * bias.strides[3]
                store(out, at, narrow(load(total, r * BLOCK_K + c), load(out, at)))


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
