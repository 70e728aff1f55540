"""The gather family in NumPy: the definition that every kernel returns bit for bit, and its oracle.

Formulas (rule 12 of `docs/arithmetic.md`); d stands for a destination element, S_d for the order-free sum of rule 4
over the sources of d alone, in the work type:

    take_along_axis            v[.., j, ..] = x[.., indices[.., j, ..], ..]   the stored bits
    take_along_axis_backward   dx_d  = RN_store(S_d)                          0 without sources
    scatter_sum                out_d = RN_store(RN(x_d + S_d))                the bits of x without sources
    index_select               y[i.., r..] = weight[indices[i..], r..]        the stored bits
    index_sum                  as scatter_sum along axis 0, one index for a whole row of values; without x as the
                               backward; sources whose index is `skipped` are left out

Negative indices count from the end.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.numerics import reference as ref

Array = NDArray[Any]
_WIDE = np.longdouble


def normalized(indices: Array, size: int) -> Array:
    """Indices as int64, counted from the front; IndexError for one out of range."""
    wide = indices.astype(np.int64)
    outside = (wide < -size) | (wide >= size)
    if outside.any():
        raise IndexError(f"index {wide[outside][0]} is out of range for size {size}")
    return np.where(wide < 0, wide + size, wide)


def take_along_axis(x: Array, indices: Array, axis: int = -1) -> Array:
    """The values of x along an axis; x and indices have equal sizes in the other dimensions."""
    bits = x.view(f"u{x.itemsize}")
    return np.take_along_axis(bits, normalized(indices, x.shape[axis]), axis).view(x.dtype)


def scatter_sum(shape: tuple[int, ...], indices: Array, values: Array, axis: int = -1, x: Array | None = None) -> Array:
    """Values added onto their destinations in x, or in zeros of a shape; equal sizes but along the axis."""
    out = np.zeros(shape, values.dtype) if x is None else x.copy()
    lines = np.moveaxis(out, axis, -1)
    places = np.moveaxis(normalized(indices, shape[axis]), axis, -1)
    terms = np.moveaxis(values, axis, -1)
    for line in np.ndindex(lines.shape[:-1]):
        if places.shape[-1] == 0:
            continue
        p = ref.widen(np.ascontiguousarray(terms[line]))
        order = np.argsort(places[line], kind="stable")
        destinations, starts = np.unique(places[line][order], return_index=True)
        for d, sources in zip(destinations, np.split(order, starts[1:]), strict=True):
            s = ref.order_free_sum(p[sources][None])
            if x is not None:
                with np.errstate(all="ignore"):
                    s = ref.widen(lines[line][d : d + 1]) + s
            lines[line][d] = ref.narrow(s, values.dtype)[0]
    return out


def take_along_axis_backward(dv: Array, indices: Array, shape: tuple[int, ...], axis: int = -1) -> Array:
    """The gradient of take_along_axis: dv added onto zeros of x's shape. Distinct indices have no other arithmetic."""
    return scatter_sum(shape, indices, dv, axis)


def index_select(weight: Array, indices: Array) -> Array:
    """The rows of weight [num, *rest] at indices of any shape: [*indices.shape, *rest]."""
    bits = weight.view(f"u{weight.itemsize}")
    return bits[normalized(indices, weight.shape[0])].view(weight.dtype)


def index_sum(
    shape: tuple[int, ...], indices: Array, values: Array, x: Array | None = None, skipped: int | None = None
) -> Array:
    """Rows of values [*indices.shape, *rest] added onto the rows of x, or of zeros of a shape [num, *rest].

    An index equal to `skipped` is compared as it stands, and may be out of range.
    """
    flat = indices.ravel().astype(np.int64)
    rows = values.reshape(flat.size, *shape[1:])
    if skipped is not None:
        flat, rows = flat[flat != skipped], rows[flat != skipped]
    places = np.broadcast_to(flat.reshape(-1, *(1,) * (len(shape) - 1)), rows.shape)
    return scatter_sum(shape, places, rows, 0, x)


# --- the oracle: exact sums, rounded to the widest float of the machine ----------------------------------------------
def exact_sum(terms: Array) -> Any:
    """The sum of a vector, off by no more than the rounding of longdouble."""
    wide = terms.astype(np.float64)
    if not np.isfinite(wide).all():
        return _WIDE(ref.special_sum(wide))
    # fsum rounds the exact sum once; the second one gives what the first has left. Scaled, so that none overflows.
    scaled = [math.ldexp(v, -64) for v in wide.tolist()] if np.abs(wide).max(initial=0) > 2.0**900 else wide.tolist()
    head = math.fsum(scaled)
    total = _WIDE(head) + _WIDE(math.fsum([*scaled, -head]))
    return total if scaled == wide.tolist() else np.ldexp(total, 64)


def oracle_take_along_axis(x: Array, indices: Array, axis: int = -1) -> Array:
    """The values in the wide type."""
    return take_along_axis(x, indices, axis).astype(_WIDE)


def oracle_index_select(weight: Array, indices: Array) -> Array:
    """The rows in the wide type."""
    return index_select(weight, indices).astype(_WIDE)


def oracle_scatter_sum(
    shape: tuple[int, ...], indices: Array, values: Array, axis: int = -1, x: Array | None = None
) -> Array:
    """The exact scatter sum, but for the rounding of the wide type."""
    out = np.zeros(shape, _WIDE) if x is None else x.astype(_WIDE)
    lines = np.moveaxis(out, axis, -1)
    places = np.moveaxis(normalized(indices, shape[axis]), axis, -1)
    terms = np.moveaxis(values, axis, -1)
    for line in np.ndindex(lines.shape[:-1]):
        for d in np.unique(places[line]):
            with np.errstate(all="ignore"):
                lines[line][d] += exact_sum(terms[line][places[line] == d])
    return out


def oracle_take_along_axis_backward(dv: Array, indices: Array, shape: tuple[int, ...], axis: int = -1) -> Array:
    """The exact gradient of take_along_axis."""
    return oracle_scatter_sum(shape, indices, dv, axis)


def oracle_index_sum(
    shape: tuple[int, ...], indices: Array, values: Array, x: Array | None = None, skipped: int | None = None
) -> Array:
    """The exact sum of rows."""
    flat = indices.ravel().astype(np.int64)
    rows = values.reshape(flat.size, *shape[1:])
    if skipped is not None:
        flat, rows = flat[flat != skipped], rows[flat != skipped]
    places = np.broadcast_to(flat.reshape(-1, *(1,) * (len(shape) - 1)), rows.shape)
    return oracle_scatter_sum(shape, places, rows, 0, x)
