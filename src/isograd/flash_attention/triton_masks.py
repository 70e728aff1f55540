# mypy: ignore-errors
# ruff: noqa: N803
"""What the attention kernels in Triton share: where a program works, which tiles it visits, the scores, the dropout.

Scores are in base 2: s * log2(e), so that exp2 of the hardware needs no multiplication. The rules on elementary
functions are not for attention, whose scores have the tensor cores' bits (`docs/arithmetic.md`, rule 10). A tile has
its queries on one axis and its keys on the other; the functions here take both as index tensors that broadcast, so that
they serve tiles of either orientation.
"""

import math

import numpy as np
import triton
import triton.language as tl

from isograd.numerics.triton_memory import wide_int

# Both in two parts, the first of them rounded to binary32.
LOG2E = tl.constexpr(float(np.float32(math.log2(math.e))))
LOG2E_LOW = tl.constexpr(math.log2(math.e) - float(np.float32(math.log2(math.e))))
LN2 = tl.constexpr(float(np.float32(math.log(2))))
LN2_LOW = tl.constexpr(math.log(2) - float(np.float32(math.log(2))))

PAD = tl.constexpr(128)  # rows of scratch memory, a multiple of every tile's

_M0, _M1 = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
_K0, _K1 = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)
_DROPOUT_WORD = tl.constexpr(0x6174746E)


# --- where a program works -------------------------------------------------------------------------------------------
@triton.jit
def place(tiles, heads, batch, together, LAST_FIRST: tl.constexpr):
    """(tile, head, batch element) of this program.

    Programs that run at the same time share the keys and values of `together` heads, so that these stay in the L2
    cache; of each head the tiles with the most work come first (LAST_FIRST: those at the end of the sequence).
    """
    pid = tl.program_id(0)
    all_heads = heads * batch
    block = pid // (together * tiles)
    rest = pid - block * (together * tiles)
    width = tl.minimum(together, all_heads - block * together)
    tile = rest // width
    head = block * together + rest - tile * width
    if LAST_FIRST:
        tile = tiles - 1 - tile
    return tile, head % heads, head // heads


@triton.jit
def _start(starts_ptr, n, tokens):
    return tl.minimum(tl.maximum(tl.load(starts_ptr + n), 0), tokens)


@triton.jit
def rows_of_sequence(starts_ptr, n, count, tokens):
    """(first row, rows) of sequence n of `count`; number `count` is what lies beyond the last one.

    Starts that are out of order or of range are bounded, so that nothing outside of the tokens is touched.
    """
    first = _start(starts_ptr, n, tokens)
    end = tl.where(n < count, _start(starts_ptr, tl.minimum(n + 1, count), tokens), tokens)
    return first, tl.maximum(end - first, 0)


