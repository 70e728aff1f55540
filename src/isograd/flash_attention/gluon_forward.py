# mypy: ignore-errors
# ruff: noqa: N803, N806, RUF059
"""The forward pass of attention on Hopper, in Gluon: causal or full, head dimensions 64 and 128, 16 bits.

There is a program for each processor, which takes one tile of queries after another; k of the next tile is on its way
while the results of one are written. One warp, the producer, brings q and tiles of k and v to shared memory by TMA.
Each consumer, a group of four warps, has 64 rows of q; it starts S = q k^T of the next tile of keys and O += P v of
this one, and computes the softmax of the next tile while the tensor cores work on v: FlashAttention-3's order. Tiles of
keys are taken from the last down, so that those that need a mask come first.

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

from isograd.flash_attention import gluon_steps as steps


@gluon.jit
def _turns(total):
    """How many tiles this program takes."""
    count = gl.num_programs(0)
    return (total - gl.program_id(0) + (count - 1)) // count


@gluon.jit
def _index(turn, total):
    """The tile of a turn. Programs take them forwards and backwards by turns, so that long ones fall to all alike."""
    count = gl.num_programs(0)
    pid = gl.program_id(0)
    whole = (turn + 1) * count <= total
    return turn * count + gl.where((turn & 1 != 0) & whole, count - 1 - pid, pid)


@gluon.jit
def _tile(index, problem, CONSUMERS: gl.constexpr, KEYS: gl.constexpr, CAUSAL: gl.constexpr):
    """A tile: batch element, head, first row, and how many tiles of keys its rows see, at least one.

    The longest tiles of a head come first.
    """
    lq, lk, offset, heads, group, tiles, total = problem
    plane = index // tiles
    first = (tiles - 1 - index % tiles) * (64 * CONSUMERS)
    batch = plane // heads
    head = plane % heads
    keys = lk
    if CAUSAL:
        keys = gl.minimum(lk, first + (64 * CONSUMERS) + offset)
    n = gl.maximum((keys + (KEYS - 1)) // KEYS, 1)
    return batch, head, first, n


@gluon.jit
def _produce(q_desc, k_desc, v_desc, buffers, barriers, problem, CAUSAL: gl.constexpr):
    """Bring q, then k and v tile by tile."""
    q_smem, k_smem, v_smem = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    lq, lk, offset, heads, group, tiles, total = problem
    CONSUMERS: gl.constexpr = q_smem.shape[0]
    STAGES: gl.constexpr = k_smem.shape[0]
    KEYS: gl.constexpr = k_smem.shape[3]
    D: gl.constexpr = k_smem.shape[4]
    step = 0
    for turn in range(_turns(total)):
        batch, head, first, n = _tile(_index(turn, total), problem, CONSUMERS, KEYS, CAUSAL)
        for i in range(n):
            at = step % STAGES
            phase = (step // STAGES & 1) ^ 1
            row = (n - 1 - i) * KEYS
            mbarrier.wait(k_empty.index(at), phase)
            mbarrier.expect(k_full.index(at), KEYS * D * 2)
            steps.load(k_desc, [batch, head // group, row, 0], k_full.index(at), k_smem.index(at))
            if i == 0:  # behind the first k, which need not wait until the tile before has left the room of q
                for c in gl.static_range(CONSUMERS):
                    mbarrier.wait(q_empty.index(c), (turn & 1) ^ 1)
                    mbarrier.expect(q_full.index(c), 64 * D * 2)
                    steps.load(q_desc, [batch, head, first + 64 * c, 0], q_full.index(c), q_smem.index(c))
            mbarrier.wait(v_empty.index(at), phase)
            mbarrier.expect(v_full.index(at), KEYS * D * 2)
            steps.load(v_desc, [batch, head // group, row, 0], v_full.index(at), v_smem.index(at))
            step += 1


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
    q, p, o, highest, weights, buffers, barriers, step, last, scale, limit, column, MASKED: gl.constexpr,
    s_layout: gl.constexpr, p_layout: gl.constexpr,
):  # fmt: skip
    """S of the next tile of keys and its softmax, while P v of this one is added to O."""
    q_smem, k_smem, v_smem = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    STAGES: gl.constexpr = k_smem.shape[0]
    KEYS: gl.constexpr = k_smem.shape[3]
    D: gl.constexpr = k_smem.shape[4]
    s = _scores(q, k_smem.index((step + 1) % STAGES), s_layout)
    at = step % STAGES
    mbarrier.wait(v_full.index(at), step // STAGES & 1)
    v = v_smem.index(at).reshape([KEYS, D])
    o = warpgroup_mma(steps.unpacked(p, q.dtype, p_layout), v, o, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_empty.index((step + 1) % STAGES))
    w, highest, weights, shrink = _weigh(s, highest, weights, scale, limit, column, MASKED)
    # The branch of this wait keeps ptxas from moving the softmax behind the product that it should overlap.
    mbarrier.wait(k_full.index((step + 2) % STAGES), (step + 2) // STAGES & 1, pred=step + 2 < last)
    o, w = warpgroup_mma_wait(0, deps=[o, w])
    mbarrier.arrive(v_empty.index(at))
    o = o * gl.convert_layout(shrink, gl.SliceLayout(1, p_layout.parent))[:, None]
    return steps.packed(w, q.dtype), o, highest, weights


@gluon.jit
def _consume(o_desc, lse_ptr, scale, buffers, barriers, problem, c: gl.constexpr, CAUSAL: gl.constexpr):
    """64 rows of every tile."""
    q_smem, k_smem, v_smem = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    lq, lk, offset, heads, group, tiles, total = problem
    CONSUMERS: gl.constexpr = q_smem.shape[0]
    STAGES: gl.constexpr = k_smem.shape[0]
    KEYS: gl.constexpr = k_smem.shape[3]
    D: gl.constexpr = k_smem.shape[4]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    rows_s: gl.constexpr = gl.SliceLayout(1, s_layout)
    rows_o: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = q_smem.dtype
    q = q_smem.index(c).reshape([64, D])
    columns = gl.arange(0, KEYS, layout=gl.SliceLayout(0, s_layout))
    lines = gl.arange(0, 64, layout=rows_s)
    step = 0
    for turn in range(_turns(total)):
        batch, head, first, n = _tile(_index(turn, total), problem, CONSUMERS, KEYS, CAUSAL)
        row = first + 64 * c
        # how many keys each row sees, and how many tiles of keys, but for the last, every row sees as a whole
        limit = lk + gl.zeros_like(lines)
        clear = lk
        if CAUSAL:
            limit = gl.minimum(limit, lines + (row + offset + 1))
            clear = gl.minimum(lk, row + offset + 1)
        clear = gl.minimum(gl.maximum(clear, 0) // KEYS, n - 1)

        last = step + n
        mbarrier.wait(q_full.index(c), turn & 1)
        mbarrier.wait(k_full.index(step % STAGES), step // STAGES & 1)
        s = _scores(q, k_smem.index(step % STAGES), s_layout)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(step % STAGES))
        highest = gl.full([64], float("-inf"), gl.float32, rows_s)
        weights = gl.zeros([64], gl.float32, rows_s)
        w, highest, weights, _ = _weigh(s, highest, weights, scale, limit, columns + (n - 1) * KEYS, True)
        p = steps.packed(w, dtype)
        o = gl.zeros([64, D], gl.float32, o_layout)
        mbarrier.wait(k_full.index((step + 1) % STAGES), (step + 1) // STAGES & 1, pred=step + 1 < last)
        for j in range(n - 1 - clear):
            p, o, highest, weights = _step(
                q, p, o, highest, weights, buffers, barriers, step, last, scale, limit, columns + (n - 2 - j) * KEYS,
                True, s_layout, p_layout,
            )  # fmt: skip
            step += 1
        for _ in range(clear):
            p, o, highest, weights = _step(
                q, p, o, highest, weights, buffers, barriers, step, last, scale, limit, columns, False,
                s_layout, p_layout,
            )  # fmt: skip
            step += 1
        at = step % STAGES
        mbarrier.wait(v_full.index(at), step // STAGES & 1)
        v = v_smem.index(at).reshape([KEYS, D])
        o = warpgroup_mma(steps.unpacked(p, dtype, p_layout), v, o, is_async=True)
        step += 1
        empty = weights == 0.0
        log2 = highest * scale + gl.log2(gl.where(empty, 1.0, weights))
        lse = gl.where(empty, float("-inf"), log2 * 0.6931471805599453)
        at_row = (batch * heads + head).to(gl.int64) * lq + row
        gl.store(lse_ptr + at_row + lines, lse, mask=lines + row < lq)
        inverse = 1.0 / gl.where(empty, 1.0, weights)
        o, inverse = warpgroup_mma_wait(0, deps=[o, inverse])
        mbarrier.arrive(v_empty.index(at))
        o = o * gl.convert_layout(inverse, rows_o)[:, None]
        q.store(o.to(dtype))
        fence_async_shared()
        steps.store(o_desc, [batch, head, row, 0], q_smem.index(c))
        tma.store_wait(0)
        mbarrier.arrive(q_empty.index(c))


@gluon.jit(do_not_specialize=["lq", "lk", "offset", "heads", "group", "tiles", "total"])
def attention_forward_hopper(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, lq, lk, offset, heads, group, tiles, total, scale,
    CONSUMERS: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Attention: o and lse [B, H, Lq] of q, k and v [B, H, L, D].

    offset: the key that row 0 is level with; group: heads of q that share one of k and v; tiles: tiles of queries of a
    head; total: of all; scale: of the scores in base 2.
    """
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, 64, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, KEYS, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, KEYS, D], v_desc.layout)
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
                (_consume, (o_desc, lse_ptr, scale, buffers, barriers, problem, 0, CAUSAL)),
                (_consume, (o_desc, lse_ptr, scale, buffers, barriers, problem, 1, CAUSAL)),
                (_produce, (q_desc, k_desc, v_desc, buffers, barriers, problem, CAUSAL)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (o_desc, lse_ptr, scale, buffers, barriers, problem, 0, CAUSAL)),
                (_consume, (o_desc, lse_ptr, scale, buffers, barriers, problem, 1, CAUSAL)),
                (_consume, (o_desc, lse_ptr, scale, buffers, barriers, problem, 2, CAUSAL)),
                (_produce, (q_desc, k_desc, v_desc, buffers, barriers, problem, CAUSAL)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
