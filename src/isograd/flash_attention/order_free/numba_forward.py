# mypy: ignore-errors
"""Order-free attention on the CPU: scores of a tile, and the forward pass.

A step is a block of queries of one head, which goes through the blocks of keys that it sees.
"""

from typing import NamedTuple

import numpy as np

from isograd.flash_attention.numba_kernels import find_problem
from isograd.flash_attention.numba_rows import BFLOAT16, HALF, Rows, padded, store_rows
from isograd.flash_attention.numba_scores import Dropout, Hidden, Place, hide, keep_factors, key_range
from isograd.flash_attention.order_free.numba_tiles import (
    BLOCK,
    MAGIC,
    ROOM,
    Cut,
    multiply_added,
    multiply_scaled,
    pack_left,
    pack_right,
    power,
    row_number,
    rows_at,
)
from isograd.flash_attention.order_free.reference import MARGIN, REACH
from isograd.numerics import constants as c_
from isograd.numerics.numba_dot import tile_lanes
from isograd.numerics.numba_functions import tanh_value
from isograd.numerics.numba_memory import advance, load, pointer, store
from isograd.numerics.numba_ops import as_int, fma, from_key, log_core_32, max_key, pow2_32, split_32, two_sum
from isograd.numerics.numba_storage import widen
from isograd.runtime.numba_compile import device_function, kernel, subroutine

# Columns of the table of problems, one row a sequence; the last two: blocks of all sequences before.
BATCH, Q_START, Q_LENGTH, K_START, K_LENGTH, OFFSET, Q_BLOCKS, K_BLOCKS = range(8)

_F = np.float32
_ZERO, _ONE, _NAN, _INFINITY = _F(0), _F(1), _F(np.nan), _F(np.inf)
_REACH, _MARGIN, _LOG2E = _F(REACH), _F(MARGIN), _F(c_.LOG2E_32)
_LN2, _LN2_REST = _F(c_.LN2_32), _F(c_.LN2_REST_32)
_C0, _C1, _C2, _C3 = (_F(x) for x in c_.EXP2_POLY_SHORT)
NOTHING = _F(-3 * 2.0**20)  # the score of a hidden key: nothing is left of its exponential beside any other
_NONE = _F(-2.5 * 2.0**20)  # between it and every other score
_LOWEST = np.int32(-0x80000000)
_FAR = _F(-64)  # from this exponent on an integer is 0
_MAGIC_BITS = np.int32(np.float32(c_.MAGIC_32).view(np.int32))


class Numbers(NamedTuple):
    """Of `reference.Numbers`: cap, and the factor of o."""

    cap: np.float32
    kept: np.float32


class Forward(NamedTuple):
    """The operands. q_scale: factors of the rows of q in scores; k_scale: of k. lse and sinks are contiguous."""

    heads: int
    groups: int
    q: Cut
    k: Cut
    v: Cut
    q_scale: int
    k_scale: int
    o: Rows
    lse: int
    sinks: int
    hidden: Hidden
    bias_kind: int
    dropout: Dropout
    numbers: Numbers


# --- scores ----------------------------------------------------------------------------------------------------------
@device_function
def _within_reach(t):
    t = _REACH if t > _REACH else t
    return -_REACH if t < -_REACH else t


@device_function
def _held(t):
    return _within_reach(_NAN if t == _INFINITY else t)


@device_function
def _add_bias(s, hidden, bias, p):
    strides = hidden.bias_strides
    start = p.batch * strides[0] + p.head * strides[1]
    for r in range(p.rows):
        row = start + (p.i + r) * strides[2] + p.j * strides[3]
        for c in range(p.keys):
            b = widen(load(bias, row + c * strides[3]))
            t = _held(load(s, r * BLOCK + c) + b * _LOG2E)
            store(s, r * BLOCK + c, t if b != -_INFINITY else NOTHING)


@subroutine
def finish_scores(s, slope, hidden, cap, bias_kind, p):
    """Base-2 scores of a tile from its products: held, NOTHING where a key is hidden. slope: of the softcap."""
    if cap != _ZERO:
        for at in range(p.rows * BLOCK):
            h = tanh_value(load(s, at))
            store(slope, at, fma(-h, h, _ONE))
            store(s, at, h * cap)
    if hidden.bias != 0 and bias_kind == HALF:
        _add_bias(s, hidden, pointer(hidden.bias, np.int16(0)), p)
    elif hidden.bias != 0 and bias_kind == BFLOAT16:
        _add_bias(s, hidden, pointer(hidden.bias, np.uint16(0)), p)
    elif hidden.bias != 0:
        _add_bias(s, hidden, pointer(hidden.bias, _ZERO), p)
    else:
        for at in range(p.rows * BLOCK):
            store(s, at, _held(load(s, at)))
    hide(s, hidden, p, NOTHING)


