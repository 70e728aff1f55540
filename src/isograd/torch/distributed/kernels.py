"""The kernels of a sum of gradients on the device of their tensors; `reference.py` says what they compute."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isograd.core import arrays
from isograd.numerics.reference import work_dtype
from isograd.numerics.storage import address, kernel_type
from isograd.runtime import parallel
from isograd.runtime.fenv import default_environment


def accumulate(
    gradient: Tensor, total: Tensor, peaks: Tensor, index: int, quantum: int, limit: int, first: bool
) -> None:
    """Add a gradient in quanta to a total, or begin the total with it, and raise the peak at an index.

    gradient: of a storage type, contiguous; or [parts, n], whose rows are contiguous and each rounded by itself. total:
    contiguous int64, n elements. peaks: int64.
    """
    if total.numel() == 0:
        return
    if not gradient.is_cpu:
        from isograd.torch.distributed import triton_launch

        triton_launch.accumulate(gradient, total, peaks, index, quantum, limit, first)
        return
    from isograd.torch.distributed import numba_kernels

    x, sums = arrays.numpy_view(gradient), arrays.numpy_view(total)
    parts, step = (1, 0) if gradient.dim() == 1 else (gradient.shape[0], gradient.stride(0))
    of = work_dtype(x.dtype)
    with default_environment():
        scale, bound = of(2.0**-quantum), of(2.0**limit)
    grain, partial = _partial(sums.size)
    parallel.for_ranges(
        numba_kernels.accumulate, sums.size, grain, kernel_type(x.dtype), address(x), address(sums), partial, parts,
        step, scale, bound, first, grain,
    )  # fmt: skip
    _raise(peaks, index, partial)


def keep(gradient: Tensor, y: Tensor, peaks: Tensor, index: int) -> None:
    """Copy a gradient, contiguous like y, and raise the peak at an index."""
    if gradient.numel() == 0:
        return
    if not gradient.is_cpu:
        from isograd.torch.distributed import triton_launch

        triton_launch.keep(gradient, y, peaks, index)
        return
    from isograd.torch.distributed import numba_kernels

    y.copy_(gradient)
    x = arrays.numpy_view(gradient)
    grain, partial = _partial(x.size)
    parallel.for_ranges(numba_kernels.peak_of, x.size, grain, kernel_type(x.dtype), address(x), partial, grain)
    _raise(peaks, index, partial)


def _partial(n: int) -> tuple[int, NDArray[np.int64]]:
    """The elements of a range, and a peak for each."""
    grain = parallel.grain(n, 1)
    return grain, np.zeros(-(-n // grain), np.int64)


def _raise(peaks: Tensor, index: int, partial: NDArray[np.int64]) -> None:
    found = arrays.numpy_view(peaks)
    found[index] = max(found[index], partial.max())


def mean(total: Tensor, header: Tensor, y: Tensor, quantum: int) -> None:
    """Write the totals over the header's number of units, NaN where its second word is not 0.

    total: contiguous int64. y: contiguous, of a storage type, as many elements. header: int64 words.
    """
    if y.numel() == 0:
        return
    if not y.is_cpu:
        from isograd.torch.distributed import triton_launch

        triton_launch.mean(total, header, y, quantum)
        return
    from isograd.torch.distributed import numba_kernels

    sums, words, out = (arrays.numpy_view(t) for t in (total, header, y))
    if words[1]:
        out[...] = np.nan
        return
    of = work_dtype(out.dtype)
    with default_environment():
        divisor, scale = words[0].astype(of), of(2.0**quantum)
    parallel.for_ranges(
        numba_kernels.mean, out.size, parallel.grain(out.size, 1), kernel_type(out.dtype), address(sums), address(out),
        divisor, scale,
    )  # fmt: skip


def mean_of_parts(gradients: Tensor, header: Tensor, y: Tensor, quantum: int, limit: int) -> None:
    """Write the mean over the header's number of units, of gradients [parts, n] whose rows are contiguous."""
    if not y.is_cpu:
        from isograd.torch.distributed import triton_launch

        triton_launch.mean_of_parts(gradients, header, y, quantum, limit)
        return
    total = torch.empty(y.numel(), dtype=torch.int64)
    accumulate(gradients, total, torch.zeros(1, dtype=torch.int64), 0, quantum, limit, True)
    mean(total, header, y, quantum)
