# mypy: ignore-errors
# ruff: noqa: N803, N806, RUF005, RUF059
"""The backward pass of attention on Hopper, in Gluon: windows, packed sequences, soft cap, 16 bits.

A program keeps 128 keys and goes over tiles of queries, and over the query heads that share the keys. One warp, the
producer, brings tiles of q and dO and the numbers of their rows to shared memory. Two consumers, groups of four warps,
have 64 keys each. They compute S and dP transposed, so that P and dS are in registers what the products for dV and dK
take as they are. Only dS goes through shared memory, for dQ = dS k over all 128 keys: each consumer computes half of
it, in columns or in rows, one tile of queries later, so that it need not wait for the other. dQ is added up in global
memory as integers, by reductions of the tensor memory accelerator; see `triton_rows` for the fixed point, its
bounds, and what comes before and after.

A row's integers depend neither on tiles nor on where the row is. Tiles of keys and of queries are counted from the
beginning of a sequence, and what lies behind its end is read as 0 (see `gluon_steps`): packed sequences have the bits
that they have alone. Sinks are in lse, and their own gradient follows from it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from isograd.flash_attention import gluon_steps as steps


@gluon.jit
def _factor(bits):
    """2**-f with the least f for which 2**f is not below the magnitude whose bits these are."""
    f = gl.minimum(gl.maximum(((bits + 0x7FFFFF) >> 23) - 127, -126), 126)
    return ((127 - f) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _one():
    """1, which the compiler cannot tell: what depends on it is not computed before the partitions part.

    What is computed there occupies registers in all of them.
    """
    return gl.inline_asm_elementwise("mov.u32 $0, 1;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _place(
    problem, starts, KEYS: gl.constexpr, ROWS: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    PACKED: gl.constexpr, LOWER_RIGHT: gl.constexpr,
):  # fmt: skip
    """The keys of this program: where they are, and from which tile of queries to which they are seen.

    (sequence, head), (places of q and k), (first key, rows, keys), (left, right), (begin, end).
    """
    lq, lk, left, right, kv_heads, group, tiles, sequences = problem
    plane = gl.program_id(0) // tiles
    number, tile, _, lk, k_place, lq, q_place = steps.locate(
        starts[1], starts[0], plane // kv_heads, gl.program_id(0) % tiles, lk, lq, sequences, KEYS, PACKED
    )
    if PACKED and LOWER_RIGHT:
        left += lk - lq
        right += lk - lq
    first = tile * KEYS
    end = gl.cdiv(lq, ROWS)
    if LEFT:
        end = gl.minimum(end, gl.cdiv(gl.maximum(first + KEYS - left, 0), ROWS))
    begin = 0
    if RIGHT:
        begin = gl.minimum(gl.maximum(first - right, 0) // ROWS, end)
    return (number, plane % kv_heads), (q_place, k_place), (first, lq, lk), (left, right), (begin, end)


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, do_desc, rows_ptr, plane, pitch, buffers, barriers, problem, starts, LEFT: gl.constexpr,
    RIGHT: gl.constexpr, PACKED: gl.constexpr, LOWER_RIGHT: gl.constexpr,
):  # fmt: skip
    """Bring k and v, then tiles of q and dO with lse, D and the factor of the fixed point of their rows."""
    k_smem, v_smem, q_smem, do_smem, rows_smem, ds_smem, dq_smem, column_smem = buffers
    k_full, v_full, q_full, q_empty, do_full, do_empty, ds_full, ds_empty = barriers
    tokens, _, _, _, kv_heads, group, tiles, sequences = problem
    Q_STAGES: gl.constexpr = q_smem.shape[0]
    STAGES: gl.constexpr = do_smem.shape[0]
    ROWS: gl.constexpr = q_smem.shape[-2]
    D: gl.constexpr = q_smem.shape[-1]
    KEYS: gl.constexpr = 64 * k_smem.shape[0]
    where, places, sizes, sides, span = _place(problem, starts, KEYS, ROWS, LEFT, RIGHT, PACKED, LOWER_RIGHT)
    number, head = where
    q_place, k_place = places
    first = sizes[0]
    begin, end = span
    slot = 0
    if PACKED:
        slot = steps.slot_of_sequence(starts[0], number, tokens)
    mbarrier.expect(k_full, KEYS * D * 2)
    for c in gl.static_range(2):
        steps.load(k_desc, steps.corner(k_place, head, first + 64 * c, 0, PACKED), k_full, k_smem.index(c))
    mbarrier.expect(v_full, KEYS * D * 2)
    for c in gl.static_range(2):
        steps.load(v_desc, steps.corner(k_place, head, first + 64 * c, 0, PACKED), v_full, v_smem.index(c))
    layout: gl.constexpr = gl.BlockedLayout([ROWS // 32], [32], [1], [0])
    one = _one()
    lines = gl.arange(0, ROWS, layout=layout) * one
    plane = plane.to(gl.int64) * one
    step = 0
    for member in range(group):
        hq = head * group + member
        row_ptr = rows_ptr + (q_place[0] * kv_heads * group + hq).to(gl.int64) * pitch + slot
        for m in range(begin, end):
            at = step % STAGES
            q_at = step % Q_STAGES
            row = m * ROWS
            lse = gl.load(row_ptr + row + lines)
            delta = gl.load(row_ptr + plane + row + lines)
            factor = gl.load(row_ptr + 2 * plane + row + lines)
            mbarrier.wait(q_empty.index(q_at), (step // Q_STAGES & 1) ^ 1)
            mbarrier.expect(q_full.index(q_at), ROWS * D * 2)
            steps.load(q_desc, steps.corner(q_place, hq, row, 0, PACKED), q_full.index(q_at), q_smem.index(q_at))
            rows_smem.index(3 * q_at).store(0.0 - lse)
            rows_smem.index(3 * q_at + 1).store(delta)
            rows_smem.index(3 * q_at + 2).store(factor)
            mbarrier.arrive(q_full.index(q_at))
            mbarrier.wait(do_empty.index(at), (step // STAGES & 1) ^ 1)
            mbarrier.expect(do_full.index(at), ROWS * D * 2)
            steps.load(do_desc, steps.corner(q_place, hq, row, 0, PACKED), do_full.index(at), do_smem.index(at))
            step += 1


@gluon.jit
def _start_queries(c: gl.constexpr, none, buffers, barriers, step, dq_layout: gl.constexpr):
    """Start this consumer's half of dQ of a step, once both consumers have left dS."""
    k_smem, v_smem, q_smem, do_smem, rows_smem, ds_smem, dq_smem, column_smem = buffers
    k_full, v_full, q_full, q_empty, do_full, do_empty, ds_full, ds_empty = barriers
    ROWS: gl.constexpr = q_smem.shape[-2]
    D: gl.constexpr = q_smem.shape[-1]
    b = step & 1
    zero = gl.zeros([64, 64], gl.float32, dq_layout)
    mbarrier.wait(ds_full.index(b), step >> 1 & 1)
    if ROWS == 64:
        half = k_smem.index(none).reshape([64, D]).slice(c * (D // 2), D // 2, 1)
        dq = warpgroup_mma(ds_smem.index(2 * b).permute([1, 0]), half, zero, use_acc=False, is_async=True)
        half = k_smem.index(1 + none).reshape([64, D]).slice(c * (D // 2), D // 2, 1)
        dq = warpgroup_mma(ds_smem.index(2 * b + 1).permute([1, 0]), half, dq, is_async=True)
    else:
        part = ds_smem.index(2 * b).slice(64 * c, 64, 1).permute([1, 0])
        dq = warpgroup_mma(part, k_smem.index(none).reshape([64, D]), zero, use_acc=False, is_async=True)
        part = ds_smem.index(2 * b + 1).slice(64 * c, 64, 1).permute([1, 0])
        dq = warpgroup_mma(part, k_smem.index(1 + none).reshape([64, D]), dq, is_async=True)
    return dq


@gluon.jit
def _add_queries(
    dq, factor, c: gl.constexpr, fixed_desc, place, hq, row, buffers, dq_layout: gl.constexpr, PACKED: gl.constexpr
):  # fmt: skip
    """Add a half of dQ as integers in global memory."""
    k_smem, v_smem, q_smem, do_smem, rows_smem, ds_smem, dq_smem, column_smem = buffers
    ROWS: gl.constexpr = q_smem.shape[-2]
    column = column_smem.index(c).load(gl.SliceLayout(0, dq_layout))
    dq = (dq * column[None, :]) * factor[:, None]
    fixed = gl.inline_asm_elementwise("cvt.rni.s32.f32 $0, $1;", "=r,f", [dq], dtype=gl.int32, is_pure=True, pack=1)
    tma.store_wait(0)
    dq_smem.index(c).reshape([64, 64]).store(fixed)
    fence_async_shared()
    if ROWS == 64:
        steps.add(fixed_desc, steps.corner(place, hq, row, 64 * c, PACKED), dq_smem.index(c))
    else:
        steps.add(fixed_desc, steps.corner(place, hq, row + 64 * c, 0, PACKED), dq_smem.index(c))


@gluon.jit
def _step(
    dk, dv, factor, old_hq, old_row, c: gl.constexpr, fixed_desc, place, buffers, barriers, step, scale, cap, limit,
    reach, row, DK_FIRST: gl.constexpr, MASKED: gl.constexpr, LEFT: gl.constexpr, SOFTCAP: gl.constexpr,
    PACKED: gl.constexpr, s_layout: gl.constexpr, a_layout: gl.constexpr, dq_layout: gl.constexpr,
):  # fmt: skip
    """A tile of queries; dQ of the tile before is computed along with it, so that no consumer waits for the other."""
    k_smem, v_smem, q_smem, do_smem, rows_smem, ds_smem, dq_smem, column_smem = buffers
    k_full, v_full, q_full, q_empty, do_full, do_empty, ds_full, ds_empty = barriers
    Q_STAGES: gl.constexpr = q_smem.shape[0]
    STAGES: gl.constexpr = do_smem.shape[0]
    ROWS: gl.constexpr = q_smem.shape[-2]
    D: gl.constexpr = q_smem.shape[-1]
    dtype: gl.constexpr = q_smem.dtype
    columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    zero = gl.zeros([64, ROWS], gl.float32, s_layout)
    at = step % STAGES
    q_at = step % Q_STAGES
    q = q_smem.index(q_at).reshape([ROWS, D])
    do = do_smem.index(at).reshape([ROWS, D])
    # 0, which the compiler cannot tell: addresses that do not vary would occupy registers
    none = step >> 30
    b = step & 1

    mbarrier.wait(q_full.index(q_at), step // Q_STAGES & 1)
    k = k_smem.index(c + none).reshape([64, D])
    s = warpgroup_mma(k, q.permute([1, 0]), zero, use_acc=False, is_async=True)
    mbarrier.wait(do_full.index(at), step // STAGES & 1)
    v = v_smem.index(c + none).reshape([64, D])
    dp = warpgroup_mma(v, do.permute([1, 0]), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    minus_lse = rows_smem.index(3 * q_at).load(columns)
    if SOFTCAP:
        t = steps.capped_tanh(s, scale)
        s = t * cap + minus_lse[None, :]
        p = gl.exp2(s)
    else:
        p = gl.exp2(gl.fma(s, scale + gl.zeros_like(s), minus_lse[None, :] + gl.zeros_like(s)))
    if MASKED:
        lines = gl.arange(0, ROWS, layout=columns) + row
        seen = limit[:, None] <= lines[None, :]
        if LEFT:
            seen = seen & (lines[None, :] <= reach[:, None])
        p = gl.where(seen, p, 0.0)
    pairs = steps.packed(p, dtype)
    if SOFTCAP:  # at once, since t would take registers until dP is there
        p = p * gl.fma(0.0 - t, t, gl.full([64, ROWS], 1.0, gl.float32, s_layout))
    # The branch of this wait, which keeps ptxas from moving the exponentials behind dP.
    mbarrier.wait(ds_empty.index(b), (step >> 1 & 1) ^ 1)
    dp, p = warpgroup_mma_wait(0, deps=[dp, p])
    dv = warpgroup_mma(steps.unpacked(pairs, dtype, a_layout), do, dv, is_async=True)
    delta = rows_smem.index(3 * q_at + 1).load(columns)
    pairs = steps.packed(p * (dp - delta[None, :]), dtype)
    next_factor = rows_smem.index(3 * q_at + 2)
    if ROWS == 128:
        next_factor = next_factor.slice(64 * c, 64)
    if DK_FIRST:
        dk = warpgroup_mma(steps.unpacked(pairs, dtype, a_layout), q, dk, is_async=True)
    ds_smem.index(2 * b + c).store(steps.unpacked(pairs, dtype, s_layout))
    fence_async_shared()
    mbarrier.arrive(ds_full.index(b))
    dq = _start_queries(c, none, buffers, barriers, step - 1, dq_layout)
    if DK_FIRST:
        next_factor = next_factor.load(gl.SliceLayout(1, dq_layout))
        dk, dv = warpgroup_mma_wait(2, deps=[dk, dv])
        mbarrier.arrive(do_empty.index(at))
        mbarrier.arrive(q_empty.index(q_at))
        dq = warpgroup_mma_wait(0, deps=[dq])
        mbarrier.arrive(ds_empty.index(1 - b), pred=step > 0)
        _add_queries(dq, factor, c, fixed_desc, place, old_hq, old_row, buffers, dq_layout, PACKED)
    else:
        dk = warpgroup_mma(steps.unpacked(pairs, dtype, a_layout), q, dk, is_async=True)
        dq, dv = warpgroup_mma_wait(1, deps=[dq, dv])
        mbarrier.arrive(do_empty.index(at))
        mbarrier.arrive(ds_empty.index(1 - b), pred=step > 0)
        _add_queries(dq, factor, c, fixed_desc, place, old_hq, old_row, buffers, dq_layout, PACKED)
        next_factor = next_factor.load(gl.SliceLayout(1, dq_layout))
        dk = warpgroup_mma_wait(0, deps=[dk])
        mbarrier.arrive(q_empty.index(q_at))
    return dk, dv, next_factor


@gluon.jit
def _consume(
    dk_desc, dv_desc, fixed_desc, bounds_ptr, scale, scale_log2, cap, buffers, barriers, problem, starts,
    c: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, SOFTCAP: gl.constexpr, PACKED: gl.constexpr,
    LOWER_RIGHT: gl.constexpr, DK_FIRST: gl.constexpr,
):  # fmt: skip
    """64 keys: dK and dV, and half of dQ of every tile of queries."""
    k_smem, v_smem, q_smem, do_smem, rows_smem, ds_smem, dq_smem, column_smem = buffers
    k_full, v_full, q_full, q_empty, do_full, do_empty, ds_full, ds_empty = barriers
    _, _, _, _, kv_heads, group, tiles, sequences = problem
    ROWS: gl.constexpr = q_smem.shape[-2]
    D: gl.constexpr = q_smem.shape[-1]
    KEYS: gl.constexpr = 64 * k_smem.shape[0]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    dtype: gl.constexpr = q_smem.dtype
    where, places, sizes, sides, span = _place(problem, starts, KEYS, ROWS, LEFT, RIGHT, PACKED, LOWER_RIGHT)
    number, head = where
    place, k_place = places
    first, lq, lk = sizes
    left, right = sides
    begin, end = span
    keys = first + 64 * c + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
    # key j is seen from row `limit` on, and up to row `reach`
    limit = gl.where(keys < lk, 0, lq + ROWS)
    reach = limit
    clear = begin
    clear_end = end
    if RIGHT:
        limit = gl.maximum(limit, keys - right)
        clear = gl.maximum(first + (64 * c + 63 + ROWS - 1) - right, 0) // ROWS
        clear = gl.minimum(gl.maximum(clear, begin), end)
    if first + KEYS > lk:
        clear = end
    if LEFT:
        reach = keys - left
        clear_end = gl.maximum(first + (64 * c + 1) - left, 0) // ROWS
        clear_end = gl.minimum(gl.maximum(clear_end, clear), end)
    d = gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [4], [0]))
    if ROWS == 64:
        d += c * (D // 2)
    # in shared memory, since registers are short in the loop
    bits = gl.load(bounds_ptr + (number * kv_heads + head).to(gl.int64) * (D + 1) + d)
    column_smem.index(c).store(_factor(bits))
    dv = gl.zeros([64, D], gl.float32, d_layout)
    dk = gl.zeros([64, D], gl.float32, d_layout)
    step = 0
    mbarrier.wait(k_full, 0)
    mbarrier.wait(v_full, 0)
    # dQ of no tile: its integers are 0
    factor = gl.zeros([64], gl.float32, gl.SliceLayout(1, dq_layout))
    old_hq = head * group
    old_row = begin * 0
    for member in range(group):
        hq = head * group + member
        for m in range(begin, clear):
            dk, dv, factor = _step(
                dk, dv, factor, old_hq, old_row, c, fixed_desc, place, buffers, barriers, step, scale_log2, cap, limit,
                reach, m * ROWS, DK_FIRST, True, LEFT, SOFTCAP, PACKED, s_layout, a_layout, dq_layout,
            )  # fmt: skip
            old_hq = hq
            old_row = m * ROWS
            step += 1
        for m in range(clear, clear_end):
            dk, dv, factor = _step(
                dk, dv, factor, old_hq, old_row, c, fixed_desc, place, buffers, barriers, step, scale_log2, cap, limit,
                reach, m * ROWS, DK_FIRST, False, LEFT, SOFTCAP, PACKED, s_layout, a_layout, dq_layout,
            )  # fmt: skip
            old_hq = hq
            old_row = m * ROWS
            step += 1
        if LEFT:
            for m in range(clear_end, end):
                dk, dv, factor = _step(
                    dk, dv, factor, old_hq, old_row, c, fixed_desc, place, buffers, barriers, step, scale_log2, cap,
                    limit, reach, m * ROWS, DK_FIRST, True, LEFT, SOFTCAP, PACKED, s_layout, a_layout, dq_layout,
                )  # fmt: skip
                old_hq = hq
                old_row = m * ROWS
                step += 1
    dq = _start_queries(c, 0, buffers, barriers, step - 1, dq_layout)
    dq = warpgroup_mma_wait(0, deps=[dq])
    _add_queries(dq, factor, c, fixed_desc, place, old_hq, old_row, buffers, dq_layout, PACKED)
    out = v_smem.index(c)
    v = out.reshape([64, D])
    v.store(dv.to(dtype))
    fence_async_shared()
    steps.store(dv_desc, steps.corner(k_place, head, first + 64 * c, 0, PACKED), out)
    tma.store_wait(0)
    v.store((dk * scale).to(dtype))
    fence_async_shared()
    steps.store(dk_desc, steps.corner(k_place, head, first + 64 * c, 0, PACKED), out)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["plane", "pitch", "lq", "lk", "left", "right", "kv_heads", "group", "tiles", "sequences"])
def attention_backward_hopper(
    q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, fixed_desc, rows_ptr, bounds_ptr, q_starts_ptr, k_starts_ptr,
    plane, pitch, lq, lk, left, right, kv_heads, group, tiles, sequences, scale, scale_log2, cap,
    D: gl.constexpr, ROWS: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr, LEFT: gl.constexpr,
    RIGHT: gl.constexpr, SOFTCAP: gl.constexpr, PACKED: gl.constexpr, LOWER_RIGHT: gl.constexpr,
    DK_FIRST: gl.constexpr,
):  # fmt: skip
    """Gradients: dK and dV [B, Hkv, Lk, D], and what `triton_rows.fixed_to_float` makes dQ of.

    rows_ptr: [3, B, H, pitch] of `triton_rows.attention_rows`, plane = B H pitch; bounds_ptr: [B or sequences + 1,
    Hkv, D + 1] of `attention_bounds`; fixed_desc: int32 [B, H, Lq, D], zeros; group: query heads that share one of
    keys; tiles: tiles of keys of a head; scale: of dK; others as in `attention_forward_hopper`.
    """
    dtype: gl.constexpr = q_desc.dtype
    k_smem = gl.allocate_shared_memory(dtype, [2] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [2] + v_desc.block_type.shape, v_desc.layout)
    q_smem = gl.allocate_shared_memory(dtype, [Q_STAGES] + q_desc.block_type.shape, q_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES] + do_desc.block_type.shape, do_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows_smem = gl.allocate_shared_memory(gl.float32, [3 * Q_STAGES, ROWS], plain)
    column_smem = gl.allocate_shared_memory(gl.float32, [2, 64], plain)
    ds_smem = gl.allocate_shared_memory(dtype, [4, 64, ROWS], gl.NVMMASharedLayout(128, 16, 2))
    dq_smem = gl.allocate_shared_memory(gl.int32, [2] + fixed_desc.block_type.shape, fixed_desc.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], barrier)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    do_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    ds_empty = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    for i in gl.static_range(2):
        mbarrier.init(ds_full.index(i), count=2)
        mbarrier.init(ds_empty.index(i), count=2)
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(i), count=2)
        mbarrier.init(q_empty.index(i), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(do_empty.index(i), count=2)
    fence_async_shared()
    buffers = (k_smem, v_smem, q_smem, do_smem, rows_smem, ds_smem, dq_smem, column_smem)
    barriers = (k_full, v_full, q_full, q_empty, do_full, do_empty, ds_full, ds_empty)
    problem = (lq, lk, left, right, kv_heads, group, tiles, sequences)
    starts = (q_starts_ptr, k_starts_ptr)
    gl.warp_specialize(
        [
            (
                _consume,
                (dk_desc, dv_desc, fixed_desc, bounds_ptr, scale, scale_log2, cap, buffers, barriers, problem, starts,
                 0, LEFT, RIGHT, SOFTCAP, PACKED, LOWER_RIGHT, DK_FIRST),
            ),
            (
                _consume,
                (dk_desc, dv_desc, fixed_desc, bounds_ptr, scale, scale_log2, cap, buffers, barriers, problem, starts,
                 1, LEFT, RIGHT, SOFTCAP, PACKED, LOWER_RIGHT, DK_FIRST),
            ),
            (
                _produce,
                (q_desc, k_desc, v_desc, do_desc, rows_ptr, plane, pitch, buffers, barriers, problem, starts, LEFT,
                 RIGHT, PACKED, LOWER_RIGHT),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
