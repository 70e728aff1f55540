"""Kernels on Apple GPUs, in Metal."""

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from isograd.core.descriptor import Kernel, PrecisionGuarantee
from isograd.core.kernel import Backend, OperationKernel, functions
from isograd.core.operation import Operation
from isograd.devices import metal


class MetalOperation(metal.MetalKernel, OperationKernel):
    """A kernel whose function yields launches of the folder's `metal_kernels.metal`."""

    def __init__(self, operation: Operation, backend: Backend, module: str) -> None:
        super().__init__(operation, backend, module)
        self.family = "/".join(module.split(".")[1:-1])

    def launches(self, descriptor: Any, arguments: Mapping[str, Any]) -> Iterator[metal.Launch]:
        """The launches that the function yields."""
        found = self.function()
        assert found is not None  # a plan was made by `reject`
        launches: Any = found.launch(descriptor, **arguments)
        yield from launches


class Metal(Backend):
    """torch's stream of the device; operands are torch tensors on "mps"."""

    name = "metal"
    device = "mps"
    dtypes = metal.DTYPES

    def architecture(self) -> str:
        """One name for all."""
        return "apple"

    def guarantee(self, promised: PrecisionGuarantee) -> PrecisionGuarantee:
        """Without that of equal bits on all hardware."""
        return metal.guarantee(promised, integers=False)

    def serves(self, operation: Operation, module: str) -> bool:
        """Whether the module, which loads fast, has a function; few operations have kernels here."""
        importlib.import_module(module)
        return (operation.name, module) in functions

    def kernel(self, operation: Operation, module: str) -> Kernel:
        """The kernel of an operation whose function stands in a module."""
        return MetalOperation(operation, self, module)


BACKEND = Metal()
