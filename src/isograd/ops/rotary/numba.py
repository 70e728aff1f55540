# mypy: ignore-errors
"""rotary and its gradient on the CPU, a piece of a block of pairs after the other."""

from typing import Any

from isograd.core.kernel import launcher
from isograd.numerics.numba_memory import BLOCK, load, load_block, pointer, row_offset, stack_block, store, store_block
from isograd.ops.rotary.reference import halves
from isograd.rows.numba_rows import piece
from isograd.rows.walk import for_pieces
from isograd.runtime.numba_compile import kernel


@kernel
def rotated(
    like, zero, a_address, b_address, cos_address, sin_address, first_address, second_address, shape, a_strides,
    b_strides, cos_strides, sin_strides, first_strides, second_strides, n, a_stride, b_stride, cos_stride, sin_stride,
    first_stride, second_stride, back, start, stop,
):  # fmt: skip
    """Pieces of both elements of pairs, which may be those that are read. back: the other way round."""
    a, b, cos, sin = (
        pointer(a_address, like), pointer(b_address, like), pointer(cos_address, zero), pointer(sin_address, zero)
    )  # fmt: skip
    first, second = pointer(first_address, like), pointer(second_address, like)
    u, v, c, s = stack_block(zero), stack_block(zero), stack_block(zero), stack_block(zero)
    for index in range(start, stop):
        row, j, count = piece(index, n)
        load_block(a, row_offset(row, shape, a_strides) + j * a_stride, a_stride, count, u)
        load_block(b, row_offset(row, shape, b_strides) + j * b_stride, b_stride, count, v)
        load_block(cos, row_offset(row, shape, cos_strides) + j * cos_stride, cos_stride, count, c)
        load_block(sin, row_offset(row, shape, sin_strides) + j * sin_stride, sin_stride, count, s)
        if back:
            for i in range(count):
                store(s, i, -load(s, i))
        for i in range(count):
            x, y = load(u, i), load(v, i)
            store(u, i, x * load(c, i) - y * load(s, i))
            store(v, i, y * load(c, i) + x * load(s, i))
        store_block(first, row_offset(row, shape, first_strides) + j * first_stride, first_stride, count, u)
        store_block(second, row_offset(row, shape, second_strides) + j * second_stride, second_stride, count, v)


@kernel
def copied(like, zero, x_address, y_address, shape, x_strides, y_strides, n, x_stride, y_stride, start, stop):
    """Pieces of what is not rotated; y may be x."""
    x, y = pointer(x_address, like), pointer(y_address, like)
    block = stack_block(zero)
    for index in range(start, stop):
        row, j, count = piece(index, n)
        load_block(x, row_offset(row, shape, x_strides) + j * x_stride, x_stride, count, block)
        store_block(y, row_offset(row, shape, y_strides) + j * y_stride, y_stride, count, block)


# --- launches --------------------------------------------------------------------------------------------------------
def _launch(problem: Any, x: Any, cos: Any, sin: Any, y: Any, back: bool) -> None:
    a, b, rest = halves(x, problem.pairs, problem.interleaved)
    first, second, other = halves(y, problem.pairs, problem.interleaved)
    for_pieces(rotated, BLOCK, (a, b, cos, sin, first, second), back)
    for_pieces(copied, BLOCK, (rest, other))


@launcher("rotary")
def rotary(problem: Any, x: Any, cos: Any, sin: Any, y: Any) -> None:
    """Compute y, which may be x."""
    _launch(problem, x, cos, sin, y, False)


@launcher("rotary_backward")
def rotary_backward(problem: Any, dy: Any, cos: Any, sin: Any, dx: Any) -> None:
    """Compute dx, which may be dy."""
    _launch(problem, dy, cos, sin, dx, True)
