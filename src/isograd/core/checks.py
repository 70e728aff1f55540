"""Checks of what users hand over, with one wording each: numbers, shapes, axes, dtypes."""

import numbers
import operator
from typing import Any

import numpy as np

from isograd.core import arrays, encoder
from isograd.errors import InvalidProblemError, UnsupportedError
from isograd.runtime.fenv import default_environment

MAX_RANK = 8


DTYPES = ("float16", "bfloat16", "float32", "float64")


INDEX_DTYPES = ("int32", "int64", "uint32")


MOST_ELEMENTS = 1 << 56  # of an array: their bytes are counted in 64 bits, and no memory holds as many


def integer(operation: str, argument: str, value: Any) -> int:
    """An argument as a plain int; InvalidProblemError for anything else, 1.0 included, which equals 1 in a cache.

    An array of one integer is a number too, but for a recording, whose replay would not see another one in it.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidProblemError(f"{operation}: {argument} is {value!r}; it takes integers only") from None
    if not isinstance(value, (int, np.integer)):
        encoder.refuse(operation, f"{argument} is a {type(value).__name__}")
    return number


def integer_within(operation: str, argument: str, value: Any, least: int, most: int | None = None) -> int:
    """An integer from `least` to `most` or to what an array holds; InvalidProblemError says what is wrong with it."""
    number = integer(operation, argument, value)
    if not least <= number <= (MOST_ELEMENTS if most is None else most):
        accepted = f"{least} to {most}" if most is not None else f"at least {least}, up to 2^56"
        raise InvalidProblemError(f"{operation}: {argument} is {number}; accepted: {accepted}")
    return number


def real_number(operation: str, argument: str, value: Any) -> float:
    """A number as a float; InvalidProblemError for anything else, and for an integer beyond all floats."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidProblemError(f"{operation}: {argument} is {value!r}; expected a number")
    try:
        if isinstance(value, (int, float)):
            return float(value)  # by Python, exactly as ever
        with default_environment():  # by the processor
            return float(value)
    except OverflowError:
        raise InvalidProblemError(f"{operation}: {argument} is beyond the range of floats; expected a number") from None


def checked_shape(operation: str, argument: str, shape: Any, least: int = 1) -> tuple[int, ...]:
    """A shape as plain ints, of `least` to MAX_RANK dimensions; InvalidProblemError says what is wrong with it."""
    try:
        sizes = tuple([operator.index(size) for size in shape])
    except TypeError as error:
        raise InvalidProblemError(f"{operation}: {argument} is {shape!r}; it takes integers only") from error
    if not least <= len(sizes) <= MAX_RANK:
        raise InvalidProblemError(
            f"{operation}: {argument} {sizes} has rank {len(sizes)}; accepted: rank {least} to {MAX_RANK}"
        )
    if min(sizes, default=0) < 0:
        raise InvalidProblemError(f"{operation}: {argument} is {sizes}; sizes are not negative")
    if max(sizes, default=0) > MOST_ELEMENTS or arrays.size_of(sizes) > MOST_ELEMENTS:
        raise InvalidProblemError(f"{operation}: {argument} has too many elements; accepted: up to 2^56")
    return sizes


def checked_axis(operation: str, axis: Any, shape: tuple[int, ...], argument: str = "axis") -> int:
    """An axis of a shape, counted from the front; InvalidProblemError for one out of range or no integer."""
    number, rank = integer(operation, argument, axis), len(shape)
    if not -rank <= number < rank:
        raise InvalidProblemError(f"{operation}: {argument} is {number}; shape {shape} accepts -{rank} to {rank - 1}")
    return number % rank


def checked_dtype(operation: str, dtype: Any, accepted: tuple[str, ...] = DTYPES, argument: str = "dtype") -> str:
    """The name of an accepted dtype; UnsupportedError for any other."""
    if not isinstance(dtype, str) or dtype not in accepted:  # a NumPy dtype equals its name
        raise UnsupportedError(f"{operation}: {argument} is {dtype!r}; accepted: {', '.join(accepted)}")
    return dtype


def checked_preference(operation: str, preference: Any) -> str | None:
    """The name of a kernel, registered or not, or None; InvalidProblemError for anything else."""
    if preference is None or isinstance(preference, str):
        return preference
    raise InvalidProblemError(f"{operation}: preference is {preference!r}; expected the name of a kernel or None")
