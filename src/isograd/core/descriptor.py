"""What a kernel serves and promises: descriptor, operands, identity, guarantee, and the kernel itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from isograd.runtime.fenv import default_environment


@dataclass(frozen=True, slots=True)
class ErrorBound:
    """A bound on the absolute error of every element of a result.

    `formula` is for people; calling the bound with the operation's inputs evaluates it to an array of the result's
    shape, in binary64 or wider.
    """

    formula: str
    evaluate: Callable[..., Any]

    def __call__(self, **inputs: Any) -> Any:
        """Evaluate the bound for given inputs."""
        with default_environment():
            return self.evaluate(**inputs)


@dataclass(frozen=True, slots=True)
class PrecisionGuarantee:
    """What a plan promises about its results.

    math_precision: the format of intermediate results. accumulator: how sums are formed. deterministic: the same
    inputs give the same bits on every run. batch_invariant: a row's bits do not depend on the rest of the batch.
    order_invariant: nor on the order of the summed axis. bit_stable_*: equal bits on the same, and on all, hardware.
    """

    math_precision: str
    accumulator: str
    deterministic: bool
    bit_stable_on_same_hardware: bool
    batch_invariant: bool
    order_invariant: bool
    bit_stable_across_hardware: bool
    error_bound: ErrorBound


@dataclass(frozen=True, slots=True)
class KernelSku:
    """The identity of a kernel: enough to tell two of them apart in a log."""

    category: str
    op: str
    dtype: str
    aux_dtype: str
    layout: str
    epilogue: str
    arch: str
    backend: str
    precision_guarantee: PrecisionGuarantee


class Operand(NamedTuple):
    """An argument of a plan.

    name, shape, dtype: what it is called and has to be. output: whether it is written. aliases: the inputs that an
    output may be the same view as.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    output: bool = False
    aliases: tuple[str, ...] = ()


class Descriptor(ABC):
    """A problem: what is computed, on which shapes and dtypes. Subclasses are frozen dataclasses with slots.

    `dtype` is the type that a kernel is registered for.
    """

    __slots__ = ()
    dtype: str

    @property
    @abstractmethod
    def operation(self) -> str:
        """The operation's name in the registry."""

    @abstractmethod
    def operands(self) -> tuple[Operand, ...]:
        """The arguments of a validated descriptor: inputs, then outputs."""

    @abstractmethod
    def validated(self) -> Self:
        """Return the descriptor with plain ints and a non-negative axis, or raise what is wrong with it."""


class Kernel(ABC):
    """One implementation of an operation. `registry.register_kernel` makes it available to plans."""

    name: str
    backend: str

    def reject(self, descriptor: Any) -> str | None:
        """Say why this kernel cannot serve a descriptor, or return None if it can."""
        return None

    @abstractmethod
    def sku(self, descriptor: Any) -> KernelSku:
        """The kernel's identity for a descriptor."""

    def workspace_size(self, descriptor: Any) -> int:
        """Bytes of scratch memory that `launch` needs."""
        return 0

    @abstractmethod
    def launch(self, descriptor: Any, arguments: Mapping[str, Any], workspace: Any, stream: Any) -> None:
        """Compute, under the default floating-point environment.

        Arguments are checked already: shapes, dtypes, device, overlap.
        """
