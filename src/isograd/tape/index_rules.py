"""Indexing on the tape, as in `rules.py`; arrays in an index are constants, of which copies are kept.

The gradient of an index without arrays of integers copies g to the places that were read, with zeros elsewhere; with
them a place may be read several times and gets the order-free sum of its parts of g (rule 12 of `docs/arithmetic.md`).
"""

from typing import Any

import numpy as np

from isograd.errors import IndexOutOfRangeError, InvalidProblemError, UnsupportedError
from isograd.gather import api as gather_family
from isograd.tape.rules import Array, Result

_ACCEPTED = "integers, slices, an ellipsis, None, and arrays or lists of integers or of booleans"


def _part(part: Any) -> Any:
    """One part of an index; arrays are copied, since the caller may overwrite the original before `backward`."""
    basic = part is None or part is Ellipsis or isinstance(part, (int, np.integer, slice))
    if basic and not isinstance(part, bool):
        return part
    if isinstance(part, np.ma.MaskedArray):
        raise InvalidProblemError("getitem: the index has a masked array, whose mask would be lost; fill it first")
    if isinstance(part, (list, tuple, np.ndarray)):
        try:
            array = np.array(part, np.intp if isinstance(part, (list, tuple)) and len(part) == 0 else None)
        except ValueError:
            raise InvalidProblemError(f"getitem: the index has {part!r}, which is no array") from None
        if array.dtype.kind in "iu" or (array.dtype.kind == "b" and array.ndim):
            return array
        raise UnsupportedError(f"getitem: the index has an array of dtype {array.dtype}; supported: {_ACCEPTED}")
    raise UnsupportedError(f"getitem: the index has a {type(part).__name__}; supported: {_ACCEPTED}")


def _places(shape: tuple[int, ...], parts: tuple[Any, ...]) -> Array:
    """The position in C order of every element that is read."""
    places: Any = np.int64(0)
    for d, n in enumerate(shape):
        along = np.arange(n).reshape(n, *[1] * (len(shape) - d - 1))
        places = places * n + np.broadcast_to(along, shape)[parts]
    return np.asarray(places)


def getitem(x: Array, index: Any) -> Result:
    """A part of x by NumPy's indexing."""
    parts = tuple([_part(part) for part in (index if isinstance(index, tuple) else (index,))])
    shape, size = x.shape, x.size
    try:
        y = np.asarray(x[parts])
    except (IndexError, OverflowError) as error:
        raise IndexOutOfRangeError(f"getitem: {error}; the shape is {shape}") from None
    except TypeError as error:  # a slice with an end that is no integer
        raise InvalidProblemError(f"getitem: {error}") from None
    arrays = [part for part in parts if isinstance(part, np.ndarray)]

    def copied(g: Array) -> Array:
        dx = np.zeros(shape, g.dtype)
        dx[parts] = g
        return dx

    def rows(g: Array) -> Array:
        dx: Array = gather_family.segment_sum(g, arrays[0].astype(np.int64), shape[0])
        return dx

    def summed(g: Array) -> Array:
        places = _places(shape, parts).reshape(-1)
        dx: Array = gather_family.segment_sum(g.reshape(-1), places, size)
        return dx.reshape(shape)

    if all(array.dtype.kind == "b" for array in arrays):
        return y, (copied,)
    return y, (rows if len(parts) == 1 else summed,)
