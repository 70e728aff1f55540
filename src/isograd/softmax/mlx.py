"""The softmax family for MLX arrays."""

from collections.abc import Mapping
from typing import Any

from isograd import arrays, metal
from isograd.mlx_kernel import HostKernel, MetalKernel
from isograd.plan import DTYPES
from isograd.registry import register_kernel
from isograd.softmax.metal import SoftmaxInMetal
from isograd.softmax.plans import KINDS

_FORWARD = """
  threadgroup long part[512];
  for (long row = group; row < layout[0]; row += groups) {
    isograd::KIND_row(x + row * layout[1], 1l, y + row * layout[1], 1l, layout[1], lane, threads, part);
  }
"""
_BACKWARD = """
  threadgroup long part[512];
  for (long row = group; row < layout[0]; row += groups) {
    const long first = row * layout[1];
    isograd::backward_row<LOG>(dy + first, 1l, y + first, 1l, dx + first, 1l, layout[1], lane, threads, part);
  }
"""


class MlxSoftmax(SoftmaxInMetal, MetalKernel):
    """The family in Metal; an axis that is not the last one is moved there and back."""

    def evaluate(self, descriptor: Any, inputs: Mapping[str, Any]) -> tuple[Any, ...]:
        """One lazy array."""
        import mlx.core as mx

        d = descriptor
        count, columns = arrays.size_of(d.shape), d.shape[d.axis]
        if count == 0:
            return (mx.zeros(d.shape, getattr(mx, d.dtype)),)
        moved = {name: mx.moveaxis(array, d.axis, -1) for name, array in inputs.items()}
        backward = d.operation.endswith("backward")
        body = _BACKWARD.replace("LOG", str(d.kind == "log_softmax").lower()) if backward else _FORWARD
        body = body.replace("KIND", d.kind)
        rows = count // columns
        outputs = {d.output: (next(iter(moved.values())).shape, d.dtype)}
        threads = min(rows, metal.MOST_GROUPS), metal.threads_for(columns)
        (result,) = self.call(d.operation, body, moved, [rows, columns], outputs, threads)
        return (mx.moveaxis(result, -1, d.axis),)


for _operation in (*KINDS, *(f"{kind}_backward" for kind in KINDS)):
    for _dtype in metal.DTYPES:
        register_kernel(_operation, "mlx", _dtype, MlxSoftmax())
    for _dtype in DTYPES:
        register_kernel(_operation, "mlx", _dtype, HostKernel())  # the second choice
