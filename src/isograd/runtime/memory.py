"""Huge pages for large tensors on the CPU.

The system hands out the pages of new memory one by one, as they are first written; with pages of 4 KiB that takes
several times as long as the writing. NumPy asks for huge pages where it makes an array, torch does not.
"""

import ctypes
import functools
import mmap
from collections.abc import Callable
from typing import Any

_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux alone has it
_LEAST = 1 << 22  # bytes that are worth a system call; NumPy's own limit


@functools.cache
def _madvise() -> Callable[..., int]:
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def with_huge_pages(tensor: Any) -> Any:
    """The tensor, which was just made and holds nothing yet; where there are no huge pages it stays as it is."""
    if _ADVICE is None or not tensor.is_cpu or (size := tensor.numel() * tensor.element_size()) < _LEAST:
        return tensor
    # Whole pages only. What the system answers does not matter: it is advice.
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    _madvise()(start, (tensor.data_ptr() + size - start) // mmap.PAGESIZE * mmap.PAGESIZE, _ADVICE)
    return tensor
