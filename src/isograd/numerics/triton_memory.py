# mypy: ignore-errors
# ruff: noqa: N803, RET505
# A branch on a constant that returns needs its else: Triton compiles what follows a lone return as well.
"""Addresses, copies and indices in Triton kernels, and what a kernel does with an index out of range.

Offsets are 64-bit. `isograd.core.faults` reads what `report` notes.
"""

import triton
import triton.language as tl

from isograd.numerics import triton_ops as ops


@triton.jit
def wide_int(value):
    """An integer argument as int64; Triton makes an argument of 1 a constant, which has no conversion."""
    return tl.zeros((), tl.int64) + value


@triton.jit
def outer_offset(outer, shape, strides):
    """Offset of an index over the outer axes, the last axis fastest."""
    offset = tl.zeros((), tl.int64)
    for i in tl.static_range(len(shape)):
        rest = outer // shape[len(shape) - 1 - i]
        offset += (outer - rest * shape[len(shape) - 1 - i]) * strides[len(shape) - 1 - i]
        outer = rest
    return offset


@triton.jit
def element_offset(index, shape, strides):
    """The offset of elements over merged dimensions, the last one fastest."""
    offset = tl.zeros((), tl.int64)
    for i in tl.static_range(len(shape) - 1):
        rest = index // shape[len(shape) - 1 - i]
        offset += (index - rest * shape[len(shape) - 1 - i]) * strides[len(shape) - 1 - i]
        index = rest
    return offset + index * strides[0]


@triton.jit
def place(inner, k, ROWS: tl.constexpr, K: tl.constexpr):
    """(rows [ROWS, 1] on the inner axis, sources [1, K] of each, index over the outer axes) of this program."""
    pid = tl.program_id(0).to(tl.int64)
    parts = tl.cdiv(k, K)
    block = pid // parts
    first = (pid - block * parts) * K
    blocks = tl.cdiv(inner, ROWS)
    outer = block // blocks
    row = (block - outer * blocks) * ROWS + tl.arange(0, ROWS)
    return row[:, None], (first + tl.arange(0, K))[None, :], outer


@triton.jit
def nan_bits(dtype: tl.constexpr):
    """The canonical NaN of a type as an integer of its width."""
    if dtype == tl.float64:
        return tl.full((), ops.NAN_64, tl.int64)
    elif dtype == tl.float32:
        return tl.full((), ops.NAN_32, tl.int32)
    elif dtype == tl.bfloat16:
        return tl.full((), 0x7FC0, tl.int16)
    else:
        return tl.full((), 0x7E00, tl.int16)


@triton.jit
def as_bits(pointer):
    """A pointer to floats as one to integers of their width: copies keep every bit, also a NaN's."""
    if pointer.dtype.element_ty == tl.float64:
        return pointer.to(tl.pointer_type(tl.int64), bitcast=True)
    elif pointer.dtype.element_ty == tl.float32:
        return pointer.to(tl.pointer_type(tl.int32), bitcast=True)
    else:
        return pointer.to(tl.pointer_type(tl.int16), bitcast=True)


@triton.jit
def in_range(index, size, negative: tl.constexpr):
    """(whether an int64 index is in range, the index from the front, 0 where it is not)."""
    if negative:
        index = tl.where(index < 0, index + size, index)
    valid = (index >= 0) & (index < size)
    return valid, tl.where(valid, index, 0)


@triton.jit
def report(flag_ptr, code, bad, position, value, size):
    """Note one of the bad indices of a tile unless the device's flag holds one already.

    bad, position and value have one shape; position and value are int64.
    """
    if tl.max(bad.to(tl.int32)) > 0:
        none: tl.constexpr = 1 << 62
        first = tl.min(tl.where(bad, position, none))
        found = tl.max(tl.where(bad & (position == first), value, -none))
        if tl.atomic_cas(flag_ptr, wide_int(0), wide_int(code)) == 0:
            tl.store(flag_ptr + 1, first)
            tl.store(flag_ptr + 2, found)
            tl.store(flag_ptr + 3, wide_int(size))
