# mypy: ignore-errors
"""Rows of operands and results for attention on the CPU, converted a tile at a time.

Kernels compute in the work type, and read and write arrays [B, H, L, D] of any storage type and strides: a tile is
widened into lines of whole vectors, and transposed where a product takes it so. One compiled kernel serves all storage
types of a work type, and no array is ever widened as a whole.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from isograd.flash_attention.numba_product import VECTOR_BYTES, lanes
from isograd.numerics.numba_memory import advance, load, pointer, store
from isograd.numerics.numba_storage import narrow, widen
from isograd.runtime.numba_compile import device_function, subroutine

HALF, BFLOAT16, WORK = range(3)  # what rows are stored in


class Rows(NamedTuple):
    """Where the rows of an array [B, H, L, D] are: an address, strides in elements, and what these are."""

    address: int
    batch: int
    head: int
    row: int
    column: int
    kind: int


@device_function
def padded(size, width):
    """A length of rows that holds whole vectors."""
    return (size + width - 1) // width * width


@device_function
def _widen_rows(base, at, rows, count, size, out, line, factor):
    for r in range(count):
        source, to = advance(base, at + r * rows.row), advance(out, r * line)
        if rows.column == 1:
            for c in range(size):
                store(to, c, widen(load(source, c)) * factor)
        else:
            for c in range(size):
                store(to, c, widen(load(source, c * rows.column)) * factor)


@subroutine
def load_rows(rows, batch, head, row, count, size, out, line, factor):
    """Widen some rows, times a factor, into lines, whose rest stays as it was."""
    at = batch * rows.batch + head * rows.head + row * rows.row
    if rows.kind == HALF:
        _widen_rows(pointer(rows.address, np.int16(0)), at, rows, count, size, out, line, factor)
    elif rows.kind == BFLOAT16:
        _widen_rows(pointer(rows.address, np.uint16(0)), at, rows, count, size, out, line, factor)
    else:
        _widen_rows(pointer(rows.address, factor), at, rows, count, size, out, line, factor)


class Pages(NamedTuple):
    """Where the rows of sequences are in a cache of pages: the address of the table, 0 without one, and its sizes.

    each: pages of a sequence in the table. size: rows of a page.
    """

    table: int
    each: int
    size: int


NO_PAGES = Pages(0, 0, 1)


@device_function
def load_cached(rows, pages, batch, head, row, count, size, out, line, one):
    """As `load_rows`; with pages, rows of sequence `batch` from wherever its pages are."""
    if pages.table == 0:
        load_rows(rows, batch, head, row, count, size, out, line, one)
        return
    table = advance(pointer(pages.table, np.int32(0)), batch * pages.each)
    done = 0
    while done < count:
        page, first = (row + done) // pages.size, (row + done) % pages.size
        some = min(count - done, pages.size - first)
        load_rows(rows, np.int64(load(table, page)), head, first, some, size, advance(out, done * line), line, one)
        done += some


@device_function
def _narrow_rows(base, at, rows, count, size, x, line, factor, like):
    for r in range(count):
        source, to = advance(x, r * line), advance(base, at + r * rows.row)
        if rows.column == 1:
            for c in range(size):
                store(to, c, narrow(load(source, c) * factor, like))
        else:
            for c in range(size):
                store(to, c * rows.column, narrow(load(source, c) * factor, like))


@subroutine
def store_rows(rows, batch, head, row, count, size, x, line, factor):
    """Round lines, times a factor, into some rows."""
    at = batch * rows.batch + head * rows.head + row * rows.row
    if rows.kind == HALF:
        like = np.int16(0)
        _narrow_rows(pointer(rows.address, like), at, rows, count, size, x, line, factor, like)
    elif rows.kind == BFLOAT16:
        unlike = np.uint16(0)
        _narrow_rows(pointer(rows.address, unlike), at, rows, count, size, x, line, factor, unlike)
    else:
        _narrow_rows(pointer(rows.address, factor), at, rows, count, size, x, line, factor, factor)


@intrinsic
def _transpose_square(typingctx: Any, x: Any, x_row: Any, y: Any, y_row: Any) -> Any:
    """Transpose as many rows as a vector has lanes: in step s, bit s of the row and that of the lane change places."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, source_row, target, target_row = arguments
        bits = signature.args[0].dtype.bitwidth
        count = VECTOR_BYTES * 8 // bits
        kind = ir.VectorType(context.get_value_type(signature.args[0].dtype), count)
        word, lane = ir.IntType(64), ir.VectorType(ir.IntType(32), count)

        def place(base: Any, row: Any, i: int) -> Any:
            return builder.bitcast(builder.gep(base, [builder.mul(word(i), row)]), kind.as_pointer())

        vectors = []
        for i in range(count):
            vectors.append(builder.load(place(source, source_row, i)))
            vectors[i].align = bits // 8
        half = 1
        while half < count:
            low = [j if not j & half else count + j - half for j in range(count)]
            high = [j + half if not j & half else count + j for j in range(count)]
            for i in range(count):
                if not i & half:
                    a, b = vectors[i], vectors[i + half]
                    vectors[i] = builder.shuffle_vector(a, b, ir.Constant(lane, low))
                    vectors[i + half] = builder.shuffle_vector(a, b, ir.Constant(lane, high))
            half *= 2
        for i in range(count):
            builder.store(vectors[i], place(target, target_row, i)).align = bits // 8
        return context.get_dummy_value()

    return types.void(x, x_row, y, y_row), generate


@device_function
def load_transposed(rows, batch, head, row, count, size, x, y, one):
    """Rows widened into x, and as vectors of rows into y, [rows // lanes, line, lanes], 0 beyond the last one."""
    width = lanes(one)
    line = padded(size, width)
    load_rows(rows, batch, head, row, count, size, x, line, one)
    transpose(x, line, count, y, one - one)


@subroutine
def transpose(x, line, count, y, zero):
    """Rows of x as `load_transposed` has them in y."""
    width = lanes(zero)
    for i in range(count * line, padded(count, width) * line):
        store(x, i, zero)
    for i in range(0, count, width):
        for c in range(0, line, width):
            _transpose_square(advance(x, i * line + c), line, advance(y, i * line + c * width), width)
