# mypy: ignore-errors
# ruff: noqa: N803
"""take_along_axis and elementwise scatter sums in Triton: any axis, any strides; formulas in `reference.py`.

A program serves ROWS neighbours on the inner axis (the remaining axis with the smallest stride) and some sources of
each. The last strides of every signature are those of flat positions, which only a report of a bad index needs.

Scatter sums have three variants. `scatter_few` and `scatter_pairs` compare all sources of a row with one another and
write the output in one pass, the first with a row a thread, the second with a tile of pairs. The three kernels
`scatter_keys`, `scatter_words` and `scatter_finish` serve any number of sources with integer atomics on scratch memory
of the output's size; integers are exact, so their order is free.
"""

import triton
import triton.language as tl

from isograd.numerics import triton_ops as ops
from isograd.numerics import triton_sum as sums
from isograd.numerics import triton_terms as terms
from isograd.numerics.triton_memory import as_bits, in_range, nan_bits, outer_offset, place, report, wide_int


@triton.jit
def take(
    x_ptr,
    indices_ptr,
    out_ptr,
    flag_ptr,
    n,
    k,
    inner,
    code,
    x_axis,
    x_inner,
    indices_axis,
    indices_inner,
    out_axis,
    out_inner,
    position_axis,
    position_inner,
    outer_shape,
    x_outer,
    indices_outer,
    out_outer,
    position_outer,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    NEGATIVE: tl.constexpr,
):
    """out[.., j, ..] = x[.., indices[.., j, ..], ..]; NaN where the index is out of range."""
    row, j, outer = place(inner, k, ROWS, K)
    mask = (row < inner) & (j < k)
    indices_ptr += outer_offset(outer, outer_shape, indices_outer)
    index = tl.load(indices_ptr + row * indices_inner + j * indices_axis, mask=mask, other=0).to(tl.int64)
    valid, at = in_range(index, n, NEGATIVE)
    x_ptr = as_bits(x_ptr) + outer_offset(outer, outer_shape, x_outer)
    bits = tl.load(x_ptr + row * x_inner + at * x_axis, mask=mask & valid, other=0)
    bits = tl.where(valid, bits, nan_bits(out_ptr.dtype.element_ty))
    out = as_bits(out_ptr) + outer_offset(outer, outer_shape, out_outer)
    tl.store(out + row * out_inner + j * out_axis, bits, mask=mask)
    position = outer_offset(outer, outer_shape, position_outer) + row * position_inner + j * position_axis
    report(flag_ptr, code, mask & ~valid, position, index, n)


