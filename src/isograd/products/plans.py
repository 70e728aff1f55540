"""Descriptor and plan of matrix products, what their kernels promise, and the kernels.

The products of 16-bit integers are `matmul`, the others `matmul_wide` (rule 10). `isograd.matmul`, the tape and torch
call what these kernels call, without a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from isograd.core.arrays import numpy_dtype
from isograd.core.checks import DTYPES, checked_dtype, checked_shape
from isograd.core.descriptor import Descriptor, ErrorBound, Kernel, KernelSku, Operand, PrecisionGuarantee
from isograd.core.plan import Plan
from isograd.core.registry import register_kernel
from isograd.devices.cuda import TritonKernel, architecture
from isograd.errors import InvalidProblemError, UnsupportedError
from isograd.numerics import int16
from isograd.numerics.matmul import MAX_TERMS, checked_precision, matmul, matmul_error_bound

BALANCES = ("", "other", "tokens")
OPERATIONS = {"int16": "matmul", "wide": "matmul_wide"}
INT16_DTYPES = ("float16", "bfloat16", "float32")
_FORMULAS = {
    "int16": "2^-16 (2^E Σ|b| + 2^F Σ|a|) + (2^-32 K + 2^-23) 2^(E + F) + 2^-24 |c| + 0.5 ulp(c) in 16 bits",
    "wide": "K max|a| max|b| 2^-50 (float64: 2^-67) + 0.5 ulp(c)",
}


@dataclass(frozen=True, slots=True)
class MatmulDescriptor(Descriptor):
    """c = a @ b without an order.

    a_shape, b_shape: [..., M, K] and [..., K, N], rank 2 to 8, whose batches broadcast to that of c [..., M, N]. dtype:
    of all three. precision: "int16" or "wide", None for the dtype's own: that of `isograd.matmul`. balance, of two
    matrices by "int16": "" for none; "other", by b, as in a linear layer; "tokens", along whose axis the product is.
    """

    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]
    dtype: str
    precision: str | None = None
    balance: str = ""

    @property
    def operation(self) -> str:
        """`matmul`, by 16-bit integers, or `matmul_wide`."""
        return OPERATIONS[checked_precision(numpy_dtype(self.dtype), self.precision)]

    @property
    def c_shape(self) -> tuple[int, ...]:
        """The shape of the product."""
        batch = np.broadcast_shapes(self.a_shape[:-2], self.b_shape[:-2])
        return (*batch, self.a_shape[-2], self.b_shape[-1])

    def operands(self) -> tuple[Operand, ...]:
        """A and b, then c."""
        return (
            Operand("a", self.a_shape, self.dtype),
            Operand("b", self.b_shape, self.dtype),
            Operand("c", self.c_shape, self.dtype, True),
        )

    def validated(self) -> Self:
        """Return the descriptor with plain ints and a precision, or raise what is wrong with it."""
        dtype = checked_dtype("matmul", self.dtype)
        a_shape, b_shape = (
            checked_shape("matmul", name, shape, 2)
            for name, shape in (("a_shape", self.a_shape), ("b_shape", self.b_shape))
        )
        precision = checked_precision(numpy_dtype(dtype), self.precision)
        given = f"a_shape is {a_shape} and b_shape {b_shape}"
        if a_shape[-1] != b_shape[-2]:
            raise InvalidProblemError(f"matmul: {given}; expected as many columns of a as rows of b")
        if a_shape[-1] > MAX_TERMS:
            raise UnsupportedError(f"matmul: {given}; supported: up to {MAX_TERMS} elements to add")
        if self.balance not in BALANCES or (self.balance and (precision != "int16" or len(a_shape + b_shape) > 4)):
            raise InvalidProblemError(
                f"matmul: balance is {self.balance!r}; accepted: '', and of two matrices in int16 'other', 'tokens'"
            )
        try:
            np.broadcast_shapes(a_shape[:-2], b_shape[:-2])
        except ValueError:
            raise InvalidProblemError(f"matmul: {given}; their batches do not broadcast") from None
        return type(self)(a_shape, b_shape, dtype, precision, self.balance)


class MatmulPlan(Plan):
    """A kernel for a matrix product: `plan.run(a=a, b=b, c=c)`."""

    descriptor_type = MatmulDescriptor
    __slots__ = ()


def balanced(balance: str, a: Any, b: Any) -> Any:
    """The balance of two matrices by its definition, int64 [K], or None."""
    if not balance:
        return None
    return int16.balance_of(b) if balance == "other" else int16.balance_between(a, b)


def _bound(precision: str) -> ErrorBound:
    def evaluate(a: Any, b: Any, balance: str = "") -> Any:
        return matmul_error_bound(a, b, precision, balanced(balance, a, b))

    return ErrorBound(_FORMULAS[precision], evaluate)


_BOUNDS = {precision: _bound(precision) for precision in OPERATIONS}


def _sku(descriptor: MatmulDescriptor, backend: str, arch: str) -> KernelSku:
    precision = checked_precision(numpy_dtype(descriptor.dtype), descriptor.precision)
    guarantee = PrecisionGuarantee(
        math_precision="16-bit integers" if precision == "int16" else "slices of 18 bits",
        accumulator="exact integers",
        deterministic=True,
        bit_stable_on_same_hardware=True,
        batch_invariant=True,
        order_invariant=True,
        bit_stable_across_hardware=True,
        error_bound=_BOUNDS[precision],
    )
    return KernelSku(
        category="products",
        op=descriptor.operation,
        dtype=descriptor.dtype,
        aux_dtype="float64" if descriptor.dtype == "float64" else "float32",
        layout="strided",
        epilogue="none",
        arch=arch,
        backend=backend,
        precision_guarantee=guarantee,
    )


class IntegerProduct(Kernel):
    """The product of 16-bit integers on the CPU: that of `isograd.matmul`, by the processor's best instructions."""

    name = "numba"
    backend = "numba"
    engine: str | None = None

    def sku(self, descriptor: MatmulDescriptor) -> KernelSku:
        """The kernel's identity."""
        return _sku(descriptor, self.backend, "cpu")

    def launch(self, descriptor: MatmulDescriptor, arguments: Mapping[str, Any], workspace: Any, stream: Any) -> None:
        """Compute on the library's threads; needs no workspace."""
        from isograd.numerics import numba_int16

        a, b = arguments["a"], arguments["b"]
        balances = {"other": lambda: numba_int16.balance_of(b), "tokens": lambda: numba_int16.balance_between(a, b)}
        balance = balances[descriptor.balance]() if descriptor.balance else None
        arguments["c"][...] = matmul(a, b, "int16", balance, self.engine)


