"""The arrays of operations: how the shape and dtype of each follow from the problem's.

The problem's shape and dtype are those of the last input that is `Like()`. An operation on rows has an attribute
`axis`: each of its arrays has whole rows (`Like`), one element a row (`PerRow`) or one row alone (`AlongAxis`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

Size = TypeVar("Size")


@dataclass(frozen=True, slots=True)
class Array:
    """An array of an operation.

    optional: whether an input may be left out, and an output is computed on request only. over: the inputs that an
    output may overwrite. compute: whether the dtype is the one that the problem's is computed in.
    """

    optional: bool = False
    over: tuple[str, ...] = ()
    compute: bool = False

    def shape(self, shape: Sequence[Size], axis: int) -> tuple[Size, ...]:
        """The array's shape for the problem's."""
        raise NotImplementedError

    def place(self, axis: int, dim: int) -> int | None:
        """Where another axis than the rows' is in this array; None if it is not there."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Like(Array):
    """An array of the problem's shape."""

    def shape(self, shape: Sequence[Size], axis: int) -> tuple[Size, ...]:
        """The same."""
        return tuple(shape)

    def place(self, axis: int, dim: int) -> int | None:
        """The same place."""
        return dim


@dataclass(frozen=True, slots=True)
class PerRow(Array):
    """An array with one element for every row: the problem's shape without the axis."""

    def shape(self, shape: Sequence[Size], axis: int) -> tuple[Size, ...]:
        """Without the axis."""
        return (*shape[:axis], *shape[axis + 1 :])

    def place(self, axis: int, dim: int) -> int | None:
        """One to the left where the axis came before."""
        return dim - (dim > axis)


@dataclass(frozen=True, slots=True)
class AlongAxis(Array):
    """An array with one element for every place in a row; an output of this kind is a sum over the rows."""

    def shape(self, shape: Sequence[Size], axis: int) -> tuple[Size, ...]:
        """The length of the axis."""
        return (shape[axis],)

    def place(self, axis: int, dim: int) -> int | None:
        """Nowhere."""
        return None
