# mypy: ignore-errors
# ruff: noqa: N803, N806
"""Exact products of digits on Hopper, in Gluon: what `triton_integers.py` has, for a group of four warps and 64 rows.

Columns of a tile are in order, and weights become the operand that `triton_integers.py` describes by packing bytes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from isograd.flash_attention.order_free import triton_integers as integers
from isograd.numerics import triton_ops as ops
from isograd.numerics.constants import MAGIC_32 as _MAGIC

BLOCK = integers.BLOCK
NUMBER_SLOTS = gl.constexpr(2)  # blocks whose numbers are in shared memory
ROWS = gl.constexpr(64)  # of a group of four warps
# Rounds to an integer and adds 128, after which the bytes are the digits, but for the first bit of the low one.
_MAGIC_DIGITS = gl.constexpr(float(_MAGIC) + 128.0)


@gluon.jit
def exact(a_high, a_low, b_high, b_low, layout: gl.constexpr):
    """The sums of `triton_integers.exact`; b_high and b_low: rows of columns in shared memory."""
    COLUMNS: gl.constexpr = b_high.shape[0]
    zero = gl.zeros([64, COLUMNS], gl.int32, layout)
    high, low = b_high.permute([1, 0]), b_low.permute([1, 0])
    rest = warpgroup_mma(a_low, low, zero, use_acc=False, is_async=True)
    total = warpgroup_mma(a_high, high, zero, use_acc=False, is_async=True)
    rest = warpgroup_mma_wait(1, deps=[rest])
    rest = (rest + 128) >> 8
    rest = warpgroup_mma(a_high, low, rest, is_async=True)
    rest = warpgroup_mma(a_low, high, rest, is_async=True)
    rest, total = warpgroup_mma_wait(0, deps=[rest, total])
    return (total << 8) + rest


@gluon.jit
def for_digits(scaled):
    """Integers of 16 bits for `operand`: scaled numbers, rounded."""
    return ops.as_int(scaled + _MAGIC_DIGITS)


@gluon.jit
def bring_numbers(ptr, stride, numbers, slot, COUNT: gl.constexpr):
    """Copy COUNT arrays of 128 numbers, `stride` apart, to a slot of shared memory, by one warp."""
    lines = gl.arange(0, BLOCK, layout=gl.BlockedLayout([4], [32], [1], [0]))
    for i in gl.static_range(COUNT):
        numbers.index(COUNT * slot + i).store(gl.load(ptr + i * stride + lines))


@gluon.jit
def number(numbers, at, part: gl.constexpr, layout: gl.constexpr):
    """One of the arrays for the left or the right half of a tile."""
    return numbers.index(at).slice(64 * part, 64).load(layout)


@gluon.jit
def halves(x):
    """The left and the right half of a tile [64, 128]."""
    return gl.split(x.reshape([64, 2, 64]).permute([0, 2, 1]))


@gluon.jit
def operand(left, right, layout: gl.constexpr):
    """High and low digits of integers of `for_digits`, in two halves, as operands of a product over the columns."""
    a, b = gl.split(left.reshape([64, 32, 2]))
    c, d = gl.split(right.reshape([64, 32, 2]))
    asm: gl.constexpr = """
    {
    .reg .b32 first, second;
    prmt.b32 first, $2, $4, 0x5410;
    prmt.b32 second, $3, $5, 0x5410;
    prmt.b32 $0, first, second, 0x7531;
    prmt.b32 $1, first, second, 0x6420;
    xor.b32 $1, $1, 0x80808080;
    }
    """
    high, low = gl.inline_asm_elementwise(
        asm, "=r,=r,r,r,r,r", [a, b, c, d], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return _bytes(high, layout), _bytes(low, layout)


@gluon.jit
def _bytes(words, layout: gl.constexpr):
    """The bytes of words [64, 32] in the order of columns."""
    b0, b1 = words.to(gl.int8), (words >> 8).to(gl.int8)
    b2, b3 = (words >> 16).to(gl.int8), (words >> 24).to(gl.int8)
    x = gl.join(gl.join(b0, b2), gl.join(b1, b3)).reshape([64, 128])
    return gl.convert_layout(x, layout, assert_trivial=True)
