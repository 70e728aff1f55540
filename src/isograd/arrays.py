"""One view of the arrays that users bring.

Kernels on the CPU work on NumPy arrays. Other arrays (anything with DLPack) enter and leave without a copy; torch
tensors and tape variables have modules of their own. bfloat16 is `ml_dtypes.bfloat16`.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.errors import DeviceMismatchError, InvalidProblemError
from isograd.numerics.reference import BFLOAT16
from isograd.numerics.storage import address, dtype_name

def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a storage type's name."""
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


def describe(array: Any, operation: str, argument: str) -> tuple[str, str]:
    """(device, dtype name) of an array that a plan is handed."""
    if not isinstance(array, np.ndarray):
        raise InvalidProblemError(f"{operation}: {argument} is {type(array).__name__}; expected a NumPy array")
    if isinstance(array, np.ma.MaskedArray):
        raise InvalidProblemError(f"{operation}: {argument} is a masked array, whose mask would be lost; fill it first")
    return "cpu", dtype_name(array.dtype, operation, argument)


def to_numpy(x: Any, operation: str, argument: str) -> tuple[NDArray[Any], Callable[[NDArray[Any]], Any] | None]:
    """A NumPy view of an array, and the function that turns a result into the same kind of array."""
    if isinstance(x, np.ndarray):
        return x, None
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        if x.__dlpack_device__()[0] != 1:
            raise DeviceMismatchError(
                f"{operation}: {argument} is a {type(x).__name__} outside the CPU's memory; accepted: arrays on the CPU"
            )
        space = x.__array_namespace__() if hasattr(x, "__array_namespace__") else None
        try:
            view = np.from_dlpack(x)
        except (BufferError, RuntimeError, TypeError) as error:
            raise InvalidProblemError(
                f"{operation}: {argument} is a {type(x).__name__} that DLPack cannot hand over ({error})"
            ) from error
        return view, None if space is None else space.from_dlpack
    raise InvalidProblemError(
        f"{operation}: {argument} is {type(x).__name__}; expected a NumPy array, an array with DLPack or a tape variable"
    )


def size_of(shape: tuple[int, ...]) -> int:
    """The number of elements of a shape."""
    return math.prod(shape)


def size(array: NDArray[Any]) -> int:
    """The number of elements of an array."""
    return array.size


def is_aligned(array: NDArray[Any]) -> bool:
    """Whether the address and every stride are multiples of the element size."""
    itemsize = array.itemsize
    if array.flags.c_contiguous and array.flags.aligned:
        return True
    return address(array) % itemsize == 0 and all(
        stride % itemsize == 0 or length < 2 for stride, length in zip(array.strides, array.shape, strict=True)
    )


def is_writeable(array: NDArray[Any]) -> bool:
    """Whether results may be stored into an array."""
    return array.flags.writeable


def overlaps_itself(array: NDArray[Any]) -> bool:
    """Whether two elements of an array share memory; decided exactly."""
    if array.flags.c_contiguous or array.size < 2:
        return False
    extent = array.itemsize
    dimensions = sorted((abs(stride), length) for stride, length in zip(array.strides, array.shape, strict=True))
    for stride, length in dimensions:
        if length > 1:
            if stride < extent:
                break
            extent += stride * (length - 1)
    else:
        return False
    # Interleaved strides: no simple rule decides, so look at the addresses.
    offsets = np.zeros(1, np.int64)
    for stride, length in dimensions:
        offsets = (offsets[:, None] + stride * np.arange(length, dtype=np.int64)).ravel()
    offsets.sort()
    return bool(np.any(np.diff(offsets) < array.itemsize))


def overlaps_partly(out: NDArray[Any], array: NDArray[Any]) -> bool:
    """Whether two arrays share memory without being the same view; interleaved views do not overlap."""
    if not np.may_share_memory(out, array):
        return False
    same = address(out) == address(array) and all(
        a == b or length < 2 for a, b, length in zip(out.strides, array.strides, out.shape, strict=True)
    )
    return not same and np.shares_memory(out, array)


def byte_buffer(workspace: Any, operation: str) -> tuple[int, int]:
    """(bytes, address) of a workspace."""
    if not isinstance(workspace, np.ndarray) or not workspace.flags.c_contiguous or not workspace.flags.writeable:
        raise InvalidProblemError(
            f"{operation}: workspace is {type(workspace).__name__}; expected a contiguous, writeable NumPy array"
        )
    return workspace.nbytes, address(workspace)
