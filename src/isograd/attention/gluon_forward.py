# ruff: noqa: N803, N806
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# The names since Triton 3.9, and the ones before.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def _turn_wait(turn: gl.constexpr, threads: gl.constexpr):
    """Wait for the consumer's turn to start its matrix products."""
    asm: gl.constexpr = f"bar.sync {turn}, {threads}; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _turn_pass(turn: gl.constexpr, threads: gl.constexpr):
    asm: gl.constexpr = f"bar.arrive {turn}, {threads}; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _tile(index, lq, lk, offset, heads, tiles, CONSUMERS: gl.constexpr, N: gl.constexpr, CAUSAL: gl.constexpr):
    """The rows of a tile, from the last down, and the tiles of keys that its rows see."""
    plane = index // tiles
    first = (tiles - 1 - index % tiles) * (64 * CONSUMERS)
    batch = plane // heads
    head = plane % heads
    keys = lk
    if CAUSAL:
        keys = gl.minimum(lk, first + (64 * CONSUMERS) + offset)
    n = gl.maximum((keys + (N - 1)) // N, 1)
    return batch, head, first, n


@gluon.jit
def _produce(q_desc, k_desc, v_desc, buffers, barriers, problem, CAUSAL: gl.constexpr):
    q_smem, k_smem, v_smem = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    lq, lk, offset, heads, group, tiles, total = problem
    CONSUMERS: gl.constexpr = q_smem.shape[0]
    STAGES: gl.constexpr = k_smem.shape[0]
    N: gl.constexpr = k_smem.shape[3]
    D: gl.constexpr = k_smem.shape[4]
    step = 0
    turn = 0
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        batch, head, first, n = _tile(index, lq, lk, offset, heads, tiles, CONSUMERS, N, CAUSAL)
        for c in gl.static_range(CONSUMERS):
            mbarrier.wait(q_empty.index(c), (turn & 1) ^ 1)
            mbarrier.expect(q_full.index(c), 64 * D * 2)
            _load(q_desc, [batch, head, first + 64 * c, 0], q_full.index(c), q_smem.index(c))
        turn += 1
        for i in range(n):
            at = step % STAGES
            phase = (step // STAGES & 1) ^ 1
            row = (n - 1 - i) * N
            mbarrier.wait(k_empty.index(at), phase)
            mbarrier.expect(k_full.index(at), N * D * 2)
            _load(k_desc, [batch, head // group, row, 0], k_full.index(at), k_smem.index(at))
            mbarrier.wait(v_empty.index(at), phase)
            mbarrier.expect(v_full.index(at), N * D * 2)
            _load(v_desc, [batch, head // group, row, 0], v_full.index(at), v_smem.index(at))
            step += 1


@gluon.jit
def _scores(q, k, layout: gl.constexpr):
    """Start S = Q K^T of a tile."""
    N: gl.constexpr = k.shape[2]
    D: gl.constexpr = k.shape[3]
    zero = gl.zeros([64, N], gl.float32, layout)
    return warpgroup_mma(q, k.reshape([N, D]).permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def _packed(w, dtype: gl.constexpr):
    """Neighbouring weights rounded to 16 bits, two to a register, which stay so across a loop's iterations."""
    first, second = gl.split(w.reshape([w.shape[0], w.shape[1] // 2, 2]))
    kind: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    asm: gl.constexpr = f"cvt.rn.{kind}.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(asm, "=r,f,f", [first, second], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _operand(pairs, dtype: gl.constexpr, layout: gl.constexpr):
    """The weights as the first operand of a product."""
    first = pairs.to(gl.int16).to(dtype, bitcast=True)
    second = (pairs >> 16).to(gl.int16).to(dtype, bitcast=True)
    p = gl.join(first, second).reshape([pairs.shape[0], 2 * pairs.shape[1]])
    return gl.convert_layout(p, layout, assert_trivial=True)


@gluon.jit
def _step(
    q, p, o, highest, weights, k_smem, v_smem, k_full, k_empty, v_full, v_empty, step, last, scale, limit, column,
    mine: gl.constexpr, following: gl.constexpr, TURNS: gl.constexpr, MASKED: gl.constexpr,
    s_layout: gl.constexpr, p_layout: gl.constexpr,
):
    """S of the next tile and its softmax, while P V of this one is added to O."""
    STAGES: gl.constexpr = k_smem.shape[0]
    N: gl.constexpr = k_smem.shape[3]
    D: gl.constexpr = k_smem.shape[4]
    if TURNS:
        _turn_wait(mine, 256)
    s = _scores(q, k_smem.index((step + 1) % STAGES), s_layout)
    at = step % STAGES
    mbarrier.wait(v_full.index(at), step // STAGES & 1)
    o = warpgroup_mma(_operand(p, q.dtype, p_layout), v_smem.index(at).reshape([N, D]), o, is_async=True)
    if TURNS:
        _turn_pass(following, 256)
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_empty.index((step + 1) % STAGES))
    w, highest, weights, shrink = _weigh(s, highest, weights, scale, limit, column, MASKED)
    # The branch of this wait keeps ptxas from moving the softmax behind the product that it should overlap.
    mbarrier.wait(k_full.index((step + 2) % STAGES), (step + 2) // STAGES & 1, pred=step + 2 < last)
    o, w = warpgroup_mma_wait(0, deps=[o, w])
    mbarrier.arrive(v_empty.index(at))
    o = o * gl.convert_layout(shrink, gl.SliceLayout(1, p_layout.parent))[:, None]
    return _packed(w, q.dtype), o, highest, weights


@gluon.jit
def _weigh(s, highest, total, scale, limit, column, MASKED: gl.constexpr):
    """exp2 of the scores below the row's highest, which may rise; and what earlier results are multiplied by."""
    if MASKED:
        s = gl.where(column[None, :] < limit[:, None], s, float("-inf"))
    higher = gl.maximum(highest, gl.max(s, 1))
    base = gl.where(higher == float("-inf"), 0.0, higher * scale)
    shrink = gl.exp2(highest * scale - base)
    p = gl.exp2(gl.fma(s, scale + gl.zeros_like(s), (0.0 - base)[:, None] + gl.zeros_like(s)))
    total = total * shrink + gl.sum(p, 1)
    return p, higher, total, shrink


@gluon.jit
def _consume(
    o_desc, lse_ptr, scale, buffers, barriers, problem, c: gl.constexpr, CAUSAL: gl.constexpr, TURNS: gl.constexpr
):
    q_smem, k_smem, v_smem = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    lq, lk, offset, heads, group, tiles, total = problem
    CONSUMERS: gl.constexpr = q_smem.shape[0]
    STAGES: gl.constexpr = k_smem.shape[0]
    N: gl.constexpr = k_smem.shape[3]
    D: gl.constexpr = k_smem.shape[4]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    rows_s: gl.constexpr = gl.SliceLayout(1, s_layout)
    rows_o: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = q_smem.dtype
    mine: gl.constexpr = 8 + c
    following: gl.constexpr = 8 + (c + 1) % CONSUMERS
    q = q_smem.index(c).reshape([64, D])
    columns = gl.arange(0, N, layout=gl.SliceLayout(0, s_layout))
    lines = gl.arange(0, 64, layout=rows_s)
    step = 0
    turn = 0
    if TURNS:
        if c == CONSUMERS - 1:
            _turn_pass(8, 256)
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        batch, head, first, n = _tile(index, lq, lk, offset, heads, tiles, CONSUMERS, N, CAUSAL)
        row = first + 64 * c
        limit = lk + gl.zeros_like(lines)
        clear = lk
        if CAUSAL:
            limit = gl.minimum(limit, lines + (row + offset + 1))
            clear = gl.minimum(lk, row + offset + 1)
        # tiles below `clear` need no mask
        clear = gl.minimum(gl.maximum(clear, 0) // N, n - 1)

        last = step + n
        mbarrier.wait(q_full.index(c), turn & 1)
        mbarrier.wait(k_full.index(step % STAGES), step // STAGES & 1)
        if TURNS:
            _turn_wait(mine, 256)
        s = _scores(q, k_smem.index(step % STAGES), s_layout)
        if TURNS:
            _turn_pass(following, 256)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(step % STAGES))
        highest = gl.full([64], float("-inf"), gl.float32, rows_s)
        weights = gl.zeros([64], gl.float32, rows_s)
        w, highest, weights, _ = _weigh(s, highest, weights, scale, limit, columns + (n - 1) * N, True)
        p = _packed(w, dtype)
        o = gl.zeros([64, D], gl.float32, o_layout)
        mbarrier.wait(k_full.index((step + 1) % STAGES), (step + 1) // STAGES & 1, pred=step + 1 < last)
        for j in range(n - 1 - clear):
            p, o, highest, weights = _step(
                q, p, o, highest, weights, k_smem, v_smem, k_full, k_empty, v_full, v_empty, step, last, scale, limit,
                columns + (n - 2 - j) * N, mine, following, TURNS, True, s_layout, p_layout
            )
            step += 1
        for _ in range(clear):
            p, o, highest, weights = _step(
                q, p, o, highest, weights, k_smem, v_smem, k_full, k_empty, v_full, v_empty, step, last, scale, limit,
                columns, mine, following, TURNS, False, s_layout, p_layout
            )
            step += 1
        at = step % STAGES
        mbarrier.wait(v_full.index(at), step // STAGES & 1)
        o = warpgroup_mma(_operand(p, dtype, p_layout), v_smem.index(at).reshape([N, D]), o, is_async=True)
        step += 1
        none = weights == 0.0
        lse = gl.where(
            none, float("-inf"), (highest * scale + gl.log2(gl.where(none, 1.0, weights))) * 0.6931471805599453
        )
        at_row = (batch * heads + head).to(gl.int64) * lq + row
        gl.store(lse_ptr + at_row + lines, lse, mask=lines + row < lq)
        inverse = 1.0 / gl.where(none, 1.0, weights)
        o, inverse = warpgroup_mma_wait(0, deps=[o, inverse])
        mbarrier.arrive(v_empty.index(at))
        o = o * gl.convert_layout(inverse, rows_o)[:, None]
        q.store(o.to(dtype))
        fence_async_shared()
        _store(o_desc, [batch, head, row, 0], q_smem.index(c))
        tma.store_wait(0)
        mbarrier.arrive(q_empty.index(c))
        turn += 1
    if TURNS:
        if c == 0:
            _turn_wait(8, 256)


@gluon.jit(do_not_specialize=["lq", "lk", "offset", "heads", "group", "tiles", "total"])
def forward(
    q_desc, k_desc, v_desc, o_desc, lse_ptr,
    lq, lk, offset, heads, group, tiles, total, scale,
    CONSUMERS: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    TURNS: gl.constexpr,
):
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, 64, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, N, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, N, D], v_desc.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    fence_async_shared()
    buffers = (q_smem, k_smem, v_smem)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    problem = (lq, lk, offset, heads, group, tiles, total)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (o_desc, lse_ptr, scale, buffers, barriers, problem, 0, CAUSAL, TURNS)),
                (_consume, (o_desc, lse_ptr, scale, buffers, barriers, problem, 1, CAUSAL, TURNS)),
                (_produce, (q_desc, k_desc, v_desc, buffers, barriers, problem, CAUSAL)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (o_desc, lse_ptr, scale, buffers, barriers, problem, 0, CAUSAL, TURNS)),
                (_consume, (o_desc, lse_ptr, scale, buffers, barriers, problem, 1, CAUSAL, TURNS)),
                (_consume, (o_desc, lse_ptr, scale, buffers, barriers, problem, 2, CAUSAL, TURNS)),
                (_produce, (q_desc, k_desc, v_desc, buffers, barriers, problem, CAUSAL)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
