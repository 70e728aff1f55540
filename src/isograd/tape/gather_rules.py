"""The gather family on the tape, as in `rules.py`; the indices are constants.

take_along_axis   dx = the order-free sum of g over the places an element was taken to
embedding         dweight: the same for rows, but for the padding row
scatter_sum       dx = g, dvalues = g at the indices; summed order-free where values were broadcast
segment_sum       dvalues = g at the segments
"""

from isograd.gather import api as gather_family
from isograd.tape.rules import Array, Result, _unbroadcast, stored, wide


def take_along_axis(x: Array, indices: Array, axis: int) -> Result:
    """Values along an axis."""
    shape = x.shape
    v: Array = gather_family.take_along_axis(x, indices, axis)

    def gradient(g: Array) -> Array:
        dx: Array = gather_family.take_along_axis_backward(g, indices, shape, axis)
        return dx

    return v, (gradient,)


def embedding(weight: Array, indices: Array, padding_idx: int | None) -> Result:
    """Rows of a table."""
    num = len(weight)
    y: Array = gather_family.embedding(weight, indices, padding_idx)

    def gradient(g: Array) -> Array:
        dweight: Array = gather_family.embedding_backward(g, indices, num, padding_idx)
        return dweight

    return y, (gradient,)


def scatter_sum(x: Array, values: Array, indices: Array, axis: int) -> Result:
    """Values added onto x along an axis."""
    shape, dtype = values.shape, values.dtype
    out: Array = gather_family.scatter_sum(x, indices, values, axis)
    if indices.ndim == 1:  # an index for a whole slice
        places = [1] * x.ndim
        places[axis] = indices.size
        indices = indices.reshape(places)

    def gradient(g: Array) -> Array:
        return _unbroadcast(wide(gather_family.take_along_axis(g, indices, axis)), shape, dtype)

    return out, (lambda g: stored(g, dtype), gradient)


def segment_sum(values: Array, segment_ids: Array, num_segments: int) -> Result:
    """The sum of each segment's rows."""
    out: Array = gather_family.segment_sum(values, segment_ids, num_segments)
    shape = values.shape

    def gradient(g: Array) -> Array:
        dvalues: Array = gather_family.index_select("segment_sum", g, segment_ids)
        return dvalues.reshape(shape)

    return out, (gradient,)
