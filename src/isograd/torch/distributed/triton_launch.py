"""How the kernels for GPUs are launched: contiguous memory in blocks."""

from typing import Any

from torch import Tensor

from isograd.devices.triton_launcher import Specification, architecture, launch
from isograd.torch.distributed import triton_kernels

_BLOCK, _WARPS = 2048, 8  # elements and warps of a program


def _over(n: int, *tail: Any) -> Specification:
    """A kernel that ends with n, other numbers and constants, and a block.

    n is not free: without knowing that 16 divides it the compiler would load every element by itself.
    """
    return Specification((n, *tail, _BLOCK), -(-n // _BLOCK), _WARPS)


def accumulate(
    gradient: Tensor, total: Tensor, peaks: Tensor, index: int, quantum: int, limit: int, first: bool
) -> None:
    """As in `kernels.py`, on the current stream; without waiting."""
    key = (total.numel(), *_parts(gradient), quantum, limit, first, architecture(gradient) >= 90)
    launch(triton_kernels.accumulate, (gradient, total, peaks), _over, *key, numbers=(index,))


def keep(gradient: Tensor, y: Tensor, peaks: Tensor, index: int) -> None:
    """As in `kernels.py`, on the current stream; without waiting."""
    key = (gradient.numel(), architecture(gradient) >= 90)
    launch(triton_kernels.keep, (gradient, y, peaks), _over, *key, numbers=(index,))


def mean(total: Tensor, header: Tensor, y: Tensor, quantum: int) -> None:
    """As in `kernels.py`, on the current stream; without waiting."""
    launch(triton_kernels.mean, (total, header, y), _over, y.numel(), quantum, architecture(y) >= 90)


def mean_of_parts(gradients: Tensor, header: Tensor, y: Tensor, quantum: int, limit: int) -> None:
    """As in `kernels.py`, on the current stream; without waiting."""
    key = (y.numel(), *_parts(gradients), quantum, limit, architecture(y) >= 90)
    launch(triton_kernels.mean_of_parts, (gradients, header, y), _over, *key)


def _parts(gradients: Tensor) -> tuple[int, int]:
    """How many, and the elements from one to the next."""
    return (1, 0) if gradients.dim() == 1 else (gradients.shape[0], gradients.stride(0))
