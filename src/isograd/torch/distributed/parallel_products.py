"""Products of 16-bit integers (rule 10) of matrices that are spread over ranks, with the bits of whole ones.

What ranks exchange are maxima of exponents and exact integers: the balance of a weight needs the exponents of all of
its rows, and where the contracted axis is spread its sums are added before they are rounded.
"""

import math

import numpy as np
import torch
from torch import Tensor

from isograd.core import arrays
from isograd.numerics import int16, numba_int16
from isograd.numerics.matmul import matmul, special_products, with_special
from isograd.numerics.reference import narrow
from isograd.runtime.fenv import default_environment
from isograd.torch.distributed.vocab_parts import Part
from isograd.torch.tensors import empty

Integers = int16.Integers


def _exponents(x: Tensor, columns: bool = False) -> Integers:
    """The greatest exponents of a matrix' rows, or of its columns."""
    if not x.numel():
        return np.full(x.shape[1 if columns else 0], int16.ZERO)
    with default_environment():
        found: Integers = numba_int16.exponents(arrays.numpy_view(x), columns)
    return found


def row_exponents(part: Part, x: Tensor) -> Integers:
    """Those of rows of which every rank has a piece."""
    return part.largest(torch.from_numpy(_exponents(x))).numpy()


def spread_balance(part: Part, weight: Tensor) -> Integers:
    """The part of a weight's balance for the rows of it that this rank has."""
    everyone = torch.full((part.classes,), int16.ZERO, dtype=torch.int64)
    here = slice(part.first, part.first + weight.shape[0])
    everyone[here] = torch.from_numpy(_exponents(weight))
    return int16.balance_from(part.largest(everyone).numpy())[here]


def whole_balance(part: Part, weight: Tensor) -> Integers:
    """A weight's balance where every rank has a piece of each of its rows."""
    return int16.balance_from(row_exponents(part, weight))


def tokens_balance(a: Integers | Tensor, b: Integers | Tensor) -> Integers:
    """The balance of a product over tokens, of a's columns and b's rows, or of their exponents."""
    x = _exponents(a, columns=True) if isinstance(a, Tensor) else a
    return int16.balance_from_tokens(x, _exponents(b) if isinstance(b, Tensor) else b)


def product(a: Tensor, b: Tensor, balance: Integers) -> Tensor:
    """[M, K] times [K, N] with a balance, of what this rank has."""
    out = empty((a.shape[0], b.shape[1]), a)
    arrays.numpy_view(out)[...] = matmul(arrays.numpy_view(a), arrays.numpy_view(b), "int16", balance)
    return out


def summed_product(part: Part, a: Tensor, b: Tensor, balance: Integers) -> Tensor:
    """The product whose contracted axis is spread over the ranks, whole on each of them."""
    out = empty((a.shape[0], b.shape[1]), a)
    if not out.numel():
        return out
    left, right, c = (arrays.numpy_view(t) for t in (a, b, out))
    with default_environment(), np.errstate(all="ignore"):
        own = numba_int16.Part(left, right, balance)
        agreed = torch.from_numpy(np.concatenate([*own.exponents, [not own.finite]]).astype(np.int64))
        *exponents, wild = part.largest(agreed).numpy()
        for mine, theirs in zip(own.exponents, np.split(np.asarray(exponents), out.shape[:1]), strict=True):
            mine[...] = theirs
        z = part.added(torch.from_numpy(own.sums())).numpy()
        own.scale(z, c)
        if wild:
            kinds = special_products(left.astype(np.float64), right.astype(np.float64))
            kinds = part.added(torch.from_numpy(kinds)).numpy()
            c[...] = narrow(with_special(kinds, c.astype(np.float64)), c.dtype)
    return out


def as_rows(x: Tensor) -> Tensor:
    """[..., features] as a matrix."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
