# mypy: ignore-errors
# ruff: noqa: N803
"""Rows of q, k, v and do as digits, before the kernels of order-free attention in Triton.

A program cuts a block of 128 rows of a head. Blocks count from the start of a sequence; those of a head lie one after
the other, the sequences of packed rows at multiples of 128 (`triton_masks.slot_of_sequence`), `pitch` rows in all, and
rows that are not there are zero. Digits are int8, high ones first: rows [heads, pitch, 2, width] for products over the
elements of a row, columns [heads, 2, width, pitch] for those over the rows of a block, in the order of
`triton_integers.py`; several of them follow one another, as do numbers in binary32 [heads, pitch].
"""

import triton
import triton.language as tl

from isograd.flash_attention import triton_cache as cache
from isograd.flash_attention import triton_masks as masks
from isograd.flash_attention.order_free.triton_integers import BLOCK, HALF, MARGIN, TINY, power
from isograd.flash_attention.triton_rows import load_rows, row_sums
from isograd.numerics import triton_ops as ops
from isograd.numerics.triton_memory import wide_int
from isograd.products.triton_slices import digits_of, exponent_of

_NO_ROW = tl.constexpr(-(1 << 14))
_INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def _block(starts_ptr, blocks, heads, length, sequences, PACKED: tl.constexpr):
    """(head among all, batch element, head, first row in memory, first row and rows of the sequence, slot)."""
    pid = tl.program_id(0)
    head = pid // blocks
    block = pid - head * blocks
    z, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    first, row = block * 0, block * BLOCK
    if PACKED:
        n, inside = masks.find_sequence(starts_ptr, sequences, length, block, BLOCK)
        first, length = masks.rows_of_sequence(starts_ptr, n, sequences, length)
        row = inside * BLOCK
    return head.to(tl.int64), z, h, first + row, row, length, block * BLOCK


@triton.jit
def _rows(x_ptr, z, h, start, row, length, strides, D: tl.constexpr, BD: tl.constexpr):
    """The rows of a block in binary32, zero where there are none."""
    inside = row + tl.arange(0, BLOCK) < length
    at = z * strides[0] + h * strides[1] + start.to(tl.int64) * strides[2]
    return load_rows(x_ptr, at, tl.arange(0, BLOCK), inside, strides[2], D, BD).to(tl.float32)


@triton.jit
def _cut(x):
    """(high digits, low digits, 2**(E - 2) or 0, E or NO_ROW, whether all is finite) of rows."""
    bits = ops.magnitude_key(x)
    finite = tl.max(bits, 1) < _INFINITY
    found = exponent_of(tl.max(tl.where(bits < _INFINITY, bits, 0), 1))
    some = found > _NO_ROW
    exponent = tl.where(some, found, 0)
    high, low = digits_of(x, exponent[:, None], 0)
    return high, low, tl.where(some, power(exponent - 2), 0.0), tl.where(some, exponent, _NO_ROW), finite


@triton.jit
def _store_rows(digits_ptr, head, slot, pitch, high, low, BD: tl.constexpr):
    row = (head * pitch + slot + tl.arange(0, BLOCK))[:, None] * (2 * BD)
    at = digits_ptr + row + tl.arange(0, BD)[None, :]
    tl.store(at, high)
    tl.store(at + BD, low)


@triton.jit
def _interleaved(x, BD: tl.constexpr):
    """A tile [128, BD] as [BD, 128] with its columns in the order of weights."""
    return tl.reshape(tl.permute(tl.reshape(x, [2, HALF, BD]), [2, 1, 0]), [BD, BLOCK])


@triton.jit
def _store_columns(digits_ptr, head, slot, pitch, high, low, BD: tl.constexpr):
    row = (head * (2 * BD) + tl.arange(0, BD))[:, None] * pitch
    at = digits_ptr + row + (slot + tl.arange(0, BLOCK))[None, :]
    tl.store(at, _interleaved(high, BD))
    tl.store(at + BD * wide_int(pitch), _interleaved(low, BD))


