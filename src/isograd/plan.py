"""From the description of a problem to a kernel: descriptor, plan, run.

A descriptor says what is to be computed (operation, shape, dtype, axis) and is hashable. `Plan.select` validates it,
asks the registry for a kernel, and returns a plan that can run any number of times on arrays of any strides. What the
plan promises stands in its `precision_guarantee`. Kernels on the CPU are handed NumPy arrays, tensors there as views
without a copy; kernels on a GPU are handed torch tensors.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from isograd import arrays, encoder, registry
from isograd.errors import (
    BufferTooSmallError,
    DeviceMismatchError,
    InvalidProblemError,
    IsogradError,
    MisalignedOperandError,
    UnsupportedError,
    WorkspaceTooSmallError,
)

MAX_RANK = 8
DTYPES = ("float16", "bfloat16", "float32", "float64")
WORKSPACE_ALIGNMENT = 64


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


@dataclass(frozen=True, slots=True)
class Descriptor(ABC):
    """A problem over one axis of arrays that share a shape and a dtype."""

    kind: str
    shape: tuple[int, ...]
    dtype: str
    axis: int = -1

    kinds: ClassVar[tuple[str, ...]]
    inputs: ClassVar[tuple[str, ...]]
    output: ClassVar[str]

    @property
    @abstractmethod
    def operation(self) -> str:
        """The operation's name in the registry."""

    def validated(self) -> Self:
        """Return the descriptor with plain ints and a non-negative axis, or raise what is wrong with it."""
        if self.kind not in self.kinds:
            raise InvalidProblemError(f"{type(self).__name__}: kind is {self.kind!r}; accepted: {list(self.kinds)}")
        name = self.operation
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:  # a NumPy dtype equals its name
            raise UnsupportedError(f"{name}: dtype is {self.dtype!r}; accepted: {', '.join(DTYPES)}")
        try:
            shape = tuple(operator.index(size) for size in self.shape)
            axis = operator.index(self.axis)
        except TypeError as error:
            raise InvalidProblemError(
                f"{name}: shape is {self.shape!r} and axis is {self.axis!r}; both take integers only"
            ) from error
        rank = len(shape)
        if not 1 <= rank <= MAX_RANK:
            raise InvalidProblemError(f"{name}: shape {shape} has rank {rank}; accepted: rank 1 to {MAX_RANK}")
        if min(shape) < 0:
            raise InvalidProblemError(f"{name}: shape is {shape}; sizes are not negative")
        if not -rank <= axis < rank:
            raise InvalidProblemError(f"{name}: axis is {axis}; shape {shape} accepts -{rank} to {rank - 1}")
        return type(self)(self.kind, shape, self.dtype, axis % rank)


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
        """Compute. Arguments are checked already: shapes, dtypes, device, overlap."""


