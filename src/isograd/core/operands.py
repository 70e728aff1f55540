"""The arrays of operations: how the shape and dtype of each follow from the problem's.

The problem's shape and dtype are those of the last input that is `Like()`, unless another is named. An operation on
rows has an attribute `axis`: each of its arrays has whole rows (`Like`), one element a row (`PerRow`) or one row alone
(`AlongAxis`). One without works on elements. One that has a `Loss` has an attribute `reduction`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Size = TypeVar("Size")
Settings = Mapping[str, Any]  # the operation's attributes
NOTHING: Settings = {}


@dataclass(frozen=True, slots=True)
class Array:
    """An array of an operation.

    optional: whether an input may be left out, and an output is computed on request only. over: the inputs that an
    output may overwrite. compute: whether the dtype is the one that the problem's is computed in. dtype: its name, or
    the attribute that has it, where it is neither.
    """

    optional: bool = False
    over: tuple[str, ...] = ()
    compute: bool = False
    dtype: str = ""

    def shape(self, shape: Sequence[Size], axis: int, settings: Settings = NOTHING) -> tuple[Size, ...]:
        """The array's shape for the problem's."""
        raise NotImplementedError

    def place(self, axis: int, dim: int, settings: Settings = NOTHING) -> int | None:
        """Where a dimension of the problem is in this array; None if it is not there."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Like(Array):
    """An array of the problem's shape."""

    def shape(self, shape: Sequence[Size], axis: int, settings: Settings = NOTHING) -> tuple[Size, ...]:
        """The same."""
        return tuple(shape)

    def place(self, axis: int, dim: int, settings: Settings = NOTHING) -> int | None:
        """The same place."""
        return dim


@dataclass(frozen=True, slots=True)
class PerRow(Array):
    """An array with one element for every row: the problem's shape without the axis."""

    def shape(self, shape: Sequence[Size], axis: int, settings: Settings = NOTHING) -> tuple[Size, ...]:
        """Without the axis."""
        return (*shape[:axis], *shape[axis + 1 :])

    def place(self, axis: int, dim: int, settings: Settings = NOTHING) -> int | None:
        """One to the left where the axis came before."""
        return None if dim == axis else dim - (dim > axis)


@dataclass(frozen=True, slots=True)
class AlongAxis(Array):
    """An array with one element for every place in a row; an output of this kind is a sum over the rows."""

    def shape(self, shape: Sequence[Size], axis: int, settings: Settings = NOTHING) -> tuple[Size, ...]:
        """The length of the axis."""
        return (shape[axis],)

    def place(self, axis: int, dim: int, settings: Settings = NOTHING) -> int | None:
        """The axis alone."""
        return 0 if dim == axis else None


@dataclass(frozen=True, slots=True)
class Chosen(Array):
    """An array with some elements of every row, as many as an attribute says, or with all."""

    count: str = ""

    def shape(self, shape: Sequence[Size], axis: int, settings: Settings = NOTHING) -> tuple[Size, ...]:
        """The problem's with as many."""
        count: Size | None = settings.get(self.count)
        axis %= len(shape)
        return tuple(shape) if count is None else (*shape[:axis], count, *shape[axis + 1 :])

    def place(self, axis: int, dim: int, settings: Settings = NOTHING) -> int | None:
        """The same place."""
        return dim


@dataclass(frozen=True, slots=True)
class AlongOrLike(Array):
    """An array of one row, or of the problem's shape where the attribute `rows` says so."""

    rows: str = ""

    def shape(self, shape: Sequence[Size], axis: int, settings: Settings = NOTHING) -> tuple[Size, ...]:
        """The length of the axis, or the same."""
        return tuple(shape) if settings.get(self.rows) else (shape[axis],)

    def place(self, axis: int, dim: int, settings: Settings = NOTHING) -> int | None:
        """The axis alone, or the same place."""
        return dim if settings.get(self.rows) else 0 if dim == axis else None


@dataclass(frozen=True, slots=True)
class Sized(Array):
    """An array whose shape is a function of the problem's and the attributes; it has no part for a part of the rows."""

    of: Callable[[Sequence[Any], Settings], tuple[Any, ...]] = lambda shape, settings: ()

    def shape(self, shape: Sequence[Size], axis: int, settings: Settings = NOTHING) -> tuple[Size, ...]:
        """What the function says."""
        return self.of(shape, settings)

    def place(self, axis: int, dim: int, settings: Settings = NOTHING) -> int | None:
        """None."""
        return None


@dataclass(frozen=True, slots=True)
class Total(Array):
    """One number of all rows, or with the attribute `batched` one for every place in the first dimension."""

    def shape(self, shape: Sequence[Size], axis: int, settings: Settings = NOTHING) -> tuple[Size, ...]:
        """None, or the first dimension."""
        return tuple(shape[:1]) if settings.get("batched") else ()

    def place(self, axis: int, dim: int, settings: Settings = NOTHING) -> int | None:
        """None: a part of the rows has another total."""
        return None


@dataclass(frozen=True, slots=True)
class Loss(Array):
    """A loss of every element, or of every row of the last axis, which the attribute `reduction` makes one of all."""

    rows: bool = False

    def shape(self, shape: Sequence[Size], axis: int, settings: Settings = NOTHING) -> tuple[Size, ...]:
        """That of all losses, or of one number."""
        if settings.get("reduction", "none") != "none":
            return ()
        return tuple(shape[:-1] if self.rows else shape)

    def place(self, axis: int, dim: int, settings: Settings = NOTHING) -> int | None:
        """The same place where nothing is reduced."""
        return None if settings.get("reduction", "none") != "none" or (self.rows and dim == axis) else dim
