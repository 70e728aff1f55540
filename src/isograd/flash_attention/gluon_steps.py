# mypy: ignore-errors
# ruff: noqa: N803
"""What the Hopper kernels of attention share: TMA under one name in every Triton, operands in 16 bits, and sequences.

Rows of packed sequences have descriptors of five axes, with which the hardware itself ends at the end of a sequence:
rows behind it are read as 0 and are not written. The axes are (wrap, end, head, row, column). Rows are counted such
that every sequence ends at row REACH, where the descriptor ends: row i of a sequence of l rows is REACH - l + i. The
axis `end` has the stride of a row as well and takes the token at which the sequence ends, and REACH steps along `wrap`
take REACH rows back: its stride is 2^34 less a row, and REACH times 2^34 elements are a multiple of 2^64 bytes, where
addresses wrap around.
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.hopper import tma

from isograd.flash_attention.triton_masks import LN2, LN2_LOW, PAD
from isograd.flash_attention.triton_masks import LOG2E as SINK_LOG2E

LOG2E = math.log2(math.e)
REACH = gl.constexpr(1 << 30)
WRAP = 1 << 34  # elements


@_core.builtin
def _add_before_39(tensor_desc, coord, src, _semantic=None):
    kind = _core.ir.DESCRIPTOR_REDUCE_KIND.ADD
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


# The names since Triton 3.9, or what there was before.
load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
add = getattr(tma, "async_atomic_add", None) or _add_before_39


@gluon.jit
def packed(x, dtype: gl.constexpr):
    """Neighbours in a row rounded to 16 bits, two in an int32: so they stay in one register across iterations."""
    first, second = gl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))
    kind: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    asm: gl.constexpr = f"cvt.rn.{kind}.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(asm, "=r,f,f", [first, second], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpacked(pairs, dtype: gl.constexpr, layout: gl.constexpr):
    """The numbers of `packed` in a layout which gives every thread those that it has."""
    first = pairs.to(gl.int16).to(dtype, bitcast=True)
    second = (pairs >> 16).to(gl.int16).to(dtype, bitcast=True)
    x = gl.join(first, second).reshape([pairs.shape[0], 2 * pairs.shape[1]])
    return gl.convert_layout(x, layout, assert_trivial=True)


# --- sequences -------------------------------------------------------------------------------------------------------
@gluon.jit
def corner(place, head, row, column, PACKED: gl.constexpr):
    """Where a tile is for a descriptor; place: batch element, and of packed sequences their end and rows."""
    batch, end, length = place
    return (REACH, end, head, row + (REACH - length), column) if PACKED else (batch, head, row, column)


@gluon.jit
def _start(starts_ptr, n, tokens):
    return gl.minimum(gl.maximum(gl.load(starts_ptr + n), 0), tokens)


@gluon.jit
def rows_of_sequence(starts_ptr, n, count, tokens):
    """(first row, rows) of a sequence, as in `triton_masks`."""
    first = _start(starts_ptr, n, tokens)
    end = gl.where(n < count, _start(starts_ptr, gl.minimum(n + 1, count), tokens), tokens)
    return first, gl.maximum(end - first, 0)


@gluon.jit
def slot_of_sequence(starts_ptr, n, tokens):
    """The place of a sequence's first row in scratch memory, as in `triton_masks`."""
    return (_start(starts_ptr, n, tokens) // PAD + n) * PAD


@gluon.jit
def find_sequence(starts_ptr, count, tokens, tile, ROWS: gl.constexpr):
    """(sequence, tile within it) of a tile of packed sequences, as in `triton_masks`."""
    low = tile * 0
    high = low + count
    while low < high:
        middle = (low + high + 1) // 2
        here = _start(starts_ptr, middle, tokens) // ROWS + middle <= tile
        low = gl.where(here, middle, low)
        high = gl.where(here, high, middle - 1)
    return low, tile - (_start(starts_ptr, low, tokens) // ROWS + low)


@gluon.jit
def locate(
    own_starts_ptr, other_starts_ptr, batch, tile, own, other, sequences, ROWS: gl.constexpr, PACKED: gl.constexpr
):  # fmt: skip
    """Where a tile of one side's rows is, the queries' or the keys'; `own` and `other` are rows of both sides.

    (batch element or sequence, tile within it, first row, rows, place of the own side, rows and place of the other).
    """
    first = 0
    place = (batch, 0, own)
    other_place = (batch, 0, other)
    if PACKED:
        batch, tile = find_sequence(own_starts_ptr, sequences, own, tile, ROWS)
        first, own = rows_of_sequence(own_starts_ptr, batch, sequences, own)
        other_first, other = rows_of_sequence(other_starts_ptr, batch, sequences, other)
        other = gl.where(batch < sequences, other, 0)
        place = (0, first + own, own)
        other_place = (0, other_first + other, other)
    return batch, tile, first, own, place, other, other_place


# --- scores ----------------------------------------------------------------------------------------------------------
@gluon.jit
def capped_tanh(s, factor):
    """The hyperbolic tangent of the soft cap, 1 - 2 / (2^(s factor) + 1).

    The reciprocal is the processor's, off by an ulp at most: it is taken of 1 or more, and what a division does for
    other ranges is not needed.
    """
    x = gl.exp2(s * factor) + 1.0
    asm: gl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
    inverse = gl.inline_asm_elementwise(asm, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
    return 1.0 - 2.0 * inverse


@gluon.jit
def with_sink(sink, highest, total):
    """Add a sink to the sums of rows: (highest in base 2, sum, what earlier results are multiplied by)."""
    sink = sink * SINK_LOG2E + gl.zeros_like(highest)
    top = gl.maximum(highest, sink)
    base = gl.where(top == float("-inf"), 0.0, top)
    shrink = gl.exp2(highest - base)
    return top, total * shrink + gl.exp2(sink - base), shrink


@gluon.jit
def natural(highest, log2):
    """The logarithm to base e from two terms to base 2, as `triton_forward` has it: a lone sink gives its bits."""
    total = highest + log2
    finite = gl.abs(total) < float("inf")
    highest, high = gl.where(finite, highest, 0.0), gl.where(finite, total, 0.0)
    back = high - highest
    low = (highest - (high - back)) + (log2 - back)
    zero = gl.zeros_like(high)
    lse = gl.fma(high, LN2 + zero, gl.fma(high, LN2_LOW + zero, low * LN2))
    return gl.where(finite, lse, total)
