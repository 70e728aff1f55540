# mypy: ignore-errors
"""Elementwise functions on the CPU, over a range of a contiguous array."""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from isograd.elementwise.reference import SILU_CLAMP
from isograd.numerics import numba_ops as ops
from isograd.numerics.numba_memory import (
    BLOCK,
    load,
    load_block,
    pointer,
    stack_block,
    store,
    store_block,
    work_one,
    work_zero,
)
from isograd.runtime.numba_compile import INLINED, device_function, kernel


def sigmoid_value(x: Any) -> Any:
    """The logistic function."""
    raise NotImplementedError


@overload(sigmoid_value, jit_options=INLINED)
def _sigmoid_value(x):
    of = np.float32 if x == types.float32 else np.float64
    zero, one = of(0), of(1)

    def value(x):
        z = ops.exp(x if x < zero else -x)
        return (z if x < zero else one) / (one + z)

    return value


@device_function
def sigmoid_gradient(dy, y):
    """The gradient of the logistic function from its result y."""
    return (dy * y) * (work_one(y) - y)


def silu_value(x: Any) -> Any:
    """The product x * sigmoid(x)."""
    raise NotImplementedError


@overload(silu_value, jit_options=INLINED)
def _silu_value(x):
    of = np.float32 if x == types.float32 else np.float64
    zero, one, low = of(0), of(1), of(-SILU_CLAMP)

    def value(x):
        z = ops.exp(x if x < zero else -x)
        n = x if x >= zero else (x if x > low else low) * z
        return n / (one + z)

    return value


def silu_slope(x: Any) -> Any:
    """The derivative of x * sigmoid(x)."""
    raise NotImplementedError


@overload(silu_slope, jit_options=INLINED)
def _silu_slope(x):
    of = np.float32 if x == types.float32 else np.float64
    zero, one, low, high = of(0), of(1), of(-SILU_CLAMP), of(SILU_CLAMP)

    def slope(x):
        z = ops.exp(x if x < zero else -x)
        d = one + z
        w = x if x > low else low
        w = w if w < high else high
        n = ops.fma(w, z, d) if x >= zero else z * (d + w)
        return n / (d * d)

    return slope


@kernel
def scale(like, factors, length, x_address, y_address, start, stop):
    """Products with the factor of each part of a length."""
    x, y = pointer(x_address, like), pointer(y_address, like)
    block = stack_block(work_zero(like))
    j = np.int64(start)
    while j < stop:
        part = j // length
        count = min(min(stop, (part + 1) * length) - j, BLOCK)
        factor = factors[part]
        load_block(x, j, 1, count, block)
        for i in range(count):
            store(block, i, load(block, i) * factor)
        store_block(y, j, 1, count, block)
        j += count


@kernel
def exp(like, x_address, y_address, start, stop):
    x, y = pointer(x_address, like), pointer(y_address, like)
    block = stack_block(work_zero(like))
    for j in range(start, stop, BLOCK):
        count = min(stop - j, BLOCK)
        load_block(x, j, 1, count, block)
        for i in range(count):
            store(block, i, ops.exp(load(block, i)))
        store_block(y, j, 1, count, block)


@kernel
def log(like, x_address, y_address, start, stop):
    x, y = pointer(x_address, like), pointer(y_address, like)
    block = stack_block(work_zero(like))
    for j in range(start, stop, BLOCK):
        count = min(stop - j, BLOCK)
        load_block(x, j, 1, count, block)
        for i in range(count):
            store(block, i, ops.log(load(block, i)))
        store_block(y, j, 1, count, block)


@kernel
def sigmoid(like, x_address, y_address, start, stop):
    x, y = pointer(x_address, like), pointer(y_address, like)
    block = stack_block(work_zero(like))
    for j in range(start, stop, BLOCK):
        count = min(stop - j, BLOCK)
        load_block(x, j, 1, count, block)
        for i in range(count):
            store(block, i, sigmoid_value(load(block, i)))
        store_block(y, j, 1, count, block)


@kernel
def sigmoid_backward(like, dy_address, y_address, dx_address, start, stop):
    dy, y, dx = pointer(dy_address, like), pointer(y_address, like), pointer(dx_address, like)
    zero = work_zero(like)
    a, b = stack_block(zero), stack_block(zero)
    for j in range(start, stop, BLOCK):
        count = min(stop - j, BLOCK)
        load_block(dy, j, 1, count, a)
        load_block(y, j, 1, count, b)
        for i in range(count):
            store(b, i, sigmoid_gradient(load(a, i), load(b, i)))
        store_block(dx, j, 1, count, b)
