"""take_along_axis and its gradient on Apple GPUs."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from isograd.core import arrays, faults
from isograd.core.descriptor import Kernel, KernelSku
from isograd.core.registry import register_kernel
from isograd.devices import metal
from isograd.gather.plans import family_guarantee, family_sku

OPERATIONS = ("take_along_axis", "take_along_axis_backward")
NAN_BITS = {"float16": 0x7E00, "bfloat16": 0x7FC0, "float32": 0x7FC00000}
_SCRATCH_WORDS = 1 << 24  # of a launch, unless one group needs more
_MOST_GROUPS = 1 << 12
_MOST_LONG = (1 << 32) - 1  # destinations and sources of a line are counted in 32 bits


def too_long(descriptor: Any) -> str | None:
    """Say that lines are longer than the kernels can count."""
    longest = max(descriptor.shape[descriptor.axis], descriptor.indices_shape[descriptor.axis])
    return f"more than {_MOST_LONG - 1} elements along the axis" if longest >= _MOST_LONG else None


def groups_for(lines: int, n: int, k: int) -> int:
    """Threadgroups of a scatter of k sources into n destinations; each has scratch memory of n + k words."""
    return max(min(lines, _MOST_GROUPS, _SCRATCH_WORDS // (n + k)), 1)


class GatherInMetal(Kernel):
    """What the family's kernels in Metal have in common, whoever launches them."""

    family = "gather"

    def sku(self, descriptor: Any) -> KernelSku:
        """The kernel's identity; bits are copied or summed as integers, so no rounding mode can show."""
        promised = metal.guarantee(family_guarantee(descriptor), integers=True)
        return replace(family_sku(descriptor, self.backend, "apple"), precision_guarantee=promised)

    def reject(self, descriptor: Any) -> str | None:
        """Say what is missing on this machine, or which lines are too long."""
        return too_long(descriptor) or super().reject(descriptor)


class MetalGather(GatherInMetal, metal.MetalKernel):
    """The family in Metal; scratch memory comes from torch's allocator."""

    def launches(self, descriptor: Any, arguments: Mapping[str, Any]) -> Iterator[metal.Launch]:
        """One launch, unless there is nothing to write."""
        if descriptor.operation == "take_along_axis":
            return self._take(descriptor, **arguments)
        return self._scatter(descriptor, **arguments)

    def _take(self, descriptor: Any, x: Any, indices: Any, v: Any) -> Iterator[metal.Launch]:
        count = arrays.size_of(descriptor.indices_shape)
        if count == 0:
            return
        axis, strides = descriptor.axis, list(x.stride())
        step, strides[axis] = strides[axis], 0
        code = faults.code(descriptor.operation)
        layout = [count, descriptor.shape[axis], step, code, NAN_BITS[descriptor.dtype], len(strides)]
        layout += [*descriptor.indices_shape, *strides, *indices.stride(), *v.stride()]
        name = f"take_{8 * x.element_size()}_{descriptor.index_dtype}"
        groups = min(-(-count // metal.MOST_THREADS), metal.MOST_GROUPS)
        source = x if descriptor.shape[axis] else v  # no buffer for no elements; every index is out of range
        yield metal.Launch(name, (source, indices, v, layout, faults.flag(x.device)), groups, metal.MOST_THREADS)

    def _scatter(self, descriptor: Any, indices: Any, dv: Any, dx: Any) -> Iterator[metal.Launch]:
        import torch

        if arrays.size_of(descriptor.shape) == 0:
            return
        axis = descriptor.axis
        n, k = descriptor.shape[axis], descriptor.indices_shape[axis]
        if k == 0:
            dx.zero_()
            return
        outer = [d for d in range(len(descriptor.shape)) if d != axis]
        lines = arrays.size_of(tuple([descriptor.shape[d] for d in outer]))
        groups = groups_for(lines, n, k)
        scratch = torch.empty(groups * (n + k), dtype=torch.int32, device=dx.device)
        positions = torch.empty(descriptor.indices_shape, device="meta").stride()
        code = faults.code(descriptor.operation)
        layout = [lines, n, k, n + k, code, len(outer), *[descriptor.shape[d] for d in outer]]
        for strides in (indices.stride(), dv.stride(), dx.stride(), positions):
            layout += [strides[axis], *[strides[d] for d in outer]]
        name = f"scatter_{descriptor.dtype}_{descriptor.index_dtype}"
        buffers = (indices, dv, dx, scratch, layout, faults.flag(dx.device))
        yield metal.Launch(name, buffers, groups, metal.threads_for(max(n, k)))


for _operation in OPERATIONS:
    for _dtype in metal.DTYPES:
        register_kernel(_operation, "mps", _dtype, MetalGather())
