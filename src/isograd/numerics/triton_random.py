# mypy: ignore-errors
"""Random numbers in Triton kernels; `random.py` is the definition."""

import triton
import triton.language as tl

_M0, _M1 = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
_K0, _K1 = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)
_ALL = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _words(value, like):
    """A constant as unsigned words."""
    return tl.full(like.shape, value, tl.uint32)


@triton.jit
def philox(block, last, seed_low, seed_high):
    """The four words of Philox-4x32-10 for blocks that uint64 counts, with the last word of the counter."""
    c0, c1 = (block & _ALL).to(tl.uint32), (block >> 32).to(tl.uint32)
    c2, c3 = _words(0, block), _words(last, block)
    k0 = _words(0, block) + seed_low.to(tl.uint32, bitcast=True)
    k1 = _words(0, block) + seed_high.to(tl.uint32, bitcast=True)
    a, b = _words(_M0, block), _words(_M1, block)
    for _ in tl.static_range(10):
        first, third = c0, c2
        c0 = tl.umulhi(b, third) ^ c1 ^ k0
        c2 = tl.umulhi(a, first) ^ c3 ^ k1
        c1 = b * third
        c3 = a * first
        k0 += _words(_K0, block)
        k1 += _words(_K1, block)
    return c0, c1, c2, c3


@triton.jit
def number(low, high):
    """A number of 64 bits that comes in int32 words, as the one of a call's first element."""
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & tl.full((), 0xFFFFFFFF, tl.int64))
