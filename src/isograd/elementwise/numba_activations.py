# mypy: ignore-errors
"""tanh on the CPU over a range of a contiguous array; silu and both forms of gelu of blocks; see `reference.py`."""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from isograd.elementwise.numba_kernels import silu_slope, silu_value
from isograd.elementwise.reference import GELU_CLAMP, GELU_TANH_32, GELU_TANH_64
from isograd.numerics import constants as c
from isograd.numerics import numba_ops as ops
from isograd.numerics.numba_functions import normal_tail, tanh_value
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

FORMS = {"silu": 0, "none": 1, "tanh": 2}


@device_function
def tanh_gradient(dy, y):
    """The gradient of tanh from its result y."""
    return dy * ops.fma(-y, y, work_one(y))


def gelu_value(x: Any) -> Any:
    """The product x * Phi(x)."""
    raise NotImplementedError


@overload(gelu_value, jit_options=INLINED)
def _gelu_value(x):
    of, reach = (np.float32, c.NORMAL_REACH_32) if x == types.float32 else (np.float64, c.NORMAL_REACH_64)
    zero, one, reach = of(0), of(1), of(reach)

    def value(x):
        a = reach if abs(x) > reach else abs(x)
        e, r = normal_tail(a)
        return x * ops.fma(-e, r, one) if x >= zero else -(e * (a * r))

    return value


def gelu_slope(x: Any) -> Any:
    """The derivative of x * Phi(x)."""
    raise NotImplementedError


@overload(gelu_slope, jit_options=INLINED)
def _gelu_slope(x):
    if x == types.float32:
        of, reach, density = np.float32, c.NORMAL_REACH_32, c.NORMAL_DENSITY_32
    else:
        of, reach, density = np.float64, c.NORMAL_REACH_64, c.NORMAL_DENSITY_64
    zero, one, reach, minus_density = of(0), of(1), of(reach), of(-density)

    def slope(x):
        a = reach if abs(x) > reach else abs(x)
        e, r = normal_tail(a)
        h = ops.fma(minus_density, a, r)
        return ops.fma(-e, h, one) if x >= zero else e * h

    return slope


def gelu_tanh_parts(x: Any) -> Any:
    """(a, z, d, w) of the tanh form."""
    raise NotImplementedError


@overload(gelu_tanh_parts, jit_options=INLINED)
def _gelu_tanh_parts(x):
    of, factors = (np.float32, GELU_TANH_32) if x == types.float32 else (np.float64, GELU_TANH_64)
    c0, c1, c2 = [of(v) for v in factors]
    one, clamp = of(1), of(GELU_CLAMP)

    def parts(x):
        a = clamp if abs(x) > clamp else abs(x)
        p = a * a
        z = ops.exp(-(a * ops.fma(c1, p, c0)))
        return a, z, one + z, a * ops.fma(c2, p, c0)

    return parts


@device_function
def gelu_tanh_value(x):
    """The product of x and the sigmoid."""
    a, z, d, _ = gelu_tanh_parts(x)
    return (x if x >= work_zero(x) else -(a * z)) / d


@device_function
def gelu_tanh_slope(x):
    """The derivative of the tanh form."""
    _, z, d, w = gelu_tanh_parts(x)
    n = ops.fma(w, z, d) if x >= work_zero(x) else z * (d - w)
    return n / (d * d)


@device_function
def values(x, y, count, form):
    """Put silu of block x, or a form of gelu as `FORMS` counts them, into block y."""
    if form == 0:
        for i in range(count):
            store(y, i, silu_value(load(x, i)))
    elif form == 1:
        for i in range(count):
            store(y, i, gelu_value(load(x, i)))
    else:
        for i in range(count):
            store(y, i, gelu_tanh_value(load(x, i)))


@device_function
def slopes(x, y, count, form):
    """Put their derivatives there."""
    if form == 0:
        for i in range(count):
            store(y, i, silu_slope(load(x, i)))
    elif form == 1:
        for i in range(count):
            store(y, i, gelu_slope(load(x, i)))
    else:
        for i in range(count):
            store(y, i, gelu_tanh_slope(load(x, i)))


@kernel
def tanh(like, x_address, y_address, start, stop):
    x, y = pointer(x_address, like), pointer(y_address, like)
    block = stack_block(work_zero(like))
    for j in range(start, stop, BLOCK):
        count = min(stop - j, BLOCK)
        load_block(x, j, 1, count, block)
        for i in range(count):
            store(block, i, tanh_value(load(block, i)))
        store_block(y, j, 1, count, block)


@kernel
def tanh_backward(like, dy_address, y_address, dx_address, start, stop):
    dy, y, dx = pointer(dy_address, like), pointer(y_address, like), pointer(dx_address, like)
    zero = work_zero(like)
    a, b = stack_block(zero), stack_block(zero)
    for j in range(start, stop, BLOCK):
        count = min(stop - j, BLOCK)
        load_block(dy, j, 1, count, a)
        load_block(y, j, 1, count, b)
        for i in range(count):
            store(b, i, tanh_gradient(load(a, i), load(b, i)))
        store_block(dx, j, 1, count, b)