class BinaryProduct(IntegerProduct):
    """The same integers multiplied by NumPy's BLAS in binary64, exactly: what serves where nothing else does."""

    name = engine = "blas"


class WideProduct(Kernel):
    """The product of slices, by NumPy's in binary64."""

    name = "blas"
    backend = "numpy"

    def sku(self, descriptor: MatmulDescriptor) -> KernelSku:
        """The kernel's identity."""
        return _sku(descriptor, self.backend, "cpu")

    def launch(self, descriptor: MatmulDescriptor, arguments: Mapping[str, Any], workspace: Any, stream: Any) -> None:
        """Compute; needs no workspace."""
        arguments["c"][...] = matmul(arguments["a"], arguments["b"], "wide")


class TritonProduct(TritonKernel):
    """The product of 16-bit integers on a GPU; scratch memory comes from torch's allocator."""

    def sku(self, descriptor: MatmulDescriptor) -> KernelSku:
        """The kernel's identity."""
        return _sku(descriptor, self.backend, architecture())

    def compute(self, descriptor: MatmulDescriptor, arguments: Mapping[str, Any], workspace: Any) -> None:
        """Launch on the current stream of the tensors' device."""
        from isograd.products import cuda

        a, b, c = (arguments[name] for name in "abc")
        out = c if c.is_contiguous() else c.new_empty(c.shape)
        balance = None
        if descriptor.balance and c.numel() and a.shape[-1]:
            balance = cuda.balance_of(b) if descriptor.balance == "other" else cuda.balance_between(a, b)
        cuda.product(a, b, out, balance)
        if out is not c:
            c.copy_(out)


for _dtype in INT16_DTYPES:
    register_kernel("matmul", "cpu", _dtype, IntegerProduct())
    register_kernel("matmul", "cpu", _dtype, BinaryProduct())
    register_kernel("matmul", "cuda", _dtype, TritonProduct())
for _dtype in DTYPES:
    register_kernel("matmul_wide", "cpu", _dtype, WideProduct())
