# mypy: ignore-errors
"""Scores of a tile on the CPU: softcap, bias, everything that hides keys, dropout, and the softmax's running state."""

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from isograd.flash_attention.numba_product import lanes
from isograd.flash_attention.options import DROPOUT_WORD
from isograd.numerics.numba_memory import load, pointer, store, work_infinity
from isograd.numerics.numba_ops import as_float, as_int, exp, exp_parts_32, exp_parts_64, fma, from_key, max_key
from isograd.numerics.numba_random import philox
from isograd.numerics.numba_storage import widen
from isograd.runtime.numba_compile import INLINED, device_function, subroutine

BLOCK_Q = 64  # rows of a tile of queries
BLOCK_K = 128  # rows of a tile of keys; the bits of a result depend on both
UNBOUNDED = 1 << 40  # a window's side that is open
_MASK = np.uint64(0xFFFFFFFF)
_THREE, _FOUR = np.uint64(3), np.uint64(4)
_LAST_WORD = np.uint64(DROPOUT_WORD)


class Hidden(NamedTuple):
    """What changes scores or hides keys. An address is 0 where there is nothing; strides count elements."""

    left: int
    right: int
    bias: int
    bias_strides: tuple[int, int, int, int]
    mask: int
    mask_strides: tuple[int, int, int, int]
    q_segments: int
    k_segments: int
    q_total: int
    k_total: int


class Dropout(NamedTuple):
    """threshold: words below it are dropped, 0 for none. seed: 64 bits."""

    threshold: np.uint64
    seed: np.uint64


class Place(NamedTuple):
    """A tile: its problem's batch and number, its query head, its first row and key, how many, and the offset."""

    batch: int
    number: int
    head: int
    i: int
    rows: int
    j: int
    keys: int
    offset: int


# --- constants of the work type --------------------------------------------------------------------------------------
def tanh_pair(x: Any) -> Any:
    """(tanh(x), 1 - tanh(x)^2), a few ulps off."""
    raise NotImplementedError


@overload(tanh_pair, jit_options=INLINED)
def _tanh_pair(x):
    # tanh |x| = m / (m + 2) with m = exp(2|x|) - 1, which keeps its relative accuracy for small x.
    if x == types.float32:
        most, one, two, four = np.float32(20), np.float32(1), np.float32(2), np.float32(4)

        def tanh_32(x):
            d = abs(x) * two
            d = most if d > most else d
            s, t, z = exp_parts_32(d)
            scale = as_float(np.int32(np.int32(as_int(z) << 23) + np.int32(127 << 23)))
            m = fma(t, scale, fma(s, scale, -one))
            y = m / (m + two)
            # 1 - y^2 = 4 (m + 1) / (m + 2)^2
            return (y if x >= 0 else -y), four * (m + one) / ((m + two) * (m + two))

        return tanh_32
    most_64, one_64, two_64, four_64 = np.float64(40), np.float64(1), np.float64(2), np.float64(4)

    def tanh_64(x):
        d = abs(x) * two_64
        d = most_64 if d > most_64 else d
        s, t, z = exp_parts_64(d)
        scale = as_float(np.int64((as_int(z) << 52) + (np.int64(1023) << 52)))
        m = fma(t, scale, fma(s, scale, -one_64))
        y = m / (m + two_64)
        return (y if x >= 0 else -y), four_64 * (m + one_64) / ((m + two_64) * (m + two_64))

    return tanh_64


# --- which keys a tile sees ------------------------------------------------------------------------------------------
@device_function
def key_range(hidden, offset, i, rows, k_length):
    """The tiles of keys, from the first to the one after the last, that a tile of queries may see."""
    low = max(i + offset - hidden.left, np.int64(0))
    high = min(i + rows - 1 + offset + hidden.right, k_length - 1)
    if low > high:
        return np.int64(0), np.int64(0)
    return low // BLOCK_K, high // BLOCK_K + 1


@device_function
def query_range(hidden, offset, j, keys, q_length):
    """The tiles of queries, from the first to the one after the last, that may see a tile of keys."""
    low = max(j - offset - hidden.right, np.int64(0))
    high = min(j + keys - 1 - offset + hidden.left, q_length - 1)
    if low > high:
        return np.int64(0), np.int64(0)
    return low // BLOCK_Q, high // BLOCK_Q + 1


@device_function
def bend(s, slope, rows, softcap):
    """The scores after the softcap, and its slope where `slope` is another place."""
    for r in range(rows):
        for c in range(BLOCK_K):
            y, d = tanh_pair(load(s, r * BLOCK_K + c) / softcap)
            store(slope, r * BLOCK_K + c, d)
            store(s, r * BLOCK_K + c, softcap * y)


@subroutine
def add_bias(s, hidden, bias_like, p):
    """Add the bias of a tile."""
    strides = hidden.bias_strides
    start = p.batch * strides[0] + p.head * strides[1]
    bias = pointer(hidden.bias, bias_like)
    for r in range(p.rows):
        row = start + (p.i + r) * strides[2] + p.j * strides[3]
        for c in range(p.keys):
            store(s, r * BLOCK_K + c, load(s, r * BLOCK_K + c) + widen(load(bias, row + c * strides[3])))


