"""Runs what the launcher of a plan would run on an Apple GPU in the emulator instead, on tensors of the CPU."""

from typing import Any

import numpy as np
import torch
from emulator import BARRIER, Library, library

from isograd.devices import metal

_INTEGERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def _extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last one in memory."""
    return 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))


def memory(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The bits from the first to the last element of a tensor."""
    flat = tensor.as_strided((_extent(tensor),), (1,))
    return flat.view(getattr(torch, f"int{8 * tensor.element_size()}")).numpy().view(_INTEGERS[tensor.element_size()])


def run(
    kernel: metal.MetalKernel,
    descriptor: Any,
    seed: int = 0,
    flush: bool = False,
    compiled: Library | None = None,
    toward_zero: bool = False,
    **arguments: torch.Tensor,
) -> None:
    """Run a kernel's launches, from its own source unless a library is given."""
    compiled = compiled or library(metal.source(kernel.family))
    for call in kernel.launches(descriptor.validated(), arguments):
        buffers = [b if isinstance(b, list) else memory(b) for b in call.buffers]
        threads = call.groups * call.group_size
        modes = {"seed": seed, "flush": flush, "toward_zero": toward_zero}
        compiled.run(call.name, *buffers, threads=threads, group_size=call.group_size, **modes)


def needed_barriers(family: str) -> range:
    """The numbers of the barriers that are a family's own and not the header's, for `emulator.without_barrier`."""
    source = metal.source(family)
    shared = metal.source("ops/softmax")
    return range(len(BARRIER.findall(shared)), len(BARRIER.findall(source)))
