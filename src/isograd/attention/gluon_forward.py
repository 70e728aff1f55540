# ruff: noqa: N803, N806, RUF059
"""The forward pass of attention on Hopper, in Gluon: causal or full, head dimensions 64 and 128, 16 bits.

A program of four or more groups of warps stays on its multiprocessor and takes one tile after the other. One warp, the
producer, brings tiles of q, k and v to shared memory by TMA. Each consumer, a group of four warps, has 64 rows of q; it
starts S = q k^T of the next tile of keys and O += P v of this one, and computes the softmax of the next tile while the
tensor cores work on v: FlashAttention-3's order. The first S of a tile of queries runs along with the last P v of the
tile before. Tiles of keys are taken from the last down, so that those that need a mask come first.

A row's result depends on the tiles of keys and their order, not on the tile of queries it is in: tiles of keys that
lie entirely behind the diagonal change nothing.

Scores are in base 2; exp2 is the processor's, which is the same on all Hopper GPUs. What keys that a row does not see
hold has no influence but that of a NaN or an infinity in a row of v: 0 times these is NaN.
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

from isograd.attention import gluon_steps as steps


@gluon.jit
def _wait_turn(c: gl.constexpr):
    """Wait until the consumer before has started its products."""
    asm: gl.constexpr = f"bar.sync {8 + c}, 256; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _pass_turn(c: gl.constexpr):
    """Let consumer c start its products."""
    asm: gl.constexpr = f"bar.arrive {8 + c}, 256; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _tile(index, problem, CONSUMERS: gl.constexpr, KEYS: gl.constexpr, CAUSAL: gl.constexpr):
    """A tile's place, its first row, and how many tiles of keys its rows see, at least one.

    Tiles of `together` heads follow one another, so that their keys and values stay in the L2 cache, the longest first.
    """
    lq, lk, offset, heads, group, tiles, total, together = problem
    block = index // (tiles * together)
    planes = gl.minimum(together, total // tiles - block * together)
    rest = index - block * (tiles * together)
    plane = block * together + rest % planes
    first = (tiles - 1 - rest // planes) * (64 * CONSUMERS)
    keys = lk
    if CAUSAL:
        keys = gl.minimum(lk, first + (64 * CONSUMERS) + offset)
    n = gl.maximum((keys + (KEYS - 1)) // KEYS, 1)
    return plane // heads, plane % heads, first, n


@gluon.jit
def _limits(lines, row, n, problem, KEYS: gl.constexpr, CAUSAL: gl.constexpr, SKIP: gl.constexpr):
    """Of 64 rows: how many keys each sees; how many tiles of keys they see at all, and as a whole but for the last."""
    lq, lk, offset, heads, group, tiles, total, together = problem
    limit = lk + gl.zeros_like(lines)
    clear = lk
    own = n
    if CAUSAL:
        limit = gl.minimum(limit, lines + (row + offset + 1))
        clear = gl.minimum(lk, row + offset + 1)
        if SKIP:
            own = gl.minimum(gl.maximum((row + (offset + 64 + KEYS - 1)) // KEYS, 1), n)
    return limit, own, gl.minimum(gl.maximum(clear, 0) // KEYS, own - 1)


@gluon.jit
def _pass_over(step, count, barriers, STAGES: gl.constexpr):
    """Let go of tiles of keys that these rows do not see, once they have come."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty, next_full, next_empty = barriers
    for _ in range(count):
        at = step % STAGES
        phase = step // STAGES & 1
        mbarrier.wait(k_full.index(at), phase)
        mbarrier.arrive(k_empty.index(at))
        mbarrier.wait(v_full.index(at), phase)
        mbarrier.arrive(v_empty.index(at))
        step += 1
    return step