@subroutine
def hide(s, hidden, p, nothing):
    """Set the scores of hidden keys to `nothing`, those beyond the last key too."""
    if hidden.mask != 0:
        mask, strides = pointer(hidden.mask, np.uint8(0)), hidden.mask_strides
        start = p.batch * strides[0] + p.head * strides[1]
        for r in range(p.rows):
            row = start + (p.i + r) * strides[2] + p.j * strides[3]
            for c in range(p.keys):
                x = load(s, r * BLOCK_K + c)
                store(s, r * BLOCK_K + c, x if load(mask, row + c * strides[3]) != 0 else nothing)
    if hidden.q_segments != 0:
        q_ids, k_ids = pointer(hidden.q_segments, np.int32(0)), pointer(hidden.k_segments, np.int32(0))
        keys = p.batch * hidden.k_total + p.j
        for r in range(p.rows):
            mine = load(q_ids, p.batch * hidden.q_total + p.i + r)
            for c in range(p.keys):
                x = load(s, r * BLOCK_K + c)
                store(s, r * BLOCK_K + c, x if load(k_ids, keys + c) == mine else nothing)
    for r in range(p.rows):
        level = p.i + r + p.offset - p.j
        for c in range(min(level - hidden.left, p.keys)):
            store(s, r * BLOCK_K + c, nothing)
        for c in range(max(min(level + hidden.right + 1, p.keys), 0), BLOCK_K):
            store(s, r * BLOCK_K + c, nothing)


@device_function
def finish_scores(s, slope, hidden, bias_like, softcap, p):
    """Scores from the products of a tile."""
    if softcap > 0:
        bend(s, slope, p.rows, softcap)
    if hidden.bias != 0:
        add_bias(s, hidden, bias_like, p)
    level = p.i + p.offset - p.j
    whole = p.keys == BLOCK_K and level + hidden.right >= BLOCK_K - 1 and level + p.rows - 1 <= hidden.left
    if not whole or hidden.mask != 0 or hidden.q_segments != 0:
        hide(s, hidden, p, -work_infinity(softcap))


# --- dropout ---------------------------------------------------------------------------------------------------------
@subroutine
def keep_factors(out, p, heads, dropout, factor):
    """[rows, keys] of a tile: `factor` where dropout keeps a probability, 0 where it does not."""
    sequence = np.uint64(p.number * heads + p.head) & _MASK
    nothing = factor - factor
    for r in range(p.rows):
        for block in range((p.keys + 3) // 4):
            words = philox(np.uint64((p.j >> 2) + block), np.uint64(p.i + r), sequence, _LAST_WORD, dropout.seed)
            at = r * BLOCK_K + 4 * block
            store(out, at, factor if words[0] >= dropout.threshold else nothing)
            store(out, at + 1, factor if words[1] >= dropout.threshold else nothing)
            store(out, at + 2, factor if words[2] >= dropout.threshold else nothing)
            store(out, at + 3, factor if words[3] >= dropout.threshold else nothing)


@device_function
def multiply_rows(s, factors, rows):
    """Multiply a tile by another, element by element."""
    for r in range(rows):
        for c in range(BLOCK_K):
            store(s, r * BLOCK_K + c, load(s, r * BLOCK_K + c) * load(factors, r * BLOCK_K + c))


# --- the running softmax ---------------------------------------------------------------------------------------------
@subroutine
def soften(s, rows, m, base, alpha, sums, zero):
    """Turn scores into exponentials relative to the running maximum m, and go on with the sums.

    alpha is what older sums and results are multiplied by; sums has a vector of partial sums for every row.
    """
    width = lanes(zero)
    for r in range(rows):
        key = max_key(load(m, r))
        for c in range(BLOCK_K):
            k = max_key(load(s, r * BLOCK_K + c))
            key = k if k > key else key
        store(base, r, from_key(key))
    for r in range(rows):
        largest = load(base, r)
        # Without anything visible yet all scores are -inf, and so has to be what the exponential is taken of.
        safe = largest if largest != -work_infinity(zero) else work_infinity(zero)
        store(alpha, r, exp(load(m, r) - safe))
        store(m, r, largest)
        store(base, r, safe)
    for r in range(rows):
        safe, factor = load(base, r), load(alpha, r)
        for c in range(BLOCK_K):
            store(s, r * BLOCK_K + c, exp(load(s, r * BLOCK_K + c) - safe))
        for lane in range(width):
            store(sums, r * width + lane, load(sums, r * width + lane) * factor)
        for c in range(0, BLOCK_K, width):
            for lane in range(width):
                store(sums, r * width + lane, load(sums, r * width + lane) + load(s, r * BLOCK_K + c + lane))


@device_function
def row_total(sums, r, width):
    """The sum of a row's partial sums, halves onto halves; what was there is lost."""
    half = width // 2
    while half > 0:
        for lane in range(half):
            store(sums, r * width + lane, load(sums, r * width + lane) + load(sums, r * width + lane + half))
        half //= 2
    return load(sums, r * width)
