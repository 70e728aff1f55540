"""How the kernels for GPUs are launched: contiguous memory in blocks."""

from torch import Tensor

from isograd.devices.triton_launcher import Specification, architecture, launch
from isograd.torch.distributed import triton_kernels

_BLOCK, _WARPS = 2048, 8  # elements and warps of a program


def _accumulation(n: int, quantum: int, limit: int, first: bool, native: bool) -> Specification:
    return Specification((n, quantum, limit, first, native, _BLOCK), -(-n // _BLOCK), _WARPS, free=("n",))


def _division(n: int, quantum: int, native: bool) -> Specification:
    return Specification((n, quantum, native, _BLOCK), -(-n // _BLOCK), _WARPS, free=("n",))


def accumulate(
    gradient: Tensor, total: Tensor, peaks: Tensor, index: int, quantum: int, limit: int, first: bool
) -> None:
    """As in `kernels.py`, on the current stream; without waiting."""
    key = (gradient.numel(), quantum, limit, first, architecture(gradient) >= 90)
    launch(triton_kernels.accumulate, (gradient, total, peaks), _accumulation, *key, numbers=(index,))


def mean(total: Tensor, header: Tensor, y: Tensor, quantum: int) -> None:
    """As in `kernels.py`, on the current stream; without waiting."""
    key = (y.numel(), quantum, architecture(y) >= 90)
    launch(triton_kernels.mean, (total, header, y), _division, *key)
