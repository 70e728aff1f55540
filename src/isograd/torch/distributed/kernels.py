"""The kernels of a sum of gradients on the device of their tensors; `reference.py` says what they compute."""

import numpy as np
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

    gradient: contiguous, of a storage type. total: contiguous int64, as many elements. peaks: int64.
    """
    if gradient.numel() == 0:
        return
    if not gradient.is_cpu:
        from isograd.torch.distributed import triton_launch

        triton_launch.accumulate(gradient, total, peaks, index, quantum, limit, first)
        return
    from isograd.torch.distributed import numba_kernels

    x, sums, found = (arrays.numpy_view(t) for t in (gradient, total, peaks))
    of = work_dtype(x.dtype)
    grain = parallel.grain(x.size, 1)
    partial = np.zeros(-(-x.size // grain), np.int64)
    with default_environment():
        scale, bound = of(2.0**-quantum), of(2.0**limit)
    parallel.for_ranges(
        numba_kernels.accumulate, x.size, grain, kernel_type(x.dtype), address(x), address(sums), partial, scale,
        bound, first, grain,
    )  # fmt: skip
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
