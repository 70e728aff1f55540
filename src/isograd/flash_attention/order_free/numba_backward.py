# mypy: ignore-errors
"""The gradients of order-free attention on the CPU.

dq: a step is a block of queries of one head. dk and dv: a step is a block of keys of one head of k, which goes through
the query heads that share it and their blocks of queries. Both compute dS of a tile anew.
"""

from typing import NamedTuple

import numpy as np

from isograd.flash_attention.numba_rows import Rows, padded, store_rows
from isograd.flash_attention.numba_scores import Dropout, Hidden, Place, keep_factors, key_range
from isograd.flash_attention.order_free.numba_forward import (
    BATCH,
    K_BLOCKS,
    K_LENGTH,
    K_START,
    NOTHING,
    OFFSET,
    Q_BLOCKS,
    Q_LENGTH,
    Q_START,
    copy_numbers,
    exp2_parts,
    find_tile,
    finish_scores,
)
from isograd.flash_attention.order_free.numba_tiles import (
    BLOCK,
    ROOM,
    Cut,
    greatest_exponent,
    multiply_added,
    multiply_scaled,
    pack_left,
    pack_right,
    power,
    row_number,
    rows_at,
    weight_integer,
)
from isograd.flash_attention.order_free.reference import HIGH
from isograd.numerics import constants as c_
from isograd.numerics.numba_dot import tile_lanes
from isograd.numerics.numba_memory import advance, load, pointer, store
from isograd.numerics.numba_ops import as_float, as_int, magnitude_key, pow2_32
from isograd.runtime.numba_compile import device_function, kernel, subroutine

_F = np.float32
_ZERO, _ONE, _NAN, _INFINITY = _F(0), _F(1), _F(np.nan), _F(np.inf)
_LOG2E, _LOW, _HIGH = _F(c_.LOG2E_32), _F(-126), _F(HIGH)
_INFINITE = np.int32(0x7F800000)


class Factors(NamedTuple):
    """Of `reference.Numbers`: cap, scale, and the factor of dv."""

    cap: np.float32
    scale: np.float32
    kept: np.float32


class Backward(NamedTuple):
    """The operands. q_scale, k_scale: factors in scores; do_scale, v_scale: in products of do and v. All contiguous."""

    heads: int
    groups: int
    q: Cut
    k: Cut
    v: Cut
    do: Cut
    q_scale: int
    k_scale: int
    do_scale: int
    lse: int
    delta: int
    dq: Rows
    dk: Rows
    dv: Rows
    hidden: Hidden
    bias_kind: int
    dropout: Dropout
    factors: Factors


class Tile(NamedTuple):
    """Buffers of a tile: scores, then dS; products, then probabilities; slopes; what is kept; numbers of rows, keys."""

    s: object
    products: object
    slope: object
    kept: object
    q_scale: object
    do_scale: object
    lse: object
    delta: object
    k_scale: object
    v_scale: object


@device_function
def _tile(base):
    """The buffers in memory of 4 ROOM BLOCK + 6 ROOM floats."""
    size = ROOM * BLOCK
    rows = advance(base, 4 * size)
    return Tile(
        base, advance(base, size), advance(base, 2 * size), advance(base, 3 * size),
        rows, advance(rows, ROOM), advance(rows, 2 * ROOM), advance(rows, 3 * ROOM),
        advance(rows, 4 * ROOM), advance(rows, 5 * ROOM),
    )  # fmt: skip


@device_function
def _load_queries(call, row, rows, tile):
    copy_numbers(pointer(call.q_scale, _ZERO), row, rows, tile.q_scale)
    copy_numbers(pointer(call.do_scale, _ZERO), row, rows, tile.do_scale)
    copy_numbers(pointer(call.lse, _ZERO), row, rows, tile.lse)
    copy_numbers(pointer(call.delta, _ZERO), row, rows, tile.delta)


@device_function
def _load_keys(call, key, count, tile):
    copy_numbers(pointer(call.k_scale, _ZERO), key, count, tile.k_scale)
    copy_numbers(pointer(call.v.scale, _ZERO), key, count, tile.v_scale)


