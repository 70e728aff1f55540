# mypy: ignore-errors
# ruff: noqa: N803, RET505
# A branch on a constant that returns needs its else: Triton compiles what follows a lone return as well.
"""Rows whose classes are spread over ranks, on GPUs: what a rank adds to a sum, and what follows from the sum.

`numba_vocab.py` says what the integers are that ranks exchange. A program has ROWS rows of a part and walks through
their classes; what follows from whole rows is computed for BLOCK rows at a time. LONG: the row has more classes than
the short sums of 16 bits hold.
"""

import triton
import triton.language as tl

from isograd.numerics import triton_ops as ops
from isograd.numerics import triton_sum as sums
from isograd.numerics import triton_terms as terms_of
from isograd.rows import triton_rows as rows
from isograd.rows import triton_tiles as tiles
from isograd.torch.distributed import vocab_layout

LOG_PROBABILITIES, PRODUCTS, VALUES = (
    tl.constexpr(vocab_layout.LOG_PROBABILITIES),
    tl.constexpr(vocab_layout.PRODUCTS),
    tl.constexpr(vocab_layout.VALUES),
)
_WORDS, _WORD = tl.constexpr(vocab_layout.WORDS), tl.constexpr(0xFFFFFFFF)
_IGNORED = tl.constexpr(-1)


# --- what ranks exchange ----------------------------------------------------------------------------------------------
@triton.jit
def _key(keys_ptr, row, inside, work: tl.constexpr):
    """Keys of the work type."""
    key = tl.load(keys_ptr + row, mask=inside, other=0)
    if work == tl.float64:
        return key
    else:
        return key.to(tl.int32)


@triton.jit
def _store_words(words_ptr, row, inside, hi, lo, last):
    """128-bit integers in words that leave room for the additions of 2**31 ranks, and a fourth word."""
    at = words_ptr + row * _WORDS
    tl.store(at, hi, mask=inside)
    tl.store(at + 1, (lo >> 32) & _WORD, mask=inside)
    tl.store(at + 2, lo & _WORD, mask=inside)
    tl.store(at + 3, last, mask=inside)


@triton.jit
def _load_words(words_ptr, row, inside):
    """The 128-bit integers of words that ranks have added up."""
    at = words_ptr + row * _WORDS
    hi = tl.load(at, mask=inside, other=0)
    a, b = sums.shifted_wide(tl.load(at + 1, mask=inside, other=0), 32)
    return sums.add_wide(hi + a, b, tl.load(at + 2, mask=inside, other=0))


