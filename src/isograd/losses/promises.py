"""What the descriptors and kernels of divergences have in common."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from isograd.errors import InvalidProblemError
from isograd.numerics.storage import compute_dtype
from isograd.plan import ErrorBound, Kernel, KernelSku, PrecisionGuarantee, real_number

REDUCTIONS = ("mean", "batchmean", "sum", "none")


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


# --- identity of kernels ---------------------------------------------------------------------------------------------
def family_sku(descriptor: Any, category: str, bound: ErrorBound, backend: str, arch: str) -> KernelSku:
    """The identity of a kernel with what every kernel promises: the bits of the reference."""
    work = compute_dtype(descriptor.dtype)
    guarantee = PrecisionGuarantee(
        math_precision=work,
        accumulator="exact integers in fixed point",
        deterministic=True,
        bit_stable_on_same_hardware=True,
        batch_invariant=True,
        order_invariant=True,
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

    def __init__(self, category: str, bound: Callable[[str, str], ErrorBound]) -> None:
        self._category, self._bound = category, bound

    def sku(self, descriptor: Any) -> KernelSku:
        """The kernel's identity."""
        bound = self._bound(descriptor.operation, descriptor.dtype)
        return family_sku(descriptor, self._category, bound, self.backend, "cpu")
