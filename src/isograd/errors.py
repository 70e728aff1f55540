"""Every error the library raises on purpose. Each class is also a standard one, so that `except ValueError` works."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self


class IsogradError(Exception):
    """Base of all errors of the library."""

    def spelled(self, **names: str) -> Self:
        """The error in a caller's words: each of the names, of operands or of an operation, replaced by its own."""
        pattern = rf"\b({'|'.join(names)})\b"
        return type(self)(re.sub(pattern, lambda found: names[found[0]], str(self)))


class InvalidProblemError(IsogradError, ValueError):
    """Shapes, axes, dtypes, strides or overlaps that no kernel could serve."""


class UnsupportedError(IsogradError, NotImplementedError):
    """A meaningful problem for which no kernel is registered here."""


class BufferTooSmallError(IsogradError, ValueError):
    """An output array with fewer elements than the result."""


class WorkspaceTooSmallError(IsogradError, ValueError):
    """A workspace with fewer bytes than `Plan.workspace_size`."""


class MisalignedOperandError(IsogradError, ValueError):
    """An array whose address or strides are not multiples of its element size, or a misaligned workspace."""


class IndexOutOfRangeError(IsogradError, IndexError):
    """An index outside the axis it indexes."""


class RecordingError(IsogradError, RuntimeError):
    """An encoder used out of turn, a result read before its recording was submitted, or an argument freed since."""


class DeviceMismatchError(IsogradError, ValueError):
    """Arguments on different devices, or on another device than the plan's."""


class MissingGradientError(IsogradError, KeyError):
    """A variable that `Tape.backward` returned no gradient for, because it is no leaf that was there."""

    __str__ = Exception.__str__  # KeyError's shows the text as a literal


@contextmanager
def spelled(**names: str) -> Iterator[None]:
    """Errors of plans that the block runs, in the words of the function that was called: see `IsogradError.spelled`."""
    try:
        yield
    except IsogradError as error:
        raise error.spelled(**names) from None
