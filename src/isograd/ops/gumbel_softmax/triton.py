# ruff: noqa: N803, RET505, SIM108
# A branch on a constant that returns needs its else: Triton compiles what follows a lone return as well.
"""Gumbel-softmax in Triton; `reference.py` is the definition, noise included.

Rows that fit a tile (HELD) make their noise once. Of longer ones all elements are perturbed first, and a softmax in
place follows; hard results make the noise twice instead, which costs no memory.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from isograd.core.kernel import launcher
from isograd.devices.triton_launcher import Launcher, Specification, architecture, kept, merged, rows
from isograd.numerics import triton_memory as memory
from isograd.numerics import triton_ops as ops
from isograd.numerics.random import number_strides
from isograd.numerics.triton_random import number, philox
from isograd.ops.gumbel_softmax.reference import LAST_WORD
from isograd.ops.softmax.triton import launch as softmax
from isograd.rows import triton_rows
from isograd.rows import triton_tiles as tiles
from isograd.rows.triton_launch import Strides, Tile, halves, launch_rows, tile, words_of
from isograd.runtime.fenv import default_environment

_WORD = tl.constexpr(LAST_WORD)
_NUMBERS = ("factor_low", "factor_high", "seed_low", "seed_high", "offset_low", "offset_high")
_ELEMENTS = 1024  # of a tile of elements


# --- noise -----------------------------------------------------------------------------------------------------------
@triton.jit
def _variate(word, high, work: tl.constexpr):
    """The variate in (0, 1) of a word, or of a pair of words, the low one first."""
    if work == tl.float64:
        bits = ((high.to(tl.uint64) << 32) | word.to(tl.uint64)) >> 12
        return bits.to(tl.int64).to(tl.float64) * 2.220446049250313e-16 + 1.1102230246251565e-16
    else:
        return (word >> 9).to(tl.int32).to(tl.float32) * 1.1920928955078125e-07 + 5.9604644775390625e-08


@triton.jit
def _gumbel(u):
    return ops.negate(ops.log(ops.negate(ops.log(u))))


@triton.jit
def _noise(index, seed_low, seed_high, work: tl.constexpr):
    """The noise of numbers that int64 counts modulo 2^64, a block for each."""
    index = index.to(tl.uint64, bitcast=True)
    if work == tl.float64:
        w0, w1, w2, w3 = philox(index >> 1, _WORD, seed_low, seed_high)
        odd = (index & 1) == 1
        return _gumbel(_variate(tl.where(odd, w2, w0), tl.where(odd, w3, w1), work))
    else:
        w0, w1, w2, w3 = philox(index >> 2, _WORD, seed_low, seed_high)
        odd, upper = (index & 1) == 1, (index & 2) == 2
        word = tl.where(upper, tl.where(odd, w3, w2), tl.where(odd, w1, w0))
        return _gumbel(_variate(word, word, work))


@triton.jit
def _noise_of_neighbours(index, seed_low, seed_high, work: tl.constexpr):
    """The same for a tile whose accesses hold neighbouring numbers, whole blocks of them: a block is made once."""
    count: tl.constexpr = index.shape[3]
    index = index.to(tl.uint64, bitcast=True)
    each: tl.constexpr = 2 if work == tl.float64 else 4
    shape: tl.constexpr = (index.shape[0], index.shape[1], index.shape[2], count // each, each)
    # The first number of each block: the others are at most `each` - 1 above it.
    first = tl.min(tl.reshape(index >> (1 if work == tl.float64 else 2), shape).to(tl.int64, bitcast=True), axis=4)
    w0, w1, w2, w3 = philox(first.to(tl.uint64, bitcast=True), _WORD, seed_low, seed_high)
    if work == tl.float64:
        u = tl.join(_variate(w0, w1, work), _variate(w2, w3, work))
    else:
        u = tl.join(
            tl.join(_variate(w0, w0, work), _variate(w2, w2, work)),
            tl.join(_variate(w1, w1, work), _variate(w3, w3, work)),
        )
    return _gumbel(tl.reshape(u, (index.shape[0], index.shape[1], index.shape[2], count)))


@triton.jit
def _perturbed(
    base, row, column, inner_stride, axis_stride, mask, index, factor, seed_low, seed_high, WHOLE: tl.constexpr,
    work: tl.constexpr,
):  # fmt: skip
    """A tile of (x + g) / tau, -inf where there is none."""
    x = tiles.load(base, row, column, inner_stride, axis_stride, mask, 0.0)
    if WHOLE:
        g = _noise_of_neighbours(index, seed_low, seed_high, work)
    else:
        g = _noise(index, seed_low, seed_high, work)
    return tl.where(mask, (x + g) * factor, float("-inf"))


# --- kernels ---------------------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=list(_NUMBERS))
def gumbel_softmax_rows(
    x_ptr, y_ptr, factor_low, factor_high, seed_low, seed_high, offset_low, offset_high, n, inner,
    x_axis, x_inner, number_axis, number_inner, y_axis, y_inner, outer_shape, x_outer, number_outer, y_outer,
    HARD: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Rows of the result that a tile holds, or hard ones of any length.

    The elements' numbers have strides as a tensor has; WHOLE: a row starts with a block.
    """
    work: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    factor = tiles.number(factor_low, factor_high, work)
    row, outer = tiles.place(inner, ROWS)
    column = tiles.columns(BLOCK, GROUP, V)
    inside = tiles.broad(row < inner)
    x_ptr += memory.outer_offset(outer, outer_shape, x_outer)
    y_ptr += memory.outer_offset(outer, outer_shape, y_outer)
    offset = number(offset_low, offset_high)
    offset += memory.outer_offset(outer, outer_shape, number_outer)
    index = tiles.broad(offset + row * number_inner) + column * number_axis
    held = _perturbed(
        x_ptr, row, column, x_inner, x_axis, inside & (column < n), index, factor, seed_low, seed_high, WHOLE, work
    )  # fmt: skip
    stop = n
    if HELD:
        stop = BLOCK
    best = held
    if not HELD:
        for start in range(BLOCK, stop, BLOCK):
            mask = inside & (column + start < n)
            z = _perturbed(
                x_ptr, row, column + start, x_inner, x_axis, mask, index + start * memory.wide_int(number_axis), factor,
                seed_low, seed_high, WHOLE, work,
            )  # fmt: skip
            best = tiles.larger(best, z)
    m, valid = tiles.maximum(best)
    if HARD:
        place = tl.full((BLOCK // GROUP, ROWS), 0x7FFFFFFFFFFFFFFF, tl.int64)
        for start in range(0, stop, BLOCK):
            z = held
            if not HELD:
                mask = inside & (column + start < n)
                z = _perturbed(
                    x_ptr, row, column + start, x_inner, x_axis, mask, index + start * memory.wide_int(number_axis),
                    factor, seed_low, seed_high, WHOLE, work,
                )  # fmt: skip
            at = tl.where(z == tiles.broad(m), column + start, 0x7FFFFFFFFFFFFFFF)
            place = tl.minimum(place, tl.min(tl.min(at, axis=3), axis=2))
        first = tl.min(place, axis=0)
        for start in range(0, stop, BLOCK):
            y = tl.where(column + start == tiles.broad(first), 1.0, 0.0).to(work)
            y = tl.where(tiles.broad(valid), y, float("nan"))
            tiles.store(y_ptr, row, column + start, y_inner, y_axis, inside & (column + start < n), y)
    else:
        tl.static_assert(HELD)
        base, floor, bias = triton_rows.row_shift(m, False)
        _, high, low = tiles.exponentials(held, base, floor, bias)
        hi, lo = triton_rows.wide_sum(high, low, work)
        r, r_low, largest = tiles.factors(hi, lo, m, base, floor, bias, valid, work)
        y = tiles.probabilities(held, m, base, floor, bias, r, r_low, largest)
        tiles.store(y_ptr, row, column, y_inner, y_axis, inside & (column < n), y)


@triton.jit(do_not_specialize=list(_NUMBERS))
def perturbed_elements(
    x_ptr, z_ptr, factor_low, factor_high, seed_low, seed_high, offset_low, offset_high, count, shape, x_strides,
    number_strides, z_strides, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(x + g) / tau of every element, in the work type. WHOLE: elements and their numbers follow one another."""
    work: tl.constexpr = z_ptr.dtype.element_ty
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = position < count
    x = ops.widen(tl.load(x_ptr + memory.element_offset(position, shape, x_strides), mask=mask, other=0.0), False)
    index = number(offset_low, offset_high) + memory.element_offset(position, shape, number_strides)
    if WHOLE:
        each: tl.constexpr = 2 if work == tl.float64 else 4
        g = _noise_of_neighbours(tl.reshape(index, (BLOCK // each, 1, 1, each)), seed_low, seed_high, work)
        g = tl.reshape(g, (BLOCK,))
    else:
        g = _noise(index, seed_low, seed_high, work)
    z = (x + g) * tiles.number(factor_low, factor_high, work)
    tl.store(z_ptr + memory.element_offset(position, shape, z_strides), z, mask=mask)


# --- launches --------------------------------------------------------------------------------------------------------
@kept
def _tile(
    shape: Strides, strides: tuple[Strides, ...], axis: int, itemsize: int, work: Any, arch: int, size: Tile | None
) -> tuple[Tile, bool]:
    """The tile, and whether its accesses hold whole blocks of numbers where a row starts with one."""
    size = size or tile(shape[axis], rows(shape, strides, axis), (0, 2), work.itemsize, itemsize, arch)
    return size, size.vector % (16 // work.itemsize) == 0


@kept
def _perturbed_elements(shape: Strides, strides: Sequence[Strides], blocks: bool, _: Any) -> Launcher:
    """The kernel for elements that are perturbed in any order; blocks: whether the first number starts one."""
    sizes, steps = merged(shape, strides)
    if not sizes:
        sizes, steps = [1], [(0, 0, 0)]
    layout = tuple([tuple([step[t] for step in steps]) for t in range(3)])
    n, whole = math.prod(shape), blocks and layout == ((1,), (1,), (1,))
    return Launcher(perturbed_elements, Specification((n, tuple(sizes), *layout, whole, _ELEMENTS), -(-n // _ELEMENTS)))


def _narrow(z: torch.Tensor, out: torch.Tensor) -> None:
    """Round values of the work type to the storage type."""
    out.copy_(z)
    out.masked_fill_(out.isnan(), float("nan"))  # whose bits torch's conversions do not keep


def _work(t: torch.Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def _factor(tau: float, work: torch.dtype) -> Any:
    """1 / tau in the work type."""
    of = np.float64 if work == torch.float64 else np.float32
    with default_environment():
        return of(1) / of(tau)


@launcher("gumbel_softmax")
def gumbel_softmax(problem: Any, logits: torch.Tensor, y: torch.Tensor, size: Tile | None = None) -> None:
    """Compute y: in one kernel where a tile holds a row or y is hard, else by a softmax of perturbed logits."""
    if y.numel() == 0:
        return
    work, axis, shape = _work(y), problem.axis, tuple(y.shape)
    factor = words_of(_factor(problem.tau, work), str(work).removeprefix("torch."))
    words = (*factor, *halves(problem.seed), *halves(problem.offset))
    numbers = number_strides(shape, problem.batched)
    strides = (logits.stride(), numbers, y.stride())
    # A block makes several numbers where an access holds neighbours, from the start of a block on.
    each = 16 // work.itemsize
    blocks = problem.offset % each == 0
    size, whole = _tile(shape, strides, axis, y.dtype.itemsize, work, architecture(y), size)
    if problem.hard or shape[axis] <= size.block:
        constants = {
            "HARD": problem.hard,
            "WHOLE": whole and blocks and axis == y.dim() - 1 and shape[axis] % each == 0,
        }
        launch_rows(
            gumbel_softmax_rows, axis, {"x": logits, "y": y}, counted={"number": numbers}, constants=constants,
            numbers=dict(zip(_NUMBERS, words, strict=True)), size=size,
        )  # fmt: skip
        return
    z = y if y.dtype == work else torch.empty_like(y, dtype=work)
    launch = _perturbed_elements(shape, (*strides[:2], z.stride()), blocks, (logits.dtype, architecture(y)))
    launch(logits, z, numbers=words)
    softmax("softmax", (z, z), axis)
    if z is not y:
        _narrow(z, y)


@launcher("gumbel_softmax_backward")
def gumbel_softmax_backward(problem: Any, dy: torch.Tensor, y: torch.Tensor, dx: torch.Tensor) -> None:
    """Compute dx: the gradient of softmax in the work type, times 1 / tau, rounded to the storage type once."""
    if dx.numel() == 0:
        return
    work = _work(dx)
    product = torch.empty_like(dx, dtype=work)
    softmax("softmax_backward", (dy.to(work), y.to(work), product), problem.axis)
    product.mul_(float(_factor(problem.tau, work)))
    _narrow(product, dx)
