"""NumPy arrays as torch tensors and back, bit for bit, and comparisons of bits."""

from typing import Any

import ml_dtypes
import numpy as np
import torch

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = ("float32", "float16", "bfloat16")


def tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """A contiguous tensor of an array's elements."""
    copy = np.array(array, order="C")
    if copy.dtype == BFLOAT16:
        return torch.from_numpy(copy.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(copy)


def array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor's elements as an array."""
    if tensor.dtype is torch.bfloat16:
        return np.asarray(tensor.contiguous().view(torch.int16).numpy().view(BFLOAT16))
    return np.asarray(tensor.contiguous().numpy())


def stored(values: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Values rounded to a storage type."""
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
        return narrow.astype(BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype))


def same_bits(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    """Whether two arrays have the same shape, type and bits."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
