"""What kernels for MLX arrays have in common: they return new arrays, lazily in Metal or at once on the CPU.

The Metal kernels are those that PyTorch tensors get, with a few lines around them as `mx.fast.metal_kernel` wants it.
mlx is imported when it is first needed.
"""

import functools
import importlib.util
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.core import arrays, registry
from isograd.core.arrays import numpy_dtype
from isograd.core.descriptor import Kernel, KernelSku
from isograd.devices import metal
from isograd.errors import UnsupportedError
from isograd.numerics.reference import BFLOAT16

# What the body of every kernel begins with; MLX declares the attributes that a body mentions.
PROLOGUE = """
  const uint group = threadgroup_position_in_grid.x, groups = threadgroups_per_grid.x;
  const uint lane = thread_position_in_threadgroup.x, threads = threads_per_threadgroup.x;
"""


def unavailable() -> str | None:
    """Why MLX cannot be used here, or None if it can."""
    return None if importlib.util.find_spec("mlx") is not None else "mlx is not installed"


def metal_unavailable() -> str | None:
    """Why MLX cannot run Metal kernels here, or None if it can."""
    if (missing := unavailable()) is not None:
        return missing
    import mlx.core as mx

    return None if mx.metal.is_available() else "MLX has no Metal back end here"


def dtype_name(array: Any) -> str:
    """What descriptors call an array's dtype."""
    return str(array.dtype).rpartition(".")[2]


def contiguous_strides(shape: tuple[int, ...]) -> list[int]:
    """The strides of an array as kernels get it."""
    return [arrays.size_of(shape[d + 1 :]) for d in range(len(shape))]


class MlxKernel(Kernel):
    """A kernel that returns new MLX arrays."""

    @abstractmethod
    def evaluate(self, descriptor: Any, inputs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The outputs in the order of the descriptor's operands. Shapes and dtypes were checked."""

    def launch(self, descriptor: Any, arguments: Mapping[str, Any], workspace: Any, stream: Any) -> None:
        """Refused: MLX arrays have no memory of their own to write into."""
        raise UnsupportedError(f"{descriptor.operation}: MLX arrays are not written into; isograd.mlx returns new ones")


class HostKernel(MlxKernel):
    """The CPU's kernel on the values of MLX arrays, which it waits for."""

    name = "cpu"
    backend = "numba"

    def reject(self, descriptor: Any) -> str | None:
        """Say what is missing on this machine."""
        return unavailable()

    def sku(self, descriptor: Any) -> KernelSku:
        """The identity of the CPU's kernel."""
        found: KernelSku = registry.find_kernel(descriptor, "cpu", None).sku(descriptor)
        return found

    def evaluate(self, descriptor: Any, inputs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Compute at once; UnsupportedError inside a transformation that has no values."""
        given = {name: _to_numpy(descriptor.operation, array) for name, array in inputs.items()}
        outputs = {o.name: np.empty(o.shape, numpy_dtype(o.dtype)) for o in descriptor.operands() if o.output}
        registry.find_kernel(descriptor, "cpu", None).launch(descriptor, given | outputs, None, None)
        return tuple(_from_numpy(out) for out in outputs.values())


def _to_numpy(operation: str, array: Any) -> NDArray[Any]:
    import mlx.core as mx

    try:
        if array.dtype == mx.bfloat16:
            return np.array(array.view(mx.uint16)).view(BFLOAT16)
        return np.array(array)
    except ValueError as error:
        raise UnsupportedError(
            f"{operation}: the CPU's kernels need values, which MLX does not have inside compile or vmap"
        ) from error


def _from_numpy(array: NDArray[Any]) -> Any:
    import mlx.core as mx

    if array.dtype == BFLOAT16:
        return mx.array(array.view(np.uint16)).view(mx.bfloat16)
    return mx.array(array, dtype=getattr(mx, array.dtype.name))


class MetalKernel(MlxKernel):
    """A kernel in Metal by way of `mx.fast.metal_kernel`."""

    name = "metal"
    backend = "metal"
    family: str

    def reject(self, descriptor: Any) -> str | None:
        """Say what is missing on this machine."""
        return metal_unavailable()

    def call(
        self,
        name: str,
        body: str,
        inputs: Mapping[str, Any],
        layout: list[int],
        outputs: Mapping[str, tuple[tuple[int, ...], str]],
        threads: tuple[int, int],
    ) -> list[Any]:
        """The results of a kernel with the input `layout` after the others, outputs of a shape and a dtype's name.

        threads: groups, and threads of a group.
        """
        import mlx.core as mx

        kernel = _compiled(self.family, name, body, tuple(inputs), tuple(outputs))
        groups, size = threads
        return list(
            kernel(
                inputs=[*inputs.values(), mx.array(layout, dtype=mx.int64)],
                grid=(groups * size, 1, 1),
                threadgroup=(size, 1, 1),
                output_shapes=[shape for shape, _ in outputs.values()],
                output_dtypes=[getattr(mx, dtype) for _, dtype in outputs.values()],
                init_value=0 if "flag" in outputs else None,
                stream=mx.gpu,
            )
        )


@functools.cache
def _compiled(family: str, name: str, body: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Any:
    import mlx.core as mx

    return mx.fast.metal_kernel(
        name=f"isograd_{name}",
        input_names=[*inputs, "layout"],
        output_names=list(outputs),
        source=PROLOGUE + body,
        header=metal.functions(family),
    )
