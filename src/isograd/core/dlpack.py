"""Arrays of other libraries by DLPack, bfloat16 among them, which NumPy's own exchange does not know.

A capsule holds a `DLManagedTensor`: the address, device (two int32), rank (int32), and the type of the elements as a
code, bits and lanes. bfloat16 passes NumPy as the 16-bit integers that it is stored in: the code is exchanged in the
capsule, which belongs to who asked for it.
"""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.numerics.reference import BFLOAT16

_UNSIGNED, _BFLOAT = 1, 4


class _Head(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("rank", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
    )


_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _head(capsule: Any) -> _Head:
    return _Head.from_address(_pointer(capsule, b"dltensor"))


class _Exporter:
    """What exports a capsule that is there already."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **options: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def taken(x: Any) -> NDArray[Any]:
    """An array on the CPU as NumPy sees it, without a copy; NumPy's errors where it cannot."""
    try:
        return np.from_dlpack(x)
    except (BufferError, RuntimeError, TypeError):
        capsule = x.__dlpack__()
        head = _head(capsule)
        if (head.code, head.bits, head.lanes) != (_BFLOAT, 16, 1):
            raise
        head.code = _UNSIGNED
        return np.from_dlpack(_Exporter(capsule)).view(BFLOAT16)


def given(array: NDArray[Any]) -> Any:
    """An array for another library's `from_dlpack`."""
    if array.dtype != BFLOAT16:
        return array
    capsule = array.view(np.uint16).__dlpack__()
    _head(capsule).code = _BFLOAT
    return _Exporter(capsule)
