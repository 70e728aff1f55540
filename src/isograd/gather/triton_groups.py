# mypy: ignore-errors
# ruff: noqa: N803, RET505
# A branch on a constant that returns needs its else: Triton compiles what follows a lone return as well.
"""Sums of whole rows by index in Triton (index_add, embedding backward, segment_sum), and rows by index.

`index_sum` groups the sources by destination first. `group_count` gives every source its rank among those of its
destination, `group_allocate` every destination a range of the list, `group_place` fills the list. Ranks and ranges
depend on the order in which atomics arrive; the sums do not, they are exact integers. Then `group_copy` writes every
destination with at most one source, which takes few registers and so keeps the memory busy, and `group_sum` those with
up to HOT sources. The sources of the others, the hot ones, are cut into chunks: `group_copy` finds the largest terms of
each chunk, `group_sum` adds its integers up, and the last chunk of a destination to arrive writes.

Scratch memory of int32 (int64 where that is too narrow), `num` destinations and `count` sources:
    total, chunks, hot, several         4 counters, zero at the start
    counts [num]                        sources of a destination, zero at the start
    offsets, first, chunk_base, slots   [num] each: start in `order`, source of rank 0, first chunk, hot number
    ranks, order                        [count] each
    chunk_destination                   [2 * count // CHUNK + 1]
    destination, start, sources         [count // 2 + 1] each, of the destinations with 2 to HOT sources
Hot scratch memory of int64, zeroed by `group_place`, for each hot destination: WORDS * width words, `width` keys and
one counter for each block of columns.
"""

import triton
import triton.language as tl

from isograd.numerics import triton_ops as ops
from isograd.numerics import triton_sum as sums
from isograd.numerics import triton_terms as terms
from isograd.numerics.triton_memory import as_bits, in_range, nan_bits, report, wide_int

COUNTERS = tl.constexpr(4)
HOT = tl.constexpr(64)  # sources of a destination that one program adds up
CHUNK = tl.constexpr(64)  # sources of a hot destination in one piece


@triton.jit
def select(
    weight_ptr,
    indices_ptr,
    out_ptr,
    flag_ptr,
    num,
    count,
    width,
    code,
    weight_row,
    weight_column,
    out_row,
    out_column,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NEGATIVE: tl.constexpr,
):
    """out[s] = weight[indices[s]], rows of `width` elements; NaN where the index is out of range."""
    pid = tl.program_id(0).to(tl.int64)
    parts = tl.cdiv(width, BLOCK)
    block = pid // parts
    column = ((pid - block * parts) * BLOCK + tl.arange(0, BLOCK))[None, :]
    s = block * ROWS + tl.arange(0, ROWS)
    inside = s < count
    index = tl.load(indices_ptr + s, mask=inside, other=0).to(tl.int64)
    valid, at = in_range(index, num, NEGATIVE)
    mask = inside[:, None] & (column < width)
    source = as_bits(weight_ptr) + at[:, None] * weight_row + column * weight_column
    bits = tl.load(source, mask=mask & valid[:, None], other=0)
    bits = tl.where(valid[:, None], bits, nan_bits(out_ptr.dtype.element_ty))
    tl.store(as_bits(out_ptr) + s[:, None] * out_row + column * out_column, bits, mask=mask)
    report(flag_ptr, code, inside & ~valid, s, index, num)


# --- grouping --------------------------------------------------------------------------------------------------------
@triton.jit
def _destinations(indices_ptr, s, count, num, stride, skipped, SKIPS: tl.constexpr, NEGATIVE: tl.constexpr):
    """(destinations, whether the source takes part, whether its index is bad, the index) of sources."""
    inside = s < count
    index = tl.load(indices_ptr + s * stride, mask=inside, other=0).to(tl.int64)
    if SKIPS:
        inside = inside & (index != skipped)
    valid, at = in_range(index, num, NEGATIVE)
    return at, inside & valid, inside & ~valid, index


