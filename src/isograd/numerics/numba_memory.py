"""Memory for Numba kernels: typed access through plain addresses, blocks on the stack, rows of a strided array.

Kernels take addresses rather than arrays: one compiled version then serves every rank and every set of strides.
Strides count elements, not bytes, and may be zero or negative.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from isograd.numerics.numba_compile import device_function
from isograd.numerics.numba_ops import narrow, widen

BLOCK = 1024  # elements that are worked on at a time: a few blocks fit the first-level cache
LANES = 512  # neighbouring rows that advance together when the reduced axis is not the contiguous one
_FORCE = {"forceinline": True}
_WORK = {
    types.int16: types.float32,
    types.uint16: types.float32,
    types.float32: types.float32,
    types.float64: types.float64,
}


@intrinsic
def pointer(typingctx: Any, address: Any, like: Any) -> Any:
    """The address as a pointer to the type of `like`."""
    result = types.CPointer(like)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(result))

    return result(types.int64, like), generate


@intrinsic
def load(typingctx: Any, base: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.gep(arguments[0], [arguments[1]]))

    return base.dtype(base, types.int64), generate


@intrinsic
def store(typingctx: Any, base: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[2], builder.gep(arguments[0], [arguments[1]]))
        return context.get_dummy_value()

    return types.void(base, types.int64, base.dtype), generate


@intrinsic
def _prefetch(typingctx: Any, base: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), (byte, word, word, word))
        function = builder.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
        address = builder.bitcast(builder.gep(arguments[0], [arguments[1]]), byte)
        # for reading, into the second-level cache, data
        builder.call(function, (address, word(0), word(2), word(1)))
        return context.get_dummy_value()

    return types.void(base, types.int64), generate


@device_function
def prefetch_block(base, offset, stride, count, line):
    """Ask for a block of a contiguous row ahead of its use; `line` is the number of elements in a cache line."""
    if stride == 1:
        for i in range(0, count, line):
            _prefetch(base, offset + i)


def _stack(size: int) -> Any:
    # Arrays a multiple of 4096 bytes apart would compete for the same sets of the first-level cache.
    padded = size + 32

    def allocate(typingctx: Any, like: Any) -> Any:
        result = types.CPointer(like)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            with builder.goto_entry_block():
                array = builder.alloca(ir.ArrayType(context.get_value_type(like), padded))
                array.align = 64
            return builder.bitcast(array, context.get_value_type(result))

        return result(like), generate

    return intrinsic(allocate)


# Memory on the stack for elements of the type of `like`: the compiler knows that nothing else points there.
stack_block = _stack(BLOCK)
stack_lanes = _stack(LANES)


def work_zero(like: Any) -> Any:
    """Zero in the type that the storage type of `like` is computed in."""
    raise NotImplementedError


@overload(work_zero, jit_options=_FORCE)
def _work_zero(like):
    return (lambda like: np.float32(0)) if _WORK[like] == types.float32 else (lambda like: np.float64(0))


@device_function
def load_block(base, offset, stride, count, block):
    """Widen `count` elements into a block."""
    if stride == 1:
        for i in range(count):
            store(block, i, widen(load(base, offset + i)))
    else:
        for i in range(count):
            store(block, i, widen(load(base, offset + i * stride)))


@device_function
def store_block(base, offset, stride, count, block):
    """Narrow `count` elements of a block."""
    like = load(base, offset)
    if stride == 1:
        for i in range(count):
            store(base, offset + i, narrow(load(block, i), like))
    else:
        for i in range(count):
            store(base, offset + i * stride, narrow(load(block, i), like))


@device_function
def row_offset(row, shape, strides):
    """The offset of a row, its index counted over `shape` with the last dimension fastest."""
    offset = np.int64(0)
    for d in range(len(shape) - 1, 0, -1):
        size = shape[d]
        quotient = row // size
        offset += (row - quotient * size) * strides[d]
        row = quotient
    return offset + row * strides[0]
