"""Kernels for MLX arrays, in Metal."""

from collections.abc import Mapping
from typing import Any

from isograd.backends.metal import Metal
from isograd.core.descriptor import Kernel
from isograd.core.kernel import Backend, OperationKernel
from isograd.core.operation import Operation
from isograd.devices import mlx_kernel


class MlxOperation(mlx_kernel.MetalKernel, OperationKernel):
    """A kernel whose function returns new arrays; it is handed `call` of `isograd.devices.mlx_kernel.MetalKernel`."""

    def __init__(self, operation: Operation, backend: Backend, module: str) -> None:
        super().__init__(operation, backend, module)
        self.family = "/".join(module.split(".")[1:-1])

    def evaluate(self, descriptor: Any, inputs: Mapping[str, Any]) -> tuple[Any, ...]:
        """What the function returns."""
        found = self.function()
        assert found is not None  # a plan was made by `reject`
        results: Any = found.launch(descriptor, self.call, **inputs)
        return tuple(results)


class Mlx(Metal):
    """MLX's own stream; where there is no Metal, or no kernel in it, the CPU's kernels serve."""

    device = "mlx"

    def kernel(self, operation: Operation, module: str) -> Kernel:
        """The kernel of an operation whose function stands in a module."""
        return MlxOperation(operation, self, module)

    def kernels(self, operation: Operation, module: str | None) -> list[tuple[str, Kernel]]:
        """Those in Metal, then those of the CPU."""
        return super().kernels(operation, module) + [(dtype, mlx_kernel.HostKernel()) for dtype in operation.dtypes]


BACKEND = Mlx()
