"""The attributes of operations: typed, and each with one wording of its check.

An attribute is looked at twice. `plain` needs nothing but the value and makes it hashable: what a cache of plans may
be asked with. `checked` knows the problem's shape too and returns what kernels are handed.
"""

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from isograd.core import arrays
from isograd.core.checks import (
    DTYPES,
    INDEX_DTYPES,
    checked_axis,
    checked_dtype,
    checked_shape,
    integer,
    integer_within,
    real_number,
)
from isograd.errors import InvalidProblemError
from isograd.numerics.storage import compute_dtype


class Attribute(ABC):
    """An argument of an operation that is no array.

    kind: what torch's schemas call its type. per_call: whether it is a number that kernels take as they run, so that
    one plan serves all its values. required: whether it has no default; a descriptor has these between shape and dtype.
    """

    kind: str
    per_call = False
    required = False

    def __init__(self, default: Any) -> None:
        self.default = default

    @abstractmethod
    def plain(self, operation: str, argument: str, value: Any) -> Any:
        """The value as a plain Python object, or InvalidProblemError for one of another type."""

    def checked(self, operation: str, argument: str, value: Any, shape: tuple[int, ...], dtype: str) -> Any:
        """The value as kernels take it, or InvalidProblemError for one that the problem does not accept."""
        return self.plain(operation, argument, value)


class Axis(Attribute):
    """An axis of the problem's shape, from -rank to rank - 1; kernels get it counted from the front."""

    kind = "int"

    def __init__(self, default: int = -1) -> None:
        super().__init__(default)

    def plain(self, operation: str, argument: str, value: Any) -> int:
        """The axis as an int."""
        return integer(operation, argument, value)

    def checked(self, operation: str, argument: str, value: Any, shape: tuple[int, ...], dtype: str) -> int:
        """The axis counted from the front."""
        return checked_axis(operation, value, shape, argument)


class Real(Attribute):
    """A number from `least` to `most`."""

    kind = "float"

    def __init__(self, default: float, least: float, most: float) -> None:
        super().__init__(default)
        self._least, self._most = least, most

    def plain(self, operation: str, argument: str, value: Any) -> float:
        """The number as a float."""
        return real_number(operation, argument, value)

    def checked(self, operation: str, argument: str, value: Any, shape: tuple[int, ...], dtype: str) -> float:
        """The number, which lies in the range."""
        number = real_number(operation, argument, value)
        if not self._least <= number <= self._most:
            raise InvalidProblemError(
                f"{operation}: {argument} is {number!r}; accepted: numbers from {self._least:g} to {self._most:g}"
            )
        return number


class Flag(Attribute):
    """True or False."""

    kind = "bool"

    def __init__(self, default: bool = False) -> None:
        super().__init__(default)

    def plain(self, operation: str, argument: str, value: Any) -> bool:
        """The flag as a bool."""
        if not isinstance(value, (bool, np.bool_)):
            raise InvalidProblemError(f"{operation}: {argument} is {value!r}; it takes True or False")
        return bool(value)


class Batched(Flag):
    """Whether every place in the first dimension is a problem of its own."""

    def checked(self, operation: str, argument: str, value: Any, shape: tuple[int, ...], dtype: str) -> bool:
        """The flag; a problem of its own has a dimension left."""
        if (flag := self.plain(operation, argument, value)) and len(shape) < 2:
            raise InvalidProblemError(f"{operation}: shape is {shape}; expected one more dimension")
        return flag


class Integer(Attribute):
    """An integer, from `least` up where that is given; the operation's own check knows what else bounds it."""

    kind = "SymInt"

    def __init__(self, default: int | None = None, least: int | None = None) -> None:
        super().__init__(default)
        self.required, self.least = default is None, least

    def plain(self, operation: str, argument: str, value: Any) -> int:
        """The integer as an int."""
        return integer(operation, argument, value)

    def checked(self, operation: str, argument: str, value: Any, shape: tuple[int, ...], dtype: str) -> int:
        """The integer, which is not too small."""
        if self.least is None:
            return integer(operation, argument, value)
        return integer_within(operation, argument, value, self.least)


_LARGEST = {"float32": (2 - 2.0**-24) * 2.0**127, "float64": math.inf}  # what rounds to infinity, from there on


class Factor(Attribute):
    """A number that is finite in the type which is computed in."""

    kind = "float"

    def __init__(self, default: float = 1.0) -> None:
        super().__init__(default)

    def plain(self, operation: str, argument: str, value: Any) -> float:
        """The number as a float."""
        return self._finite(operation, argument, value, "float64")

    def checked(self, operation: str, argument: str, value: Any, shape: tuple[int, ...], dtype: str) -> float:
        """The number, which is finite; -0 as +0, so that plans for both are equal."""
        return self._finite(operation, argument, value, compute_dtype(dtype)) + 0.0

    @staticmethod
    def _finite(operation: str, argument: str, value: Any, work: str) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _LARGEST[work]:
            kind = "finite number" if work == "float64" else "number that is finite in float32"
            raise InvalidProblemError(f"{operation}: {argument} is {value!r}; expected a {kind}")
        return real_number(operation, argument, value)


class Sizes(Attribute):
    """The shape of a problem whose array is an output, as the gradient of an input that its vjp does not read."""

    kind = "SymInt[]"
    required = True

    def __init__(self) -> None:
        super().__init__(None)

    def plain(self, operation: str, argument: str, value: Any) -> tuple[int, ...]:
        """The shape as plain ints."""
        return checked_shape(operation, argument, value)