@triton.jit
def slot_of_sequence(starts_ptr, n, tokens):
    """The place of a sequence's first row in scratch memory whose sequences start at multiples of PAD."""
    return (_start(starts_ptr, n, tokens) // PAD + n) * PAD


@triton.jit
def find_sequence(starts_ptr, count, tokens, tile, BLOCK: tl.constexpr):
    """(sequence, tile within it) of a tile of packed sequences.

    Sequence n has the tiles from starts[n] // BLOCK + n on. That leaves room for all of its rows, since
    ceil(l / BLOCK) <= (a + l) // BLOCK - a // BLOCK + 1; a tile that is not needed begins beyond them.
    """
    low, high = tile * 0, tile * 0 + count
    while low < high:
        middle = (low + high + 1) // 2
        here = _start(starts_ptr, middle, tokens) // BLOCK + middle <= tile
        low = tl.where(here, middle, low)
        high = tl.where(here, high, middle - 1)
    return low, tile - (_start(starts_ptr, low, tokens) // BLOCK + low)


@triton.jit
def locate(
    own_starts_ptr, other_starts_ptr, z, tile, own, other, sequences, BLOCK: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """Where a tile of BLOCK rows of one side is, the queries' or the keys'; `own` and `other` are rows of both sides.

    (sequence, batch element, tile within the sequence, first row and rows of the own side, those of the other).
    """
    first, other_first = tile * 0, tile * 0
    zb = z.to(tl.int64)
    if PACKED:
        z, tile = find_sequence(own_starts_ptr, sequences, own, tile, BLOCK)
        first, own = rows_of_sequence(own_starts_ptr, z, sequences, own)
        other_first, other = rows_of_sequence(other_starts_ptr, z, sequences, other)
        other = tl.where(z < sequences, other, 0)
        zb = zb * 0
    return z, zb, tile, first, own, other_first, other


@triton.jit
def offset(zb, head, row, strides):
    """The offset of a row; strides are (batch, head, row)."""
    return zb * strides[0] + head.to(tl.int64) * strides[1] + row.to(tl.int64) * strides[2]


@triton.jit
def tile_rows(ptr, offset, rows, stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A descriptor of `rows` rows of WIDTH elements in tiles [ROWS, BLOCK]; what lies outside is read as zero."""
    return tl.make_tensor_descriptor(
        ptr + offset, shape=[rows, WIDTH], strides=[wide_int(stride), 1], block_shape=[ROWS, BLOCK]
    )


# --- which tiles a program visits ------------------------------------------------------------------------------------
@triton.jit
def other_tiles(
    first, other, left, right, ROWS: tl.constexpr, OTHER: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr
):  # fmt: skip
    """Tiles of OTHER indices that see some of the ROWS indices from `first` on: (begin, full, full end, end).

    Index x sees y only if x + left <= y (LEFT) and y <= x + right (RIGHT). Between `full` and `full end` every pair is
    visible and y is below `other`, their number.
    """
    begin, full, full_end, end = first * 0, first * 0, first * 0 + other, first * 0 + other
    if LEFT:
        begin = tl.minimum(tl.maximum(first + left, 0), other)
        full = tl.minimum(tl.maximum(first + ROWS - 1 + left, 0), other)
    if RIGHT:
        full_end = tl.minimum(tl.maximum(first + right + 1, 0), other)
        end = tl.minimum(tl.maximum(first + ROWS + right, 0), other)
    end = tl.cdiv(end, OTHER)
    full = tl.minimum(tl.cdiv(full, OTHER), end)
    return tl.minimum(begin // OTHER, end), full, tl.maximum(full_end // OTHER, full), end


# --- scores ----------------------------------------------------------------------------------------------------------
@triton.jit
def scores(
    qk, i, j, lq, lk, left, right, a, b, bias_base, bias_strides, mask_base, mask_strides, q_segment, k_segment,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, DIRECT: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, SEGMENTS: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """(scores of a tile in base 2, -inf where hidden; tanh of the soft cap, else something unused).

    DIRECT: the scores are still to be multiplied by a > 0. PARTIAL: positions hide some keys.
    """
    t = qk
    if SOFTCAP:
        t = 1.0 - 2.0 / (tl.exp2(qk * a) + 1.0)
        s = t * b
    elif DIRECT:
        s = qk
    else:
        s = qk * a
    if BIAS or MASK:
        inside = (i < lq) & (j < lk)
    if BIAS:
        at = bias_base + i.to(tl.int64) * bias_strides[2] + j.to(tl.int64) * bias_strides[3]
        s += tl.load(at, mask=inside, other=0.0).to(tl.float32) * LOG2E
    if MASK:
        at = mask_base + i.to(tl.int64) * mask_strides[2] + j.to(tl.int64) * mask_strides[3]
        s = tl.where(tl.load(at, mask=inside, other=0) != 0, s, float("-inf"))
    if SEGMENTS:
        s = tl.where(q_segment == k_segment, s, float("-inf"))
    if PARTIAL:
        seen = j < lk
        if LEFT:
            seen = seen & (j >= i + left)
        if RIGHT:
            seen = seen & (j <= i + right)
        s = tl.where(seen, s, float("-inf"))
    return s, t


@triton.jit
def probabilities(s, a, lse, rest, DIRECT: tl.constexpr, EXACT: tl.constexpr):
    """2^(s - lse), for DIRECT of s * a, lse in base 2; EXACT: `rest` is what rounding has left of lse."""
    x = tl.fma(s, a, -lse) if DIRECT else s - lse
    if EXACT:
        x = x - rest
    return tl.exp2(x)


# --- dropout ---------------------------------------------------------------------------------------------------------
@triton.jit
def kept(row, column, number, seed_low, seed_high, threshold, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS]: whether probabilities are kept, for the queries from `row` and the keys from `column` on.

    Philox-4x32-10 with the counter (key // 4, query, number of the sequence and head, a constant); column is a multiple
    of 4. Word w of a block decides about key 4 * block + w.
    """
    i = (row + tl.arange(0, ROWS)).to(tl.uint32)[:, None]
    block = (column // 4 + tl.arange(0, COLUMNS // 4)).to(tl.uint32)[None, :]
    zero = tl.zeros((ROWS, COLUMNS // 4), tl.uint32)
    c0, c1, c2, c3 = zero + block, zero + i, zero + number.to(tl.uint32), zero + _DROPOUT_WORD
    k0, k1 = zero + seed_low.to(tl.uint32, bitcast=True), zero + seed_high.to(tl.uint32, bitcast=True)
    m0, m1 = zero + _M0, zero + _M1
    for _ in tl.static_range(10):
        first, third = c0, c2
        c0 = tl.umulhi(m1, third) ^ c1 ^ k0
        c2 = tl.umulhi(m0, first) ^ c3 ^ k1
        c1 = m1 * third
        c3 = m0 * first
        k0 += zero + _K0
        k1 += zero + _K1
    words = tl.join(tl.join(c0, c2), tl.join(c1, c3))
    return tl.reshape(words, (ROWS, COLUMNS)).to(tl.int64) >= threshold
