# mypy: ignore-errors
# ruff: noqa: N803, RET505
# A branch on a constant that returns needs its else: Triton compiles what follows a lone return as well.
"""Order-free sums of terms that arrive in pieces: keys, integer parts, and the words that add up in memory (rule 4).

A sum takes two steps over its terms. The first finds `term_key`'s maximum. The second adds the parts of every term,
(a, b), whose integer is a for binary32 and a * 2**44 + b for binary64; each part has room for 2**17 terms. Where a sum
may have more, parts are split into two words each before they are added up.
"""

import triton
import triton.language as tl

from isograd.numerics import triton_ops as ops
from isograd.numerics import triton_sum as sums
from isograd.numerics.triton_memory import wide_int

_INF_32, _INF_64 = tl.constexpr(0x7F800000), tl.constexpr(0x7FF0000000000000)
_WORD = tl.constexpr(0xFFFFFFFF)
# Bits in the first word of a sum whose terms are not all finite: a positive infinity, a negative one, NaN both.
_POSITIVE, _NEGATIVE = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def term_key(p):
    """The bits of |p|, one above infinity's for every NaN: an int32 or int64 whose maximum is that of the terms."""
    if p.dtype == tl.float64:
        return tl.minimum(ops.magnitude_key(p), _INF_64 + 1)
    else:
        return tl.minimum(ops.magnitude_key(p), _INF_32 + 1)


@triton.jit
def key_is_finite(key):
    """Whether a key belongs to a finite number."""
    if key.dtype == tl.int64:
        return key < _INF_64
    else:
        return key < _INF_32


@triton.jit
def term_parts(p, scale, magic, low_scale):
    """The parts (a, b) of terms, from what `sums.term_scale` says of the largest; binary32 has its term twice."""
    high, low = sums.split_term_bits(p, scale, magic, low_scale)
    high -= ops.as_int(magic)
    if p.dtype == tl.float64:
        return high, low - ops.MAGIC_BITS_64
    else:
        term = (high.to(tl.int64) << 23) + (low - ops.MAGIC_BITS_32).to(tl.int64)
        return term, term


@triton.jit
def special_terms(p):
    """Terms that are not finite, zero for the others: their float sum is the same in any order."""
    return tl.where(key_is_finite(term_key(p)), 0.0, p)


@triton.jit
def parts_to_wide(a, b, dtype: tl.constexpr):
    """Sums of parts as one 128-bit integer."""
    if dtype == tl.float64:
        hi, lo = sums.shifted_wide(a, 44)
        return sums.add_wide(hi, lo, b)
    else:
        return a >> 63, a


@triton.jit
def _scaled(hi, lo, exponent, special, key):
    if key.dtype == tl.int64:
        s = sums.wide_to_float(hi, lo, exponent - 88, tl.float64)
    else:
        s = sums.wide_to_float(hi, lo, exponent.to(tl.int64) - 44, tl.float32)
    return tl.where(key_is_finite(key), s, special)


@triton.jit
def sum_of_parts(a, b, exponent, special, key):
    """The sum from the sums of its parts over at most 2**17 terms; `special` where a term is not finite."""
    if key.dtype == tl.int64:
        hi, lo = parts_to_wide(a, b, tl.float64)
        return _scaled(hi, lo, exponent, special, key)
    else:
        s = sums.scale_pow2(a.to(tl.float32), exponent - 44)
        return tl.where(key_is_finite(key), s, special)


@triton.jit
def limb_parts(high, low, magic, COUNT: tl.constexpr):
    """The parts of sums of COUNT limbs as `sums.split_term_bits` gives them, at most 256 of binary32."""
    high -= COUNT * ops.as_int(magic)  # modulo the width, as all that follows
    if high.dtype == tl.int64:
        surplus: tl.constexpr = (COUNT * ops.MAGIC_BITS_64 + 2**63) % 2**64 - 2**63
        return high, low - surplus
    else:
        surplus: tl.constexpr = (COUNT * ops.MAGIC_BITS_32 + 2**31) % 2**32 - 2**31
        total = (high.to(tl.int64) << 23) + (low - surplus).to(tl.int64)
        return total, total