@triton.jit
def _store_worst(worst_ptr, head, slot, pitch, scale, good):
    """The largest of the scales of a block, infinity where something is not finite."""
    worst = tl.max(tl.where(good, scale, float("inf")), 0)
    tl.store(worst_ptr + head * (pitch // BLOCK) + slot // BLOCK, worst)


@triton.jit
def cut_queries(
    q_ptr, digits_ptr, numbers_ptr, starts_ptr, blocks, heads, length, sequences, pitch, count, strides, factor,
    D: tl.constexpr, BD: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Rows of q; numbers: factors RN(φ · σ 2**-18), the largest φ of every block. `count`: pitch times all heads."""
    head, z, h, start, row, length, slot = _block(starts_ptr, blocks, heads, length, sequences, PACKED)
    if row >= length:
        return
    high, low, scale, _, finite = _cut(_rows(q_ptr, z, h, start, row, length, strides, D, BD))
    _store_rows(digits_ptr, head, slot, pitch, high, low, BD)
    rows = tl.where(finite, scale * (factor * TINY), float("nan"))
    tl.store(numbers_ptr + head * pitch + slot + tl.arange(0, BLOCK), rows)
    _store_worst(numbers_ptr + wide_int(count), head, slot, pitch, scale, finite)


@triton.jit
def cut_keys(
    k_ptr, v_ptr, digits_ptr, numbers_ptr, starts_ptr, blocks, heads, length, sequences, pitch, count, k_strides,
    v_strides, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Rows of k, columns of v; numbers: φ of keys, Ev + 1/64, the integers Ev, the largest φ of every block."""
    head, z, h, start, row, length, slot = _block(starts_ptr, blocks, heads, length, sequences, PACKED)
    if row >= length:
        return
    k = _rows(k_ptr, z, h, start, row, length, k_strides, D, BD)
    v = _rows(v_ptr, z, h, start, row, length, v_strides, DV, BDV)
    _store_keys(k, v, digits_ptr, numbers_ptr, head, slot, pitch, count, BD, BDV)


@triton.jit
def cut_cached_keys(
    k_ptr, v_ptr, digits_ptr, numbers_ptr, used_ptr, table_ptr, blocks, heads, length, pages, pitch, count, k_strides,
    v_strides, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """The same of keys and values in a cache, as many as `triton_cache.check_cache` says."""
    head, z, h, _, row, _, slot = _block(used_ptr, blocks, heads, length, 0, False)
    used = tl.load(used_ptr + z)
    if row >= used:
        return
    k_rows = cache.place(k_ptr, table_ptr, z, h, pages, k_strides)
    v_rows = cache.place(v_ptr, table_ptr, z, h, pages, v_strides)
    k = cache.rows(k_rows, row, used, D, BLOCK, BD, PAGE).to(tl.float32)
    v = cache.rows(v_rows, row, used, DV, BLOCK, BDV, PAGE).to(tl.float32)
    _store_keys(k, v, digits_ptr, numbers_ptr, head, slot, pitch, count, BD, BDV)


@triton.jit
def _store_keys(
    k, v, digits_ptr, numbers_ptr, head, slot, pitch, count, BD: tl.constexpr, BDV: tl.constexpr
):  # fmt: skip
    high, low, scale, _, k_finite = _cut(k)
    _store_rows(digits_ptr, head, slot, pitch, high, low, BD)
    high, low, _, exponent, v_finite = _cut(v)
    count = wide_int(count)
    _store_columns(digits_ptr + count * (2 * BD), head, slot, pitch, high, low, BDV)
    good = k_finite & v_finite
    at = numbers_ptr + head * pitch + slot + tl.arange(0, BLOCK)
    tl.store(at, tl.where(good, scale, float("nan")))
    tl.store(at + count, exponent.to(tl.float32) + MARGIN)
    tl.store(at + 2 * count, ops.as_float(exponent))
    _store_worst(numbers_ptr + 3 * count, head, slot, pitch, scale, good)


@triton.jit
def cut_keys_twice(
    k_ptr, v_ptr, digits_ptr, numbers_ptr, starts_ptr, blocks, heads, length, sequences, pitch, count, k_strides,
    v_strides, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """For the backward pass: rows and columns of k, rows of v; numbers: φ of keys, of values, the largest of keys."""
    head, z, h, start, row, length, slot = _block(starts_ptr, blocks, heads, length, sequences, PACKED)
    if row >= length:
        return
    count = wide_int(count)
    high, low, scale, _, k_finite = _cut(_rows(k_ptr, z, h, start, row, length, k_strides, D, BD))
    _store_rows(digits_ptr, head, slot, pitch, high, low, BD)
    _store_columns(digits_ptr + count * (2 * BD), head, slot, pitch, high, low, BD)
    high, low, v_scale, _, v_finite = _cut(_rows(v_ptr, z, h, start, row, length, v_strides, DV, BDV))
    _store_rows(digits_ptr + count * (4 * BD), head, slot, pitch, high, low, BDV)
    good = k_finite & v_finite
    at = numbers_ptr + head * pitch + slot + tl.arange(0, BLOCK)
    tl.store(at, tl.where(good, scale, float("nan")))
    tl.store(at + count, tl.where(v_finite, v_scale, float("nan")))
    _store_worst(numbers_ptr + 2 * count, head, slot, pitch, scale, good)


@triton.jit
def cut_queries_twice(
    q_ptr, do_ptr, o_ptr, lse_ptr, dlse_ptr, digits_ptr, numbers_ptr, starts_ptr, blocks, heads, length, sequences,
    pitch, count, q_strides, do_strides, o_strides,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, DLSE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """For the backward pass: rows and columns of q, then of do, and numbers of rows, 0 where a row is absent.

    RN(lse log2 e), +inf where absent; D; φ of q; φ of do; the first, -inf where absent; the largest φ of q in blocks.
    """
    tokens = wide_int(length)
    head, z, h, start, row, length, slot = _block(starts_ptr, blocks, heads, length, sequences, PACKED)
    if row >= length:
        return
    here = tl.arange(0, BLOCK)
    inside = row + here < length
    lse_at = head * tokens + start + here
    lse = tl.load(lse_ptr + lse_at, mask=inside, other=float("-inf"))
    present = lse != float("-inf")
    level = lse * masks.LOG2E
    at = numbers_ptr + head * pitch + slot + here
    count = wide_int(count)
    tl.store(at, tl.where(present, level, float("inf")))
    tl.store(at + 4 * count, tl.where(present, level, float("-inf")))
    high, low, scale, _, q_finite = _cut(_rows(q_ptr, z, h, start, row, length, q_strides, D, BD))
    _store_rows(digits_ptr, head, slot, pitch, high, low, BD)
    _store_columns(digits_ptr + count * (2 * BD), head, slot, pitch, high, low, BD)
    scale = tl.where(present, tl.where(q_finite, scale, float("nan")), 0.0)
    tl.store(at + 2 * count, scale)
    do = _rows(do_ptr, z, h, start, row, length, do_strides, DV, BDV)
    o = _rows(o_ptr, z, h, start, row, length, o_strides, DV, BDV)
    delta = row_sums(o, do)
    if DLSE:
        delta = delta - tl.load(dlse_ptr + lse_at, mask=inside, other=0.0)
    delta = tl.where(present, delta, 0.0)
    tl.store(at + count, delta)
    high, low, do_scale, _, do_finite = _cut(do)
    do_digits = digits_ptr + count * (4 * BD)
    _store_rows(do_digits, head, slot, pitch, high, low, BDV)
    _store_columns(do_digits + count * (2 * BDV), head, slot, pitch, high, low, BDV)
    tl.store(at + 3 * count, tl.where(present, tl.where(do_finite, do_scale, float("nan")), 0.0))
    good = (q_finite & do_finite & ops.is_finite(delta) & ops.is_finite(level)) | (present == 0)
    _store_worst(numbers_ptr + 5 * count, head, slot, pitch, scale, good)


@triton.jit
def sink_terms(
    numbers_ptr, lse_ptr, sinks_ptr, terms_ptr, starts_ptr, blocks, heads, length, sequences, pitch, count,
    PACKED: tl.constexpr,
):  # fmt: skip
    """RN(-exp(RN(sink - lse)) D) of all rows [heads, length], 0 of rows behind the last sequence."""
    tokens, end = wide_int(length), wide_int(length)
    if PACKED:
        end = masks.rows_of_sequence(starts_ptr, sequences, sequences, length)[0]
    head, _, h, start, row, length, slot = _block(starts_ptr, blocks, heads, length, sequences, PACKED)
    if row >= length:
        return
    here = tl.arange(0, BLOCK)
    inside = row + here < length
    at = head * tokens + start + here
    lse = tl.load(lse_ptr + at, mask=inside, other=float("-inf"))
    delta = tl.load(numbers_ptr + wide_int(count) + head * pitch + slot + here)
    far = tl.where(lse == float("-inf"), float("inf"), lse)
    share = ops.exp(tl.load(sinks_ptr + h).to(tl.float32) - far)
    term = tl.where(start + here < end, ops.negate(share) * delta, 0.0)
    tl.store(terms_ptr + at, term, mask=inside)
