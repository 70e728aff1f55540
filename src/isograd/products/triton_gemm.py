# mypy: ignore-errors
# ruff: noqa: N803, RET505
# A branch on a constant that returns needs its else: Triton compiles what follows a lone return as well.
"""The product of lines of digits (`triton_slices.py`): exact integers, rounded once.

With A = 256 A1 + A0 and B = 256 B1 + B0 one int32 accumulator holds everything, as no partial sum over 2**16 elements
reaches 2**31:

    s = 128 + Σ A0 B0;  s = ⌊s / 256⌋ + Σ (A1 B0 + A0 B1);  T = 256 (⌊s / 256⌋ + Σ A1 B1) + s mod 256

`product` does this. `add_parts` adds the exact sums of pieces of the contracted axis up in int64, for a longer one and
where there are few tiles, and `round_sums` rounds them. `repair` sees to entries with products that are not finite.
"""

import triton
import triton.language as tl

from isograd.numerics import triton_ops as ops
from isograd.numerics.triton_memory import outer_offset, wide_int
from isograd.products.triton_slices import DEPTH


@triton.jit
def tile_of(number, m, n, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """(matrix, first row, first column) of a tile: groups of rows whose tiles use the same lines of b."""
    rows, columns = tl.cdiv(m, BM), tl.cdiv(n, BN)
    matrix = number // (rows * columns)
    number -= matrix * (rows * columns)
    first = number // (GROUP * columns) * GROUP
    size = tl.minimum(rows - first, GROUP)
    inside = number % (GROUP * columns)
    return matrix, (first + inside % size) * BM, inside // size * BN


@triton.jit
def lines_of(x_ptr, count, blocks, ROWS: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr):
    """What `_load` reads lines of digits through."""
    if TMA:
        width = wide_int(blocks) * (2 * DEPTH)
        return tl.make_tensor_descriptor(x_ptr, [count, width.to(tl.int32)], [width, 1], [ROWS, BK])
    else:
        return x_ptr


@triton.jit
def _load(x, first, at, count, width, ROWS: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr):
    """Digits `at` and following of lines `first` and following; what is beyond the last line is anything."""
    if TMA:
        return x.load([first, at])
    else:
        line = tl.minimum(first + tl.arange(0, ROWS), count - 1).to(tl.int64)
        return tl.load(x + line[:, None] * (2 * width) + (at + tl.arange(0, BK))[None, :])


@triton.jit
def _multiply(
    acc, a, b, a_first, b_first, a_at, b_at, length, a_count, b_count, width,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    for k in range(0, length, BK):
        x = _load(a, a_first, a_at + k, a_count, width, BM, BK, TMA)
        y = _load(b, b_first, b_at + k, b_count, width, BN, BK, TMA)
        acc = tl.dot(x, y.T, acc, out_dtype=tl.int32)
    return acc


@triton.jit
def _halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of a tile, which a thread holds in registers of its own."""
    return tl.split(tl.permute(tl.reshape(x, [ROWS, 2, COLUMNS // 2]), [0, 2, 1]))


@triton.jit
def scaled(t, exponent):
    """An integer within 2**48, as a float, times 2**exponent, rounded once."""
    exponent = tl.minimum(tl.maximum(exponent, -252), 252)  # beyond it leaves the range of binary32 either way
    half = exponent >> 1
    return t * ops.pow2_32(half) * ops.pow2_32(exponent - half)


@triton.jit
def tile_sums(
    a, b, p, q, at, length, a_count, b_count, width,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """(T without its low bytes, those) over `length` digits of lines, from digit `at` on."""
    high, low = at, width + at
    acc = tl.full((BM, BN), 128, tl.int32)
    acc = _multiply(acc, a, b, p, q, low, low, length, a_count, b_count, width, BM, BN, BK, TMA)
    acc = acc >> 8
    acc = _multiply(acc, a, b, p, q, high, low, length, a_count, b_count, width, BM, BN, BK, TMA)
    acc = _multiply(acc, a, b, p, q, low, high, length, a_count, b_count, width, BM, BN, BK, TMA)
    # The low bytes of four quarters of the columns share a register.
    x, y = _halves(acc & 255, BM, BN)
    packed = x | (y << 16)
    x, y = _halves(packed, BM, BN // 2)
    packed = x | (y << 8)
    acc = acc >> 8
    acc = _multiply(acc, a, b, p, q, high, high, length, a_count, b_count, width, BM, BN, BK, TMA)
    return acc, packed


@triton.jit
def exact_sums(
    a, b, p, q, at, length, a_count, b_count, width,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Z over `length` digits of lines, 2**16 at most, from digit `at` on, as int64."""
    high, low = at, width + at
    acc = tl.zeros((BM, BN), tl.int32)
    acc = _multiply(acc, a, b, p, q, low, low, length, a_count, b_count, width, BM, BN, BK, TMA)
    rest = acc & 255
    acc = acc >> 8
    acc = _multiply(acc, a, b, p, q, high, low, length, a_count, b_count, width, BM, BN, BK, TMA)
    acc = _multiply(acc, a, b, p, q, low, high, length, a_count, b_count, width, BM, BN, BK, TMA)
    rest |= (acc & 255) << 8
    acc = acc >> 8
    acc = _multiply(acc, a, b, p, q, high, high, length, a_count, b_count, width, BM, BN, BK, TMA)
    return (acc.to(tl.int64) << 16) + rest


@triton.jit
def store_tile(
    c, acc, low, row, left, e, f_ptr, f_first, m, n, BM: tl.constexpr, BN: tl.constexpr, NATIVE: tl.constexpr
):  # fmt: skip
    """Store what `tile_sums` found for rows below m and columns from `left` on."""
    x, y = _halves(acc, BM, BN)
    x0, x1 = _halves(x, BM, BN // 2)
    y0, y1 = _halves(y, BM, BN // 2)
    column = left + tl.arange(0, BN // 4)
    _store_quarter(c, x0, low & 255, row, column, e, f_ptr, f_first, m, n, NATIVE)
    _store_quarter(c, x1, (low >> 8) & 255, row, column + BN // 4, e, f_ptr, f_first, m, n, NATIVE)
    _store_quarter(c, y0, (low >> 16) & 255, row, column + BN // 2, e, f_ptr, f_first, m, n, NATIVE)
    _store_quarter(c, y1, (low >> 24) & 255, row, column + 3 * (BN // 4), e, f_ptr, f_first, m, n, NATIVE)


@triton.jit
def _store_quarter(c_ptr, high, low, row, column, e, f_ptr, f_first, m, n, NATIVE: tl.constexpr):
    """Store RN(256 high + low) * 2**(e + f - 22) for some columns of a tile."""
    f = tl.load(f_ptr + f_first + column, mask=column < n, other=0) >> 2
    # Two exact floats, whose sum is rounded.
    t = (high & -4096).to(tl.float32) * 256.0 + ((high & 4095) * 256 + low).to(tl.float32)
    c = ops.narrow(scaled(t, e[:, None] + f[None, :] - 22), c_ptr.dtype.element_ty, NATIVE)
    at = c_ptr + row.to(tl.int64)[:, None] * n + column.to(tl.int64)[None, :]
    tl.store(at, c, mask=(row < m)[:, None] & (column < n)[None, :])


@triton.jit
def product(
    a_ptr, b_ptr, e_ptr, f_ptr, c_ptr, m, n, blocks, matrices, a_count, b_count, batch, a_outer, b_outer,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Fill c [matrices, m, n] from digits a [a_count, 2, width] and b [b_count, 2, width] and their words e and f.

    batch: the shape that the matrices come in; a_outer, b_outer: strides in lines.
    """
    width = blocks * DEPTH
    a = lines_of(a_ptr, a_count, blocks, BM, BK, TMA)
    b = lines_of(b_ptr, b_count, blocks, BN, BK, TMA)
    for number in range(tl.program_id(0), tl.cdiv(m, BM) * tl.cdiv(n, BN) * matrices, tl.num_programs(0)):
        matrix, top, left = tile_of(number, m, n, BM, BN, GROUP)
        a_base = outer_offset(matrix, batch, a_outer).to(tl.int32)
        b_base = outer_offset(matrix, batch, b_outer).to(tl.int32)
        p, q = a_base + top, b_base + left
        acc, low = tile_sums(a, b, p, q, 0, width, a_count, b_count, width, BM, BN, BK, TMA)
        row = top + tl.arange(0, BM)
        e = tl.load(e_ptr + a_base + row, mask=row < m, other=0) >> 2
        store_tile(c_ptr + wide_int(matrix) * m * n, acc, low, row, left, e, f_ptr, b_base, m, n, BM, BN, NATIVE)


@triton.jit
def add_parts(
    a_ptr, b_ptr, z_ptr, m, n, blocks, matrices, a_count, b_count, pieces, length, batch, a_outer, b_outer,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Add the exact sums of `pieces` of the contracted axis, of `length` blocks each, to z [matrices, m, n], int64."""
    width = blocks * DEPTH
    a = lines_of(a_ptr, a_count, blocks, BM, BK, TMA)
    b = lines_of(b_ptr, b_count, blocks, BN, BK, TMA)
    tiles = tl.cdiv(m, BM) * tl.cdiv(n, BN) * matrices
    for number in range(tl.program_id(0), tiles * pieces, tl.num_programs(0)):
        piece = number // tiles
        matrix, top, left = tile_of(number - piece * tiles, m, n, BM, BN, GROUP)
        p = outer_offset(matrix, batch, a_outer).to(tl.int32) + top
        q = outer_offset(matrix, batch, b_outer).to(tl.int32) + left
        high = piece * length * DEPTH
        count = tl.minimum(length * DEPTH, width - high)
        sums = exact_sums(a, b, p, q, high, count, a_count, b_count, width, BM, BN, BK, TMA)
        row = (top + tl.arange(0, BM)).to(tl.int64)[:, None]
        column = (left + tl.arange(0, BN)).to(tl.int64)[None, :]
        z = z_ptr + (wide_int(matrix) * m + row) * n + column
        tl.atomic_add(z, sums, mask=(row < m) & (column < n), sem="relaxed")


@triton.jit
def round_sums(
    z_ptr, e_ptr, f_ptr, c_ptr, m, n, matrices, batch, a_outer, b_outer, BLOCK: tl.constexpr, NATIVE: tl.constexpr
):
    """The product from its exact sums z [matrices, m, n]."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < wide_int(matrices) * m * n
    row = place // n
    matrix = row // m
    i = outer_offset(matrix, batch, a_outer) + row - matrix * m
    j = outer_offset(matrix, batch, b_outer) + place - row * n
    e = tl.load(e_ptr + i, mask=inside, other=0) >> 2
    f = tl.load(f_ptr + j, mask=inside, other=0) >> 2
    z = tl.load(z_ptr + place, mask=inside, other=0)
    t = ((z + 128) >> 8).to(tl.float32)
    tl.store(c_ptr + place, ops.narrow(scaled(t, e + f - 22), c_ptr.dtype.element_ty, NATIVE), mask=inside)


# --- what is not finite ----------------------------------------------------------------------------------------------
@triton.jit
def _operand(x_ptr, line, k, lines, n, x_axis, x_inner):
    """Elements of some lines as int8: whether each is infinite, its sign, 0 for a NaN, and whether it is zero."""
    inside = (line < lines) & (k < n)
    x = ops.widen(tl.load(x_ptr + line * x_inner + k * x_axis, mask=inside, other=1.0), False)
    key = ops.magnitude_key(x)
    infinite, zero = key == 0x7F800000, key == 0
    sign = tl.where(ops.as_int(x) < 0, -1, 1)
    sign = tl.where(inside & (key <= 0x7F800000) & (key != 0), sign, 0)
    return infinite.to(tl.int8), sign.to(tl.int8), zero.to(tl.int8)


@triton.jit
def _dot(x, y, total):
    return tl.dot(x, y.T, total, out_dtype=tl.int32)


@triton.jit
def _special(
    c_ptr, a_ptr, b_ptr, row, column, e, f, m, n, terms, a_axis, a_inner, b_axis, b_inner,
    SIZE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Write the entries of a tile that have products that are not finite, as IEEE addition would in any order."""
    count = tl.zeros((SIZE, SIZE), tl.int32)
    signed = tl.zeros((SIZE, SIZE), tl.int32)
    invalid = tl.zeros((SIZE, SIZE), tl.int32)
    for start in range(0, terms, SIZE):
        k = (start + tl.arange(0, SIZE)).to(tl.int64)[None, :]
        a_infinite, a_sign, a_zero = _operand(a_ptr, row[:, None], k, m, terms, a_axis, a_inner)
        b_infinite, b_sign, b_zero = _operand(b_ptr, column[:, None], k, n, terms, b_axis, b_inner)
        count = _dot(a_infinite, b_sign * b_sign, _dot(a_sign * a_sign, b_infinite, count))
        signed = _dot(a_infinite * a_sign, b_sign, _dot(a_sign, b_infinite * b_sign, signed))
        invalid = _dot(a_infinite, b_zero, _dot(a_zero, b_infinite, invalid))
    unknown = ((e & 2) != 0)[:, None] | ((f & 2) != 0)[None, :]
    unknown = unknown | (invalid > 0) | (tl.abs(signed) < count)
    c = tl.where(unknown, float("nan"), tl.where(signed < 0, float("-inf"), float("inf")))
    inside = (row < m)[:, None] & (column < n)[None, :] & (unknown | (count > 0))
    c = ops.narrow(c, c_ptr.dtype.element_ty, NATIVE)
    tl.store(c_ptr + row[:, None] * n + column[None, :], c, mask=inside)


@triton.jit
def repair_span(
    c, a, b, row, e, f_ptr, first, m, n, terms, a_axis, a_inner, b_axis, b_inner,
    SIZE: tl.constexpr, SPAN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Rewrite entries of some rows, with marks e, and of SPAN columns from the first one on, with words f_ptr."""
    every = first + tl.arange(0, SPAN)
    rows_wild = tl.max(e) > 0
    if rows_wild | (tl.max(tl.load(f_ptr + every, mask=every < n, other=0) & 3) > 0):
        for start in range(first, tl.minimum(first + SPAN, n), SIZE):
            column = start + tl.arange(0, SIZE)
            f = tl.load(f_ptr + column, mask=column < n, other=0) & 3
            if rows_wild | (tl.max(f) > 0):
                _special(
                    c, a, b, row, column, e, f, m, n, terms, a_axis, a_inner, b_axis, b_inner, SIZE, NATIVE
                )  # fmt: skip


@triton.jit
def repair(
    a_ptr, b_ptr, e_ptr, f_ptr, c_ptr, m, n, terms, a_axis, a_inner, b_axis, b_inner, batch, a_outer, b_outer,
    a_lines, b_lines, SIZE: tl.constexpr, SPAN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Rewrite entries of c with products that are not finite; a_outer and b_outer in elements, a_lines and b_lines."""
    pid = tl.program_id(0).to(tl.int64)
    down, across = tl.cdiv(m, SIZE), tl.cdiv(n, SPAN)
    matrix = pid // (down * across)
    pid -= matrix * (down * across)
    row = pid // across * SIZE + tl.arange(0, SIZE)
    first = pid % across * SPAN
    e_ptr += outer_offset(matrix, batch, a_lines)
    f_ptr += outer_offset(matrix, batch, b_lines)
    e = tl.load(e_ptr + row, mask=row < m, other=0) & 3
    a = a_ptr + outer_offset(matrix, batch, a_outer)
    b = b_ptr + outer_offset(matrix, batch, b_outer)
    repair_span(
        c_ptr + matrix * m * n, a, b, row, e, f_ptr, first, m, n, terms, a_axis, a_inner, b_axis, b_inner, SIZE, SPAN,
        NATIVE,
    )  # fmt: skip


# --- a bias ----------------------------------------------------------------------------------------------------------
@triton.jit
def add_to_rows(x_ptr, bias_ptr, out_ptr, count, n, BLOCK: tl.constexpr, NATIVE: tl.constexpr):
    """Add a number for each of its n columns to a matrix in C order."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    x = ops.widen(tl.load(x_ptr + place, mask=inside, other=0.0), NATIVE)
    bias = ops.widen(tl.load(bias_ptr + place % n, mask=inside, other=0.0), NATIVE)
    tl.store(out_ptr + place, ops.narrow(x + bias, out_ptr.dtype.element_ty, NATIVE), mask=inside)
