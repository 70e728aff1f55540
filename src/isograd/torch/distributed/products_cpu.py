"""Products of matrices that are spread over ranks on the CPU: what lies between two collectives.

Keys of lines are the greatest exponents of their elements, int64; balances are int64 too.
"""

from typing import Final

import numpy as np
import torch
from torch import Tensor

from isograd.core import arrays
from isograd.numerics import int16, numba_int16
from isograd.numerics.matmul import matmul
from isograd.runtime.fenv import default_environment
from isograd.torch.tensors import empty

KEYS: Final = torch.int64
NONE: Final = int16.ZERO  # the key of a line without a number


def keys(x: Tensor, columns: bool = False) -> Tensor:
    """Those of a matrix' rows, or of its columns."""
    if not x.numel():
        return x.new_full((x.shape[1 if columns else 0],), NONE, dtype=KEYS)
    with default_environment():
        return torch.from_numpy(numba_int16.exponents(arrays.numpy_view(x), columns))


def balance_from(found: Tensor) -> Tensor:
    """The balance that a weight asks for, from the keys of its rows."""
    return torch.from_numpy(int16.balance_from(found.numpy()))


def balance_from_tokens(a: Tensor, b: Tensor) -> Tensor:
    """The balance of a product over tokens, from the keys of a's columns and of b's rows."""
    return torch.from_numpy(int16.balance_from_tokens(a.numpy(), b.numpy()))


def product(a: Tensor, b: Tensor, balance: Tensor) -> Tensor:
    """[M, K] times [K, N] with a balance."""
    out = empty((a.shape[0], b.shape[1]), a)
    arrays.numpy_view(out)[...] = matmul(arrays.numpy_view(a), arrays.numpy_view(b), "int16", balance.numpy())
    return out


class Pieces:
    """The product of parts of the contracted axis, a [M, K] and b [K, N] with a balance."""

    def __init__(self, a: Tensor, b: Tensor, balance: Tensor) -> None:
        self._shape, self._like = (a.shape[0], b.shape[1]), a
        with default_environment():
            self._own = numba_int16.Part(arrays.numpy_view(a), arrays.numpy_view(b), balance.numpy())

    def keys(self) -> Tensor:
        """The keys of rows and of columns, and whether anything is not finite."""
        found = np.concatenate([*self._own.exponents, [not self._own.finite]])
        return torch.from_numpy(found.astype(np.int64))

    def sums(self, greatest: Tensor) -> Tensor:
        """The exact sums, int64, by the greatest keys of all parts."""
        parts = np.split(greatest[:-1].numpy(), self._shape[:1])
        for mine, theirs in zip(self._own.exponents, parts, strict=True):
            mine[...] = theirs
        with default_environment(), np.errstate(all="ignore"):
            return torch.from_numpy(self._own.sums())

    def rounded(self, sums: Tensor) -> Tensor:
        """The product of what is finite, from the sums over all parts."""
        out = empty(self._shape, self._like)
        with default_environment():
            self._own.scale(sums.numpy(), arrays.numpy_view(out))
        return out
