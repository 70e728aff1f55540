"""The four storage types: which arrays an operation accepts, and how kernels are told their type."""

import ctypes
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.errors import InvalidProblemError, UnsupportedError
from isograd.numerics.reference import BFLOAT16

_BIT_TYPES: dict[np.dtype[Any], Any] = {
    np.dtype(np.float16): np.int16,
    BFLOAT16: np.uint16,
    np.dtype(np.float32): np.float32,
    np.dtype(np.float64): np.float64,
}
_NAMES = {dtype: str(dtype.name) for dtype in _BIT_TYPES}  # NumPy puts a name together at every call
_ZEROS = {dtype: kind(0) for dtype, kind in _BIT_TYPES.items()}
ACCEPTED = "float16, bfloat16 (ml_dtypes), float32, float64"


def require_array(operation: str, argument: str, x: Any) -> NDArray[Any]:
    """A plain view of `x`, or an error if it is no NumPy array of a storage type.

    Raises InvalidProblemError for anything that is no array and UnsupportedError for another dtype.
    """
    if not isinstance(x, np.ndarray):
        raise InvalidProblemError(f"{operation}: {argument} is a {type(x).__name__}; expected a NumPy array")
    dtype_name(x.dtype, operation, argument)
    return plain_array(operation, argument, x)


def plain_array(operation: str, argument: str, x: NDArray[Any]) -> NDArray[Any]:
    """An array without what a subclass adds, such as the operators of a matrix; InvalidProblemError for a mask."""
    if type(x) is np.ndarray:
        return x
    if isinstance(x, np.ma.MaskedArray):
        raise InvalidProblemError(f"{operation}: {argument} is a masked array, whose mask would be lost; fill it first")
    return x.view(np.ndarray)


def dtype_name(dtype: Any, operation: str, argument: str) -> str:
    """The name of a storage type; UnsupportedError for any other dtype, also for one in foreign byte order."""
    name = _NAMES.get(dtype)
    if name is None:
        order = "" if getattr(dtype, "isnative", True) else " in foreign byte order"
        raise UnsupportedError(f"{operation}: {argument} has dtype {dtype}{order}; accepted: {ACCEPTED}")
    return name


def compute_dtype(dtype: str) -> str:
    """The name of the type that a storage type is computed in."""
    return "float64" if dtype == "float64" else "float32"


def kernel_type(dtype: np.dtype[Any]) -> Any:
    """A zero of the type that a kernel sees for a storage type: halves as int16, bfloat16 as uint16."""
    return _ZEROS[dtype]


# An array begins with the head of every object, then the address of its data: the public part of NumPy's C interface.
# Reading it there takes a tenth of the time that the dict takes in which NumPy hands it out.
_HEAD = object.__basicsize__
_word = ctypes.c_size_t.from_address


def _interface_address(x: NDArray[Any]) -> int:
    return int(x.__array_interface__["data"][0])


def _head_address(x: NDArray[Any]) -> int:
    return _word(id(x) + _HEAD).value


def _is_in_head() -> bool:
    """Whether this interpreter's arrays are laid out so."""
    if sys.implementation.name != "cpython":
        return False
    whole = np.zeros(4, np.float32)
    return all(_head_address(x) == _interface_address(x) for x in (whole, whole[1:], whole[::-1]))


# address(x): the address of an array's first element.
address = _head_address if _is_in_head() else _interface_address
