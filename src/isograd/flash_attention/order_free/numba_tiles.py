# mypy: ignore-errors
"""Rows of integers and tiles of their exact products for order-free attention on the CPU.

Operands are cut once, as a whole, into rows of integers one after the other. A tile is BLOCK queries by BLOCK keys. Its
products read panels of words, made of those rows or of weights; where a panel reaches beyond a sequence it holds
whatever comes next, and the results are not used, or the weights there are 0.
"""

from typing import NamedTuple

import numpy as np

from isograd.flash_attention.order_free.reference import BLOCK as BLOCK
from isograd.flash_attention.order_free.reference import LEAST, NO_ROW
from isograd.numerics import int16
from isograd.numerics.constants import MAGIC_32
from isograd.numerics.numba_dot import add_products, tile_lanes, tile_rows, word_terms
from isograd.numerics.numba_memory import advance, load, pointer, stack_lanes, store
from isograd.numerics.numba_ops import as_float, as_int, fma, pow2_32
from isograd.numerics.numba_panels import exponent_of, pack_panels
from isograd.numerics.numba_storage import widen
from isograd.runtime.numba_compile import device_function, kernel, subroutine

ROOM = BLOCK + 16  # lines of a tile that whole panels of any engine take
MAGIC = np.float32(MAGIC_32)
_ZERO = int16.ZERO
_NO_ROW, _NAN = np.float32(NO_ROW), np.float32(np.nan)


class Cut(NamedTuple):
    """Addresses of an operand [B, H, L, size]: integers, 2^(E - 2) (NaN: not finite) and E of every row."""

    integers: int
    scale: int
    exponent: int
    heads: int
    length: int
    size: int


@device_function
def row_number(cut, batch, head, row):
    """Where a row is among all."""
    return (batch * cut.heads + head) * cut.length + row


@device_function
def rows_at(cut, row):
    """The integers from a row on."""
    return pointer(cut.integers + row * cut.size * 2, np.int16(0))


@device_function
def power(x):
    """2^x for x up to 127: subnormal below -126, zero below -149."""
    x = max(np.int64(x), np.int64(-252))
    half = x >> 1
    return pow2_32(half) * pow2_32(x - half)


@kernel
def cut_rows(like, x_address, strides, cut, start, stop):
    """Cut rows of an array with these strides."""
    x, zero = pointer(x_address, like), np.float32(0)
    values = stack_lanes(zero)
    scale, exponents = pointer(cut.scale, zero), pointer(cut.exponent, zero)
    for row in range(start, stop):
        line, i = row // cut.length, row % cut.length
        at = line // cut.heads * strides[0] + line % cut.heads * strides[1] + i * strides[2]
        for c in range(cut.size):
            store(values, c, widen(load(x, at + c * strides[3])))
        most, wild = np.int32(_ZERO), np.int32(0)
        for c in range(cut.size):
            v = load(values, c)
            most = max(most, exponent_of(v))
            wild = np.int32(wild | np.int32(np.int32(as_int(v) & 0x7FFFFFFF) >= 0x7F800000))
        some = most != _ZERO
        shift = np.int32(15 - most if some else 0)
        half = np.int32(shift >> 1)
        first, second = pow2_32(half), pow2_32(np.int32(shift - half))
        out = rows_at(cut, row)
        for c in range(cut.size):
            v = load(values, c)
            finite = np.int32(as_int(v) & 0x7FFFFFFF) < 0x7F800000
            store(out, c, np.int16(np.int32(as_int((v if finite else zero) * first * second + MAGIC) & 0xFFFF)))
        store(scale, row, _NAN if wild != 0 else power(most - 2) if some else zero)
        store(exponents, row, np.float32(most) if some else _NO_ROW)


# --- panels ----------------------------------------------------------------------------------------------------------
@device_function
def pack_left(engine, element, source, step, stride, lines, n, out):
    """Panels of what a tile's rows come from."""
    pack_panels(source, step, stride, lines, n, tile_rows(engine), word_terms(element) == 4, element, out)


@device_function
def pack_right(engine, element, source, step, stride, lines, n, out):
    """Panels of what its columns come from."""
    pack_panels(source, step, stride, lines, n, tile_lanes(engine), True, element, out)


@device_function
def _multiply(engine, element, left, i, right, j, n, z):
    """The exact sums of panel i of rows and panel j of columns."""
    rows, lanes, terms = tile_rows(engine), tile_lanes(engine), word_terms(element)
    groups = n // terms
    for c in range(rows * lanes):
        store(z, c, np.int64(0))
    a = advance(left, i * groups * terms // 2 * rows)
    b = advance(right, j * groups * 2 * lanes)
    add_products(engine, a, b, groups, z, b)


@device_function
def _rounded(z):
    return np.float32(np.int32((z + 128) >> 8))


@subroutine
def multiply_scaled(engine, element, left, right, lines, n, row_scale, column_scale, s):
    """[lines, BLOCK] of products by exact sums of n terms, times a factor of the row and one of the column."""
    rows, lanes = tile_rows(engine), tile_lanes(engine)
    z = stack_lanes(np.int64(0))
    for j in range(BLOCK // lanes):
        factors = advance(column_scale, j * lanes)
        for i in range((lines + rows - 1) // rows):
            _multiply(engine, element, left, i, right, j, n, z)
            for r in range(rows):
                to, factor = advance(s, (i * rows + r) * BLOCK + j * lanes), load(row_scale, i * rows + r)
                for c in range(lanes):
                    store(to, c, _rounded(load(z, r * lanes + c)) * (factor * load(factors, c)))


@subroutine
def multiply_added(engine, element, left, right, lines, size, scale, fade, total, line):
    """Total [lines, size] = fma(products over a block, scale, total · fade); rows with a negative fade stay."""
    rows, lanes = tile_rows(engine), tile_lanes(engine)
    z = stack_lanes(np.int64(0))
    for j in range((size + lanes - 1) // lanes):
        for i in range((lines + rows - 1) // rows):
            _multiply(engine, element, left, i, right, j, BLOCK, z)
            for r in range(min(rows, lines - i * rows)):
                to = advance(total, (i * rows + r) * line + j * lanes)
                factor, before = load(scale, i * rows + r), load(fade, i * rows + r)
                if before >= 0:
                    for c in range(lanes):
                        store(to, c, fma(_rounded(load(z, r * lanes + c)), factor, load(to, c) * before))


# --- weights ---------------------------------------------------------------------------------------------------------
@device_function
def greatest_exponent(key):
    """The exponent G of weights whose largest magnitude has these bits."""
    return max(exponent_of(as_float(np.int32(key))), np.int32(LEAST))


@device_function
def weight_integer(w, factor):
    """The integer of a weight, factor = 2^(15 - G)."""
    return np.int16(np.int32(as_int(w * factor + MAGIC) & 0xFFFF))
