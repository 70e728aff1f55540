# mypy: ignore-errors
# ruff: noqa: N803
"""The order-free sum over an axis in Triton, divided by the number of terms for a mean.

`sum_rows` serves a row in one program. `sum_keys`, `sum_parts` and `sum_finish` cut long rows into chunks: the first
finds every chunk's largest term, the second adds its integer terms up, the third adds up the chunks. What a chunk finds
stands in scratch memory of its own, which needs no zeros and no atomics: keys [chunks, rows], words [chunks, WORDS,
rows].
"""

import triton
import triton.language as tl

from isograd.numerics import triton_ops as ops
from isograd.numerics import triton_sum as sums
from isograd.numerics import triton_terms as terms
from isograd.numerics.triton_memory import outer_offset, place, wide_int


@triton.jit
def _load(x_ptr, row, j, stop, inner, x_axis, x_inner, NATIVE: tl.constexpr):
    mask = (row < inner) & (j < stop)
    return ops.widen(tl.load(x_ptr + row * x_inner + j * x_axis, mask=mask, other=0.0), NATIVE)


@triton.jit
def _store(out_ptr, s, mask, n, MEAN: tl.constexpr, NATIVE: tl.constexpr):
    if MEAN:
        s = ops.divide(s, tl.zeros_like(s) + wide_int(n).to(s.dtype))
    tl.store(out_ptr, ops.narrow(s, out_ptr.dtype.element_ty, NATIVE), mask=mask)