class Plan:
    """A descriptor with the kernel that serves it. Subclasses name their descriptor."""

    descriptor_type: ClassVar[type[Descriptor]]
    __slots__ = ("_names", "descriptor", "device", "kernel", "sku", "workspace_size")

    def __init__(self, descriptor: Descriptor, device: str, kernel: Kernel) -> None:
        self.descriptor = descriptor
        self.device = device
        self.kernel = kernel
        self.sku = kernel.sku(descriptor)
        self.workspace_size = kernel.workspace_size(descriptor)
        self._names = frozenset((*descriptor.inputs, descriptor.output))

    @classmethod
    def select(cls, descriptor: Any, device: str = "cpu", preference: str | None = None) -> Self:
        """Validate a descriptor and choose a kernel for it.

        `device` is "cpu" or "cuda"; a plan for "cuda" runs on whichever GPU holds its arguments.
        `preference` names a kernel (see `isograd kernels`); it is taken or, if it cannot serve, an UnsupportedError
        says why. InvalidProblemError: the descriptor makes no sense. UnsupportedError: nothing registered serves it.
        """
        if not isinstance(descriptor, cls.descriptor_type):
            raise InvalidProblemError(
                f"{cls.__name__}.select: descriptor is {type(descriptor).__name__}; "
                f"expected {cls.descriptor_type.__name__}"
            )
        checked = descriptor.validated()
        return cls(checked, device, registry.find_kernel(checked, device, preference))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.descriptor!r}, device={self.device!r}, kernel={self.kernel.name!r})"

    @property
    def precision_guarantee(self) -> PrecisionGuarantee:
        """What the plan promises."""
        return self.sku.precision_guarantee

    def can_implement(self, **arguments: Any) -> bool:
        """Whether `run` would accept these arguments."""
        try:
            self._check(arguments)
        except IsogradError:
            return False
        return True

    def run(self, *, workspace: Any = None, stream: Any = None, **arguments: Any) -> None:
        """Check the arguments, then compute into the output array.

        The arguments are NumPy arrays or torch tensors on the CPU, and tensors of one GPU for a plan for "cuda".
        Gradients are not recorded (`isograd.torch` does that). `workspace` is a contiguous byte array or tensor of at
        least `workspace_size` bytes, 64-byte aligned; without one the kernel allocates what it needs. `stream` is the
        device's stream object (`torch.cuda.Stream`), by default the current one of the arguments' device; the CPU has
        none and takes None only. Inside an `Encoder` the launch is recorded instead.
        """
        if encoder.recordings and (recording := encoder.current()) is not None:
            recording.record(self, arguments, workspace, stream)
            return
        operands = self.check(arguments, workspace, stream)
        out = arguments[self.descriptor.output]
        if type(out) is not np.ndarray:
            arrays.mark_written(out)
        self.kernel.launch(self.descriptor, operands, workspace, stream)

    def check(self, arguments: Mapping[str, Any], workspace: Any = None, stream: Any = None) -> Mapping[str, Any]:
        """What `run` checks before it computes; returns the operands as the kernel takes them."""
        operands = self._check(arguments)
        if workspace is not None:
            self._check_workspace(workspace)
        if stream is not None and self.device == "cpu":
            raise InvalidProblemError(
                f"{self.sku.op}: stream is {stream!r}; a CPU plan has no streams and accepts None"
            )
        return operands

    def _check(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        name, descriptor = self.sku.op, self.descriptor
        if arguments.keys() != self._names:
            given = sorted(arguments)
            raise InvalidProblemError(f"{name}: arguments are {given}; expected {sorted(self._names)}")
        plain = True
        for key in descriptor.inputs:
            array = arguments[key]
            plain &= self._check_array(key, array, arguments)
            if array.shape != descriptor.shape:
                raise InvalidProblemError(
                    f"{name}: {key} has shape {tuple(array.shape)}; the plan is for {descriptor.shape}"
                )
        out = arguments[descriptor.output]
        plain &= self._check_array(descriptor.output, out, arguments)
        self._check_output(out, [(key, arguments[key]) for key in descriptor.inputs])
        if plain:
            return arguments
        if self.device == "cpu":
            return {k: a if isinstance(a, np.ndarray) else arrays.numpy_view(a) for k, a in arguments.items()}
        place = out.device
        if any(array.device != place for array in arguments.values()):
            raise DeviceMismatchError(f"{name}: {self._locations(arguments)}; expected one device for all")
        return arguments

    def _check_array(self, key: str, array: Any, arguments: Mapping[str, Any]) -> bool:
        """Raise what is wrong with an argument; whether it is a NumPy array."""
        name = self.sku.op
        device, dtype = arrays.describe(array, name, key)
        if device != self.device:
            raise DeviceMismatchError(f"{name}: {self._locations(arguments)}; the plan is for {self.device}")
        if dtype != self.descriptor.dtype:
            raise InvalidProblemError(f"{name}: {key} has dtype {dtype}; the plan is for {self.descriptor.dtype}")
        if not arrays.is_aligned(array):
            raise MisalignedOperandError(
                f"{name}: {key} has an address or strides that are no multiple of its element size; "
                "copy it into an aligned array"
            )
        return isinstance(array, np.ndarray)

    def _locations(self, arguments: Mapping[str, Any]) -> str:
        names = (*self.descriptor.inputs, self.descriptor.output)
        return ", ".join(f"{key} is on {arrays.location(arguments[key])}" for key in names)

    def _check_output(self, out: Any, inputs: list[tuple[str, Any]]) -> None:
        name, key, shape = self.sku.op, self.descriptor.output, self.descriptor.shape
        if out.shape != shape:
            kind = BufferTooSmallError if arrays.size_of(out.shape) < arrays.size_of(shape) else InvalidProblemError
            raise kind(f"{name}: {key} has shape {tuple(out.shape)}; the result has shape {shape}")
        if not arrays.is_writeable(out):
            raise InvalidProblemError(f"{name}: {key} is read-only; expected a writeable array")
        if arrays.overlaps_itself(out):
            raise InvalidProblemError(f"{name}: {key} has elements that share memory; expected one address for each")
        for other, array in inputs:
            if arrays.overlaps_partly(out, array):
                raise InvalidProblemError(
                    f"{name}: {key} overlaps {other} in part; expected separate memory or exactly the same view"
                )

    def _check_workspace(self, workspace: Any) -> None:
        name = self.sku.op
        available, address = arrays.byte_buffer(workspace, name)
        place = arrays.location(workspace)
        if place.partition(":")[0] != self.device:
            raise DeviceMismatchError(f"{name}: workspace is on {place}; the plan is for {self.device}")
        if available < self.workspace_size:
            raise WorkspaceTooSmallError(
                f"{name}: workspace has {available} bytes; the plan needs {self.workspace_size}"
            )
        if address % WORKSPACE_ALIGNMENT:
            raise MisalignedOperandError(
                f"{name}: workspace starts at {address:#x}; expected a multiple of {WORKSPACE_ALIGNMENT}"
            )