@subroutine
def _slopes(engine, element, call, p, queries, gradients, keys, values, tile):
    """Gradients dS and probabilities of a tile, 0 where a key is hidden and, of probabilities, where it is dropped."""
    multiply_scaled(engine, element, queries, keys, p.rows, call.q.size, tile.q_scale, tile.k_scale, tile.s)
    multiply_scaled(
        engine, element, gradients, values, p.rows, call.v.size, tile.do_scale, tile.v_scale, tile.products
    )  # fmt: skip
    finish_scores(tile.s, tile.slope, call.hidden, call.factors.cap, call.bias_kind, p)
    if call.dropout.threshold != 0:
        keep_factors(tile.kept, p, call.heads, call.dropout, _ONE)
    else:
        for at in range(p.rows * BLOCK):
            store(tile.kept, at, _ONE)
    bent = call.factors.cap != _ZERO
    if not bent:
        for at in range(p.rows * BLOCK):
            store(tile.slope, at, _ONE)
    for r in range(p.rows):
        y = load(tile.lse, r)
        present = y != -_INFINITY
        level, delta = y * _LOG2E if present else _ZERO, load(tile.delta, r)
        of_do = load(tile.do_scale, r)
        s, products = advance(tile.s, r * BLOCK), advance(tile.products, r * BLOCK)
        slope, kept = advance(tile.slope, r * BLOCK), advance(tile.kept, r * BLOCK)
        for c in range(BLOCK):
            t = load(s, c)
            x = t - level
            low = x < _LOW
            held = _HIGH if x > _HIGH else x
            m, _, z = exp2_parts(_ZERO if low or x != x else held)
            probability = as_float(np.int32(as_int(m) + np.int32(as_int(z) << 23)))
            probability = _ZERO if low else probability
            probability = probability if x == x else _NAN
            stays = load(kept, c) != _ZERO
            g = load(products, c) if stays else _ZERO
            ds = probability * (g - delta) * load(slope, c)
            seen = t != NOTHING and present
            store(s, c, ds if seen else _ZERO)
            probability = probability if of_do == of_do else _NAN
            store(products, c, probability if seen and stays else _ZERO)


@device_function
def _scales(key, scale, fade, poison, at):
    """What follows from the largest weight of a sum: how its integers are scaled, and whether it is NaN."""
    wild = key >= _INFINITE
    exponent = greatest_exponent(np.int32(0) if wild else key)
    store(scale, at, power(np.int64(exponent) - 20))
    store(fade, at, _ONE)
    if wild:
        store(poison, at, np.int32(1))
    return _ZERO if wild else pow2_32(np.int32(15 - exponent))


@device_function
def _finish(gradient, total, line, size, poison, batch, head, row, rows, factor):
    """Round totals, times a factor, into an array."""
    for r in range(rows):
        wild = load(poison, r) != 0
        for c in range(size):
            store(total, r * line + c, _NAN if wild else load(total, r * line + c))
    store_rows(gradient, batch, head, row, rows, size, total, line, factor)


