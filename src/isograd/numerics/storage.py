"""The four storage types: which arrays an operation accepts, and how kernels are told their type."""

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
    if dtype not in _BIT_TYPES:
        order = "" if getattr(dtype, "isnative", True) else " in foreign byte order"
        raise UnsupportedError(f"{operation}: {argument} has dtype {dtype}{order}; accepted: {ACCEPTED}")
    return str(dtype.name)


def compute_dtype(dtype: str) -> str:
    """The name of the type that a storage type is computed in."""
    return "float64" if dtype == "float64" else "float32"


def kernel_type(dtype: np.dtype[Any]) -> Any:
    """A zero of the type that a kernel sees for a storage type: halves as int16, bfloat16 as uint16."""
    return _BIT_TYPES[dtype](0)


def address(x: NDArray[Any]) -> int:
    """The address of an array's first element."""
    return int(x.__array_interface__["data"][0])
