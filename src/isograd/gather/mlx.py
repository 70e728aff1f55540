"""take_along_axis and its gradient for MLX arrays."""

from collections.abc import Mapping
from typing import Any

from isograd.core import arrays
from isograd.core.checks import DTYPES
from isograd.core.registry import register_kernel
from isograd.devices import metal
from isograd.devices.mlx_kernel import HostKernel, MetalKernel, contiguous_strides
from isograd.gather.metal import NAN_BITS, OPERATIONS, GatherInMetal, groups_for

_TAKE = """
  for (long i = group * threads + lane; i < layout[0]; i += groups * threads) {
    isograd::take_element<BITS>(i, x, indices, v, layout, flag);
  }
"""
# Lines are contiguous; the last dimension is the axis.
_SCATTER = """
  device uint* heads = scratch + group * layout[3];
  const long n = layout[1], k = layout[2];
  for (long line = group; line < layout[0]; line += groups) {
    isograd::scatter_line(indices + line * k, 1l, dv + line * k, 1l, dx + line * n, 1l, n, k, heads, heads + n, flag,
                          1l, line * k, 1l, lane, threads);
  }
"""
_FLAG = ((4,), "int64")  # where the first index out of range would be noted; MLX has nobody to read it


class MlxGather(GatherInMetal, MetalKernel):
    """The family in Metal. An index out of range makes its value NaN, or leaves its source out."""

    def evaluate(self, descriptor: Any, inputs: Mapping[str, Any]) -> tuple[Any, ...]:
        """One lazy array."""
        if descriptor.operation == "take_along_axis":
            return (self._taken(descriptor, **inputs),)
        return (self._summed(descriptor, **inputs),)

    def _taken(self, d: Any, x: Any, indices: Any) -> Any:
        import mlx.core as mx

        dtype = getattr(mx, d.dtype)
        count = arrays.size_of(d.indices_shape)
        if count == 0:
            return mx.zeros(d.indices_shape, dtype)
        bits = "uint32" if d.dtype == "float32" else "uint16"
        strides = contiguous_strides(d.shape)
        step, strides[d.axis] = strides[d.axis], 0
        places = contiguous_strides(d.indices_shape)
        layout = [count, d.shape[d.axis], step, 1, NAN_BITS[d.dtype], len(strides)]
        layout += [*d.indices_shape, *strides, *places, *places]
        # A buffer of no elements is none; every index is out of range then.
        source = x.view(getattr(mx, bits)) if d.shape[d.axis] else mx.array([0], dtype=getattr(mx, bits))
        given = {"x": source, "indices": indices}
        groups = min(-(-count // metal.MOST_THREADS), metal.MOST_GROUPS)
        body = _TAKE.replace("BITS", "uint" if bits == "uint32" else "ushort")
        outputs = {"v": (d.indices_shape, bits), "flag": _FLAG}
        v, _ = self.call(d.operation, body, given, layout, outputs, (groups, metal.MOST_THREADS))
        return v.view(dtype)

    def _summed(self, d: Any, indices: Any, dv: Any) -> Any:
        import mlx.core as mx

        n, k = d.shape[d.axis], d.indices_shape[d.axis]
        if k == 0 or arrays.size_of(d.shape) == 0:
            return mx.zeros(d.shape, getattr(mx, d.dtype))
        given = {"indices": mx.moveaxis(indices, d.axis, -1), "dv": mx.moveaxis(dv, d.axis, -1)}
        lines = arrays.size_of(d.shape) // n
        groups = groups_for(lines, n, k)
        shape = (*given["dv"].shape[:-1], n)
        outputs = {"dx": (shape, d.dtype), "scratch": ((groups * (n + k),), "uint32"), "flag": _FLAG}
        threads = groups, metal.threads_for(max(n, k))
        dx, _, _ = self.call(d.operation, _SCATTER, given, [lines, n, k, n + k], outputs, threads)
        return mx.moveaxis(dx, -1, d.axis)


for _operation in OPERATIONS:
    for _dtype in metal.DTYPES:
        register_kernel(_operation, "mlx", _dtype, MlxGather())
    for _dtype in DTYPES:
        register_kernel(_operation, "mlx", _dtype, HostKernel())  # the second choice