@triton.jit
def sum_rows(
    x_ptr,
    out_ptr,
    n,
    inner,
    x_axis,
    x_inner,
    out_axis,
    out_inner,
    outer_shape,
    x_outer,
    out_outer,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
    MEAN: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Sums of rows of at most 2**17 elements; HELD: a tile holds them."""
    row, _, outer = place(inner, 1, ROWS, 1)
    x_ptr += outer_offset(outer, outer_shape, x_outer)
    column = tl.arange(0, BLOCK).to(tl.int64)[None, :]
    p = _load(x_ptr, row, column, n, inner, x_axis, x_inner, NATIVE)
    key = terms.term_key(p)
    if not HELD:
        for start in range(BLOCK, n, BLOCK):
            key = tl.maximum(key, terms.term_key(_load(x_ptr, row, column + start, n, inner, x_axis, x_inner, NATIVE)))
    key = tl.max(key, axis=1)[:, None]
    exponent, scale, magic, low_scale = sums.term_scale(key)
    a, b = terms.term_parts(p, scale, magic, low_scale)
    special = terms.special_terms(p)
    if not HELD:
        for start in range(BLOCK, n, BLOCK):
            p = _load(x_ptr, row, column + start, n, inner, x_axis, x_inner, NATIVE)
            more_a, more_b = terms.term_parts(p, scale, magic, low_scale)
            a += more_a
            b += more_b
            special += terms.special_terms(p)
    a, b, special = tl.sum(a, axis=1)[:, None], tl.sum(b, axis=1)[:, None], tl.sum(special, axis=1)[:, None]
    s = terms.sum_of_parts(a, b, exponent, special, key)
    out = out_ptr + outer_offset(outer, outer_shape, out_outer) + row * out_inner
    _store(out, s, row < inner, n, MEAN, NATIVE)


@triton.jit
def _chunk(inner, chunks, length, ROWS: tl.constexpr):
    """(rows, outer, chunk, its first element, the rows' numbers) of a program."""
    pid = tl.program_id(0).to(tl.int64)
    chunk = pid % chunks
    block = pid // chunks
    blocks = tl.cdiv(inner, ROWS)
    outer = block // blocks
    row = (block - outer * blocks) * ROWS + tl.arange(0, ROWS)
    return row[:, None], outer, chunk, chunk * length, outer * inner + row


@triton.jit
def sum_keys(
    x_ptr,
    keys_ptr,
    n,
    inner,
    chunks,
    length,
    count,
    x_axis,
    x_inner,
    outer_shape,
    x_outer,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """The largest key of every chunk of `length` elements; `count` rows in all."""
    row, outer, chunk, begin, number = _chunk(inner, chunks, length, ROWS)
    x_ptr += outer_offset(outer, outer_shape, x_outer)
    column = begin + tl.arange(0, BLOCK).to(tl.int64)[None, :]
    stop = tl.minimum(begin + length, n)
    key = terms.term_key(_load(x_ptr, row, column, stop, inner, x_axis, x_inner, NATIVE))
    for start in range(BLOCK, length, BLOCK):
        p = _load(x_ptr, row, column + start, stop, inner, x_axis, x_inner, NATIVE)
        key = tl.maximum(key, terms.term_key(p))
    inside = (number - outer * inner) < inner
    tl.store(keys_ptr + chunk * count + number, tl.max(key, axis=1), mask=inside)


@triton.jit
def _row_key(keys_ptr, number, inside, chunks, count, CHUNKS: tl.constexpr):
    """The largest key of rows over all chunks."""
    c = tl.arange(0, CHUNKS).to(tl.int64)[None, :]
    keys = tl.load(keys_ptr + c * count + number[:, None], mask=inside[:, None] & (c < chunks), other=0)
    return tl.max(keys, axis=1)


@triton.jit
def sum_parts(
    x_ptr,
    keys_ptr,
    words_ptr,
    n,
    inner,
    chunks,
    length,
    count,
    x_axis,
    x_inner,
    outer_shape,
    x_outer,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    WORDS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """The words of every chunk, or the mark of a row that is not finite."""
    row, outer, chunk, begin, number = _chunk(inner, chunks, length, ROWS)
    inside = (number - outer * inner) < inner
    key = _row_key(keys_ptr, number, inside, chunks, count, CHUNKS)
    _, scale, magic, low_scale = sums.term_scale(key[:, None])
    x_ptr += outer_offset(outer, outer_shape, x_outer)
    column = begin + tl.arange(0, BLOCK).to(tl.int64)[None, :]
    stop = tl.minimum(begin + length, n)
    p = _load(x_ptr, row, column, stop, inner, x_axis, x_inner, NATIVE)
    a, b = terms.term_parts(p, scale, magic, low_scale)
    special = terms.special_terms(p)
    for start in range(BLOCK, length, BLOCK):
        p = _load(x_ptr, row, column + start, stop, inner, x_axis, x_inner, NATIVE)
        more_a, more_b = terms.term_parts(p, scale, magic, low_scale)
        a += more_a
        b += more_b
        special += terms.special_terms(p)
    # What one place of the tile holds fits a word; the tile as a whole may not.
    w0, w1, w2, w3 = terms.split_words(a, b, WORDS, p.dtype == tl.float64)
    mark = terms.mark_of(tl.sum(special, axis=1))
    words = words_ptr + chunk * WORDS * count + number
    tl.store(words, tl.where(terms.key_is_finite(key), tl.sum(w0, axis=1), mark), mask=inside)
    if WORDS > 1:
        tl.store(words + count, tl.sum(w1, axis=1), mask=inside)
    if WORDS > 2:
        tl.store(words + 2 * wide_int(count), tl.sum(w2, axis=1), mask=inside)
        tl.store(words + 3 * wide_int(count), tl.sum(w3, axis=1), mask=inside)


@triton.jit
def sum_finish(
    keys_ptr,
    words_ptr,
    out_ptr,
    n,
    inner,
    chunks,
    count,
    out_axis,
    out_inner,
    outer_shape,
    out_outer,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    WORDS: tl.constexpr,
    MEAN: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Add up the chunks' words."""
    row, _, outer = place(inner, 1, ROWS, 1)
    number = outer * inner + tl.max(row, axis=1)
    inside = (number - outer * inner) < inner
    key = _row_key(keys_ptr, number, inside, chunks, count, CHUNKS)
    c = tl.arange(0, CHUNKS).to(tl.int64)[None, :]
    words = words_ptr + c * WORDS * count + number[:, None]
    w0, w1, w2, w3 = terms.load_words(words, count, inside[:, None] & (c < chunks), WORDS)
    mark = tl.max(w0 & 1, axis=1) | tl.max(w0 & 2, axis=1)
    w0 = tl.where(terms.key_is_finite(key), tl.sum(w0, axis=1), mark)
    s = terms.sum_of_words(w0, tl.sum(w1, axis=1), tl.sum(w2, axis=1), tl.sum(w3, axis=1), key, WORDS)
    out = out_ptr + outer_offset(outer, outer_shape, out_outer) + (number - outer * inner) * out_inner
    _store(out, s, inside, n, MEAN, NATIVE)
