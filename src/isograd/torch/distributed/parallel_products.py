"""Products of 16-bit integers (rule 10) of matrices that are spread over ranks, with the bits of whole ones.

What ranks exchange are maxima of exponents and exact integers: the balance of a weight needs the exponents of all of
its rows, and where the contracted axis is spread its sums are added before they are rounded. `products_cpu.py` and
`products_gpu.py` have what lies between.
"""

import math
from types import ModuleType

import torch
from torch import Tensor

from isograd.torch.distributed import products_cpu
from isograd.torch.distributed.vocab_parts import Part
from isograd.torch.tensors import empty


def of(x: Tensor) -> ModuleType:
    """The kernels for a tensor's device."""
    if x.is_cpu:
        return products_cpu
    from isograd.torch.distributed import products_gpu

    return products_gpu


def row_keys(part: Part, x: Tensor) -> Tensor:
    """The keys of rows of which every rank has a piece."""
    return part.largest(of(x).keys(x))


def spread_balance(part: Part, weight: Tensor) -> Tensor:
    """The part of a weight's balance for the rows of it that this rank has."""
    kernels = of(weight)
    everyone = torch.full((part.classes,), kernels.NONE, dtype=kernels.KEYS, device=weight.device)
    here = slice(part.first, part.first + weight.shape[0])
    everyone[here] = kernels.keys(weight)
    found: Tensor = kernels.balance_from(part.largest(everyone))
    return found[here].clone()


def whole_balance(part: Part, weight: Tensor) -> Tensor:
    """A weight's balance where every rank has a piece of each of its rows."""
    found: Tensor = of(weight).balance_from(row_keys(part, weight))
    return found


def tokens_balance(a: Tensor, b: Tensor) -> Tensor:
    """The balance of a product over tokens, of a's columns and b's rows; either is a matrix or has its keys."""
    kernels = of(a)
    x = kernels.keys(a, columns=True) if a.dim() == 2 else a
    found: Tensor = kernels.balance_from_tokens(x, kernels.keys(b) if b.dim() == 2 else b)
    return found


def product(a: Tensor, b: Tensor, balance: Tensor) -> Tensor:
    """[M, K] times [K, N] with a balance, of what this rank has."""
    found: Tensor = of(a).product(a, b, balance)
    return found


def summed_product(part: Part, a: Tensor, b: Tensor, balance: Tensor) -> Tensor:
    """The product whose contracted axis is spread over the ranks, whole on each of them.

    A GPU is waited for to learn whether all that was multiplied is finite.
    """
    if part.group is None:
        return product(a, b, balance)
    if not a.shape[0] * b.shape[1]:
        return empty((a.shape[0], b.shape[1]), a)
    own = of(a).Pieces(a, b, balance)
    greatest = part.largest(own.keys())
    found: Tensor = own.rounded(part.added(own.sums(greatest)))
    if greatest[-1]:
        found = _with_special(part.added(_special_products(a.double(), b.double())), found)
    return found


def _special_products(a: Tensor, b: Tensor) -> Tensor:
    """How many products of an entry are infinite, their signs added, how many are NaN, int64 [3, M, N].

    A product of indicators counts exactly in binary64, in any order.
    """
    (a_infinite, a_sign, a_zero, a_nan), (b_infinite, b_sign, b_zero, b_nan) = (
        (x.isinf().double(), torch.where(x.isnan(), 0.0, x.sign()), (x == 0).double(), x.isnan()) for x in (a, b)
    )
    count = a_infinite @ b_sign.abs() + a_sign.abs() @ b_infinite
    signed = (a_infinite * a_sign) @ b_sign + a_sign @ (b_infinite * b_sign)
    invalid = a_infinite @ b_zero + a_zero @ b_infinite + a_nan.sum(1)[:, None] + b_nan.sum(0)
    return torch.stack([count, signed, invalid]).long()


def _with_special(products: Tensor, finite: Tensor) -> Tensor:
    """`finite` with the entries replaced whose products are not all finite."""
    count, signed, invalid = products
    # Made on the CPU and copied: devices round a NaN to different bits.
    nan, inf, minus = (torch.tensor(v, dtype=finite.dtype).to(finite.device) for v in (math.nan, math.inf, -math.inf))
    found = torch.where(count > 0, torch.where(signed < 0, minus, inf), finite)
    return torch.where((invalid > 0) | (signed.abs() < count), nan, found)


def as_rows(x: Tensor) -> Tensor:
    """[..., features] as a matrix."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
