# mypy: ignore-errors
"""Powers and their gradients on the CPU, in binary64, over a range of contiguous arrays; see `reference.py`."""

import math

import numpy as np

from isograd.elementwise.reference import POWER_LOGARITHM, POWER_PRODUCTS
from isograd.numerics import numba_ops as ops
from isograd.numerics.numba_functions import exp_of_pair, log_pair_64
from isograd.numerics.numba_memory import load, pointer, store
from isograd.runtime.numba_compile import device_function, kernel, subroutine

_ZERO, _ONE, _HALF = np.float64(0), np.float64(1), np.float64(0.5)
_INF, _NAN = np.float64(np.inf), np.float64(np.nan)
_PRODUCTS, _LOGARITHM = np.float64(POWER_PRODUCTS), np.float64(POWER_LOGARITHM)
_BITS = POWER_PRODUCTS.bit_length()


@device_function
def _product(x, y):
    n = np.int64(abs(y))
    r = _ONE
    started = False
    for i in range(_BITS):
        if started:
            r = r * r
        if (n >> (_BITS - 1 - i)) & 1:
            r = r * x if started else x
            started = True
    return _ONE / r if y < _ZERO else r


@device_function
def _magnitude(size, y):
    """exp(y * log(size))."""
    if size == _ONE:
        return _ONE
    if size == _ZERO or size == _INF:  # noqa: SIM109 - compiled
        return exp_of_pair(y * (-_INF if size == _ZERO else _INF), _ZERO)
    high, low = log_pair_64(size)
    p = y * high
    rest = ops.fma(y, low, ops.fma(y, high, -p))
    return exp_of_pair(p, rest if abs(p) < _LOGARITHM else _ZERO)


@subroutine
def _power(x, y):
    whole = np.rint(y) == y
    if whole and abs(y) <= _PRODUCTS:
        return _product(x, y)
    if y == _HALF:
        return np.sqrt(x)
    if y == -_HALF:
        return _ONE / np.sqrt(x)
    if x != x or (y != y and x != _ONE):
        return _NAN
    if x < _ZERO and x > -_INF and not whole:
        return _NAN
    value = _magnitude(abs(x), y)
    odd = whole and np.rint(y * _HALF) != y * _HALF
    return -value if odd and math.copysign(_ONE, x) < _ZERO else value


@kernel
def power(like, x_address, y_address, out_address, start, stop):
    x, y, out = pointer(x_address, like), pointer(y_address, like), pointer(out_address, like)
    for i in range(start, stop):
        store(out, i, _power(load(x, i), load(y, i)))


@kernel
def power_backward(like, dy_address, x_address, y_address, dx_address, start, stop):
    dy, x = pointer(dy_address, like), pointer(x_address, like)
    y, dx = pointer(y_address, like), pointer(dx_address, like)
    for i in range(start, stop):
        e = load(y, i)
        store(dx, i, _ZERO if e == _ZERO else load(dy, i) * (e * _power(load(x, i), e - _ONE)))


@kernel
def power_backward_exponent(like, dy_address, x_address, y_address, dx_address, start, stop):
    dy, x = pointer(dy_address, like), pointer(x_address, like)
    y, dx = pointer(y_address, like), pointer(dx_address, like)
    for i in range(start, stop):
        b, e = load(x, i), load(y, i)
        p = _power(b, e)
        none = p == _ZERO or (b == _ZERO and e == _ZERO)
        store(dx, i, _ZERO if none else load(dy, i) * (p * ops.log(b)))
