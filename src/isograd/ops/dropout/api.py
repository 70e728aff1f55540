"""What a user calls: dropout."""

from __future__ import annotations

from isograd.core import call
from isograd.ops.dropout.operation import DROPOUT
from isograd.typing import ArrayT

_dropout = call.function(DROPOUT)


def dropout(x: ArrayT, p: float = 0.5, *, seed: int, offset: int = 0) -> ArrayT:
    """Zero every element with probability p, and multiply the others by `1 / (1 - p)`.

    x: float16, bfloat16, float32 or float64, rank 1 to 8, any strides: a NumPy array, a torch tensor, an array with
    DLPack or a tape variable; the result is of the same kind. p: from 0 to 1. seed, offset: from 0 to 2^64 - 1;
    element i of x, in C order, goes by number `offset + i` of the sequence of `seed`, on every device and in every
    dtype. So a part of a batch has the mask that it has in the whole one, if offset is the number of elements before
    it; multiples of 4 are the fastest. There is no default seed, which would drop the same at every call.

    What is dropped is +0 whatever it was; the gradient is `dropout` of the upstream gradient with the same arguments.
    Bits and bound in `docs/arithmetic.md`, rule 22.

    Raises InvalidProblemError for a wrong rank, p, seed or offset, UnsupportedError for another dtype.
    """
    result: ArrayT = _dropout((x,), (p, seed, offset, False))
    return result
