"""From the description of a problem to a kernel: descriptor, plan, run.

A descriptor says what is to be computed (operation, shape, dtype, axis) and is hashable. `Plan.select` validates it,
asks the registry for a kernel, and returns a plan that can run any number of times on arrays of any strides. What the
plan promises stands in its `precision_guarantee`. Kernels on the CPU are handed NumPy arrays, tensors there as views
without a copy; kernels on a GPU are handed torch tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import numpy as np

from isograd.core import arrays, encoder, registry
from isograd.core.checks import INDEX_DTYPES
from isograd.core.descriptor import Descriptor, Kernel, KernelSku, Operand, PrecisionGuarantee
from isograd.errors import (
    BufferTooSmallError,
    DeviceMismatchError,
    InvalidProblemError,
    IsogradError,
    MisalignedOperandError,
    WorkspaceTooSmallError,
)
from isograd.runtime import launches
from isograd.runtime.fenv import default_environment

WORKSPACE_ALIGNMENT = 64


class Plan:
    """A descriptor with the kernel that serves it. Subclasses name their descriptor."""

    descriptor_type: ClassVar[type[Descriptor]]
    __slots__ = (
        "_are_arrays", "_are_tensors", "_inputs", "_names", "_outputs", "descriptor", "device", "kernel", "outputs",
        "sku", "workspace_size",
    )  # fmt: skip

    def __init__(self, descriptor: Descriptor, device: str, kernel: Kernel) -> None:
        self.descriptor = descriptor
        self.device = device
        self.kernel = kernel
        self.sku = kernel.sku(descriptor)
        self.workspace_size = kernel.workspace_size(descriptor)
        if not isinstance(self.sku, KernelSku) or not isinstance(self.workspace_size, int) or self.workspace_size < 0:
            raise InvalidProblemError(
                f"{descriptor.operation}: kernel {kernel.name} returns {type(self.sku).__name__} for its identity and "
                f"{self.workspace_size!r} for its workspace; expected a KernelSku and a number of bytes"
            )
        operands = descriptor.operands()
        self._inputs = tuple([o for o in operands if not o.output])
        self._outputs = tuple([o for o in operands if o.output])
        self._names = frozenset([o.name for o in operands])
        self.outputs = tuple([o.name for o in self._outputs])
        # Made when an array or a tensor is met, and shared with the plans of calls.
        self._are_arrays: list[Callable[[Mapping[str, Any]], bool]] = []
        self._are_tensors: list[Callable[[Mapping[str, Any], str], bool]] = []

    @classmethod
    def select(cls, descriptor: Any, device: str = "cpu", preference: str | None = None) -> Self:
        """Validate a descriptor and choose a kernel for it.

        `device` is "cpu", "cuda" or "mps"; a plan for "cuda" runs on whichever GPU holds its arguments.
        `preference` names a kernel (see `isograd kernels`); it is taken or, if it cannot serve, an UnsupportedError
        says why. InvalidProblemError: the descriptor makes no sense. UnsupportedError: nothing registered serves it.
        """
        if not isinstance(descriptor, cls.descriptor_type):
            raise InvalidProblemError(
                f"{cls.__name__}.select: descriptor is {type(descriptor).__name__}; "
                f"expected {cls.descriptor_type.__name__}"
            )
        with default_environment():
            checked = descriptor.validated()
        return cls(checked, device, registry.find_kernel(checked, device, preference))

    def of_call(self, descriptor: Descriptor) -> Self:
        """The plan for a validated descriptor that differs in numbers alone which no kernel is chosen by."""
        plan = object.__new__(type(self))
        for name in Plan.__slots__:
            setattr(plan, name, getattr(self, name))
        plan.descriptor = descriptor
        return plan

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

        The arguments are NumPy arrays or torch tensors on the CPU, and tensors of one GPU for "cuda" and "mps".
        Gradients are not recorded (`isograd.torch` does that). `workspace` is a contiguous byte array or tensor of at
        least `workspace_size` bytes, 64-byte aligned; without one the kernel allocates what it needs. `stream` is the
        device's stream object (`torch.cuda.Stream`), by default the current one of the arguments' device; the CPU has
        none and takes None only. Inside an `Encoder` the launch is recorded instead.
        """
        if encoder.recordings and (recording := encoder.current()) is not None:
            recording.record(self, arguments, workspace, stream)
            return
        operands = self.check(arguments, workspace, stream)
        self.mark_written(arguments)
        self.launch(operands, workspace, stream)

    def launch(self, operands: Mapping[str, Any], workspace: Any, stream: Any) -> None:
        """Let the kernel compute on checked operands.

        The caller's thread is under the default floating-point environment meanwhile, so that what a kernel does in
        Python and NumPy before and after its compiled code is as exact as that.
        """
        if self.device != "cpu":
            launches.running(self.kernel)
        with default_environment():
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

    def mark_written(self, arguments: Mapping[str, Any]) -> None:
        """Tell torch's autograd which arguments have new contents."""
        for name in self.outputs:
            if type(arguments[name]) is not np.ndarray:
                arrays.mark_written(arguments[name])

    def _check(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        name = self.sku.op
        if arguments.keys() != self._names:
            given = sorted(arguments)
            raise InvalidProblemError(f"{name}: arguments are {given}; expected {sorted(self._names)}")
        if type(arguments[self.outputs[0]]) is np.ndarray:
            if self.device == "cpu" and self._holds_for_arrays(arguments):
                return arguments
        elif self._holds_for_tensors(arguments):
            if self.device == "cpu":
                return {key: arrays.numpy_view(tensor) for key, tensor in arguments.items()}
            return arguments
        plain = True
        for operand in self._inputs:
            array = arguments[operand.name]
            plain &= self._check_array(operand, array, arguments)
            if array.shape != operand.shape:
                raise InvalidProblemError(
                    f"{name}: {operand.name} has shape {tuple(array.shape)}; expected {operand.shape}"
                )
        for operand in self._outputs:
            plain &= self._check_array(operand, arguments[operand.name], arguments)
            self._check_output(operand, arguments)
        if plain:
            return arguments
        if self.device == "cpu":
            return {
                k: a.view(np.ndarray) if isinstance(a, np.ndarray) else arrays.numpy_view(a)
                for k, a in arguments.items()
            }
        place = arguments[self.outputs[0]].device
        if any(array.device != place for array in arguments.values()):
            raise DeviceMismatchError(f"{name}: {self._locations(arguments)}; expected one device for all")
        return arguments

    def _holds_for_arrays(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a short look suffices: the arguments are contiguous arrays, as the plan asks."""
        if not self._are_arrays:
            self._are_arrays.append(arrays.array_check((*self._inputs, *self._outputs)))
        return self._are_arrays[0](arguments)

    def _holds_for_tensors(self, arguments: Mapping[str, Any]) -> bool:
        """The same for tensors."""
        if not arrays.is_tensor(arguments[self.outputs[0]]):
            return False
        if not self._are_tensors:
            self._are_tensors.append(arrays.tensor_check((*self._inputs, *self._outputs)))
        return self._are_tensors[0](arguments, self.device)

    def _check_array(self, operand: Operand, array: Any, arguments: Mapping[str, Any]) -> bool:
        """Raise what is wrong with an argument; whether it is a NumPy array and none of a subclass."""
        name, key = self.sku.op, operand.name
        if operand.dtype == "bool":
            device, dtype = arrays.describe_mask(array, name, key)
        else:
            device, dtype = arrays.describe(array, name, key, operand.dtype in INDEX_DTYPES)
        if device != self.device:
            raise DeviceMismatchError(f"{name}: {self._locations(arguments)}; expected all on {self.device}")
        if dtype != operand.dtype:
            raise InvalidProblemError(f"{name}: {key} has dtype {dtype}; expected {operand.dtype}")
        if not arrays.is_aligned(array):
            raise MisalignedOperandError(
                f"{name}: {key} has an address or strides that are no multiple of its element size; "
                "copy it into an aligned array"
            )
        return type(array) is np.ndarray

    def _locations(self, arguments: Mapping[str, Any]) -> str:
        names = [operand.name for operand in (*self._inputs, *self._outputs)]
        return ", ".join(f"{key} is on {arrays.location(arguments[key])}" for key in names)

    def _check_output(self, operand: Operand, arguments: Mapping[str, Any]) -> None:
        name, key, shape = self.sku.op, operand.name, operand.shape
        out = arguments[key]
        if out.shape != shape:
            kind = BufferTooSmallError if arrays.size_of(out.shape) < arrays.size_of(shape) else InvalidProblemError
            raise kind(f"{name}: {key} has shape {tuple(out.shape)}; the result has shape {shape}")
        if not arrays.is_writeable(out):
            raise InvalidProblemError(f"{name}: {key} is read-only; expected a writeable array")
        if arrays.overlaps_itself(out):
            raise InvalidProblemError(f"{name}: {key} has elements that share memory; expected one address for each")
        for other in self._inputs:
            if other.name in operand.aliases:
                if arrays.overlaps_partly(out, arguments[other.name]):
                    raise InvalidProblemError(
                        f"{name}: {key} overlaps {other.name} in part; expected separate memory or exactly the same "
                        "view"
                    )
            elif arrays.overlaps(out, arguments[other.name]):
                raise InvalidProblemError(f"{name}: {key} overlaps {other.name}; expected separate memory")
        for other in self._outputs:
            if other is operand:
                break
            if arrays.overlaps(out, arguments[other.name]):
                raise InvalidProblemError(f"{name}: {key} overlaps {other.name}; expected separate memory")

    def _check_workspace(self, workspace: Any) -> None:
        name = self.sku.op
        available, address = arrays.byte_buffer(workspace, name)
        place = arrays.location(workspace)
        if place.partition(":")[0] != self.device:
            raise DeviceMismatchError(f"{name}: workspace is on {place}; expected {self.device}")
        if available < self.workspace_size:
            raise WorkspaceTooSmallError(
                f"{name}: workspace has {available} bytes; the plan needs {self.workspace_size}"
            )
        if address % WORKSPACE_ALIGNMENT:
            raise MisalignedOperandError(
                f"{name}: workspace starts at {address:#x}; expected a multiple of {WORKSPACE_ALIGNMENT}"
            )
