# mypy: ignore-errors
# ruff: noqa: N803
"""Products of 16-bit integers of several experts in one launch: rows offsets[e] to offsets[e + 1] are those of e.

Offsets lie on the device, and nobody waits for them: a launch has the programs that any offsets may need, which find
their expert in the offsets, at most EP - 1 experts. Where the rows are the contracted axis an expert's digits begin at
a whole block of 128.
"""

import triton
import triton.language as tl

from isograd.numerics import triton_memory as memory
from isograd.numerics import triton_ops as ops
from isograd.products import triton_gemm as gemm
from isograd.products import triton_slices as slices
from isograd.products.triton_slices import DEPTH

_LONGEST = tl.constexpr(1 << 16)  # elements whose products one accumulator holds


@triton.jit
def check_offsets(given_ptr, offsets_ptr, flag_ptr, experts, count, code, EP: tl.constexpr):
    """Copy offsets, or report one that does not fit and give no expert a row; the last number tells of that."""
    i = tl.arange(0, EP).to(tl.int64)
    inside = i <= experts
    offset = tl.load(given_ptr + i, mask=inside, other=0).to(tl.int64)
    before = tl.load(given_ptr + i - 1, mask=inside & (i > 0), other=0).to(tl.int64)
    ends = ((i == 0) & (offset != 0)) | ((i == experts) & (offset != count))
    bad = inside & ((offset < before) | (offset < 0) | (offset > count) | ends)
    memory.report(flag_ptr, code, bad, i, offset, memory.wide_int(count) + 1)
    wrong = tl.max(bad.to(tl.int32), axis=0)
    tl.store(offsets_ptr + i, tl.where(wrong > 0, 0, offset), mask=inside)
    tl.store(offsets_ptr + experts + 1, wrong.to(tl.int64))


@triton.jit
def _expert(offsets_ptr, experts, number, UNIT: tl.constexpr, EP: tl.constexpr):
    """(the expert that has the numbered unit of rows, or no expert; units before its own)."""
    e = tl.arange(0, EP)
    start = tl.load(offsets_ptr + e, mask=e < experts, other=0)
    stop = tl.load(offsets_ptr + e + 1, mask=e < experts, other=0)
    units = tl.cdiv(stop - start, UNIT)
    ends = tl.cumsum(units, axis=0)
    # Whoever is no expert has no units, and ends where the last one does.
    expert = tl.sum((ends <= number).to(tl.int32), axis=0)
    return expert, tl.sum(tl.where(e < expert, units, 0), axis=0)


