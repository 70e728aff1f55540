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


@triton.jit
def _sum(g_ptr, at, inside, parts, step, QUANTUM: tl.constexpr, LIMIT: tl.constexpr, NATIVE: tl.constexpr):
    """(the sum of the parts in quanta, the bits of the largest magnitude of each element)."""
    sums, most = _units(ops.widen(tl.load(g_ptr + at, mask=inside, other=0.0), NATIVE), QUANTUM, LIMIT)
    for _ in range(1, parts):
        g_ptr += step
        units, bits = _units(ops.widen(tl.load(g_ptr + at, mask=inside, other=0.0), NATIVE), QUANTUM, LIMIT)
        sums += units
        most = tl.maximum(most, bits)
    return sums, most


@triton.jit
def _raise_peak(peak_ptr, index, bits):
    peak = tl.max(bits).to(tl.int64)
    # Most programs find a peak that is as large, and spare the atomic operation.
    if peak > tl.load(peak_ptr + index):
        tl.atomic_max(peak_ptr + index, peak)


@triton.jit
def _quotient(total, header_ptr, dtype: tl.constexpr, QUANTUM: tl.constexpr, NATIVE: tl.constexpr):
    """Totals over the units that the header counts, times the quantum; NaN where it has a flag."""
    units, flag = tl.load(header_ptr), tl.load(header_ptr + 1)
    if dtype == tl.float64:
        divisor = tl.full(total.shape, 0.0, tl.float64) + units.to(tl.float64)
        y = ops.divide(total.to(tl.float64), divisor) * ops.pow2_64(tl.full((), QUANTUM, tl.int64))
    else:
        divisor = tl.full(total.shape, 0.0, tl.float32) + units.to(tl.float32)
        y = ops.divide(total.to(tl.float32), divisor) * ops.pow2_32(tl.full((), QUANTUM, tl.int32))
    return ops.narrow(tl.where(flag == 0, y, float("nan")), dtype, NATIVE)


@triton.jit(do_not_specialize=["index"])
def accumulate(
    g_ptr, total_ptr, peak_ptr, index, n, parts, step, QUANTUM: tl.constexpr, LIMIT: tl.constexpr,
    FIRST: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the parts of a gradient to a total, or begin the total with them; raise the peak at an index."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    units, bits = _sum(g_ptr, at, inside, parts, step, QUANTUM, LIMIT, NATIVE)
    if not FIRST:
        units += tl.load(total_ptr + at, mask=inside, other=0)
    tl.store(total_ptr + at, units, mask=inside)
    _raise_peak(peak_ptr, index, bits)


@triton.jit(do_not_specialize=["index"])
def keep(g_ptr, y_ptr, peak_ptr, index, n, NATIVE: tl.constexpr, BLOCK: tl.constexpr):
    """Copy a gradient; raise the peak at an index."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    g = tl.load(g_ptr + at, mask=inside, other=0.0)
    tl.store(y_ptr + at, g, mask=inside)
    _raise_peak(peak_ptr, index, ops.as_int(tl.abs(ops.widen(g, NATIVE))))


@triton.jit
def mean(
    total_ptr, header_ptr, y_ptr, n, QUANTUM: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The quotients of totals."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.load(total_ptr + at, mask=inside, other=0)
    tl.store(y_ptr + at, _quotient(total, header_ptr, y_ptr.dtype.element_ty, QUANTUM, NATIVE), mask=inside)


@triton.jit
def mean_of_parts(
    g_ptr, header_ptr, y_ptr, n, parts, step, QUANTUM: tl.constexpr, LIMIT: tl.constexpr, NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The quotients of the sums of gradients."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total, _ = _sum(g_ptr, at, inside, parts, step, QUANTUM, LIMIT, NATIVE)
    tl.store(y_ptr + at, _quotient(total, header_ptr, y_ptr.dtype.element_ty, QUANTUM, NATIVE), mask=inside)
