# mypy: ignore-errors
"""Memory for Numba kernels: typed access through plain addresses, blocks on the stack, rows of a strided array.

Kernels take addresses rather than arrays: one compiled version then serves every rank and every set of strides.
Strides count elements, not bytes, and may be zero or negative.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from isograd.numerics.constants import LANES as LANES
from isograd.numerics.numba_storage import narrow, widen
from isograd.numerics.numba_vectors import LANES as LANES_OF_VECTOR
from isograd.numerics.numba_vectors import LINE, prefetcher, stream_line
from isograd.runtime.numba_compile import INLINED, device_function

BLOCK = 4096  # elements that are worked on at a time: 16 KiB, so that a block stays in the first-level cache
STEP = 512  # results of a row that are written at a time
AHEAD = 2048  # how many elements ahead of the work on them they are asked for
STREAMED = 1 << 26  # bytes of results from which on they are written past the caches
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
def advance(typingctx: Any, base: Any, offset: Any) -> Any:
    """The pointer to an element."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.gep(arguments[0], [arguments[1]])

    return base(base, types.int64), generate


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
stack_lines = _stack(2 * BLOCK)
stack_step = _stack(STEP)
stack_vector = _stack(LANES_OF_VECTOR)


def work_zero(like: Any) -> Any:
    """Zero in the type that the storage type of `like` is computed in."""
    raise NotImplementedError


@overload(work_zero, jit_options=INLINED)
def _work_zero(like):
    return (lambda like: np.float32(0)) if _WORK[like] == types.float32 else (lambda like: np.float64(0))


def work_one(like: Any) -> Any:
    """One in that type."""
    raise NotImplementedError


@overload(work_one, jit_options=INLINED)
def _work_one(like):
    return (lambda like: np.float32(1)) if _WORK[like] == types.float32 else (lambda like: np.float64(1))


def work_infinity(like: Any) -> Any:
    """Infinity in that type."""
    raise NotImplementedError


@overload(work_infinity, jit_options=INLINED)
def _work_infinity(like):
    return (lambda like: np.float32(np.inf)) if _WORK[like] == types.float32 else (lambda like: np.float64(np.inf))


def work_largest(like: Any) -> Any:
    """The largest finite number in that type."""
    raise NotImplementedError


@overload(work_largest, jit_options=INLINED)
def _work_largest(like):
    largest = np.finfo(np.float32).max if _WORK[like] == types.float32 else np.finfo(np.float64).max
    return lambda like: largest


def work_nan(like: Any) -> Any:
    """The canonical NaN in that type."""
    raise NotImplementedError


@overload(work_nan, jit_options=INLINED)
def _work_nan(like):
    return (lambda like: np.float32(np.nan)) if _WORK[like] == types.float32 else (lambda like: np.float64(np.nan))


def empty_work(count: Any, like: Any) -> Any:
    """An array of the type that the storage type of `like` is computed in."""
    raise NotImplementedError


@overload(empty_work, jit_options=INLINED)
def _empty_work(count, like):
    dtype = np.float32 if _WORK[like] == types.float32 else np.float64
    return lambda count, like: np.empty(count, dtype)


def empty_stored(count: Any, like: Any) -> Any:
    """An array of the storage type of `like`."""
    raise NotImplementedError


@overload(empty_stored, jit_options=INLINED)
def _empty_stored(count, like):
    names = {types.int16: np.int16, types.uint16: np.uint16, types.float32: np.float32, types.float64: np.float64}
    dtype = names[like]
    return lambda count, like: np.empty(count, dtype)


# What is read soon has time to come from the second level; what is written is written at once.
_prefetch_read, _prefetch_write = prefetcher(write=False, level=2), prefetcher(write=True, level=1)


def stored_bytes(like: Any) -> Any:
    """The bytes of an element of the storage type of `like`."""
    raise NotImplementedError


@overload(stored_bytes, jit_options=INLINED)
def _stored_bytes(like):
    size = like.bitwidth // 8
    return lambda like: np.int64(size)


@device_function
def prefetch_read(base, offset, stride, count):
    """Ask for a piece of a contiguous row that is read later, while there is arithmetic to do."""
    if stride == 1:
        for i in range(0, count, LINE // stored_bytes(load(base, offset))):
            _prefetch_read(base, offset + i)


@device_function
def prefetch_write(base, offset, stride, count):
    """Ask for a piece of a contiguous row that is written later."""
    if stride == 1:
        for i in range(0, count, LINE // stored_bytes(load(base, offset))):
            _prefetch_write(base, offset + i)


@device_function
def raise_flag(address, raised):
    """Set the byte at an address if there is a reason; threads may do so at once."""
    if raised:
        store(pointer(address, np.uint8(0)), 0, np.uint8(1))


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


@intrinsic
def _fence(typingctx: Any) -> Any:
    """Wait until what was written past the caches is seen by others."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _address(typingctx: Any, base: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(builder.gep(arguments[0], [arguments[1]]), ir.IntType(64))

    return types.int64(base, types.int64), generate


@device_function
def is_streamed(base, shape, n, stride):
    """Whether results, n at each place of a shape, are so many that they would only push others out of the caches."""
    count = n
    for d in range(len(shape)):
        count *= shape[d]
    return stride == 1 and count * stored_bytes(load(base, 0)) >= STREAMED


@device_function
def end_stream(streamed):
    """Wait for what this thread wrote past the caches; every kernel that streams ends with it."""
    if streamed:
        _fence()


@device_function
def stream(base, offset, count, block):
    """Write `count` elements of a block of the storage type: whole lines past the caches."""
    size = stored_bytes(load(block, 0))
    each = LINE // size
    head = min(count, (-_address(base, offset) & (LINE - 1)) // size)
    for i in range(head):
        store(base, offset + i, load(block, i))
    last = head + (count - head) // each * each
    for i in range(head, last, each):
        stream_line(base, offset + i, block, i)
    for i in range(last, count):
        store(base, offset + i, load(block, i))


@device_function
def put(base, offset, stride, count, block, streamed):
    """Write `count` elements of a block of the storage type; only what is contiguous is `streamed`."""
    if streamed:
        stream(base, offset, count, block)
    else:
        for i in range(count):
            store(base, offset + i * stride, load(block, i))


@device_function
def narrow_and_put(base, offset, stride, count, block, results, streamed):
    """Narrow `count` elements of a block, to `results` first."""
    like = load(base, offset)
    for i in range(count):
        store(results, i, narrow(load(block, i), like))
    put(base, offset, stride, count, results, streamed)


@device_function
def multiply_part(a, a_offset, a_stride, b, b_offset, b_stride, start, stop, block):
    """The products of two rows, read side by side: memory is faster when neither stream pauses."""
    if a_stride == 1 and b_stride == 1:
        for i in range(start, stop):
            store(block, i, widen(load(a, a_offset + i)) * widen(load(b, b_offset + i)))
    else:
        for i in range(start, stop):
            store(block, i, widen(load(a, a_offset + i * a_stride)) * widen(load(b, b_offset + i * b_stride)))


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
