"""As `products_cpu.py` on GPUs, on the current stream of the tensors' device and without waiting.

Keys are words of lines (`products/triton_slices.py`), int32, whose two last bits are those of any part. Balances are
int32 too.
"""

from typing import Final

import torch
from torch import Tensor

from isograd.numerics import int16
from isograd.products import cuda
from isograd.torch.tensors import empty

KEYS: Final = torch.int32
NONE: Final = 4 * int16.ZERO  # the key of a line without a number


def keys(x: Tensor, columns: bool = False) -> Tensor:
    """Those of a matrix' rows, or of its columns."""
    return cuda.words_of(x, 0 if columns else 1)


def balance_from(found: Tensor) -> Tensor:
    """The balance that a weight asks for, from the keys of its rows."""
    return cuda.balance_from(found[None])


def balance_from_tokens(a: Tensor, b: Tensor) -> Tensor:
    """The balance of a product over tokens, from the keys of a's columns and of b's rows."""
    return cuda.balance_from_tokens(a[None], b[None])


def product(a: Tensor, b: Tensor, balance: Tensor) -> Tensor:
    """[M, K] times [K, N] with a balance."""
    out = empty((a.shape[0], b.shape[1]), a)
    cuda.product(a, b, out, balance)
    return out


class Pieces:
    """The product of parts of the contracted axis, a [M, K] and b [K, N] with a balance."""

    def __init__(self, a: Tensor, b: Tensor, balance: Tensor) -> None:
        self._a, self._b, self._balance = a, b, balance
        self._words: tuple[Tensor, ...] = ()

    def keys(self) -> Tensor:
        """The keys of rows and of columns, and whether anything is not finite."""
        words = torch.cat([cuda.words_of(self._a, 1, self._balance), cuda.words_of(self._b, 0, self._balance)])
        return torch.cat([words, (words & 3).amax()[None]])

    def sums(self, greatest: Tensor) -> Tensor:
        """The exact sums, int64, by the greatest keys of all parts."""
        m, n, terms = self._a.shape[0], self._b.shape[1], self._a.shape[1]
        rows, columns = greatest[:m], greatest[m : m + n].clone()  # aligned as if it were alone
        x, y = cuda.sliced_by(self._a, 1, rows, self._balance), cuda.sliced_by(self._b, 0, columns, self._balance)
        self._words = x.words, y.words
        return cuda.sums_of(x, y, terms)

    def rounded(self, sums: Tensor) -> Tensor:
        """The product of what is finite, from the sums over all parts."""
        out = empty((self._a.shape[0], self._b.shape[1]), self._a)
        rows, columns = self._words
        cuda.rounded(sums, rows, columns, out)
        return out
