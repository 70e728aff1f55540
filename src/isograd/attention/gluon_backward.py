# ruff: noqa: N803, N806
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from isograd.attention.gluon_forward import _operand, _packed

# The names since Triton 3.9, and the ones before.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@builtin
def _add_before_39(descriptor, coordinates, source, _semantic=None):
    kind = gl._core.ir.DESCRIPTOR_REDUCE_KIND.ADD
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, coordinates, source.handle)


_add = getattr(tma, "async_atomic_add", None) or _add_before_39


@gluon.jit
def _pow2(exponent):
    return ((exponent + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _one():
    """1, which the compiler cannot tell: it would compute what the partitions need before they part, in each."""
    return gl.inline_asm_elementwise("mov.u32 $0, 1;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _place(problem, KEYS: gl.constexpr, ROWS: gl.constexpr, CAUSAL: gl.constexpr):
    """The tile of keys of this program, the first tile of queries that sees it, and how many there are."""
    lq, lk, offset, kv_heads, group, tiles = problem
    plane = gl.program_id(0) // tiles
    first = (gl.program_id(0) % tiles) * KEYS
    batch = plane // kv_heads
    head = plane % kv_heads
    end = gl.cdiv(lq, ROWS)
    begin = 0
    if CAUSAL:
        begin = gl.minimum(gl.maximum(first - offset, 0) // ROWS, end)
    return batch, head, first, begin, end


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, do_desc, rows_ptr, plane_rows, buffers, barriers, problem, CAUSAL: gl.constexpr,
):
    k_smem, v_smem, q_smem, do_smem, rows_smem, ds_smem, dq_smem, column_smem = buffers
    k_full, v_full, q_full, q_empty, do_full, do_empty = barriers
    lq, lk, offset, kv_heads, group, tiles = problem
    Q_STAGES: gl.constexpr = q_smem.shape[0]
    STAGES: gl.constexpr = do_smem.shape[0]
    ROWS: gl.constexpr = q_smem.shape[3]
    D: gl.constexpr = q_smem.shape[4]
    KEYS: gl.constexpr = 128
    batch, head, first, begin, end = _place(problem, KEYS, ROWS, CAUSAL)
    mbarrier.expect(k_full, KEYS * D * 2)
    for c in gl.static_range(2):
        _load(k_desc, [batch, head, first + 64 * c, 0], k_full, k_smem.index(c))
    mbarrier.expect(v_full, KEYS * D * 2)
    for c in gl.static_range(2):
        _load(v_desc, [batch, head, first + 64 * c, 0], v_full, v_smem.index(c))
    layout: gl.constexpr = gl.BlockedLayout([ROWS // 32], [32], [1], [0])
    one = _one()
    lines = gl.arange(0, ROWS, layout=layout) * one
    plane_rows *= one
    step = 0
    for member in range(group):
        hq = head * group + member
        row_ptr = rows_ptr + (batch * kv_heads * group + hq).to(gl.int64) * lq
        for m in range(begin, end):
            at = step % STAGES
            q_at = step % Q_STAGES
            row = m * ROWS
            lse = gl.load(row_ptr + row + lines, mask=row + lines < lq, other=float("inf"))
            delta = gl.load(row_ptr + plane_rows + row + lines, mask=row + lines < lq, other=0.0)
            factor = gl.load(row_ptr + 2 * plane_rows + row + lines, mask=row + lines < lq, other=0.0)
            mbarrier.wait(q_empty.index(q_at), (step // Q_STAGES & 1) ^ 1)
            mbarrier.expect(q_full.index(q_at), ROWS * D * 2)
            _load(q_desc, [batch, hq, row, 0], q_full.index(q_at), q_smem.index(q_at))
            rows_smem.index(3 * q_at).store(lse)
            rows_smem.index(3 * q_at + 1).store(delta)
            rows_smem.index(3 * q_at + 2).store(factor)
            mbarrier.arrive(q_full.index(q_at))
            mbarrier.wait(do_empty.index(at), (step // STAGES & 1) ^ 1)
            mbarrier.expect(do_full.index(at), ROWS * D * 2)
            _load(do_desc, [batch, hq, row, 0], do_full.index(at), do_smem.index(at))
            step += 1


@gluon.jit
def _widened(pairs, dtype: gl.constexpr, layout: gl.constexpr):
    if dtype == gl.bfloat16:
        first = (pairs << 16).to(gl.float32, bitcast=True)
        second = (pairs & -65536).to(gl.float32, bitcast=True)
    else:
        first = pairs.to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
        second = (pairs >> 16).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
    p = gl.join(first, second).reshape([pairs.shape[0], 2 * pairs.shape[1]])
    return gl.convert_layout(p, layout, assert_trivial=True)


@gluon.jit
def _meet():
    """Both consumers have come here."""
    asm: gl.constexpr = "bar.sync 8, 256; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _step(
    dk, dv, c: gl.constexpr, fixed_desc, place, buffers, barriers, step, scale, limit, row,
    MASKED: gl.constexpr, s_layout: gl.constexpr, a_layout: gl.constexpr, dq_layout: gl.constexpr,
):
    k_smem, v_smem, q_smem, do_smem, rows_smem, ds_smem, dq_smem, column_smem = buffers
    k_full, v_full, q_full, q_empty, do_full, do_empty = barriers
    Q_STAGES: gl.constexpr = q_smem.shape[0]
    STAGES: gl.constexpr = do_smem.shape[0]
    ROWS: gl.constexpr = q_smem.shape[3]
    D: gl.constexpr = q_smem.shape[4]
    dtype: gl.constexpr = q_smem.dtype
    columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    zero = gl.zeros([64, ROWS], gl.float32, s_layout)
    at = step % STAGES
    q_at = step % Q_STAGES
    q = q_smem.index(q_at).reshape([ROWS, D])
    do = do_smem.index(at).reshape([ROWS, D])
    # 0, which the compiler cannot tell: addresses that do not vary would occupy registers
    none = step >> 30

    mbarrier.wait(q_full.index(q_at), step // Q_STAGES & 1)
    k = k_smem.index(c + none).reshape([64, D])
    s = warpgroup_mma(k, q.permute([1, 0]), zero, use_acc=False, is_async=True)
    mbarrier.wait(do_full.index(at), step // STAGES & 1)
    v = v_smem.index(c + none).reshape([64, D])
    dp = warpgroup_mma(v, do.permute([1, 0]), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    lse = rows_smem.index(3 * q_at).load(columns)
    p = gl.exp2(gl.fma(s, scale + gl.zeros_like(s), (0.0 - lse)[None, :] + gl.zeros_like(s)))
    if MASKED:
        p = gl.where(limit[:, None] <= (gl.arange(0, ROWS, layout=columns) + row)[None, :], p, 0.0)
    pairs = _packed(p, dtype)
    # The branch of this wait, which has nothing to wait for, keeps ptxas from moving the exponentials behind dP.
    mbarrier.wait(q_full.index(q_at), step // Q_STAGES & 1)
    dp = warpgroup_mma_wait(0, deps=[dp])
    dv = warpgroup_mma(_operand(pairs, dtype, a_layout), do, dv, is_async=True)
    delta = rows_smem.index(3 * q_at + 1).load(columns)
    pairs = _packed(_widened(pairs, dtype, s_layout) * (dp - delta[None, :]), dtype)
    b = step % 2 * 2
    ds_smem.index(b + c).store(_operand(pairs, dtype, s_layout))
    fence_async_shared()
    _meet()
    if ROWS == 64:
        none_q = gl.zeros([64, D // 2], gl.float32, dq_layout)
        half = k_smem.index(none).reshape([64, D]).slice(c * (D // 2), D // 2, 1)
        dq = warpgroup_mma(ds_smem.index(b).permute([1, 0]), half, none_q, use_acc=False, is_async=True)
        half = k_smem.index(1 + none).reshape([64, D]).slice(c * (D // 2), D // 2, 1)
        dq = warpgroup_mma(ds_smem.index(b + 1).permute([1, 0]), half, dq, is_async=True)
    else:
        none_q = gl.zeros([64, D], gl.float32, dq_layout)
        part = ds_smem.index(b).slice(64 * c, 64, 1).permute([1, 0])
        dq = warpgroup_mma(part, k_smem.index(none).reshape([64, D]), none_q, use_acc=False, is_async=True)
        part = ds_smem.index(b + 1).slice(64 * c, 64, 1).permute([1, 0])
        dq = warpgroup_mma(part, k_smem.index(1 + none).reshape([64, D]), dq, is_async=True)
    dk = warpgroup_mma(_operand(pairs, dtype, a_layout), q, dk, is_async=True)
    dq, dv = warpgroup_mma_wait(1, deps=[dq, dv])
    mbarrier.arrive(do_empty.index(at))
    factor = rows_smem.index(3 * q_at + 2)
    if ROWS == 128:
        factor = factor.slice(64 * c, 64)
    factor = factor.load(gl.SliceLayout(1, dq_layout))
    column = column_smem.index(c).load(gl.SliceLayout(0, dq_layout))
    dq = (dq * column[None, :]) * factor[:, None]
    fixed = gl.inline_asm_elementwise("cvt.rni.s32.f32 $0, $1;", "=r,f", [dq], dtype=gl.int32, is_pure=True, pack=1)
    tma.store_wait(0)
    dq_smem.index(c).reshape([64, 64]).store(fixed)
    fence_async_shared()
    batch, hq = place
    if ROWS == 64:
        _add(fixed_desc, [batch, hq, row, c * (D // 2)], dq_smem.index(c))
    else:
        _add(fixed_desc, [batch, hq, row + 64 * c, 0], dq_smem.index(c))
    dk = warpgroup_mma_wait(0, deps=[dk])
    mbarrier.arrive(q_empty.index(q_at))
    return dk, dv


@gluon.jit
def _consume(
    dk_desc, dv_desc, fixed_desc, bounds_ptr, scale, scale_log2, buffers, barriers, problem, c: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    k_smem, v_smem, q_smem, do_smem, rows_smem, ds_smem, dq_smem, column_smem = buffers
    k_full, v_full, q_full, q_empty, do_full, do_empty = barriers
    lq, lk, offset, kv_heads, group, tiles = problem
    ROWS: gl.constexpr = q_smem.shape[3]
    D: gl.constexpr = q_smem.shape[4]
    KEYS: gl.constexpr = 128
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    dtype: gl.constexpr = q_smem.dtype
    batch, head, first, begin, end = _place(problem, KEYS, ROWS, CAUSAL)
    keys = first + 64 * c + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
    # key j is seen from row `limit` on
    limit = gl.where(keys < lk, 0, lq + ROWS)
    clear = begin
    if CAUSAL:
        limit = gl.maximum(limit, keys - offset)
        clear = gl.maximum(first + (64 * c + 63 + ROWS - 1) - offset, 0) // ROWS
        clear = gl.minimum(gl.maximum(clear, begin), end)
    if first + KEYS > lk:
        clear = end
    d = gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [4], [0]))
    if ROWS == 64:
        d += c * (D // 2)
    bits = gl.load(bounds_ptr + (batch * kv_heads + head).to(gl.int64) * (D + 1) + d)
    # in shared memory, since registers are short in the loop
    column_smem.index(c).store(_pow2(0 - gl.minimum(gl.maximum(((bits + 0x7FFFFF) >> 23) - 127, -126), 126)))
    dv = gl.zeros([64, D], gl.float32, d_layout)
    dk = gl.zeros([64, D], gl.float32, d_layout)
    step = 0
    mbarrier.wait(k_full, 0)
    mbarrier.wait(v_full, 0)
    for member in range(group):
        place = (batch, head * group + member)
        for m in range(begin, clear):
            dk, dv = _step(
                dk, dv, c, fixed_desc, place, buffers, barriers, step, scale_log2, limit, m * ROWS, True,
                s_layout, a_layout, dq_layout,
            )
            step += 1
        for m in range(clear, end):
            dk, dv = _step(
                dk, dv, c, fixed_desc, place, buffers, barriers, step, scale_log2, limit, m * ROWS, False,
                s_layout, a_layout, dq_layout,
            )
            step += 1
    out = v_smem.index(c)
    v = out.reshape([64, D])
    v.store(dv.to(dtype))
    fence_async_shared()
    _store(dv_desc, [batch, head, first + 64 * c, 0], out)
    tma.store_wait(0)
    v.store((dk * scale).to(dtype))
    fence_async_shared()
    _store(dk_desc, [batch, head, first + 64 * c, 0], out)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["plane_rows", "lq", "lk", "offset", "kv_heads", "group", "tiles"])
def backward(
    q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, fixed_desc, rows_ptr, bounds_ptr,
    plane_rows, lq, lk, offset, kv_heads, group, tiles, scale, scale_log2,
    D: gl.constexpr, ROWS: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    k_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, D], v_desc.layout)
    q_smem = gl.allocate_shared_memory(dtype, [Q_STAGES, 1, 1, ROWS, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, D], do_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows_smem = gl.allocate_shared_memory(gl.float32, [3 * Q_STAGES, ROWS], plain)
    column_smem = gl.allocate_shared_memory(gl.float32, [2, 64], plain)
    ds_smem = gl.allocate_shared_memory(dtype, [4, 64, ROWS], gl.NVMMASharedLayout(128, 16, 2))
    dq_smem = gl.allocate_shared_memory(gl.int32, [2, 1, 1, 64, 64], fixed_desc.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], barrier)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    do_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
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
    barriers = (k_full, v_full, q_full, q_empty, do_full, do_empty)
    problem = (lq, lk, offset, kv_heads, group, tiles)
    gl.warp_specialize(
        [
            (
                _consume,
                (dk_desc, dv_desc, fixed_desc, bounds_ptr, scale, scale_log2, buffers, barriers, problem, 0, CAUSAL),
            ),
            (
                _consume,
                (dk_desc, dv_desc, fixed_desc, bounds_ptr, scale, scale_log2, buffers, barriers, problem, 1, CAUSAL),
            ),
            (_produce, (q_desc, k_desc, v_desc, do_desc, rows_ptr, plane_rows, buffers, barriers, problem, CAUSAL)),
        ],
        [4, 1],
        [240, 24],
    )