@kernel
def query_gradients(engine, element, call, table, start, stop):
    """Fill dq. Steps: blocks of queries, heads within a sequence faster."""
    d, e = call.q.size, call.v.size
    line = padded(d, tile_lanes(engine))
    floats = np.empty(ROOM * (4 * BLOCK + line + 8), np.float32)
    words = ROOM * (max(line, d) + e)
    integers = np.empty(ROOM * (2 * BLOCK + d + e + 1) + words, np.int32)
    tile = _tile(pointer(floats.ctypes.data, _ZERO))
    scale = advance(tile.s, ROOM * (4 * BLOCK + 6))
    fade, total = advance(scale, ROOM), advance(scale, 2 * ROOM)
    left = pointer(integers.ctypes.data, np.int32(0))
    queries, gradients = advance(left, ROOM * BLOCK), advance(left, ROOM * (BLOCK + d))
    poison, keys = advance(left, ROOM * (BLOCK + d + e)), advance(left, ROOM * (BLOCK + d + e + 1))
    values = advance(keys, ROOM * max(line, d))
    weights = pointer(integers.ctypes.data + 4 * (ROOM * (BLOCK + d + e + 1) + words), np.int16(0))
    for step in range(start, stop):
        n, head, i, rows = find_tile(table, Q_BLOCKS, Q_LENGTH, step, call.heads)
        problem = table[n]
        batch, kv_head = problem[BATCH], head // call.groups
        row = row_number(call.q, batch, head, problem[Q_START] + i)
        _load_queries(call, row, rows, tile)
        pack_left(engine, element, rows_at(call.q, row), d, 1, rows, d, queries)
        pack_left(engine, element, rows_at(call.do, row), e, 1, rows, e, gradients)
        for at in range(ROOM * line):
            store(total, at, _ZERO)
        for r in range(ROOM):
            store(poison, r, np.int32(0))
        first, last = key_range(call.hidden, problem[OFFSET], i, rows, problem[K_LENGTH])
        for block in range(first, last):
            j = block * BLOCK
            count = min(problem[K_LENGTH] - j, BLOCK)
            key = row_number(call.k, batch, kv_head, problem[K_START] + j)
            _load_keys(call, key, count, tile)
            pack_right(engine, element, rows_at(call.k, key), d, 1, BLOCK, d, keys)
            pack_right(engine, element, rows_at(call.v, key), e, 1, BLOCK, e, values)
            p = Place(batch, n, head, i, rows, j, count, problem[OFFSET])
            _slopes(engine, element, call, p, queries, gradients, keys, values, tile)
            copy_numbers(pointer(call.k.scale, _ZERO), key, count, tile.k_scale)
            for r in range(rows):
                s, w = advance(tile.s, r * BLOCK), advance(weights, r * BLOCK)
                most = np.int32(0)
                for c in range(BLOCK):
                    x = load(s, c)
                    x = x * load(tile.k_scale, c) if x != _ZERO else _ZERO
                    store(s, c, x)
                    most = max(most, magnitude_key(x))
                factor = _scales(most, scale, fade, poison, r)
                for c in range(BLOCK):
                    store(w, c, weight_integer(load(s, c), factor))
            pack_left(engine, element, weights, BLOCK, 1, rows, BLOCK, left)
            pack_right(engine, element, rows_at(call.k, key), 1, d, d, BLOCK, keys)
            multiply_added(engine, element, left, keys, rows, d, scale, fade, total, line)
        _finish(
            call.dq, total, line, d, poison, batch, head, problem[Q_START] + i, rows, call.factors.scale
        )  # fmt: skip


@device_function
def query_blocks(hidden, offset, j, keys, q_length):
    """The blocks of queries, from the first to the one after the last, that may see a block of keys."""
    low = max(j - offset - hidden.right, np.int64(0))
    high = min(j + keys - 1 - offset + hidden.left, q_length - 1)
    if low > high:
        return np.int64(0), np.int64(0)
    return low // BLOCK, high // BLOCK + 1


@subroutine
def _columns(weights, factors, rows, integers, most, scale, fade, poison):
    """Weights times a factor of their row become the integers of the columns' sums, in lines of queries."""
    for c in range(BLOCK):
        store(most, c, np.int32(0))
    for r in range(rows):
        factor = load(factors, r)
        w = advance(weights, r * BLOCK)
        for c in range(BLOCK):
            x = load(w, c)
            x = x * factor if x != _ZERO else _ZERO
            store(w, c, x)
            store(most, c, max(load(most, c), magnitude_key(x)))
    for c in range(BLOCK):
        store(most, c, as_int(_scales(load(most, c), scale, fade, poison, c)))
    for r in range(rows):
        w, to = advance(weights, r * BLOCK), advance(integers, r * BLOCK)
        for c in range(BLOCK):
            store(to, c, weight_integer(load(w, c), as_float(load(most, c))))
    for at in range(rows * BLOCK, ROOM * BLOCK):
        store(integers, at, np.int16(0))