@triton.jit
def _rows(count, ROWS: tl.constexpr):
    """(rows of this program, whether there are such)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return row, row < count


@triton.jit
def _columns(BLOCK: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr):
    return tiles.columns(BLOCK, GROUP, V)


# --- the sum of exponentials -----------------------------------------------------------------------------------------
@triton.jit
def maxima(
    x_ptr, keys_ptr, count, n, step, stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """The key of the maximum of a part of every row."""
    work: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    row, inside = _rows(count, ROWS)
    column = _columns(BLOCK, GROUP, V)
    best = tiles.empty_tile(BLOCK, ROWS, GROUP, V, float("-inf"), work)
    for start in range(0, n, BLOCK):
        mask = tiles.broad(inside) & (column + start < n)
        best = tiles.larger(best, tiles.load(x_ptr, row, column + start, step, stride, mask, float("-inf")))
    key = tl.max(ops.max_key(rows.thread_maximum(best)), axis=0)
    tl.store(keys_ptr + row, key.to(tl.int64), mask=inside)


@triton.jit
def exponentials(
    x_ptr, keys_ptr, words_ptr, count, n, step, stride,
    LONG: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """The exact sums of a part's exponentials, relative to the maxima of whole rows."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    short: tl.constexpr = dtype.primitive_bitwidth == 16
    work: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    row, inside = _rows(count, ROWS)
    column = _columns(BLOCK, GROUP, V)
    m = ops.from_key(_key(keys_ptr, row, inside, work))
    base, floor, bias = rows.row_shift(m, short)
    high_sum = tl.zeros((BLOCK // GROUP, ROWS), tl.int64)
    low_sum = tl.zeros((BLOCK // GROUP, ROWS), tl.int64)
    for start in range(0, n, BLOCK):
        mask = tiles.broad(inside) & (column + start < n)
        x = tiles.load(x_ptr, row, column + start, step, stride, mask, float("-inf"))
        e, error = rows.exponential(x, tiles.broad(base), tiles.broad(floor), tiles.broad(bias), short)
        high, low = rows.exponential_terms(e, error, short, LONG, False)
        high, low = rows.exponential_sums(high, low, short, LONG)
        high_sum += high
        low_sum += low
    if LONG or not short:
        hi, lo = rows.wide_sum(high_sum, low_sum, dtype)
    else:
        lo = tl.sum(high_sum, axis=0)
        hi = lo >> 63
    finite = ops.is_finite(m)
    _store_words(words_ptr, row, inside, tl.where(finite, hi, 0), tl.where(finite, lo, 0), row * 0)


@triton.jit
def statistics(
    keys_ptr, words_ptr, about_ptr, count, SHORT: tl.constexpr, LONG: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """What maximum and sum of a row give, NaN where the maximum is not finite."""
    work: tl.constexpr = about_ptr.dtype.element_ty
    row, inside = _rows(count, BLOCK)
    m = ops.from_key(_key(keys_ptr, row, inside, work))
    valid = ops.is_finite(m)
    base, floor, bias = rows.row_shift(m, SHORT)
    hi, lo = _load_words(words_ptr, row, inside)
    wide: tl.constexpr = LONG or not SHORT
    # Outside a sum is 0, which nothing is divided by.
    lo = tl.where(inside & valid, lo, 1)
    hi = tl.where(inside & valid, hi, 0)
    r, r_low = rows.softmax_factors(hi, lo, valid, SHORT, LONG, wide, work)
    top, middle, bottom = rows.log_sum(hi, lo, m, base, floor, bias, valid, SHORT, LONG, wide, work, False)
    if SHORT:
        r_low = tl.zeros_like(r)
        bottom = tl.zeros_like(r)
    size = count + row * 0
    tl.store(about_ptr + row, tl.where(valid, m, float("nan")), mask=inside)
    tl.store(about_ptr + size + row, r, mask=inside)
    tl.store(about_ptr + 2 * size + row, tl.where(valid, r_low, float("nan")), mask=inside)
    tl.store(about_ptr + 3 * size + row, top, mask=inside)
    tl.store(about_ptr + 4 * size + row, middle, mask=inside)
    tl.store(about_ptr + 5 * size + row, bottom, mask=inside)


@triton.jit
def _about(about_ptr, number: tl.constexpr, row, inside, count):
    return tl.load(about_ptr + number * (count + row * 0) + row, mask=inside, other=0.0)


# --- sums of terms (rule 4) ------------------------------------------------------------------------------------------
@triton.jit
def _terms(
    x_ptr, y_ptr, row, column, mask, x_step, x_stride, y_step, y_stride, top, middle, bottom, MODE: tl.constexpr,
    short: tl.constexpr,
):  # fmt: skip
    """Terms of a tile, 0 where there are none."""
    x = tiles.load(x_ptr, row, column, x_step, x_stride, mask, 0.0)
    if MODE == PRODUCTS:
        x = x * tiles.load(y_ptr, row, column, y_step, y_stride, mask, 0.0)
    if MODE == LOG_PROBABILITIES:
        x = rows.log_softmax_output(x, tiles.broad(top), tiles.broad(middle), tiles.broad(bottom), short)
    return tl.where(mask, x, 0.0)


@triton.jit
def _log_sum(about_ptr, row, inside, count, MODE: tl.constexpr):
    """The parts that are subtracted from logits."""
    if MODE == LOG_PROBABILITIES:
        top, middle = _about(about_ptr, 3, row, inside, count), _about(about_ptr, 4, row, inside, count)
        return top, middle, _about(about_ptr, 5, row, inside, count)
    else:
        nothing = (row * 0).to(tl.float32)
        return nothing, nothing, nothing


@triton.jit
def magnitudes(
    x_ptr, y_ptr, about_ptr, keys_ptr, count, n, x_step, x_stride, y_step, y_stride,
    MODE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """The key of the largest magnitude among a part's terms."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    short: tl.constexpr = dtype.primitive_bitwidth == 16
    row, inside = _rows(count, ROWS)
    column = _columns(BLOCK, GROUP, V)
    top, middle, bottom = _log_sum(about_ptr, row, inside, count, MODE)
    key = tl.zeros((BLOCK // GROUP, ROWS, GROUP // V, V), tl.int64 if dtype == tl.float64 else tl.int32)
    for start in range(0, n, BLOCK):
        mask = tiles.broad(inside) & (column + start < n)
        p = _terms(
            x_ptr, y_ptr, row, column + start, mask, x_step, x_stride, y_step, y_stride, top, middle, bottom, MODE,
            short,
        )  # fmt: skip
        key = tl.maximum(key, terms_of.term_key(p))
    key = tl.max(tl.max(tl.max(key, axis=3), axis=2), axis=0)
    tl.store(keys_ptr + row, key.to(tl.int64), mask=inside)


@triton.jit
def _any(flags):
    """Whether a row of a tile has a flag, as int64."""
    return tl.max(tl.max(tl.max(flags.to(tl.int32), axis=3), axis=2), axis=0).to(tl.int64)


@triton.jit
def terms(
    x_ptr, y_ptr, about_ptr, keys_ptr, words_ptr, count, n, x_step, x_stride, y_step, y_stride,
    MODE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """The exact sums of a part's terms, relative to the largest magnitudes of whole rows."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    short: tl.constexpr = dtype.primitive_bitwidth == 16
    work: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    row, inside = _rows(count, ROWS)
    column = _columns(BLOCK, GROUP, V)
    top, middle, bottom = _log_sum(about_ptr, row, inside, count, MODE)
    key = _key(keys_ptr, row, inside, work)
    finite = terms_of.key_is_finite(key)
    _, scale, magic, low_scale = sums.term_scale(tl.where(finite, key, 0))
    high_sum = tl.zeros((BLOCK // GROUP, ROWS), tl.int64)
    low_sum = tl.zeros((BLOCK // GROUP, ROWS), tl.int64)
    positive, negative = row * 0, row * 0
    for start in range(0, n, BLOCK):
        mask = tiles.broad(inside) & (column + start < n)
        p = _terms(
            x_ptr, y_ptr, row, column + start, mask, x_step, x_stride, y_step, y_stride, top, middle, bottom, MODE,
            short,
        )  # fmt: skip
        nan = p != p
        positive = tl.maximum(positive, _any(nan | (p == float("inf"))))
        negative = tl.maximum(negative, _any(nan | (p == float("-inf"))))
        high, low = tiles.limbs(tl.where(tiles.broad(finite), p, 0.0), scale, magic, low_scale)
        high_sum += high
        low_sum += low
    hi, lo = rows.wide_sum(high_sum, low_sum, work)
    # How many ranks have seen an infinity of either sign.
    _store_words(words_ptr, row, inside, hi, lo, positive + (negative << 32))


@triton.jit
def totals(keys_ptr, words_ptr, sums_ptr, count, BLOCK: tl.constexpr):
    """The sums of whole rows, rounded once."""
    work: tl.constexpr = sums_ptr.dtype.element_ty
    row, inside = _rows(count, BLOCK)
    key = _key(keys_ptr, row, inside, work)
    exponent, _, _, _ = sums.term_scale(tl.where(terms_of.key_is_finite(key), key, 0))
    hi, lo = _load_words(words_ptr, row, inside)
    seen = tl.load(words_ptr + row * _WORDS + 3, mask=inside, other=0)
    positive, negative = (seen & _WORD) != 0, (seen >> 32) != 0
    special = tl.where(positive, float("inf"), float("-inf"))
    special = tl.where(positive & negative, float("nan"), special)
    s = rows.order_free_sum(hi, lo, exponent, special, key, True, work)
    tl.store(sums_ptr + row, s, mask=inside)


# --- results ---------------------------------------------------------------------------------------------------------
@triton.jit
def losses(
    about_ptr, own_ptr, target_ptr, everything_ptr, numbers_ptr, loss_ptr, state_ptr, count,
    SMOOTH: tl.constexpr, Z: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The losses of rows from the logits of their targets, and the states that their gradients start from."""
    short: tl.constexpr = own_ptr.dtype.element_ty.primitive_bitwidth == 16
    work: tl.constexpr = loss_ptr.dtype.element_ty
    row, inside = _rows(count, BLOCK)
    kept = tl.load(target_ptr + row, mask=inside, other=0) != _IGNORED
    m, r = _about(about_ptr, 0, row, inside, count), _about(about_ptr, 1, row, inside, count)
    r_low, top = _about(about_ptr, 2, row, inside, count), _about(about_ptr, 3, row, inside, count)
    middle, bottom = _about(about_ptr, 4, row, inside, count), _about(about_ptr, 5, row, inside, count)
    valid = ops.is_finite(m)
    own = ops.widen(tl.load(own_ptr + row, mask=inside, other=0.0), False)
    loss = 0.0 - rows.log_softmax_output(own, top, middle, bottom, short)
    factor = tl.full(loss.shape, 1.0, work)
    if SMOOTH:
        everything = 0.0 - tl.load(everything_ptr + row, mask=inside, other=0.0)
        loss = tl.load(numbers_ptr) * loss + tl.load(numbers_ptr + 1) * everything
    if Z:
        lse = top + middle
        if not short:
            lse = top + (middle + bottom)
        loss += tl.load(numbers_ptr + 2) * (lse * lse)
        factor += tl.load(numbers_ptr + 3) * lse
    loss = tl.where(valid, loss, float("nan"))
    factor = tl.where(valid, factor, float("nan"))
    size = count + row * 0
    tl.store(loss_ptr + row, ops.narrow(tl.where(kept, loss, 0.0), work, False), mask=inside)
    tl.store(state_ptr + row, ops.narrow(tl.where(kept, m, 0.0), work, False), mask=inside)
    tl.store(state_ptr + size + row, ops.narrow(tl.where(kept, r, 0.0), work, False), mask=inside)
    tl.store(state_ptr + 2 * size + row, ops.narrow(tl.where(kept, r_low, 0.0), work, False), mask=inside)
    tl.store(state_ptr + 3 * size + row, ops.narrow(tl.where(kept, factor, 0.0), work, False), mask=inside)


@triton.jit
def outputs(
    x_ptr, about_ptr, y_ptr, count, n, step, stride,
    LOGARITHM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """A part's softmax, or the logarithm of it; y is contiguous."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    short: tl.constexpr = dtype.primitive_bitwidth == 16
    row, inside = _rows(count, ROWS)
    column = _columns(BLOCK, GROUP, V)
    m, r = _about(about_ptr, 0, row, inside, count), _about(about_ptr, 1, row, inside, count)
    r_low, top = _about(about_ptr, 2, row, inside, count), _about(about_ptr, 3, row, inside, count)
    middle, bottom = _about(about_ptr, 4, row, inside, count), _about(about_ptr, 5, row, inside, count)
    valid = ops.is_finite(m)
    base, floor, bias = rows.row_shift(m, short)
    largest = rows.largest_output(m, base, floor, bias, r, r_low, valid, short)
    every = tiles.broad(tl.full((ROWS,), 1, tl.int32))
    for start in range(0, n, BLOCK):
        mask = tiles.broad(inside) & (column + start < n)
        x = tiles.load(x_ptr, row, column + start, step, stride, mask, float("-inf"))
        if LOGARITHM:
            y = rows.log_softmax_output(x, tiles.broad(top), tiles.broad(middle), tiles.broad(bottom), short)
        else:
            e, _ = rows.exponential(x, tiles.broad(base), tiles.broad(floor), tiles.broad(bias), short)
            found = rows.find_largest(x, tiles.broad(m), every, tiles.broad(valid), short, False)
            y = rows.softmax_output(e, found, tiles.broad(r), tiles.broad(r_low), tiles.broad(largest), short, False)
        tiles.store(y_ptr, row, column + start, n, 1, mask, y)


@triton.jit
def gradients(
    dy_ptr, y_ptr, sums_ptr, dx_ptr, count, n, step, stride,
    LOGARITHM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """The gradients of `outputs` from the sums of y_j dy_j, or of dy_j; y and dx are contiguous."""
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    short: tl.constexpr = dtype.primitive_bitwidth == 16
    kind: tl.constexpr = rows.LOG_SOFTMAX if LOGARITHM else rows.SOFTMAX
    row, inside = _rows(count, ROWS)
    column = _columns(BLOCK, GROUP, V)
    s = tiles.broad(tl.load(sums_ptr + row, mask=inside, other=0.0))
    for start in range(0, n, BLOCK):
        mask = tiles.broad(inside) & (column + start < n)
        dy = tiles.load(dy_ptr, row, column + start, step, stride, mask, 0.0)
        y = tiles.load(y_ptr, row, column + start, n, 1, mask, 0.0)
        tiles.store(dx_ptr, row, column + start, n, 1, mask, rows.backward_output(dy, y, s, kind, short))
