"""What the descriptors and kernels of divergences, gumbel_softmax and sparsemax have in common."""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from isograd.errors import InvalidProblemError
from isograd.layout import plan_walk
from isograd.numerics.storage import kernel_type
from isograd.plan import ErrorBound, Kernel, KernelSku, PrecisionGuarantee, real_number

REDUCTIONS = ("mean", "batchmean", "sum", "none")
Shape = tuple[int, ...]


# --- fields of descriptors -------------------------------------------------------------------------------------------
def checked_reduction(operation: str, reduction: Any) -> str:
    """The name of a reduction, or InvalidProblemError."""
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        raise InvalidProblemError(f"{operation}: reduction is {reduction!r}; accepted: {', '.join(REDUCTIONS)}")
    return reduction


def checked_flag(operation: str, argument: str, value: Any) -> bool:
    """A bool, or InvalidProblemError."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidProblemError(f"{operation}: {argument} is {value!r}; it takes True or False")
    return bool(value)


def checked_scale(operation: str, argument: str, value: Any, dtype: str) -> float:
    """A temperature as a float that the work type and its reciprocal can hold, or InvalidProblemError."""
    number = real_number(operation, argument, value)
    limit = 2.0**500 if dtype == "float64" else 2.0**60
    if not (math.isfinite(number) and 1 / limit <= number <= limit):
        raise InvalidProblemError(
            f"{operation}: {argument} is {number!r}; accepted: positive numbers from {1 / limit:.3g} to {limit:.3g}"
        )
    return number


def checked_integer(operation: str, argument: str, value: Any, bits: int) -> int:
    """An integer from 0 to 2**bits - 1, or InvalidProblemError."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value < 1 << bits:
        raise InvalidProblemError(f"{operation}: {argument} is {value!r}; accepted: integers from 0 to 2^{bits} - 1")
    return int(value)


def signed(word: int) -> int:
    """A word of 64 bits as the signed integer that an operator's schema holds.

    A symbol of torch.compile's counts as one of int64, though larger numbers reach its place: no condition may ask.
    """
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)


def work_name(dtype: str) -> str:
    """The name of the type that a storage type is computed in."""
    return "float64" if dtype == "float64" else "float32"


# --- identity of kernels ---------------------------------------------------------------------------------------------
def family_sku(descriptor: Any, category: str, bound: ErrorBound, ordered: bool, backend: str, arch: str) -> KernelSku:
    """The identity of a kernel with what every kernel promises: the bits of the reference.

    ordered: whether the place of an element matters, as it does to noise that belongs to places.
    """
    work = work_name(descriptor.dtype)
    guarantee = PrecisionGuarantee(
        math_precision=work,
        accumulator="exact integers in fixed point",
        deterministic=True,
        bit_stable_on_same_hardware=True,
        batch_invariant=True,
        order_invariant=not ordered,
        bit_stable_across_hardware=True,
        error_bound=bound,
    )
    return KernelSku(
        category, descriptor.operation, descriptor.dtype, work, "strided", "none", arch, backend, guarantee
    )


class NumbaKernel(Kernel):
    """A kernel on the CPU, compiled by Numba; needs no workspace."""

    name = "numba"
    backend = "numba"

    def __init__(self, category: str, bound: Callable[[str, str], ErrorBound], ordered: bool = False) -> None:
        self._category, self._bound, self._ordered = category, bound, ordered

    def sku(self, descriptor: Any) -> KernelSku:
        """The kernel's identity."""
        bound = self._bound(descriptor.operation, descriptor.dtype)
        return family_sku(descriptor, self._category, bound, self._ordered, self.backend, "cpu")


# --- walks over arrays -----------------------------------------------------------------------------------------------
def element_strides(array: Any) -> Shape:
    """The strides of an array in elements."""
    return tuple([s // array.itemsize for s in array.strides])


def work_zero(dtype: str) -> Any:
    """The zero of the work type, as kernels take it."""
    return kernel_type(np.dtype(work_name(dtype)))


@functools.lru_cache(maxsize=4096)
def row_walk(shape: Shape, strides: tuple[Shape, ...]) -> tuple[int, tuple[Any, ...]]:
    """(rows, (shape, strides of every operand)) of the dimensions besides the one that rows lie on."""
    # A last axis of size 1 is left out of every row, so that the walk is over the given dimensions alone.
    walk = plan_walk((*shape, 1), tuple((*s, 0) for s in strides), len(shape))
    return math.prod(shape), (np.array(walk.shape, np.int64), *(np.array(s, np.int64) for s in walk.strides))


@functools.lru_cache(maxsize=4096)
def piece_walk(shape: Shape, strides: tuple[Shape, ...], block: int) -> tuple[int, tuple[Any, ...], int, Shape]:
    """(pieces, (outer shape, outer strides), elements of a row, its strides) for work on one element at a time.

    The dimensions are merged as far as memory allows; a row of what is left is cut into pieces of a block.
    """
    walk = plan_walk((*shape, 1), tuple((*s, 0) for s in strides), len(shape))
    *outer, n = walk.shape
    sizes = np.array(outer or [1], np.int64)
    steps = tuple(np.array(s[:-1] or (0,), np.int64) for s in walk.strides)
    pieces = math.prod(outer) * -(-n // block)
    return pieces, (sizes, *steps), n, tuple(s[-1] for s in walk.strides)