@device_function
def exp2_parts(t):
    """2^t = m 2^k, k as a float, and as the low bits of the last number."""
    z = t + MAGIC
    k = z - MAGIC
    f = t - k
    return fma(fma(fma(fma(_C3, f, _C2), f, _C1), f, _C0), f, _ONE), k, z


@device_function
def above(x):
    """⌊x⌋ + 1."""
    return _F(np.floor(x)) + _ONE


@device_function
def _scaled_integer(m, exponent):
    """rint(m 2^exponent) for a result below 2^22."""
    e = exponent if exponent > _FAR else _FAR
    return np.int32(as_int(m * pow2_32(np.int32(e)) + MAGIC) - _MAGIC_BITS)


@device_function
def find_tile(table, column, length, step, heads):
    """(problem, head, first row) of a block of queries or of keys."""
    n = find_problem(table, column, step // heads)
    inner = step - table[n, column] * heads
    return n, inner % heads, inner // heads * BLOCK, min(table[n, length] - inner // heads * BLOCK, BLOCK)


@device_function
def copy_numbers(source, at, count, to):
    """Numbers of rows into a buffer of ROOM, zeros behind."""
    for r in range(count):
        store(to, r, load(source, at + r))
    for r in range(count, ROOM):
        store(to, r, _ZERO)


# --- a block of keys -------------------------------------------------------------------------------------------------
@device_function
def _weigh(s, weights, levels, top, sums, scale, fade, bad, rows):
    """The integers of a tile's weights from its scores; M and l of the rows, and how their results go on."""
    for r in range(rows):
        t, w = advance(s, r * BLOCK), advance(weights, r * BLOCK)
        most, wild = _LOWEST, np.int32(0)
        for c in range(BLOCK):
            x = load(t, c)
            wild = np.int32(wild | np.int32(x != x))
            most = max(most, max_key(x))
        if wild != 0:
            store(bad, r, np.int32(1))
        if wild != 0 or from_key(most) < _NONE:
            for c in range(BLOCK):
                store(w, c, np.int16(0))
            store(scale, r, _ZERO)
            store(fade, r, -_ONE)
            continue
        valued = _LOWEST
        for c in range(BLOCK):
            valued = max(valued, max_key(load(t, c) + (load(levels, c) + _MARGIN)))
        n, u = above(from_key(most) + _MARGIN), above(from_key(valued))
        share = np.int32(0)
        for c in range(BLOCK):
            m, k, _ = exp2_parts(load(t, c))
            share = np.int32(share + _scaled_integer(m, k - n + _F(22)))
            store(w, c, np.int16(_scaled_integer(m, k + (load(levels, c) - u) + _F(15))))
        before = load(top, r)
        new = before if before > n else n
        factor = power(np.int64(before - new)) if before != -_INFINITY else _ZERO
        total = load(sums, r) * factor
        store(sums, r, fma(_F(share), power(np.int64(n - new) - 22), total))
        store(top, r, new)
        store(scale, r, power(np.int64(u - new) - 22))
        store(fade, r, factor)


@device_function
def _drop(weights, keep_, rows):
    for at in range(rows * BLOCK):
        store(weights, at, load(weights, at) if load(keep_, at) != _ZERO else np.int16(0))


@device_function
def _begin(call, head, top, sums, bad, rows):
    """M and l of rows without a key yet: those of the sink."""
    sink = load(pointer(call.sinks, _ZERO), head) if call.sinks != 0 else -_INFINITY
    m_, l_, wild = -_INFINITY, _ZERO, np.int32(0)
    if sink != sink or sink == _INFINITY:
        wild = np.int32(1)
    elif sink != -_INFINITY:
        t = _within_reach(sink * _LOG2E)
        m_ = above(t + _MARGIN)
        m, k, _ = exp2_parts(t)
        l_ = _F(_scaled_integer(m, k - m_ + _F(22))) * _F(2.0**-22)
    for r in range(rows):
        store(top, r, m_)
        store(sums, r, l_)
        store(bad, r, wild)


@device_function
def _log_sum(m, total):
    f, k = split_32(total)
    high, low = log_core_32(f, _F(k), _ZERO)
    a = m * _LN2
    rest = fma(m, _LN2_REST, fma(m, _LN2, -a))
    s, e = two_sum(a, high)
    return s + (e + (low + rest))


@device_function
def _finish(call, total, line, top, sums, bad, lse, rows):
    for r in range(rows):
        m, l_, wild = load(top, r), load(sums, r), load(bad, r) != 0
        there = m != -_INFINITY
        factor = _ONE / l_ * call.numbers.kept if there else _ZERO
        for c in range(call.v.size):
            x = load(total, r * line + c) * factor
            store(total, r * line + c, _NAN if wild else x)
        y = _log_sum(m, l_) if there else -_INFINITY
        store(lse, r, _NAN if wild else y)


@kernel
def forward(engine, element, call, table, start, stop):
    """Fill o and lse. Steps: blocks of queries, heads within a sequence faster."""
    d, e = call.q.size, call.v.size
    line = padded(e, tile_lanes(engine))
    words = ROOM * (BLOCK + d + max(d, line))
    floats = np.empty(ROOM * (3 * BLOCK + line + 8), np.float32)
    integers = np.empty(words + ROOM * (BLOCK + 1), np.int32)
    s = pointer(floats.ctypes.data, _ZERO)
    other, keep_, total = advance(s, ROOM * BLOCK), advance(s, 2 * ROOM * BLOCK), advance(s, 3 * ROOM * BLOCK)
    q_scale = advance(total, ROOM * line)
    k_scale, levels = advance(q_scale, ROOM), advance(q_scale, 2 * ROOM)
    top, sums, scale, fade = (advance(q_scale, 3 * ROOM), advance(q_scale, 4 * ROOM), advance(q_scale, 5 * ROOM),
                              advance(q_scale, 6 * ROOM))  # fmt: skip
    left = pointer(integers.ctypes.data, np.int32(0))
    q_panels, keys = advance(left, ROOM * BLOCK), advance(left, ROOM * (BLOCK + d))
    bad = advance(left, words)
    weights = pointer(integers.ctypes.data + 4 * (words + ROOM), np.int16(0))
    for step in range(start, stop):
        n, head, i, rows = find_tile(table, Q_BLOCKS, Q_LENGTH, step, call.heads)
        problem = table[n]
        batch, kv_head = problem[BATCH], head // call.groups
        row = row_number(call.q, batch, head, problem[Q_START] + i)
        copy_numbers(pointer(call.q_scale, _ZERO), row, rows, q_scale)
        pack_left(engine, element, rows_at(call.q, row), d, 1, rows, d, q_panels)
        _begin(call, head, top, sums, bad, rows)
        for at in range(ROOM * line):
            store(total, at, _ZERO)
        first, last = key_range(call.hidden, problem[OFFSET], i, rows, problem[K_LENGTH])
        for block in range(first, last):
            j = block * BLOCK
            count = min(problem[K_LENGTH] - j, BLOCK)
            key = row_number(call.k, batch, kv_head, problem[K_START] + j)
            copy_numbers(pointer(call.k_scale, _ZERO), key, count, k_scale)
            copy_numbers(pointer(call.v.exponent, _ZERO), key, count, levels)
            pack_right(engine, element, rows_at(call.k, key), d, 1, BLOCK, d, keys)
            multiply_scaled(engine, element, q_panels, keys, rows, d, q_scale, k_scale, s)
            p = Place(batch, n, head, i, rows, j, count, problem[OFFSET])
            finish_scores(s, other, call.hidden, call.numbers.cap, call.bias_kind, p)
            _weigh(s, weights, levels, top, sums, scale, fade, bad, rows)
            if call.dropout.threshold != 0:
                keep_factors(keep_, p, call.heads, call.dropout, _ONE)
                _drop(weights, keep_, rows)
            pack_left(engine, element, weights, BLOCK, 1, rows, BLOCK, left)
            pack_right(engine, element, rows_at(call.v, key), 1, e, e, BLOCK, keys)
            multiply_added(engine, element, left, keys, rows, e, scale, fade, total, line)
        lse = pointer(call.lse + 4 * row, _ZERO)
        _finish(call, total, line, top, sums, bad, lse, rows)
        store_rows(call.o, batch, head, problem[Q_START] + i, rows, e, total, line, _ONE)