# --- slices along the rows -------------------------------------------------------------------------------------------
@triton.jit
def expert_words(
    x_ptr, shift_ptr, offsets_ptr, words_ptr, lines, x_axis, x_inner,
    SIGN: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The words of lines along the rows of every expert [experts, lines]."""
    pid = tl.program_id(0).to(tl.int64)
    several = tl.cdiv(lines, LINES)
    expert = pid // several
    line = (pid - expert * several) * LINES + tl.arange(0, LINES)
    start, stop = tl.load(offsets_ptr + expert), tl.load(offsets_ptr + expert + 1)
    top = tl.full((LINES, BLOCK), slices.lowest(SIGN), tl.int32)
    most = tl.zeros((LINES, BLOCK), tl.int32)
    for at in range(start, stop, BLOCK):
        k = at + tl.arange(0, BLOCK).to(tl.int64)[None, :]
        top, most = slices.greatest_of(
            top, most, x_ptr, shift_ptr, line[:, None], k, lines, stop, x_axis, x_inner, SIGN, NATIVE
        )  # fmt: skip
    word = slices.word_of(tl.max(top, axis=1), tl.max(most, axis=1), SIGN)
    tl.store(words_ptr + expert * lines + line, word, mask=line < lines)


@triton.jit
def expert_slices(
    x_ptr, shift_ptr, offsets_ptr, words_ptr, digits_ptr, lines, blocks, experts, x_axis, x_inner,
    SIGN: tl.constexpr, LINES: tl.constexpr, EP: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Digits [lines, 2, blocks * 128] from those words; blocks that no expert has stay as they are."""
    pid = tl.program_id(0).to(tl.int64)
    block = pid % blocks
    line = pid // blocks * LINES + tl.arange(0, LINES)
    expert, before = _expert(offsets_ptr, experts, block, DEPTH, EP)
    if expert < experts:
        start, stop = tl.load(offsets_ptr + expert), tl.load(offsets_ptr + expert + 1)
        place = tl.arange(0, DEPTH).to(tl.int64)[None, :]
        word = tl.load(words_ptr + expert.to(tl.int64) * lines + line, mask=line < lines, other=0)
        slices.store_slices(
            x_ptr, shift_ptr, digits_ptr, line[:, None], word[:, None], start + (block - before) * DEPTH + place,
            block * DEPTH + place, lines, stop, blocks, x_axis, x_inner, SIGN, NATIVE,
        )  # fmt: skip


# --- products --------------------------------------------------------------------------------------------------------
@triton.jit
def _long_sums(
    a, b, p, q, at, length, a_count, b_count, width,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Z over any number of digits."""
    total = tl.zeros((BM, BN), tl.int64)
    for done in range(0, length, _LONGEST):
        count = tl.minimum(length - done, _LONGEST)
        total += gemm.exact_sums(a, b, p, q, at + done, count, a_count, b_count, width, BM, BN, BK, TMA)
    return total


@triton.jit
def _store_sums(c_ptr, z, row, left, e, f_ptr, f_first, m, n, BN: tl.constexpr, NATIVE: tl.constexpr):
    """Store a tile's sums, rounded, for rows below m."""
    column = left + tl.arange(0, BN)
    f = tl.load(f_ptr + f_first + column, mask=column < n, other=0) >> 2
    t = ((z + 128) >> 8).to(tl.float32)
    c = ops.narrow(gemm.scaled(t, e[:, None] + f[None, :] - 22), c_ptr.dtype.element_ty, NATIVE)
    at = c_ptr + row.to(tl.int64)[:, None] * n + column.to(tl.int64)[None, :]
    tl.store(at, c, mask=(row < m)[:, None] & (column < n)[None, :])


@triton.jit
def _compute(
    c, a, b, p, q, at, length, a_count, b_count, width, row, left, e, f_ptr, f_first, m, n,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr, LONG: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """A tile of c, of rows below m."""
    if LONG:
        z = _long_sums(a, b, p, q, at, length, a_count, b_count, width, BM, BN, BK, TMA)
        _store_sums(c, z, row, left, e, f_ptr, f_first, m, n, BN, NATIVE)
    else:
        acc, low = gemm.tile_sums(a, b, p, q, at, length, a_count, b_count, width, BM, BN, BK, TMA)
        gemm.store_tile(c, acc, low, row, left, e, f_ptr, f_first, m, n, BM, BN, NATIVE)


@triton.jit
def product_of_rows(
    a_ptr, b_ptr, e_ptr, f_ptr, offsets_ptr, c_ptr, m, n, blocks, experts, a_count, b_count,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr, LONG: tl.constexpr,
    EP: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Fill c [m, n] from digits of its rows and of n columns of every expert."""
    width = blocks * DEPTH
    a = gemm.lines_of(a_ptr, a_count, blocks, BM, BK, TMA)
    b = gemm.lines_of(b_ptr, b_count, blocks, BN, BK, TMA)
    most = tl.cdiv(m, BM) + experts
    for number in range(tl.program_id(0), most * tl.cdiv(n, BN), tl.num_programs(0)):
        _, top, left = gemm.tile_of(number, most * BM, n, BM, BN, GROUP)
        expert, before = _expert(offsets_ptr, experts, top // BM, BM, EP)
        if expert < experts:
            start, stop = tl.load(offsets_ptr + expert), tl.load(offsets_ptr + expert + 1)
            first = (start + (top // BM - before) * BM).to(tl.int32)
            stop = stop.to(tl.int32)
            row = first + tl.arange(0, BM)
            e = tl.load(e_ptr + row, mask=row < stop, other=0) >> 2
            column = expert * n
            _compute(
                c_ptr, a, b, first, column + left, 0, width, a_count, b_count, width, row, left, e, f_ptr, column,
                stop, n, BM, BN, BK, TMA, LONG, NATIVE,
            )  # fmt: skip


@triton.jit
def product_along_rows(
    a_ptr, b_ptr, e_ptr, f_ptr, offsets_ptr, c_ptr, m, n, blocks, experts, a_count, b_count,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr, LONG: tl.constexpr,
    EP: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Fill c [experts, m, n] from digits of m and of n lines along the rows."""
    width = blocks * DEPTH
    a = gemm.lines_of(a_ptr, a_count, blocks, BM, BK, TMA)
    b = gemm.lines_of(b_ptr, b_count, blocks, BN, BK, TMA)
    every = tl.arange(0, EP)
    some = every < experts
    units = tl.cdiv(
        tl.load(offsets_ptr + every + 1, mask=some, other=0) - tl.load(offsets_ptr + every, mask=some, other=0), DEPTH
    )
    for number in range(tl.program_id(0), tl.cdiv(m, BM) * tl.cdiv(n, BN) * experts, tl.num_programs(0)):
        expert, top, left = gemm.tile_of(number, m, n, BM, BN, GROUP)
        at = (tl.sum(tl.where(every < expert, units, 0), axis=0) * DEPTH).to(tl.int32)
        length = (tl.sum(tl.where(every == expert, units, 0), axis=0) * DEPTH).to(tl.int32)
        row = top + tl.arange(0, BM)
        line = memory.wide_int(expert) * m
        e = tl.load(e_ptr + line + row, mask=row < m, other=0) >> 2
        _compute(
            c_ptr + line * n, a, b, top, left, at, length, a_count, b_count, width, row, left, e, f_ptr,
            memory.wide_int(expert) * n, m, n, BM, BN, BK, TMA, LONG, NATIVE,
        )  # fmt: skip


# --- what is not finite ----------------------------------------------------------------------------------------------
@triton.jit
def repair_rows(
    a_ptr, b_ptr, e_ptr, f_ptr, offsets_ptr, c_ptr, m, n, terms, experts, a_axis, a_inner, b_axis, b_inner, b_outer,
    SIZE: tl.constexpr, SPAN: tl.constexpr, EP: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Rewrite entries of `product_of_rows`; all rows are NaN where the offsets do not fit."""
    pid = tl.program_id(0).to(tl.int64)
    across = tl.cdiv(n, SPAN)
    number = pid // across
    first = pid % across * SPAN
    expert, before = _expert(offsets_ptr, experts, number, SIZE, EP)
    if expert < experts:
        start, stop = tl.load(offsets_ptr + expert), tl.load(offsets_ptr + expert + 1)
        row = (number - before) * SIZE + tl.arange(0, SIZE)
        e = tl.load(e_ptr + start + row, mask=row < stop - start, other=0) & 3
        own = expert.to(tl.int64)
        gemm.repair_span(
            c_ptr + start * n, a_ptr + start * a_inner, b_ptr + own * b_outer, row, e, f_ptr + own * n, first,
            stop - start, n, terms, a_axis, a_inner, b_axis, b_inner, SIZE, SPAN, NATIVE,
        )  # fmt: skip
    elif tl.load(offsets_ptr + experts + 1) != 0:
        row = number * SIZE + tl.arange(0, SIZE)
        for at in range(first, tl.minimum(first + SPAN, n), SIZE):
            column = at + tl.arange(0, SIZE)
            place = c_ptr + row[:, None] * n + column[None, :]
            c = ops.narrow(tl.full((SIZE, SIZE), float("nan"), tl.float32), c_ptr.dtype.element_ty, NATIVE)
            tl.store(place, c, mask=(row < m)[:, None] & (column < n)[None, :])


@triton.jit
def repair_along_rows(
    a_ptr, b_ptr, e_ptr, f_ptr, offsets_ptr, c_ptr, m, n, a_axis, a_inner, b_axis, b_inner,
    SIZE: tl.constexpr, SPAN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Rewrite entries of `product_along_rows`."""
    pid = tl.program_id(0).to(tl.int64)
    down, across = tl.cdiv(m, SIZE), tl.cdiv(n, SPAN)
    expert = pid // (down * across)
    pid -= expert * (down * across)
    row = pid // across * SIZE + tl.arange(0, SIZE)
    start, stop = tl.load(offsets_ptr + expert), tl.load(offsets_ptr + expert + 1)
    e = tl.load(e_ptr + expert * m + row, mask=row < m, other=0) & 3
    gemm.repair_span(
        c_ptr + expert * m * n, a_ptr + start * a_axis, b_ptr + start * b_axis, row, e, f_ptr + expert * n,
        pid % across * SPAN, m, n, stop - start, a_axis, a_inner, b_axis, b_inner, SIZE, SPAN, NATIVE,
    )  # fmt: skip
