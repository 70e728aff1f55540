# mypy: ignore-errors
"""silu_mul, gelu_mul and their gradients on the CPU, a piece of a block after the other."""

from typing import Any

from isograd.core.kernel import launcher
from isograd.elementwise.numba_activations import FORMS, slopes, values
from isograd.numerics.numba_memory import BLOCK, load, load_block, pointer, row_offset, stack_block, store, store_block
from isograd.rows.numba_rows import piece
from isograd.rows.walk import for_pieces
from isograd.runtime.numba_compile import kernel


@kernel
def gated(
    like, zero, gate_address, up_address, y_address, shape, gate_strides, up_strides, y_strides, n,
    gate_stride, up_stride, y_stride, form, start, stop,
):  # fmt: skip
    """Pieces of the result; y may be any of its inputs."""
    gate, up, y = pointer(gate_address, like), pointer(up_address, like), pointer(y_address, like)
    a, b, c = stack_block(zero), stack_block(zero), stack_block(zero)
    for index in range(start, stop):
        row, j, count = piece(index, n)
        load_block(gate, row_offset(row, shape, gate_strides) + j * gate_stride, gate_stride, count, a)
        load_block(up, row_offset(row, shape, up_strides) + j * up_stride, up_stride, count, b)
        values(a, c, count, form)
        for i in range(count):
            store(c, i, load(c, i) * load(b, i))
        store_block(y, row_offset(row, shape, y_strides) + j * y_stride, y_stride, count, c)


@kernel
def gated_backward(
    like, zero, dy_address, gate_address, up_address, dgate_address, dup_address, shape, dy_strides, gate_strides,
    up_strides, dgate_strides, dup_strides, n, dy_stride, gate_stride, up_stride, dgate_stride, dup_stride, form,
    start, stop,
):  # fmt: skip
    """Pieces of both gradients, each of which may be any of the inputs."""
    dy, gate, up = pointer(dy_address, like), pointer(gate_address, like), pointer(up_address, like)
    dgate, dup = pointer(dgate_address, like), pointer(dup_address, like)
    g, a, b, c = stack_block(zero), stack_block(zero), stack_block(zero), stack_block(zero)
    for index in range(start, stop):
        row, j, count = piece(index, n)
        load_block(dy, row_offset(row, shape, dy_strides) + j * dy_stride, dy_stride, count, g)
        load_block(gate, row_offset(row, shape, gate_strides) + j * gate_stride, gate_stride, count, a)
        load_block(up, row_offset(row, shape, up_strides) + j * up_stride, up_stride, count, b)
        slopes(a, c, count, form)
        for i in range(count):
            store(b, i, (load(g, i) * load(b, i)) * load(c, i))
        values(a, c, count, form)
        for i in range(count):
            store(c, i, load(g, i) * load(c, i))
        store_block(dgate, row_offset(row, shape, dgate_strides) + j * dgate_stride, dgate_stride, count, b)
        store_block(dup, row_offset(row, shape, dup_strides) + j * dup_stride, dup_stride, count, c)


# --- launches --------------------------------------------------------------------------------------------------------
def _launch(kernel: Any, form: str, *arrays: Any) -> None:
    for_pieces(kernel, BLOCK, arrays, FORMS[form])


@launcher("silu_mul")
def silu_mul(problem: Any, gate: Any, up: Any, y: Any) -> None:
    """Compute y."""
    _launch(gated, "silu", gate, up, y)


@launcher("silu_mul_backward")
def silu_mul_backward(problem: Any, dy: Any, gate: Any, up: Any, dgate: Any, dup: Any) -> None:
    """Compute dgate and dup."""
    _launch(gated_backward, "silu", dy, gate, up, dgate, dup)


@launcher("gelu_mul")
def gelu_mul(problem: Any, gate: Any, up: Any, y: Any) -> None:
    """Compute y."""
    _launch(gated, problem.approximate, gate, up, y)


@launcher("gelu_mul_backward")
def gelu_mul_backward(problem: Any, dy: Any, gate: Any, up: Any, dgate: Any, dup: Any) -> None:
    """Compute dgate and dup."""
    _launch(gated_backward, problem.approximate, dy, gate, up, dgate, dup)


def _halves(x: Any) -> tuple[Any, Any]:
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


@launcher("swiglu")
def swiglu(problem: Any, x: Any, y: Any) -> None:
    """Compute y."""
    _launch(gated, "silu", *_halves(x), y)


@launcher("swiglu_backward")
def swiglu_backward(problem: Any, dy: Any, x: Any, dx: Any) -> None:
    """Compute both halves of dx, which may be x."""
    _launch(gated_backward, "silu", dy, *_halves(x), *_halves(dx))


@launcher("geglu")
def geglu(problem: Any, x: Any, y: Any) -> None:
    """Compute y."""
    _launch(gated, problem.approximate, *_halves(x), y)


@launcher("geglu_backward")
def geglu_backward(problem: Any, dy: Any, x: Any, dx: Any) -> None:
    """Compute both halves of dx, which may be x."""
    _launch(gated_backward, problem.approximate, dy, *_halves(x), *_halves(dx))
