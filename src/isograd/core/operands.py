"""The arrays of operations: how the shape and dtype of each follow from the problem's.

The problem's shape and dtype are those of the last input that is `Like()`, unless another is named. An operation on
rows has an attribute `axis`: each of its arrays has whole rows (`Like`), one element a row (`PerRow`) or one row alone
(`AlongAxis`). One without works on elements. One that has a `Loss` has an attribute `reduction`.
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

    def shape(self, shape: Sequence[Size], axis: int, reduction: str = "none") -> tuple[Size, ...]:
        """The array's shape for the problem's."""
        raise NotImplementedError

    def place(self, axis: int, dim: int, reduction: str = "none") -> int | None:
        """Where a dimension of the problem is in this array; None if it is not there."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Like(Array):
    """An array of the problem's shape."""

    def shape(self, shape: Sequence[Size], axis: int, reduction: str = "none") -> tuple[Size, ...]:
        """The same."""
        return tuple(shape)

    def place(self, axis: int, dim: int, reduction: str = "none") -> int | None:
        """The same place."""
        return dim


@dataclass(frozen=True, slots=True)
class PerRow(Array):
    """An array with one element for every row: the problem's shape without the axis."""

    def shape(self, shape: Sequence[Size], axis: int, reduction: str = "none") -> tuple[Size, ...]:
        """Without the axis."""
        return (*shape[:axis], *shape[axis + 1 :])

    def place(self, axis: int, dim: int, reduction: str = "none") -> int | None:
        """One to the left where the axis came before."""
        return None if dim == axis else dim - (dim > axis)


@dataclass(frozen=True, slots=True)
class AlongAxis(Array):
    """An array with one element for every place in a row; an output of this kind is a sum over the rows."""

    def shape(self, shape: Sequence[Size], axis: int, reduction: str = "none") -> tuple[Size, ...]:
        """The length of the axis."""
        return (shape[axis],)

    def place(self, axis: int, dim: int, reduction: str = "none") -> int | None:
        """The axis alone."""
        return 0 if dim == axis else None


@dataclass(frozen=True, slots=True)
class Loss(Array):
    """A loss of every element, which the attribute `reduction` makes one of all, or its gradient."""

    def shape(self, shape: Sequence[Size], axis: int, reduction: str = "none") -> tuple[Size, ...]:
        """The problem's, or that of one number."""
        return tuple(shape) if reduction == "none" else ()

    def place(self, axis: int, dim: int, reduction: str = "none") -> int | None:
        """The same place where nothing is reduced."""
        return dim if reduction == "none" else None
