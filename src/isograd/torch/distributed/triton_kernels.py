# mypy: ignore-errors
# ruff: noqa: N803
"""Sums of gradients on GPUs, over contiguous memory."""

import triton
import triton.language as tl

from isograd.numerics import triton_ops as ops


@triton.jit
def _units(x, QUANTUM: tl.constexpr, LIMIT: tl.constexpr):
    """(the nearest multiple of the quantum as an int64, 0 where x is not within the range; the bits of |x|)."""
    magnitude = tl.abs(x)
    if x.dtype == tl.float64:
        scaled = tl.where(magnitude < ops.pow2_64(tl.full((), LIMIT, tl.int64)), magnitude, 0.0)
        scaled = scaled * ops.pow2_64(tl.full((), -QUANTUM, tl.int64))
        whole: tl.constexpr = 4503599627370496.0  # 2**52: from here on every number is an integer
    else:
        scaled = tl.where(magnitude < ops.pow2_32(tl.full((), LIMIT, tl.int32)), magnitude, 0.0)
        scaled = scaled * ops.pow2_32(tl.full((), -QUANTUM, tl.int32))
        whole: tl.constexpr = 8388608.0  # 2**23
    units = tl.where(scaled < whole, (scaled + whole) - whole, scaled).to(tl.int64)
    return tl.where(x < 0.0, -units, units), ops.as_int(magnitude)


@triton.jit(do_not_specialize=["index"])
def accumulate(
    g_ptr, total_ptr, peak_ptr, index, n, QUANTUM: tl.constexpr, LIMIT: tl.constexpr, FIRST: tl.constexpr,
    NATIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add a gradient to a total, or begin the total with it; raise the peak at an index."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    units, bits = _units(ops.widen(tl.load(g_ptr + at, mask=inside, other=0.0), NATIVE), QUANTUM, LIMIT)
    if not FIRST:
        units += tl.load(total_ptr + at, mask=inside, other=0)
    tl.store(total_ptr + at, units, mask=inside)
    peak = tl.max(bits).to(tl.int64)
    # Most programs find a peak that is as large, and spare the atomic operation.
    if peak > tl.load(peak_ptr + index):
        tl.atomic_max(peak_ptr + index, peak)


@triton.jit
def mean(
    total_ptr, header_ptr, y_ptr, n, QUANTUM: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Totals over the units that the header counts, times the quantum; NaN where it has a flag."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.load(total_ptr + at, mask=inside, other=0)
    units, flag = tl.load(header_ptr), tl.load(header_ptr + 1)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    if dtype == tl.float64:
        divisor = tl.full(total.shape, 0.0, tl.float64) + units.to(tl.float64)
        y = ops.divide(total.to(tl.float64), divisor) * ops.pow2_64(tl.full((), QUANTUM, tl.int64))
    else:
        divisor = tl.full(total.shape, 0.0, tl.float32) + units.to(tl.float32)
        y = ops.divide(total.to(tl.float32), divisor) * ops.pow2_32(tl.full((), QUANTUM, tl.int32))
    y = tl.where(flag == 0, y, float("nan"))
    tl.store(y_ptr + at, ops.narrow(y, dtype, NATIVE), mask=inside)
