"""The kernels of operations: one function for an operation and a backend, found by the file that it stands in.

    # ops/sparsemax/triton.py
    @launcher("sparsemax")
    def sparsemax(problem, x, y): ...

`problem` is the validated descriptor; arrays come by name, an optional one only where it is there. A file
`ops/<folder>/<backend>.py` announces that the folder's operations have kernels by this backend. It is imported when a
plan for one of them is made: listing kernels imports neither torch nor what is compiled.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

from isograd.core.checks import DTYPES, INDEX_DTYPES
from isograd.core.descriptor import Kernel, KernelSku, PrecisionGuarantee
from isograd.core.operation import Operation
from isograd.errors import InvalidProblemError
from isograd.runtime.fenv import default_environment

F = TypeVar("F", bound=Callable[..., Any])
Reject = Callable[[Any], str | None]


class _Function(NamedTuple):
    launch: Callable[..., Any]
    reject: Reject


functions: dict[tuple[str, str], _Function] = {}  # by operation and module


def launcher(operation: str, reject: Reject = lambda descriptor: None) -> Callable[[F], F]:
    """Let a function compute an operation; `reject` says why it cannot serve a descriptor, or None."""

    def register(function: F) -> F:
        functions[operation, function.__module__] = _Function(function, reject)
        return function

    return register


class Backend(ABC):
    """What compiles and launches kernels on a device: one file in `runtime/`.

    name: of the kernels. device: of the operands. dtypes: those that it computes.
    """

    name: str
    device: str
    dtypes: tuple[str, ...] = (*DTYPES, *INDEX_DTYPES)

    def unavailable(self) -> str | None:
        """Why its kernels cannot run on this machine, or None."""
        return None

    @abstractmethod
    def architecture(self) -> str:
        """The architecture of the devices here."""

    def guarantee(self, promised: PrecisionGuarantee) -> PrecisionGuarantee:
        """What kernels promise here, from what those of the operation promise elsewhere."""
        return promised

    def serves(self, operation: Operation, module: str) -> bool:
        """Whether a module has a function for an operation of its folder."""
        return True

    def kernel(self, operation: Operation, module: str) -> Kernel:
        """The kernel of an operation whose function stands in a module."""
        return OperationKernel(operation, self, module)

    def kernels(self, operation: Operation, module: str | None) -> list[tuple[str, Kernel]]:
        """(dtype, kernel) of all that serve an operation, in the order of choice; `module` where it has a file here."""
        if module is None or not self.serves(operation, module):
            return []
        kernel = self.kernel(operation, module)
        return [(dtype, kernel) for dtype in operation.dtypes if dtype in self.dtypes]

    def on_stream(self, operation: str, stream: Any, arguments: Mapping[str, Any]) -> AbstractContextManager[Any]:
        """A block whose launches run on a stream that was given, or an error."""
        raise InvalidProblemError(f"{operation}: stream is {stream!r}; expected None")


class OperationKernel(Kernel):
    """The kernel of an operation by a backend, from a module that is imported when it is needed."""

    def __init__(self, operation: Operation, backend: Backend, module: str) -> None:
        self.name = self.backend = backend.name
        self._operation, self._backend, self._module = operation, backend, module
        self._run: Callable[..., None] | None = None

    def function(self) -> _Function | None:
        """What launches it, from its module."""
        with default_environment():  # constants are rounded as a module is loaded
            importlib.import_module(self._module)
        return functions.get((self._operation.name, self._module))

    def reject(self, descriptor: Any) -> str | None:
        """Say what is missing on this machine, or what the kernel does not take."""
        if (missing := self._backend.unavailable()) is not None:
            return missing
        found = self.function()
        return f"{self._module} has no kernel for it" if found is None else found.reject(descriptor)

    def sku(self, descriptor: Any) -> KernelSku:
        """The kernel's identity."""
        op, dtype = self._operation, descriptor.dtype
        return KernelSku(
            category=self._module.split(".")[-2],
            op=op.name,
            dtype=dtype,
            aux_dtype=op.work_dtype(dtype),
            layout="strided",
            epilogue="none",
            arch=self._backend.architecture(),
            backend=self._backend.name,
            precision_guarantee=self._backend.guarantee(op.guarantee(dtype)),
        )

    def launch(self, descriptor: Any, arguments: Mapping[str, Any], workspace: Any, stream: Any) -> None:
        """Compute on the backend's device."""
        if self._run is None:
            found = self.function()
            assert found is not None  # a plan was made by `reject`
            self._run = found.launch
        if stream is None:
            self._run(descriptor, **arguments)
            return
        with self._backend.on_stream(descriptor.operation, stream, arguments):
            self._run(descriptor, **arguments)