@kernel
def key_gradients(engine, element, call, table, start, stop):
    """Fill dk and dv. Steps: blocks of keys, heads of k within a sequence faster."""
    d, e, kv_heads = call.q.size, call.v.size, call.heads // call.groups
    k_line, v_line = padded(d, tile_lanes(engine)), padded(e, tile_lanes(engine))
    floats = np.empty(ROOM * (4 * BLOCK + k_line + v_line + 10), np.float32)
    wide = max(k_line, v_line)
    integers = np.empty(ROOM * (2 * BLOCK + 2 * d + 2 * e + wide + 4), np.int32)
    tile = _tile(pointer(floats.ctypes.data, _ZERO))
    scale = advance(tile.s, ROOM * (4 * BLOCK + 6))
    fade, of_rows = advance(scale, ROOM), advance(scale, 2 * ROOM)
    dk, dv = advance(scale, 3 * ROOM), advance(scale, ROOM * (3 + k_line))
    left = pointer(integers.ctypes.data, np.int32(0))
    queries, gradients = advance(left, ROOM * BLOCK), advance(left, ROOM * (BLOCK + d))
    keys, values = advance(gradients, ROOM * e), advance(gradients, ROOM * (e + d))
    right, most = advance(values, ROOM * e), advance(values, ROOM * (e + wide))
    of_k, of_v = advance(most, ROOM), advance(most, 2 * ROOM)
    weights = pointer(integers.ctypes.data + 4 * ROOM * (BLOCK + 2 * d + 2 * e + wide + 3), np.int16(0))
    for step in range(start, stop):
        n, kv_head, j, count = find_tile(table, K_BLOCKS, K_LENGTH, step, kv_heads)
        problem = table[n]
        batch, offset = problem[BATCH], problem[OFFSET]
        key = row_number(call.k, batch, kv_head, problem[K_START] + j)
        _load_keys(call, key, count, tile)
        pack_right(engine, element, rows_at(call.k, key), d, 1, BLOCK, d, keys)
        pack_right(engine, element, rows_at(call.v, key), e, 1, BLOCK, e, values)
        for at in range(ROOM * (k_line + v_line)):
            store(dk, at, _ZERO)
        for c in range(ROOM):
            store(of_k, c, np.int32(0))
            store(of_v, c, np.int32(0))
        first, last = query_blocks(call.hidden, offset, j, count, problem[Q_LENGTH])
        for shared in range(call.groups):
            head = kv_head * call.groups + shared
            for block in range(first, last):
                i = block * BLOCK
                rows = min(problem[Q_LENGTH] - i, BLOCK)
                row = row_number(call.q, batch, head, problem[Q_START] + i)
                _load_queries(call, row, rows, tile)
                pack_left(engine, element, rows_at(call.q, row), d, 1, rows, d, queries)
                pack_left(engine, element, rows_at(call.do, row), e, 1, rows, e, gradients)
                p = Place(batch, n, head, i, rows, j, count, offset)
                _slopes(engine, element, call, p, queries, gradients, keys, values, tile)
                copy_numbers(pointer(call.q.scale, _ZERO), row, rows, of_rows)
                _columns(tile.s, of_rows, rows, weights, most, scale, fade, of_k)
                pack_left(engine, element, weights, 1, BLOCK, count, BLOCK, left)
                pack_right(engine, element, rows_at(call.q, row), 1, d, d, BLOCK, right)
                multiply_added(engine, element, left, right, count, d, scale, fade, dk, k_line)
                copy_numbers(pointer(call.do.scale, _ZERO), row, rows, of_rows)
                _columns(tile.products, of_rows, rows, weights, most, scale, fade, of_v)
                pack_left(engine, element, weights, 1, BLOCK, count, BLOCK, left)
                pack_right(engine, element, rows_at(call.do, row), 1, e, e, BLOCK, right)
                multiply_added(engine, element, left, right, count, e, scale, fade, dv, v_line)
        at = problem[K_START] + j
        _finish(call.dk, dk, k_line, d, of_k, batch, kv_head, at, count, call.factors.scale)
        _finish(call.dv, dv, v_line, e, of_v, batch, kv_head, at, count, call.factors.kept)