@triton.jit
def sum_of_two(p, q):
    """The sum of two terms. No integer is needed: the smaller one is rounded to the quantum, and IEEE adds exactly.

    The smaller term is a multiple of the quantum unless it is below the precision's power of two times that, where
    adding and subtracting this power rounds it. Infinities and NaN pass through.
    """
    key_p, key_q = ops.magnitude_key(p), ops.magnitude_key(q)
    large, small = tl.where(key_q > key_p, q, p), tl.where(key_q > key_p, p, q)
    if p.dtype == tl.float64:
        limit = tl.maximum((tl.maximum(key_p, key_q) & _INF_64) - (36 << 52), 0)  # 2**52 * 2**-88
        sign = ops.as_int(small) & -0x8000000000000000
    else:
        limit = tl.maximum((tl.maximum(key_p, key_q) & _INF_32) - (21 << 23), 0)  # 2**23 * 2**-44
        sign = ops.as_int(small) & -0x80000000
    step = ops.as_float(limit | sign)
    small = tl.where(tl.minimum(key_p, key_q) < limit, (small + step) - step, small)
    return (large + small) + 0.0  # minus zero becomes zero


# --- words in memory -------------------------------------------------------------------------------------------------
# A sum has WORDS int64 words: 1 (binary32) or 2 (binary64) for sums of at most 2**17 terms, otherwise twice as many.
@triton.jit
def mark_of(special):
    """What a sum of special terms leaves in the first word: 0 without any, both bits for NaN."""
    mark = tl.where(special > 0, _POSITIVE, tl.where(special < 0, _NEGATIVE, 0))
    return tl.where(special == special, mark, _POSITIVE | _NEGATIVE).to(tl.int64)


@triton.jit
def accumulate(pointers, step, a, b, special, key, mask, WORDS: tl.constexpr, wide: tl.constexpr):
    """Add sums of parts into memory; the words of one sum are `step` apart. Special terms leave a mark in the first."""
    finite, step = mask & key_is_finite(key), wide_int(step)
    w0, w1, w2, w3 = split_words(a, b, WORDS, wide)
    tl.atomic_add(pointers, w0, mask=finite, sem="relaxed")
    if WORDS > 1:
        tl.atomic_add(pointers + step, w1, mask=finite, sem="relaxed")
    if WORDS > 2:
        tl.atomic_add(pointers + 2 * step, w2, mask=finite, sem="relaxed")
        tl.atomic_add(pointers + 3 * step, w3, mask=finite, sem="relaxed")
    mark = mark_of(special)
    tl.atomic_or(pointers, mark, mask=mask & (mark != 0), sem="relaxed")


@triton.jit
def split_words(a, b, WORDS: tl.constexpr, wide: tl.constexpr):
    """The four words of sums of parts, of which WORDS count."""
    if WORDS == 1 or (wide and WORDS == 2):
        return a, b, a, b
    else:
        return a >> 32, a & _WORD, b >> 32, b & _WORD


@triton.jit
def load_words(pointers, step, mask, WORDS: tl.constexpr):
    """Four words of sums in memory, of which WORDS count."""
    step = wide_int(step)
    w0 = tl.load(pointers, mask=mask, other=0)
    w1, w2, w3 = w0, w0, w0
    if WORDS > 1:
        w1 = tl.load(pointers + step, mask=mask, other=0)
    if WORDS > 2:
        w2 = tl.load(pointers + 2 * step, mask=mask, other=0)
        w3 = tl.load(pointers + 3 * step, mask=mask, other=0)
    return w0, w1, w2, w3


@triton.jit
def sum_of_words(w0, w1, w2, w3, key, WORDS: tl.constexpr):
    """The sums whose words are complete; the first word of one that is not finite is its mark."""
    wide: tl.constexpr = key.dtype == tl.int64
    exponent, _, _, _ = sums.term_scale(key)
    if WORDS == 1:
        hi, lo = w0 >> 63, w0
    elif WORDS == 2 and wide:
        hi, lo = parts_to_wide(w0, w1, tl.float64)
    else:
        hi, lo = sums.fold_wide(w0, w1)
        if wide:
            # The first part times 2**44: it stays below 2**84 for fewer than 2**39 terms.
            hi, lo = (hi << 44) | ((lo >> 20) & 0xFFFFFFFFFFF), lo << 44
            hi2, lo2 = sums.fold_wide(w2, w3)
            hi, lo = sums.add_words(hi, lo, hi2, lo2)
    infinity = tl.where(w0 == _POSITIVE, float("inf"), float("-inf"))
    special = tl.where((w0 == _POSITIVE) | (w0 == _NEGATIVE), infinity, float("nan"))
    return _scaled(hi, lo, exponent, special.to(tl.float64 if wide else tl.float32), key)