class StorageDtype(Attribute):
    """The dtype of such a problem."""

    kind = "ScalarType"
    required = True

    def __init__(self) -> None:
        super().__init__(None)

    def plain(self, operation: str, argument: str, value: Any) -> str:
        """The dtype's name."""
        return checked_dtype(operation, value, DTYPES, argument)


class Scale(Attribute):
    """A positive number, as a temperature is, that the type which is computed in can hold with its reciprocal."""

    kind = "float"

    def __init__(self, default: float = 1.0) -> None:
        super().__init__(default)

    def plain(self, operation: str, argument: str, value: Any) -> float:
        """The number as a float."""
        return real_number(operation, argument, value)

    def checked(self, operation: str, argument: str, value: Any, shape: tuple[int, ...], dtype: str) -> float:
        """The number, which lies in the range of the dtype."""
        number = real_number(operation, argument, value)
        limit = 2.0**500 if dtype == "float64" else 2.0**60
        if not 1 / limit <= number <= limit:
            raise InvalidProblemError(
                f"{operation}: {argument} is {number!r}; accepted: positive numbers from {1 / limit:.3g} to {limit:.3g}"
            )
        return number


class Choice(Attribute):
    """One of some names."""

    kind = "str"

    def __init__(self, default: str, *others: str) -> None:
        super().__init__(default)
        self.accepted = (default, *others)

    def plain(self, operation: str, argument: str, value: Any) -> str:
        """The name."""
        if not isinstance(value, str) or value not in self.accepted:
            raise InvalidProblemError(f"{operation}: {argument} is {value!r}; accepted: {', '.join(self.accepted)}")
        return value


class Reduction(Choice):
    """What becomes of losses: their mean, their sum over the first dimension's size, their sum, or all as they are."""

    def __init__(self, default: str = "mean") -> None:
        super().__init__("mean", "batchmean", "sum", "none")
        self.default = default


class Measured(Attribute):
    """An attribute that nobody gives: it is measured from the input `of`, which need not be there."""

    def __init__(self, of: str, default: Any = None) -> None:
        super().__init__(default)
        self.of = of

    def plain(self, operation: str, argument: str, value: Any) -> Any:
        """The value, which `checked` looks at."""
        return value

    @abstractmethod
    def measure(self, operation: str, array: Any) -> Any:
        """The value for an array, or for None."""


class SizeOf(Measured):
    """How many elements of each row an input has, at most all; None where it is not there.

    repeated: whether it may have one more than once, so that nothing bounds their number. required: whether the input
    is always there.
    """

    def __init__(self, of: str, *, repeated: bool = False, required: bool = False) -> None:
        super().__init__(of)
        self._repeated, self.required = repeated, required

    def measure(self, operation: str, array: Any) -> Any:
        """The size of its last dimension."""
        return None if array is None else (array.shape[-1] if len(array.shape) else 0)

    def checked(self, operation: str, argument: str, value: Any, shape: tuple[int, ...], dtype: str) -> Any:
        """The size, of one element to all."""
        if value is None and not self.required:
            return None
        if self._repeated:
            return integer_within(operation, argument, value, 1)
        if not 1 <= (number := integer(operation, argument, value)) <= shape[-1]:
            raise InvalidProblemError(
                f"{operation}: {argument} is {number}; accepted for shape {shape}: 1 to {shape[-1]}"
            )
        return number


class HasRows(Measured):
    """Whether an input has an element for every one of the problem's, and not for one row alone."""

    def __init__(self, of: str) -> None:
        super().__init__(of, default=False)

    def measure(self, operation: str, array: Any) -> bool:
        """Whether it has more than one dimension."""
        return array is not None and len(array.shape) > 1

    def checked(self, operation: str, argument: str, value: Any, shape: tuple[int, ...], dtype: str) -> bool:
        """The flag."""
        if not isinstance(value, bool):
            raise InvalidProblemError(f"{operation}: {argument} is {value!r}; it takes True or False")
        return value


class DtypeOf(Measured):
    """The dtype of an input: one with the problem's compute dtype, by default the problem's, or an index type."""

    def __init__(self, of: str, default: str | None = None) -> None:
        super().__init__(of, default)
        self.index = default in INDEX_DTYPES

    def measure(self, operation: str, array: Any) -> Any:
        """The dtype's name."""
        return self.default if array is None else arrays.describe(array, operation, self.of, self.index)[1]

    def checked(self, operation: str, argument: str, value: Any, shape: tuple[int, ...], dtype: str) -> str:
        """The name, which is accepted."""
        if self.index:
            return checked_dtype(operation, value, INDEX_DTYPES, argument)
        found = checked_dtype(operation, dtype if value is None else value, argument=argument)
        if compute_dtype(found) != compute_dtype(dtype):
            raise InvalidProblemError(
                f"{operation}: {self.of} has dtype {found} for {dtype}; float64 goes with float64 only"
            )
        return found


class Word(Attribute):
    """An integer from 0 to 2^64 - 1 that varies by call. counts: whether it is the number of the first element."""

    kind = "SymInt"
    per_call = True

    def __init__(self, counts: bool = False) -> None:
        super().__init__(0)
        self.counts = counts

    def plain(self, operation: str, argument: str, value: Any) -> int:
        """The integer as an int."""
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value < 1 << 64:
            raise InvalidProblemError(f"{operation}: {argument} is {value!r}; accepted: integers from 0 to 2^64 - 1")
        return int(value)


def signed(word: int) -> int:
    """A word of 64 bits as the signed integer that an operator's schema holds.

    A symbol of torch.compile's counts as one of int64, though larger numbers reach its place: no condition may ask.
    """
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)
