"""The error bounds that plans of the gather family promise, as formulas that can be evaluated.

Notation: for one destination element S is the exact sum of its sources, c their number, E the exponent of the largest
(at least that of the smallest normal number), q = 2^(E - 44) or 2^(E - 88) in float64 the quantum of the sum. ulp is
the spacing of the work type's numbers, ulp' that of the storage type's. Where the result overflows, the bound is
infinite.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.core.descriptor import ErrorBound
from isograd.gather import reference as ref
from isograd.numerics import constants as c
from isograd.numerics.bounds import LARGEST, ulp

Array = NDArray[Any]


def _copy(dtype: str, **inputs: Any) -> Array:
    """Nothing is rounded."""
    rest = inputs["weight"].shape[1:] if "weight" in inputs else ()
    return np.zeros((*inputs["indices"].shape, *rest))


def _quanta(dtype: str, shape: tuple[int, ...], indices: Array, values: Array, axis: int) -> Array:
    """Count · q / 2 of every destination element."""
    counts, tops = np.zeros(shape), np.zeros(shape)
    places: list[Array] = list(np.indices(indices.shape))
    places[axis] = ref.normalized(indices, shape[axis])
    where = tuple(places)
    with np.errstate(all="ignore"):
        magnitudes = np.abs(values.astype(np.float64))
    np.add.at(counts, where, 1)
    np.maximum.at(tops, where, np.where(np.isfinite(magnitudes), magnitudes, 0))
    _, exponent = np.frexp(tops)
    wide = dtype == "float64"
    bits = c.QUANTUM_BITS + (c.LIMB_SHIFT_64 if wide else 0)
    # The quantum of the smallest binary64 numbers needs a wider type; where there is none, so does the error.
    q = np.ldexp(np.longdouble(1), np.maximum(exponent - 1, -1022 if wide else -126) - bits)
    return np.where(tops > 0, counts * q / 2, 0)


def _scatter(
    dtype: str, shape: tuple[int, ...], indices: Array, values: Array, axis: int = -1, x: Array | None = None
) -> Array:
    work = "float64" if dtype == "float64" else "float32"
    quanta = _quanta(dtype, shape, indices, values, axis % len(shape))
    with np.errstate(all="ignore"):
        total = np.abs(ref.oracle_scatter_sum(shape, indices, values, axis)) + quanta
        bound = quanta + ulp(total, work) / 2
        result = np.abs(ref.oracle_scatter_sum(shape, indices, values, axis, x)) + bound
        if x is not None:
            bound = bound + ulp(result, work) / 2
        if dtype != work:
            bound = bound + ulp(result + bound, dtype) / 2
        return np.where((total + bound > LARGEST[work]) | (result + bound > LARGEST[dtype]), np.inf, bound)


def _backward(dtype: str, dv: Array, indices: Array, shape: tuple[int, ...], axis: int = -1, **options: Any) -> Array:
    return _scatter(dtype, shape, indices, dv, axis)


def _scatter_sum(dtype: str, x: Array, indices: Array, values: Array, axis: int = -1) -> Array:
    return _scatter(dtype, x.shape, indices, values, axis, x)


def _index_sum(
    dtype: str,
    indices: Array,
    values: Array,
    shape: tuple[int, ...] | None = None,
    x: Array | None = None,
    skipped: int | None = None,
) -> Array:
    if shape is None:
        if x is None:
            raise TypeError("the error bound of index_sum takes the shape of the result, or x")
        shape = x.shape
    flat = indices.ravel().astype(np.int64)
    rows = values.reshape(flat.size, *shape[1:])
    if skipped is not None:
        flat, rows = flat[flat != skipped], rows[flat != skipped]
    places = np.broadcast_to(flat.reshape(-1, *(1,) * (len(shape) - 1)), rows.shape)
    return _scatter(dtype, shape, places, rows, 0, x)


_EVALUATE: dict[str, Callable[..., Array]] = {
    "take_along_axis": _copy,
    "index_select": _copy,
    "take_along_axis_backward": _backward,
    "scatter_sum": _scatter_sum,
    "index_sum": _index_sum,
}
_SUM = "c·q/2 + ulp(S)/2"
_FORMULAS = {
    "take_along_axis": "0",
    "index_select": "0",
    "take_along_axis_backward": _SUM,
    "scatter_sum": f"{_SUM} + ulp(x + S)/2",
    "index_sum": f"{_SUM}, + ulp(x + S)/2 with x",
}


def error_bound(operation: str, dtype: str) -> ErrorBound:
    """The bound of an operation; call it with the operation's inputs, and with `axis`, `shape` and `skipped`."""
    formula = _FORMULAS[operation]
    if formula != "0" and dtype in ("float16", "bfloat16"):
        formula += " + ulp'(result)/2"
    return ErrorBound(formula, functools.partial(_EVALUATE[operation], dtype))
