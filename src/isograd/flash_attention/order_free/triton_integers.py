# mypy: ignore-errors
# ruff: noqa: N803
"""Integers and powers of two of order-free attention in Triton: rule 23 of `docs/arithmetic.md`, see `reference.py`.

A tile [rows, 128] of weights comes as two halves of 64 columns, which are worked on one after the other to spare
registers. Together they are one operand of a product over 128 columns, whose order is free: column 64 h + c of the
block is column 2 c + h of the operand. There a thread finds in its registers what the tensor cores want it to hold,
and what is weighed lies in memory in that order (`triton_cut.py`).
"""

import triton
import triton.language as tl

from isograd.numerics import constants as c
from isograd.numerics import triton_ops as ops
from isograd.products.triton_slices import exponent_of

BLOCK = tl.constexpr(128)
HALF = tl.constexpr(64)
MARGIN = tl.constexpr(0.015625)  # of the largest score of a block
LEAST = tl.constexpr(-110)
INFINITY = tl.constexpr(0x7F800000)
TINY = tl.constexpr(2.0**-18)  # what scales of two rows leave of 2**-22
_S0, _S1, _S2, _S3 = (tl.constexpr(v) for v in c.EXP2_POLY_SHORT)


@triton.jit
def exact(a_high, a_low, b_high, b_low):
    """⌊(Σ A B + 128) / 256⌋ of A = 256 a_high + a_low and B: at most 512 terms, whose sum stays below 2**31."""
    rest = tl.dot(a_low, b_low, out_dtype=tl.int32)
    total = tl.dot(a_high, b_high, out_dtype=tl.int32) << 8
    total = tl.dot(a_high, b_low, total, out_dtype=tl.int32)
    total = tl.dot(a_low, b_high, total, out_dtype=tl.int32)
    return total + ((rest + 128) >> 8)


@triton.jit
def power(k):
    """2**k for k <= 127, an int32: subnormal below -126, zero below -149."""
    k = tl.maximum(k, -200)
    half = k >> 1
    return ops.pow2_32(half) * ops.pow2_32(k - half)


@triton.jit
def exp2_parts(t):
    """2**t = m 2**k for |t| <= 2**22: m, and k on top of MAGIC_BITS_32."""
    z = t + ops.MAGIC_32
    f = t - (z - ops.MAGIC_32)
    return tl.fma(tl.fma(tl.fma(tl.fma(f, _S3, _S2), f, _S1), f, _S0), f, 1.0), ops.as_int(z)


@triton.jit
def scaled(m, places):
    """Return m 2**places for m about 1, some small number below 2**-64."""
    return ops.as_float(ops.as_int(m) + (tl.maximum(places, -64) << 23))


@triton.jit
def rounded(m, places):
    """rint(m 2**places) on top of MAGIC_BITS_32, for m about 1 and places <= 22."""
    return ops.as_int(scaled(m, places) + ops.MAGIC_32)


@triton.jit
def above(x):
    """⌊x⌋ + 1 as an int32, for |x| < 2**22."""
    return ops.as_int((tl.floor(x) + 1.0) + ops.MAGIC_32) - ops.MAGIC_BITS_32


@triton.jit
def digits(integer):
    """The high and the low digit of integers of 16 bits, which may stand on top of MAGIC_BITS_32."""
    return ((integer + 128) >> 8).to(tl.int8), integer.to(tl.int8)


@triton.jit
def joined(left, right, ROWS: tl.constexpr):
    """Two halves of digits as one operand [ROWS, 128]."""
    return tl.reshape(tl.join(left, right), [ROWS, BLOCK])


@triton.jit
def weights(left, right, ROWS: tl.constexpr):
    """(high digits, low digits, exponents G, which are not finite) of rows of weights in two halves [ROWS, 64]."""
    key = tl.maximum(tl.max(ops.magnitude_key(left), 1), tl.max(ops.magnitude_key(right), 1))
    exponent = tl.maximum(exponent_of(key), LEAST)
    scale = ops.pow2_32(15 - exponent)[:, None]
    left_high, left_low = digits(ops.as_int(left * scale + ops.MAGIC_32))
    right_high, right_low = digits(ops.as_int(right * scale + ops.MAGIC_32))
    high, low = joined(left_high, right_high, ROWS), joined(left_low, right_low, ROWS)
    return high, low, exponent, key >= INFINITY
