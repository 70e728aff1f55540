# mypy: ignore-errors
"""silu, gelu and their gradients on the CPU, a piece of a block after the other."""

from typing import Any

from isograd.core.kernel import launcher
from isograd.elementwise.numba_activations import FORMS, slopes, values
from isograd.numerics.numba_memory import BLOCK, load, load_block, pointer, row_offset, stack_block, store, store_block
from isograd.rows.numba_rows import piece
from isograd.rows.walk import for_pieces
from isograd.runtime.numba_compile import kernel


@kernel
def activation(
    like, zero, x_address, y_address, shape, x_strides, y_strides, n, x_stride, y_stride, form, start, stop,
):  # fmt: skip
    """Pieces of the result; y may be x."""
    x, y = pointer(x_address, like), pointer(y_address, like)
    a, b = stack_block(zero), stack_block(zero)
    for index in range(start, stop):
        row, j, count = piece(index, n)
        load_block(x, row_offset(row, shape, x_strides) + j * x_stride, x_stride, count, a)
        values(a, b, count, form)
        store_block(y, row_offset(row, shape, y_strides) + j * y_stride, y_stride, count, b)


@kernel
def activation_backward(
    like, zero, dy_address, x_address, dx_address, shape, dy_strides, x_strides, dx_strides, n, dy_stride, x_stride,
    dx_stride, form, start, stop,
):  # fmt: skip
    """Pieces of the gradient, which may be any of the inputs."""
    dy, x, dx = pointer(dy_address, like), pointer(x_address, like), pointer(dx_address, like)
    g, a, b = stack_block(zero), stack_block(zero), stack_block(zero)
    for index in range(start, stop):
        row, j, count = piece(index, n)
        load_block(dy, row_offset(row, shape, dy_strides) + j * dy_stride, dy_stride, count, g)
        load_block(x, row_offset(row, shape, x_strides) + j * x_stride, x_stride, count, a)
        slopes(a, b, count, form)
        for i in range(count):
            store(b, i, load(g, i) * load(b, i))
        store_block(dx, row_offset(row, shape, dx_strides) + j * dx_stride, dx_stride, count, b)


# --- launches --------------------------------------------------------------------------------------------------------
def _launch(kernel: Any, form: str, *arrays: Any) -> None:
    for_pieces(kernel, BLOCK, arrays, FORMS[form])


@launcher("silu")
def silu(problem: Any, x: Any, y: Any) -> None:
    """Compute y."""
    _launch(activation, "silu", x, y)


@launcher("silu_backward")
def silu_backward(problem: Any, dy: Any, x: Any, dx: Any) -> None:
    """Compute dx."""
    _launch(activation_backward, "silu", dy, x, dx)


@launcher("gelu")
def gelu(problem: Any, x: Any, y: Any) -> None:
    """Compute y."""
    _launch(activation, problem.approximate, x, y)


@launcher("gelu_backward")
def gelu_backward(problem: Any, dy: Any, x: Any, dx: Any) -> None:
    """Compute dx."""
    _launch(activation_backward, problem.approximate, dy, x, dx)