@triton.jit
def _fill(x_ptr, out_ptr, row, n, inner, x_axis, x_inner, out_axis, out_inner, ROWS, BLOCK, HAS_X: tl.constexpr):
    """Write zeros or x's bits to rows [ROWS, 1] of the output."""
    for start in range(0, n, BLOCK):
        column = (start + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
        inside = (row < inner) & (column < n)
        target = as_bits(out_ptr) + row * out_inner + column * out_axis
        if HAS_X:
            tl.store(target, tl.load(as_bits(x_ptr) + row * x_inner + column * x_axis, mask=inside), mask=inside)
        else:
            tl.store(target, tl.zeros((ROWS, BLOCK), target.dtype.element_ty), mask=inside)


@triton.jit
def _thread_sums(p, at, K: tl.constexpr):
    """(sums of each source's group, whether the source is in range and the first of its group).

    p and at are tuples of K tiles of the same shape: every comparison stays within a thread.
    """
    own, keys, a, b, special = (), (), (), (), ()
    for i in tl.static_range(K):
        own += (terms.term_key(p[i]),)
    for i in tl.static_range(K):
        key = own[i]
        for j in tl.static_range(K):
            if i != j:
                key = tl.maximum(key, tl.where(at[i] == at[j], own[j], 0))
        _, scale, magic, low_scale = sums.term_scale(key)
        term_a, term_b = terms.term_parts(p[i], scale, magic, low_scale)
        keys += (key,)
        a += (term_a,)
        b += (term_b,)
        special += (terms.special_terms(p[i]),)
    s, leads = (), ()
    for i in tl.static_range(K):
        lead = at[i] >= 0
        for j in tl.static_range(i):
            lead = lead & (at[i] != at[j])
        sum_a, sum_b, sum_special = a[i], b[i], special[i]
        for j in tl.static_range(i + 1, K):
            same = at[i] == at[j]
            sum_a += tl.where(same, a[j], 0)
            sum_b += tl.where(same, b[j], 0)
            sum_special += tl.where(same, special[j], 0.0)
        exponent, _, _, _ = sums.term_scale(keys[i])
        s += (terms.sum_of_parts(sum_a, sum_b, exponent, sum_special, keys[i]),)
        leads += (lead,)
    return s, leads


@triton.jit
def scatter_few(
    indices_ptr,
    values_ptr,
    x_ptr,
    out_ptr,
    flag_ptr,
    n,
    k,
    inner,
    code,
    indices_axis,
    indices_inner,
    values_axis,
    values_inner,
    position_axis,
    position_inner,
    x_axis,
    x_inner,
    out_axis,
    out_inner,
    outer_shape,
    indices_outer,
    values_outer,
    position_outer,
    x_outer,
    out_outer,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_X: tl.constexpr,
    FILL: tl.constexpr,
    UNIQUE: tl.constexpr,
    NARROW: tl.constexpr,
    NEGATIVE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Scatter sums of rows with at most K sources into zeros or x, which is x_ptr; FILL writes the other elements too.

    Every element of a row is filled by one thread and the sums are stored by others after a barrier of the program.
    """
    row, _, outer = place(inner, 1, ROWS, 1)
    line = tl.reshape(row, (ROWS,))
    indices_ptr += outer_offset(outer, outer_shape, indices_outer)
    values_ptr += outer_offset(outer, outer_shape, values_outer)
    x_ptr += outer_offset(outer, outer_shape, x_outer)
    out_ptr += outer_offset(outer, outer_shape, out_outer)
    position = outer_offset(outer, outer_shape, position_outer) + line * position_inner
    bad = tl.zeros((ROWS,), tl.int1)
    bad_position, bad_index = tl.zeros((ROWS,), tl.int64), tl.zeros((ROWS,), tl.int64)
    at, p = (), ()
    for j in tl.static_range(K):
        mask = (line < inner) & (j < k)
        index = tl.load(indices_ptr + line * indices_inner + j * wide_int(indices_axis), mask=mask, other=0).to(
            tl.int64
        )
        term = tl.load(values_ptr + line * values_inner + j * wide_int(values_axis), mask=mask, other=0.0)
        valid, found = in_range(index, n, NEGATIVE)
        found = tl.where(mask & valid, found, -1 - j)  # equal to no other
        at += (found.to(tl.int32) if NARROW else found,)
        p += (ops.widen(term, NATIVE),)
        new = mask & ~valid & ~bad
        bad_position = tl.where(new, position + j * wide_int(position_axis), bad_position)
        bad_index = tl.where(new, index, bad_index)
        bad = bad | new
    if FILL:
        _fill(x_ptr, out_ptr, row, n, inner, x_axis, x_inner, out_axis, out_inner, ROWS, BLOCK, HAS_X)
    if UNIQUE:
        s, leads = (), ()
        for j in tl.static_range(K):
            s += (p[j] + 0.0,)
            leads += (at[j] >= 0,)
    else:
        s, leads = _thread_sums(p, at, K)
    if FILL:
        tl.debug_barrier()
    for j in tl.static_range(K):
        y = s[j]
        place_ = at[j].to(tl.int64)
        if HAS_X:
            y = ops.widen(tl.load(x_ptr + line * x_inner + place_ * x_axis, mask=leads[j], other=0.0), NATIVE) + y
        y = ops.narrow(y, out_ptr.dtype.element_ty, NATIVE)
        tl.store(out_ptr + line * out_inner + place_ * out_axis, y, mask=leads[j])
    report(flag_ptr, code, bad, bad_position, bad_index, n)


@triton.jit
def _pair_sums(p, at, valid, K: tl.constexpr):
    """(sums [ROWS, K] of each source's group, whether the source is the first of its group): sources compared in pairs.

    The axes of a pair are [row, other source, source].
    """
    source = tl.arange(0, K)
    same = (at[:, :, None] == at[:, None, :]) & valid[:, :, None] & valid[:, None, :]
    earlier = same & (source[None, :, None] < source[None, None, :])
    leads = valid & (tl.max(earlier.to(tl.int32), axis=1) == 0)
    s = p + 0.0  # the sum of one term: minus zero becomes zero
    if tl.max(earlier.to(tl.int32)) > 0:
        key = tl.max(tl.where(same, terms.term_key(p)[:, :, None], 0), axis=1)
        exponent, scale, magic, low_scale = sums.term_scale(key)
        a, b = terms.term_parts(p, scale, magic, low_scale)  # a group has one key
        a = tl.sum(tl.where(same, a[:, :, None], 0), axis=1)
        b = tl.sum(tl.where(same, b[:, :, None], 0), axis=1)
        special = tl.sum(tl.where(same, terms.special_terms(p)[:, :, None], 0.0), axis=1)
        s = terms.sum_of_parts(a, b, exponent, special, key)
    return s, leads


@triton.jit
def scatter_pairs(
    indices_ptr,
    values_ptr,
    x_ptr,
    out_ptr,
    flag_ptr,
    n,
    k,
    inner,
    code,
    indices_axis,
    indices_inner,
    values_axis,
    values_inner,
    position_axis,
    position_inner,
    x_axis,
    x_inner,
    out_axis,
    out_inner,
    outer_shape,
    indices_outer,
    values_outer,
    position_outer,
    x_outer,
    out_outer,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_X: tl.constexpr,
    FILL: tl.constexpr,
    UNIQUE: tl.constexpr,
    NARROW: tl.constexpr,
    NEGATIVE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """The same with tiles of sources [ROWS, K], for more sources."""
    row, _, outer = place(inner, 1, ROWS, 1)
    j = tl.arange(0, K)[None, :]
    mask = (row < inner) & (j < k)
    indices_ptr += outer_offset(outer, outer_shape, indices_outer)
    values_ptr += outer_offset(outer, outer_shape, values_outer)
    x_ptr += outer_offset(outer, outer_shape, x_outer)
    out_ptr += outer_offset(outer, outer_shape, out_outer)
    j_wide = j.to(tl.int64)
    index = tl.load(indices_ptr + row * indices_inner + j_wide * indices_axis, mask=mask, other=0).to(tl.int64)
    p = ops.widen(tl.load(values_ptr + row * values_inner + j_wide * values_axis, mask=mask, other=0.0), NATIVE)
    if FILL:
        _fill(x_ptr, out_ptr, row, n, inner, x_axis, x_inner, out_axis, out_inner, ROWS, BLOCK, HAS_X)
    valid, at = in_range(index, n, NEGATIVE)
    bad = mask & ~valid
    valid = mask & valid
    if UNIQUE:
        s, leads = p + 0.0, valid
    else:
        s, leads = _pair_sums(p, at.to(tl.int32) if NARROW else at, valid, K)
    if FILL:
        tl.debug_barrier()
    if HAS_X:
        old = tl.load(x_ptr + row * x_inner + at * x_axis, mask=leads, other=0.0)
        s = ops.widen(old, NATIVE) + s
    y = ops.narrow(s, out_ptr.dtype.element_ty, NATIVE)
    tl.store(out_ptr + row * out_inner + at * out_axis, y, mask=leads)
    position = outer_offset(outer, outer_shape, position_outer) + row * position_inner + j_wide * position_axis
    report(flag_ptr, code, bad, position, index, n)


# --- any number of sources -------------------------------------------------------------------------------------------
# Scratch memory holds a key for every output element, 0 for "no sources", and WORDS int64 words; both start as zeros.
# Element (outer, i, inner) of the output stands at (outer * n + i) * inner_size + inner.
@triton.jit
def _sources(
    indices_ptr,
    values_ptr,
    n,
    k,
    inner,
    indices_axis,
    indices_inner,
    values_axis,
    values_inner,
    outer_shape,
    indices_outer,
    values_outer,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    NEGATIVE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """(terms, places in the scratch memory, whether to use them, bad ones, indices, row, source, outer)."""
    row, j, outer = place(inner, k, ROWS, K)
    mask = (row < inner) & (j < k)
    indices_ptr += outer_offset(outer, outer_shape, indices_outer)
    values_ptr += outer_offset(outer, outer_shape, values_outer)
    index = tl.load(indices_ptr + row * indices_inner + j * indices_axis, mask=mask, other=0).to(tl.int64)
    p = ops.widen(tl.load(values_ptr + row * values_inner + j * values_axis, mask=mask, other=0.0), NATIVE)
    valid, at = in_range(index, n, NEGATIVE)
    return p, (outer * n + at) * inner + row, mask & valid, mask & ~valid, index, row, j, outer


@triton.jit
def scatter_keys(
    indices_ptr,
    values_ptr,
    keys_ptr,
    flag_ptr,
    n,
    k,
    inner,
    code,
    indices_axis,
    indices_inner,
    values_axis,
    values_inner,
    position_axis,
    position_inner,
    outer_shape,
    indices_outer,
    values_outer,
    position_outer,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    CROWDED: tl.constexpr,
    NEGATIVE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One more than the largest term's key, for every output element with sources."""
    p, at, use, bad, index, row, j, outer = _sources(
        indices_ptr,
        values_ptr,
        n,
        k,
        inner,
        indices_axis,
        indices_inner,
        values_axis,
        values_inner,
        outer_shape,
        indices_outer,
        values_outer,
        ROWS,
        K,
        NEGATIVE,
        NATIVE,
    )
    key = terms.term_key(p) + 1
    if CROWDED:
        # A key that is not the largest any more is only too small: the atomic decides.
        use = use & (tl.load(keys_ptr + at, mask=use, other=0) < key)
    tl.atomic_max(keys_ptr + at, key, mask=use, sem="relaxed")
    position = outer_offset(outer, outer_shape, position_outer) + row * position_inner + j * position_axis
    report(flag_ptr, code, bad, position, index, n)


@triton.jit
def scatter_words(
    indices_ptr,
    values_ptr,
    keys_ptr,
    words_ptr,
    n,
    k,
    inner,
    size,
    indices_axis,
    indices_inner,
    values_axis,
    values_inner,
    outer_shape,
    indices_outer,
    values_outer,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    WORDS: tl.constexpr,
    NEGATIVE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Add up the integer terms; `size` is the number of output elements."""
    p, at, use, _, _, _, _, _ = _sources(
        indices_ptr,
        values_ptr,
        n,
        k,
        inner,
        indices_axis,
        indices_inner,
        values_axis,
        values_inner,
        outer_shape,
        indices_outer,
        values_outer,
        ROWS,
        K,
        NEGATIVE,
        NATIVE,
    )
    key = tl.load(keys_ptr + at, mask=use, other=1) - 1
    _, scale, magic, low_scale = sums.term_scale(key)
    a, b = terms.term_parts(p, scale, magic, low_scale)
    special = terms.special_terms(p)
    terms.accumulate(words_ptr + at, size, a, b, special, key, use, WORDS, p.dtype == tl.float64)


@triton.jit
def scatter_finish(
    keys_ptr,
    words_ptr,
    x_ptr,
    out_ptr,
    n,
    inner,
    size,
    x_axis,
    x_inner,
    out_axis,
    out_inner,
    outer_shape,
    x_outer,
    out_outer,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    WORDS: tl.constexpr,
    HAS_X: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Turn keys and words into the output; elements without sources are x's bits or zero."""
    row, i, outer = place(inner, n, ROWS, K)
    mask = (row < inner) & (i < n)
    at = (outer * n + i) * inner + row
    key = tl.load(keys_ptr + at, mask=mask, other=0)
    some = mask & (key > 0)
    key = tl.maximum(key - 1, 0)
    w0, w1, w2, w3 = terms.load_words(words_ptr + at, size, some, WORDS)
    s = terms.sum_of_words(w0, w1, w2, w3, key, WORDS)
    out_ptr += outer_offset(outer, outer_shape, out_outer)
    out = out_ptr + row * out_inner + i * out_axis
    if HAS_X:
        x_ptr += outer_offset(outer, outer_shape, x_outer)
        old = tl.load(x_ptr + row * x_inner + i * x_axis, mask=mask, other=0.0)
        y = ops.narrow(ops.widen(old, NATIVE) + s, out_ptr.dtype.element_ty, NATIVE)
        tl.store(out, tl.where(some, y, old), mask=mask)
    else:
        y = ops.narrow(tl.where(some, s, 0.0), out_ptr.dtype.element_ty, NATIVE)
        tl.store(out, y, mask=mask)
