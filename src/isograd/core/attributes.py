"""The attributes of operations: typed, and each with one wording of its check.

An attribute is looked at twice. `plain` needs nothing but the value and makes it hashable: what a cache of plans may
be asked with. `checked` knows the problem's shape too and returns what kernels are handed.
"""

from abc import ABC, abstractmethod
from typing import Any

from isograd.errors import InvalidProblemError
from isograd.plan import checked_axis, integer, real_number


class Attribute(ABC):
    """An argument of an operation that is no array. `kind` is what torch's schemas call its type."""

    kind: str

    def __init__(self, default: Any) -> None:
        self.default = default

    @abstractmethod
    def plain(self, operation: str, argument: str, value: Any) -> Any:
        """The value as a plain Python object, or InvalidProblemError for one of another type."""

    @abstractmethod
    def checked(self, operation: str, argument: str, value: Any, shape: tuple[int, ...]) -> Any:
        """The plain value as kernels take it, or InvalidProblemError for one that the problem does not accept."""


class Axis(Attribute):
    """An axis of the problem's shape, from -rank to rank - 1; kernels get it counted from the front."""

    kind = "int"

    def __init__(self, default: int = -1) -> None:
        super().__init__(default)

    def plain(self, operation: str, argument: str, value: Any) -> int:
        """The axis as an int."""
        return integer(operation, argument, value)

    def checked(self, operation: str, argument: str, value: Any, shape: tuple[int, ...]) -> int:
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

    def checked(self, operation: str, argument: str, value: Any, shape: tuple[int, ...]) -> float:
        """The number, which lies in the range."""
        number = real_number(operation, argument, value)
        if not self._least <= number <= self._most:
            raise InvalidProblemError(
                f"{operation}: {argument} is {number!r}; accepted: numbers from {self._least:g} to {self._most:g}"
            )
        return number