@triton.jit
def _several(scratch_ptr, num, count):
    """Where the list of destinations with several sources starts."""
    return scratch_ptr + COUNTERS + 5 * wide_int(num) + 2 * wide_int(count) + (2 * wide_int(count) // CHUNK + 1)


@triton.jit
def group_count(
    indices_ptr,
    scratch_ptr,
    flag_ptr,
    num,
    count,
    stride,
    skipped,
    code,
    BLOCK: tl.constexpr,
    SKIPS: tl.constexpr,
    NEGATIVE: tl.constexpr,
):
    """Counts, ranks, and the first source of every destination."""
    counts = scratch_ptr + COUNTERS
    first = counts + 2 * wide_int(num)
    ranks = first + 3 * wide_int(num)
    s = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at, use, bad, index = _destinations(indices_ptr, s, count, num, stride, skipped, SKIPS, NEGATIVE)
    # Sources of a program that share a destination are counted with one atomic: hot destinations would queue up.
    other = tl.arange(0, BLOCK)
    same = (at[:, None] == at[None, :]) & use[:, None] & use[None, :]
    kind: tl.constexpr = counts.dtype.element_ty
    rank = tl.sum((same & (other[:, None] < other[None, :])).to(kind), axis=0)
    leads = use & (rank == 0)
    base = tl.atomic_add(counts + at, tl.sum(same.to(kind), axis=0), mask=leads, sem="relaxed")
    base = tl.where(leads, base, 0)
    rank += tl.sum(tl.where(same, base[:, None], 0), axis=0)
    tl.store(ranks + s, rank, mask=use)
    tl.store(first + at, s.to(first.dtype.element_ty), mask=use & (rank == 0))
    report(flag_ptr, code, bad, s, index, num)


@triton.jit
def group_allocate(scratch_ptr, num, count, BLOCK: tl.constexpr, HOTS: tl.constexpr):
    """A range of `order` for every destination with sources, a list of those with several, chunks of the hot ones."""
    size = wide_int(num)
    counts = scratch_ptr + COUNTERS
    d = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = d < num
    c = tl.load(counts + d, mask=mask, other=0)
    start = tl.cumsum(c, 0) - c
    base = tl.atomic_add(scratch_ptr, tl.sum(c, axis=0), sem="relaxed")
    tl.store(counts + size + d, base + start, mask=mask)
    some = (c > 1) & (c <= HOT)
    several = some.to(c.dtype)
    number = tl.sum(several, axis=0)
    if number > 0:
        line = _several(scratch_ptr, num, count) + tl.atomic_add(scratch_ptr + 3, number, sem="relaxed")
        line += tl.cumsum(several, 0) - several
        step = wide_int(count) // 2 + 1
        tl.store(line, d.to(c.dtype), mask=some)
        tl.store(line + step, base + start, mask=some)
        tl.store(line + 2 * step, c, mask=some)
    if HOTS:
        hot = (c > HOT).to(c.dtype)
        number = tl.sum(hot, axis=0)
        if number > 0:
            chunks = tl.where(c > HOT, tl.cdiv(c, CHUNK), 0)
            base = tl.atomic_add(scratch_ptr + 1, tl.sum(chunks, axis=0), sem="relaxed")
            tl.store(counts + 3 * size + d, base + tl.cumsum(chunks, 0) - chunks, mask=mask)
            base = tl.atomic_add(scratch_ptr + 2, number, sem="relaxed")
            tl.store(counts + 4 * size + d, base + tl.cumsum(hot, 0) - hot, mask=mask)


@triton.jit
def group_place(
    indices_ptr,
    scratch_ptr,
    hot_ptr,
    num,
    count,
    stride,
    skipped,
    hot_size,
    programs,
    BLOCK: tl.constexpr,
    HOTS: tl.constexpr,
    SKIPS: tl.constexpr,
    NEGATIVE: tl.constexpr,
):
    """Fill `order` and the list of chunks, and zero as much of the hot scratch memory as will be used."""
    size = wide_int(num)
    counts = scratch_ptr + COUNTERS
    ranks = counts + 5 * size
    order = ranks + wide_int(count)
    pid = tl.program_id(0).to(tl.int64)
    s = pid * BLOCK + tl.arange(0, BLOCK)
    at, use, _, _ = _destinations(indices_ptr, s, count, num, stride, skipped, SKIPS, NEGATIVE)
    rank = tl.load(ranks + s, mask=use, other=0)
    offset = tl.load(counts + size + at, mask=use, other=0)
    tl.store(order + offset + rank, s.to(order.dtype.element_ty), mask=use)
    if HOTS:
        hot = use & (tl.load(counts + at, mask=use, other=0) > HOT) & (rank % CHUNK == 0)
        base = tl.load(counts + 3 * size + at, mask=hot, other=0)
        chunk_destination = order + wide_int(count)
        tl.store(chunk_destination + base + rank // CHUNK, at.to(order.dtype.element_ty), mask=hot)
        total = tl.load(scratch_ptr + 2).to(tl.int64) * hot_size
        for begin in range(pid * BLOCK, total, wide_int(programs) * BLOCK):
            w = begin + tl.arange(0, BLOCK)
            tl.store(hot_ptr + w, tl.zeros((BLOCK,), tl.int64), mask=w < total)


# --- sums ------------------------------------------------------------------------------------------------------------
@triton.jit
def _terms(values_ptr, s, column, use, width, row, column_stride, NATIVE: tl.constexpr):
    """Widened rows of sources as a tile, zero where they are not used."""
    pointers = values_ptr + s.to(tl.int64)[:, None] * row + column * column_stride
    return ops.widen(tl.load(pointers, mask=use[:, None] & (column < width), other=0.0), NATIVE)


@triton.jit
def _store(out_ptr, x_ptr, d, column, s, some, mask, x_row, x_column, out_row, out_column, HAS_X, NATIVE: tl.constexpr):
    """Write sums, added to x where there are sources and x's bits elsewhere."""
    out = out_ptr + d * out_row + column * out_column
    if HAS_X:
        old = tl.load(x_ptr + d * x_row + column * x_column, mask=mask, other=0.0)
        y = ops.narrow(ops.widen(old, NATIVE) + s, out_ptr.dtype.element_ty, NATIVE)
        tl.store(out, tl.where(some, y, old), mask=mask)
    else:
        tl.store(out, ops.narrow(s, out_ptr.dtype.element_ty, NATIVE), mask=mask)


@triton.jit
def _chunk(scratch_ptr, task, num, count, parts, BLOCK: tl.constexpr):
    """(start in `order`, sources, hot number, destination, chunks of it, block of columns) of a task."""
    size = wide_int(num)
    counts = scratch_ptr + COUNTERS
    order = counts + 5 * size + wide_int(count)
    t = task // parts
    d = tl.load(order + count + t).to(tl.int64)
    c = tl.load(counts + d)
    begin = (t - tl.load(counts + 3 * size + d)) * CHUNK
    start = order + tl.load(counts + size + d) + begin
    slot = tl.load(counts + 4 * size + d).to(tl.int64)
    column = ((task - t * parts) * BLOCK + tl.arange(0, BLOCK))[None, :]
    return start, tl.minimum(c - begin, CHUNK), slot, d, tl.cdiv(c, CHUNK), column


@triton.jit
def _entry(scratch_ptr, block, several, num, count, ROWS: tl.constexpr):
    """(destinations, where their sources stand, how many, the first two) of a block of the list; none past its end."""
    order = scratch_ptr + COUNTERS + 5 * wide_int(num) + wide_int(count)
    step = wide_int(count) // 2 + 1
    line = block * ROWS + tl.arange(0, ROWS)
    inside = line < several
    entry = _several(scratch_ptr, num, count) + line
    d = tl.load(entry, mask=inside, other=0).to(tl.int64)
    start = order + tl.load(entry + step, mask=inside, other=0)
    c = tl.load(entry + 2 * step, mask=inside, other=0)
    source = tl.load(start, mask=inside, other=0)
    second = tl.load(start + 1, mask=inside, other=0)
    return d, start, c, source, second


@triton.jit
def _keys(base, width, WORDS: tl.constexpr, dtype: tl.constexpr):
    """Where a hot destination's keys stand."""
    keys = base + wide_int(width) * WORDS
    if dtype != tl.float64:
        return keys.to(tl.pointer_type(tl.int32), bitcast=True)
    else:
        return keys


@triton.jit
def group_copy(
    values_ptr,
    x_ptr,
    out_ptr,
    scratch_ptr,
    hot_ptr,
    num,
    count,
    width,
    hot_programs,
    hot_size,
    values_row,
    values_column,
    x_row,
    x_column,
    out_row,
    out_column,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HOT_ROWS: tl.constexpr,
    HOT_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    WORDS: tl.constexpr,
    HOTS: tl.constexpr,
    HAS_X: tl.constexpr,
    IN_PLACE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Destinations with at most one source; the first `hot_programs` find the keys of hot chunks."""
    pid = tl.program_id(0).to(tl.int64)
    counts = scratch_ptr + COUNTERS
    work: tl.constexpr = tl.float64 if values_ptr.dtype.element_ty == tl.float64 else tl.float32
    if pid >= hot_programs:
        pid -= hot_programs
        parts = tl.cdiv(width, BLOCK)
        block = pid // parts
        column = ((pid - block * parts) * BLOCK + tl.arange(0, BLOCK))[None, :]
        d = block * ROWS + tl.arange(0, ROWS)
        c = tl.load(counts + d, mask=d < num, other=2)
        source = tl.load(counts + 2 * wide_int(num) + d, mask=c == 1, other=0)
        s = _terms(values_ptr, source, column, c == 1, width, values_row, values_column, NATIVE)
        s += 0.0  # the sum of one term: minus zero becomes zero
        mask = ((c == 1) if IN_PLACE else (c <= 1))[:, None] & (column < width)
        some = (c == 1)[:, None]
        _store(out_ptr, x_ptr, d[:, None], column, s, some, mask, x_row, x_column, out_row, out_column, HAS_X, NATIVE)
    elif HOTS:
        parts = tl.cdiv(width, HOT_BLOCK)
        tasks = tl.load(scratch_ptr + 1).to(tl.int64) * parts
        for task in range(pid, tasks, wide_int(hot_programs)):
            start, length, slot, _, _, column = _chunk(scratch_ptr, task, num, count, parts, HOT_BLOCK)
            best = tl.zeros((HOT_ROWS, HOT_BLOCK), tl.int64 if work == tl.float64 else tl.int32)
            for i in tl.range(0, CHUNK, HOT_ROWS, num_stages=STAGES):
                j = i + tl.arange(0, HOT_ROWS)
                source = tl.load(start + j, mask=j < length, other=0)
                p = _terms(values_ptr, source, column, j < length, width, values_row, values_column, NATIVE)
                best = tl.maximum(best, terms.term_key(p))
            keys = _keys(hot_ptr + slot * hot_size, width, WORDS, work) + column
            tl.atomic_max(keys, tl.max(best, axis=0)[None, :], mask=column < width, sem="relaxed")


@triton.jit
def _hot_special(values_ptr, start, length, column, width, row, column_stride, HOT_ROWS, HOT_BLOCK, NATIVE):
    """The sum of a chunk's terms that are not finite."""
    work: tl.constexpr = tl.float64 if values_ptr.dtype.element_ty == tl.float64 else tl.float32
    special = tl.zeros((HOT_ROWS, HOT_BLOCK), work)
    for i in range(0, CHUNK, HOT_ROWS):
        j = i + tl.arange(0, HOT_ROWS)
        source = tl.load(start + j, mask=j < length, other=0)
        p = _terms(values_ptr, source, column, j < length, width, row, column_stride, NATIVE)
        special += terms.special_terms(p)
    return tl.sum(special, axis=0)[None, :]


@triton.jit
def group_sum(
    values_ptr,
    x_ptr,
    out_ptr,
    scratch_ptr,
    hot_ptr,
    num,
    count,
    width,
    programs,
    hot_size,
    values_row,
    values_column,
    x_row,
    x_column,
    out_row,
    out_column,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HOT_ROWS: tl.constexpr,
    HOT_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    WORDS: tl.constexpr,
    HOTS: tl.constexpr,
    HAS_X: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Sums of two to HOT sources, and the integers of hot chunks; programs share the work in turn."""
    pid = tl.program_id(0).to(tl.int64)
    work: tl.constexpr = tl.float64 if values_ptr.dtype.element_ty == tl.float64 else tl.float32
    if HOTS:
        parts = tl.cdiv(width, HOT_BLOCK)
        tasks = tl.load(scratch_ptr + 1).to(tl.int64) * parts
        for task in range(pid, tasks, wide_int(programs)):
            start, length, slot, d, chunks, column = _chunk(scratch_ptr, task, num, count, parts, HOT_BLOCK)
            mask = column < width
            words = hot_ptr + slot * hot_size
            key = tl.load(_keys(words, width, WORDS, work) + column, mask=mask, other=0)
            _, scale, magic, low_scale = sums.term_scale(key)
            integer: tl.constexpr = tl.int64 if work == tl.float64 else tl.int32
            high = tl.zeros((HOT_ROWS, HOT_BLOCK), integer)
            low = tl.zeros((HOT_ROWS, HOT_BLOCK), integer)
            for i in tl.range(0, CHUNK, HOT_ROWS, num_stages=STAGES):
                j = i + tl.arange(0, HOT_ROWS)
                source = tl.load(start + j, mask=j < length, other=0)
                p = _terms(values_ptr, source, column, j < length, width, values_row, values_column, NATIVE)
                more_high, more_low = sums.split_term_bits(p, scale, magic, low_scale)
                high += more_high
                low += more_low
            a, b = terms.limb_parts(high, low, magic, CHUNK // HOT_ROWS)
            a, b = tl.sum(a, axis=0)[None, :], tl.sum(b, axis=0)[None, :]
            special = tl.zeros((1, HOT_BLOCK), work)
            if tl.max((~terms.key_is_finite(key)).to(tl.int32)) > 0:
                special = _hot_special(
                    values_ptr, start, length, column, width, values_row, values_column, HOT_ROWS, HOT_BLOCK, NATIVE
                )
            terms.accumulate(words + column, width, a, b, special, key, mask, WORDS, work == tl.float64)
            # The barrier puts the program's additions before its arrival, which releases them; whoever arrives last
            # has acquired everyone's.
            tl.debug_barrier()
            arrived = words + WORDS * wide_int(width) + width + (task - task // parts * parts)
            if tl.atomic_add(arrived, wide_int(1), sem="acq_rel") == chunks - 1:
                tl.debug_barrier()
                w0, w1, w2, w3 = terms.load_words(words + column, width, mask, WORDS)
                s = terms.sum_of_words(w0, w1, w2, w3, key, WORDS)
                some = tl.full((1, 1), 1, tl.int1)
                _store(out_ptr, x_ptr, d, column, s, some, mask, x_row, x_column, out_row, out_column, HAS_X, NATIVE)
    several = tl.load(scratch_ptr + 3)
    parts = tl.cdiv(width, BLOCK)
    tasks = tl.cdiv(several, ROWS).to(tl.int64) * parts
    d, start, c, source, second = _entry(scratch_ptr, pid // parts, several, num, count, ROWS)
    for task in range(pid, tasks, wide_int(programs)):
        column = ((task - task // parts * parts) * BLOCK + tl.arange(0, BLOCK))[None, :]
        inside = c > 0
        p = _terms(values_ptr, source, column, inside, width, values_row, values_column, NATIVE)
        q = _terms(values_ptr, second, column, inside, width, values_row, values_column, NATIVE)
        # While these arrive, the program finds out what comes next.
        following = (task + programs) // parts
        next_d, next_start, next_c, source, second = _entry(scratch_ptr, following, several, num, count, ROWS)
        most = tl.max(c, axis=0)
        if most <= 2:
            s = terms.sum_of_two(p, q)
        else:
            key = tl.maximum(terms.term_key(p), terms.term_key(q))
            for i in range(2, most):
                more_source = tl.load(start + i, mask=i < c, other=0)
                more = _terms(values_ptr, more_source, column, i < c, width, values_row, values_column, NATIVE)
                key = tl.maximum(key, terms.term_key(more))
            exponent, scale, magic, low_scale = sums.term_scale(key)
            a, b = terms.term_parts(p, scale, magic, low_scale)
            more_a, more_b = terms.term_parts(q, scale, magic, low_scale)
            a += more_a
            b += more_b
            special = terms.special_terms(p) + terms.special_terms(q)
            for i in range(2, most):
                more_source = tl.load(start + i, mask=i < c, other=0)
                more = _terms(values_ptr, more_source, column, i < c, width, values_row, values_column, NATIVE)
                more_a, more_b = terms.term_parts(more, scale, magic, low_scale)
                a += more_a
                b += more_b
                special += terms.special_terms(more)
            s = terms.sum_of_parts(a, b, exponent, special, key)
        some = inside[:, None]
        mask = some & (column < width)
        _store(out_ptr, x_ptr, d[:, None], column, s, some, mask, x_row, x_column, out_row, out_column, HAS_X, NATIVE)
        d, start, c = next_d, next_start, next_c