@gluon.jit
def _produce(q_desc, k_desc, v_desc, counter_ptr, buffers, barriers, problem, CAUSAL: gl.constexpr):
    """Bring q, k and v. Which tile comes next is whatever is left: programs take tiles of unequal length."""
    q_smem, k_smem, v_smem, o_smem, next_smem = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, next_full, next_empty = barriers
    lq, lk, offset, heads, group, tiles, total, together = problem
    CONSUMERS: gl.constexpr = o_smem.shape[0]
    STAGES: gl.constexpr = k_smem.shape[0]
    KEYS: gl.constexpr = k_smem.shape[3]
    D: gl.constexpr = k_smem.shape[4]
    single: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    step = 0
    turn = 0
    index = gl.program_id(0)
    while index < total:
        batch, head, first, n = _tile(index, problem, CONSUMERS, KEYS, CAUSAL)
        for c in gl.static_range(CONSUMERS):
            slot = (turn & 1) * CONSUMERS + c
            mbarrier.wait(q_empty.index(slot), (turn >> 1 & 1) ^ 1)
            mbarrier.expect(q_full.index(slot), 64 * D * 2)
            steps.load(q_desc, [batch, head, first + 64 * c, 0], q_full.index(slot), q_smem.index(slot))
        for i in range(n):
            at = step % STAGES
            phase = (step // STAGES & 1) ^ 1
            row = (n - 1 - i) * KEYS
            mbarrier.wait(k_empty.index(at), phase)
            mbarrier.expect(k_full.index(at), KEYS * D * 2)
            steps.load(k_desc, [batch, head // group, row, 0], k_full.index(at), k_smem.index(at))
            mbarrier.wait(v_empty.index(at), phase)
            mbarrier.expect(v_full.index(at), KEYS * D * 2)
            steps.load(v_desc, [batch, head // group, row, 0], v_full.index(at), v_smem.index(at))
            step += 1
        index = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1, sem="relaxed")
        mbarrier.wait(next_empty.index(turn & 1), (turn >> 1 & 1) ^ 1)
        next_smem.index(turn & 1).store(gl.full([1], 0, gl.int32, single) + index)
        mbarrier.arrive(next_full.index(turn & 1))
        turn += 1


@gluon.jit
def _scores(q, k, layout: gl.constexpr):
    """Start S = q k^T of a tile."""
    KEYS: gl.constexpr = k.shape[2]
    D: gl.constexpr = k.shape[3]
    zero = gl.zeros([64, KEYS], gl.float32, layout)
    return warpgroup_mma(q, k.reshape([KEYS, D]).permute([1, 0]), zero, use_acc=False, is_async=True)


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
def _step(
    q, p, o, highest, weights, buffers, barriers, step, last, slot, scale, limit, column, c: gl.constexpr,
    TURNS: gl.constexpr, MASKED: gl.constexpr, s_layout: gl.constexpr, p_layout: gl.constexpr,
):  # fmt: skip
    """S of the next tile of keys and its softmax, while P v of this one is added to O."""
    q_smem, k_smem, v_smem, o_smem, next_smem = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, next_full, next_empty = barriers
    CONSUMERS: gl.constexpr = o_smem.shape[0]
    STAGES: gl.constexpr = k_smem.shape[0]
    KEYS: gl.constexpr = k_smem.shape[3]
    D: gl.constexpr = k_smem.shape[4]
    if TURNS:
        _wait_turn(c)
    s = _scores(q, k_smem.index((step + 1) % STAGES), s_layout)
    at = step % STAGES
    mbarrier.wait(v_full.index(at), step // STAGES & 1)
    v = v_smem.index(at).reshape([KEYS, D])
    o = warpgroup_mma(steps.unpacked(p, q.dtype, p_layout), v, o, is_async=True)
    if TURNS:
        _pass_turn((c + 1) % CONSUMERS)
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_empty.index((step + 1) % STAGES))
    mbarrier.arrive(q_empty.index(slot), pred=step + 2 == last)
    w, highest, weights, shrink = _weigh(s, highest, weights, scale, limit, column, MASKED)
    # The branch of this wait keeps ptxas from moving the softmax behind the product that it should overlap.
    mbarrier.wait(k_full.index((step + 2) % STAGES), (step + 2) // STAGES & 1, pred=step + 2 < last)
    o, w = warpgroup_mma_wait(0, deps=[o, w])
    mbarrier.arrive(v_empty.index(at))
    o = o * gl.convert_layout(shrink, gl.SliceLayout(1, p_layout.parent))[:, None]
    return steps.packed(w, q.dtype), o, highest, weights


@gluon.jit
def _consume(
    o_desc, lse_ptr, scale, buffers, barriers, problem, c: gl.constexpr, CAUSAL: gl.constexpr, TURNS: gl.constexpr
):
    """64 rows of every tile."""
    q_smem, k_smem, v_smem, o_smem, next_smem = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, next_full, next_empty = barriers
    lq, lk, offset, heads, group, tiles, total, together = problem
    CONSUMERS: gl.constexpr = o_smem.shape[0]
    STAGES: gl.constexpr = k_smem.shape[0]
    KEYS: gl.constexpr = k_smem.shape[3]
    D: gl.constexpr = k_smem.shape[4]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    rows_s: gl.constexpr = gl.SliceLayout(1, s_layout)
    rows_o: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = q_smem.dtype
    columns = gl.arange(0, KEYS, layout=gl.SliceLayout(0, s_layout))
    lines = gl.arange(0, 64, layout=rows_s)
    none = gl.full([64], float("-inf"), gl.float32, rows_s)
    nothing = gl.zeros([64], gl.float32, rows_s)
    if TURNS and c == CONSUMERS - 1:
        _pass_turn(0)

    index = gl.program_id(0)
    batch, head, first, n = _tile(index, problem, CONSUMERS, KEYS, CAUSAL)
    row = first + 64 * c
    limit, own, clear = _limits(lines, row, n, problem, KEYS, CAUSAL, not TURNS)
    step = 0
    if CAUSAL:
        step = _pass_over(index * 0, n - own, barriers, STAGES)
    n = own
    mbarrier.wait(q_full.index(c), 0)
    mbarrier.wait(k_full.index(step % STAGES), step // STAGES & 1)
    if TURNS:
        _wait_turn(c)
    s = _scores(q_smem.index(c).reshape([64, D]), k_smem.index(step % STAGES), s_layout)
    if TURNS:
        _pass_turn((c + 1) % CONSUMERS)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(step % STAGES))
    mbarrier.arrive(q_empty.index(c), pred=n == 1)
    w, highest, weights, _ = _weigh(s, none, nothing, scale, limit, columns + (n - 1) * KEYS, True)
    p = steps.packed(w, dtype)
    turn = 0
    while index < total:
        last = step + n
        slot = (turn & 1) * CONSUMERS + c
        q = q_smem.index(slot).reshape([64, D])
        o = gl.zeros([64, D], gl.float32, o_layout)
        mbarrier.wait(k_full.index((step + 1) % STAGES), (step + 1) // STAGES & 1, pred=step + 1 < last)
        for j in range(n - 1 - clear):
            p, o, highest, weights = _step(
                q, p, o, highest, weights, buffers, barriers, step, last, slot, scale, limit,
                columns + (n - 2 - j) * KEYS, c, TURNS, True, s_layout, p_layout,
            )  # fmt: skip
            step += 1
        for _ in range(clear):
            p, o, highest, weights = _step(
                q, p, o, highest, weights, buffers, barriers, step, last, slot, scale, limit, columns, c, TURNS, False,
                s_layout, p_layout,
            )  # fmt: skip
            step += 1

        # The last P v of this tile, along with the first S of the next; behind the last tile, S of whatever lies there.
        old_batch = batch
        old_head = head
        old_row = row
        mbarrier.wait(next_full.index(turn & 1), turn >> 1 & 1)
        index = gl.max(next_smem.index(turn & 1).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        mbarrier.arrive(next_empty.index(turn & 1))
        more = index < total
        turn += 1
        slot = (turn & 1) * CONSUMERS + c
        at = step % STAGES
        phase = step // STAGES & 1
        step += 1
        batch, head, first, n = _tile(gl.minimum(index, total - 1), problem, CONSUMERS, KEYS, CAUSAL)
        row = first + 64 * c
        limit, own, clear = _limits(lines, row, n, problem, KEYS, CAUSAL, not TURNS)
        if CAUSAL:
            step = _pass_over(step, gl.where(more, n - own, 0), barriers, STAGES)
        n = own
        after = step % STAGES
        mbarrier.wait(v_full.index(at), phase)
        mbarrier.wait(q_full.index(slot), turn >> 1 & 1, pred=more)
        mbarrier.wait(k_full.index(after), step // STAGES & 1, pred=more)
        if TURNS:
            _wait_turn(c)
        s = _scores(q_smem.index(slot).reshape([64, D]), k_smem.index(after), s_layout)
        v = v_smem.index(at).reshape([KEYS, D])
        o = warpgroup_mma(steps.unpacked(p, dtype, p_layout), v, o, is_async=True)
        if TURNS:
            _pass_turn((c + 1) % CONSUMERS)
        # The branches of this wait and the next, which have nothing to wait for, keep arithmetic where it is written.
        mbarrier.wait(v_full.index(at), phase)
        empty = weights == 0.0
        log2 = highest * scale + gl.log2(gl.where(empty, 1.0, weights))
        lse = gl.where(empty, float("-inf"), log2 * 0.6931471805599453)
        at_row = (old_batch * heads + old_head).to(gl.int64) * lq + old_row
        gl.store(lse_ptr + at_row + lines, lse, mask=lines + old_row < lq)
        inverse = 1.0 / gl.where(empty, 1.0, weights)
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_empty.index(after), pred=more)
        mbarrier.arrive(q_empty.index(slot), pred=more & (n == 1))
        w, highest, weights, _ = _weigh(s, none, nothing, scale, limit, columns + (n - 1) * KEYS, True)
        mbarrier.wait(v_full.index(at), phase)
        o, inverse, w = warpgroup_mma_wait(0, deps=[o, inverse, w])
        p = steps.packed(w, dtype)
        tma.store_wait(0)
        mbarrier.arrive(v_empty.index(at))
        o = o * gl.convert_layout(inverse, rows_o)[:, None]
        o_smem.index(c).reshape([64, D]).store(o.to(dtype))
        fence_async_shared()
        steps.store(o_desc, [old_batch, old_head, old_row, 0], o_smem.index(c))
    tma.store_wait(0)
    if TURNS and c == 0:
        _wait_turn(0)


@gluon.jit(do_not_specialize=["lq", "lk", "offset", "heads", "group", "tiles", "total", "together"])
def attention_forward_hopper(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, counter_ptr, lq, lk, offset, heads, group, tiles, total, together, scale,
    CONSUMERS: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    TURNS: gl.constexpr,
):  # fmt: skip
    """Attention: o and lse [B, H, Lq] of q, k and v [B, H, L, D].

    counter_ptr: a zero, from which tiles are handed out; offset: the key that row 0 is level with; group: heads of q
    that share one of k and v; tiles: tiles of queries of a head; total: of all; together: heads whose tiles run at the
    same time; scale: of the scores in base 2.
    """
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2 * CONSUMERS, 1, 1, 64, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, KEYS, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, KEYS, D], v_desc.layout)
    o_smem = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, 64, D], o_desc.layout)
    next_smem = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2 * CONSUMERS, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [2 * CONSUMERS, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    next_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    next_empty = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    for i in gl.static_range(2 * CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(2):
        mbarrier.init(next_full.index(i), count=1)
        mbarrier.init(next_empty.index(i), count=CONSUMERS)
    fence_async_shared()
    buffers = (q_smem, k_smem, v_smem, o_smem, next_smem)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty, next_full, next_empty)
    problem = (lq, lk, offset, heads, group, tiles, total, together)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (o_desc, lse_ptr, scale, buffers, barriers, problem, 0, CAUSAL, TURNS)),
                (_consume, (o_desc, lse_ptr, scale, buffers, barriers, problem, 1, CAUSAL, TURNS)),
                (_produce, (q_desc, k_desc, v_desc, counter_ptr, buffers, barriers, problem, CAUSAL)),
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
                (_produce, (q_desc, k_desc, v_desc, counter_ptr, buffers, barriers, problem, CAUSAL)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
