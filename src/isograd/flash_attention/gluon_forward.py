# mypy: ignore-errors
# ruff: noqa: N803, N806, RUF005, RUF059
"""The forward pass of attention on Hopper, in Gluon: windows, packed sequences, soft cap, sinks, 16 bits.

There is a program for each processor, which takes one tile of queries after another; k of the next tile is on its way
while the results of one are written. One warp, the producer, brings q and tiles of k and v to shared memory by TMA.
Each consumer, a group of four warps, has 64 rows of q; it starts S = q k^T of the next tile of keys and O += P v of
this one, and computes the softmax of the next tile while the tensor cores work on v: FlashAttention-3's order. Tiles of
keys are taken from the last down, so that those that need a mask come first.

A row's result depends on the tiles of keys and their order, not on the tile of queries it is in: tiles of keys that
lie entirely outside of its window change nothing. Tiles are counted from the beginning of a sequence, and what lies
behind its end is read as 0 (see `gluon_steps`): packed sequences have the bits that they have alone.

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
def _tile(
    index, problem, starts, ROWS: gl.constexpr, KEYS: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    PACKED: gl.constexpr, LOWER_RIGHT: gl.constexpr,
):  # fmt: skip
    """A tile: where it is, its sizes, and the tiles of keys from `begin` to `n`, at least one, that its rows see.

    (sequence, head), (places of q and k), (first token, first row, rows, keys), (left, right), (begin, n). The longest
    tiles of a head come first.
    """
    lq, lk, left, right, heads, group, tiles, total, sequences = problem
    plane = index // tiles
    tile = tiles - 1 - index % tiles
    batch = plane // heads
    head = plane % heads
    number, tile, token, lq, q_place, lk, k_place = steps.locate(
        starts[0], starts[1], batch, tile, lq, lk, sequences, ROWS, PACKED
    )
    if PACKED and LOWER_RIGHT:
        left += lk - lq
        right += lk - lq
    first = tile * ROWS
    keys = lk
    if RIGHT:
        keys = gl.minimum(lk, first + ROWS + right)
    n = gl.maximum((keys + (KEYS - 1)) // KEYS, 1)
    begin = 0
    if LEFT:
        begin = gl.minimum(gl.maximum(first + left, 0) // KEYS, n - 1)
    return (number, head), (q_place, k_place), (token, first, lq, lk), (left, right), (begin, n)


@gluon.jit
def _bring(
    descs, buffers, barriers, where, places, sizes, span, group, turn, step, PACKED: gl.constexpr
):  # fmt: skip
    """Bring q, then k and v tile by tile."""
    q_desc, k_desc, v_desc = descs
    q_smem, k_smem, v_smem = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    q_place, k_place = places
    begin, n = span
    head = where[1]
    first = sizes[1]
    CONSUMERS: gl.constexpr = q_smem.shape[0]
    STAGES: gl.constexpr = k_smem.shape[0]
    KEYS: gl.constexpr = k_smem.shape[-2]
    D: gl.constexpr = k_smem.shape[-1]
    for i in range(n - begin):
        at = step % STAGES
        phase = (step // STAGES & 1) ^ 1
        row = (n - 1 - i) * KEYS
        mbarrier.wait(k_empty.index(at), phase)
        mbarrier.expect(k_full.index(at), KEYS * D * 2)
        steps.load(k_desc, steps.corner(k_place, head // group, row, 0, PACKED), k_full.index(at), k_smem.index(at))
        if i == 0:  # behind the first k, which need not wait until the tile before has left the room of q
            for c in gl.static_range(CONSUMERS):
                mbarrier.wait(q_empty.index(c), (turn & 1) ^ 1)
                mbarrier.expect(q_full.index(c), 64 * D * 2)
                at_q = steps.corner(q_place, head, first + 64 * c, 0, PACKED)
                steps.load(q_desc, at_q, q_full.index(c), q_smem.index(c))
        mbarrier.wait(v_empty.index(at), phase)
        mbarrier.expect(v_full.index(at), KEYS * D * 2)
        steps.load(v_desc, steps.corner(k_place, head // group, row, 0, PACKED), v_full.index(at), v_smem.index(at))
        step += 1
    return step


@gluon.jit
def _produce(
    descs, buffers, barriers, problem, starts, LEFT: gl.constexpr, RIGHT: gl.constexpr, PACKED: gl.constexpr,
    LOWER_RIGHT: gl.constexpr,
):  # fmt: skip
    """Bring what the consumers need of every tile."""
    q_smem, k_smem, v_smem = buffers
    lq, lk, left, right, heads, group, tiles, total, sequences = problem
    ROWS: gl.constexpr = 64 * q_smem.shape[0]
    KEYS: gl.constexpr = k_smem.shape[-2]
    step = 0
    taken = 0
    for turn in range(_turns(total)):
        where, places, sizes, sides, span = _tile(
            _index(turn, total), problem, starts, ROWS, KEYS, LEFT, RIGHT, PACKED, LOWER_RIGHT
        )
        if PACKED:
            if sizes[1] < sizes[2]:  # not every tile of packed sequences has rows
                step = _bring(descs, buffers, barriers, where, places, sizes, span, group, taken, step, PACKED)
                taken += 1
        else:
            step = _bring(descs, buffers, barriers, where, places, sizes, span, group, turn, step, PACKED)


@gluon.jit
def _scores(q, k, layout: gl.constexpr):
    """Start S = q k^T of a tile."""
    KEYS: gl.constexpr = k.shape[-2]
    D: gl.constexpr = k.shape[-1]
    zero = gl.zeros([64, KEYS], gl.float32, layout)
    return warpgroup_mma(q, k.reshape([KEYS, D]).permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def _weigh(
    s, highest, total, scale, cap, floor, limit, column, MASKED: gl.constexpr, LEFT: gl.constexpr,
    SOFTCAP: gl.constexpr,
):  # fmt: skip
    """exp2 of the scores below the row's highest, which may rise; and what earlier results are multiplied by."""
    unit = scale
    if SOFTCAP:
        s = steps.capped_tanh(s, scale) * cap
        unit = 1.0
    if MASKED:
        seen = column[None, :] < limit[:, None]
        if LEFT:
            seen = seen & (column[None, :] >= floor[:, None])
        s = gl.where(seen, s, float("-inf"))
    higher = gl.maximum(highest, gl.max(s, 1))
    base = gl.where(higher == float("-inf"), 0.0, higher * unit)
    shrink = gl.exp2(highest * unit - base)
    p = gl.exp2(gl.fma(s, unit + gl.zeros_like(s), (0.0 - base)[:, None] + gl.zeros_like(s)))
    total = total * shrink + gl.sum(p, 1)
    return p, higher, total, shrink


@gluon.jit
def _step(
    q, p, o, highest, weights, buffers, barriers, step, last, scale, cap, floor, limit, column, MASKED: gl.constexpr,
    LEFT: gl.constexpr, SOFTCAP: gl.constexpr, s_layout: gl.constexpr, p_layout: gl.constexpr,
):  # fmt: skip
    """S of the next tile of keys and its softmax, while P v of this one is added to O."""
    q_smem, k_smem, v_smem = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    STAGES: gl.constexpr = k_smem.shape[0]
    KEYS: gl.constexpr = k_smem.shape[-2]
    D: gl.constexpr = k_smem.shape[-1]
    s = _scores(q, k_smem.index((step + 1) % STAGES), s_layout)
    at = step % STAGES
    mbarrier.wait(v_full.index(at), step // STAGES & 1)
    v = v_smem.index(at).reshape([KEYS, D])
    o = warpgroup_mma(steps.unpacked(p, q.dtype, p_layout), v, o, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_empty.index((step + 1) % STAGES))
    w, highest, weights, shrink = _weigh(s, highest, weights, scale, cap, floor, limit, column, MASKED, LEFT, SOFTCAP)
    # The branch of this wait keeps ptxas from moving the softmax behind the product that it should overlap.
    mbarrier.wait(k_full.index((step + 2) % STAGES), (step + 2) // STAGES & 1, pred=step + 2 < last)
    o, w = warpgroup_mma_wait(0, deps=[o, w])
    mbarrier.arrive(v_empty.index(at))
    o = o * gl.convert_layout(shrink, gl.SliceLayout(1, p_layout.parent))[:, None]
    return steps.packed(w, q.dtype), o, highest, weights


@gluon.jit
def _attend(
    o_desc, lse_ptr, sinks_ptr, scale, cap, buffers, barriers, problem, where, places, sizes, sides, span, turn, step,
    c: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    """64 rows of a tile."""
    q_smem, k_smem, v_smem = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    tokens, _, _, _, heads, group, tiles, total, sequences = problem
    number, head = where
    q_place, k_place = places
    token, first, lq, lk = sizes
    left, right = sides
    begin, n = span
    STAGES: gl.constexpr = k_smem.shape[0]
    KEYS: gl.constexpr = k_smem.shape[-2]
    D: gl.constexpr = k_smem.shape[-1]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    rows_s: gl.constexpr = gl.SliceLayout(1, s_layout)
    rows_o: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = q_smem.dtype
    q = q_smem.index(c).reshape([64, D])
    columns = gl.arange(0, KEYS, layout=gl.SliceLayout(0, s_layout))
    lines = gl.arange(0, 64, layout=rows_s)
    row = first + 64 * c
    # from where on and up to where each row sees keys; of the tiles but the last those that every row sees as a whole
    limit = lk + gl.zeros_like(lines)
    floor = limit
    clear = lk
    if RIGHT:
        limit = gl.minimum(limit, lines + (row + right + 1))
        clear = gl.minimum(lk, row + right + 1)
    clear = gl.minimum(gl.maximum(clear, 0) // KEYS, n - 1)
    clear_begin = begin
    if LEFT:
        floor = lines + (row + left)
        clear = gl.maximum(clear, begin)
        clear_begin = (gl.maximum(row + 63 + left, 0) + (KEYS - 1)) // KEYS
        clear_begin = gl.minimum(gl.maximum(clear_begin, begin), clear)

    last = step + (n - begin)
    mbarrier.wait(q_full.index(c), turn & 1)
    mbarrier.wait(k_full.index(step % STAGES), step // STAGES & 1)
    s = _scores(q, k_smem.index(step % STAGES), s_layout)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(step % STAGES))
    highest = gl.full([64], float("-inf"), gl.float32, rows_s)
    weights = gl.zeros([64], gl.float32, rows_s)
    w, highest, weights, _ = _weigh(
        s, highest, weights, scale, cap, floor, limit, columns + (n - 1) * KEYS, True, LEFT, SOFTCAP
    )
    p = steps.packed(w, dtype)
    o = gl.zeros([64, D], gl.float32, o_layout)
    mbarrier.wait(k_full.index((step + 1) % STAGES), (step + 1) // STAGES & 1, pred=step + 1 < last)
    for j in range(n - 1 - clear):
        p, o, highest, weights = _step(
            q, p, o, highest, weights, buffers, barriers, step, last, scale, cap, floor, limit,
            columns + (n - 2 - j) * KEYS, True, LEFT, SOFTCAP, s_layout, p_layout,
        )  # fmt: skip
        step += 1
    for _ in range(clear - clear_begin):
        p, o, highest, weights = _step(
            q, p, o, highest, weights, buffers, barriers, step, last, scale, cap, floor, limit, columns, False, LEFT,
            SOFTCAP, s_layout, p_layout,
        )  # fmt: skip
        step += 1
    if LEFT:
        for j in range(clear_begin - begin):
            p, o, highest, weights = _step(
                q, p, o, highest, weights, buffers, barriers, step, last, scale, cap, floor, limit,
                columns + (clear_begin - 1 - j) * KEYS, True, LEFT, SOFTCAP, s_layout, p_layout,
            )  # fmt: skip
            step += 1
    at = step % STAGES
    mbarrier.wait(v_full.index(at), step // STAGES & 1)
    v = v_smem.index(at).reshape([KEYS, D])
    o = warpgroup_mma(steps.unpacked(p, dtype, p_layout), v, o, is_async=True)
    step += 1
    if not SOFTCAP:
        highest = highest * scale
    if SINKS:
        sink = gl.load(sinks_ptr + head).to(gl.float32)
        if PACKED:
            sink = gl.where(number < sequences, sink, float("-inf"))
        highest, weights, shrink = steps.with_sink(sink, highest, weights)
    empty = weights == 0.0
    log2 = gl.log2(gl.where(empty, 1.0, weights))
    if SINKS:
        lse = steps.natural(highest, log2)
    else:
        lse = gl.where(empty, float("-inf"), (highest + log2) * 0.6931471805599453)
    at_row = (q_place[0] * heads + head).to(gl.int64) * tokens + token + row
    gl.store(lse_ptr + at_row + lines, lse, mask=lines + row < lq)
    inverse = 1.0 / gl.where(empty, 1.0, weights)
    if SINKS:
        inverse = inverse * shrink
    o, inverse = warpgroup_mma_wait(0, deps=[o, inverse])
    mbarrier.arrive(v_empty.index(at))
    o = o * gl.convert_layout(inverse, rows_o)[:, None]
    q.store(o.to(dtype))
    fence_async_shared()
    steps.store(o_desc, steps.corner(q_place, head, row, 0, PACKED), q_smem.index(c))
    tma.store_wait(0)
    mbarrier.arrive(q_empty.index(c))
    return step


@gluon.jit
def _consume(
    o_desc, lse_ptr, sinks_ptr, scale, cap, buffers, barriers, problem, starts, c: gl.constexpr, LEFT: gl.constexpr,
    RIGHT: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr, PACKED: gl.constexpr, LOWER_RIGHT: gl.constexpr,
):  # fmt: skip
    """64 rows of every tile."""
    q_smem, k_smem, v_smem = buffers
    lq, lk, left, right, heads, group, tiles, total, sequences = problem
    ROWS: gl.constexpr = 64 * q_smem.shape[0]
    KEYS: gl.constexpr = k_smem.shape[-2]
    step = 0
    taken = 0
    for turn in range(_turns(total)):
        where, places, sizes, sides, span = _tile(
            _index(turn, total), problem, starts, ROWS, KEYS, LEFT, RIGHT, PACKED, LOWER_RIGHT
        )
        if PACKED:
            if sizes[1] < sizes[2]:
                step = _attend(
                    o_desc, lse_ptr, sinks_ptr, scale, cap, buffers, barriers, problem, where, places, sizes, sides,
                    span, taken, step, c, LEFT, RIGHT, SOFTCAP, SINKS, PACKED,
                )  # fmt: skip
                taken += 1
        else:
            step = _attend(
                o_desc, lse_ptr, sinks_ptr, scale, cap, buffers, barriers, problem, where, places, sizes, sides, span,
                turn, step, c, LEFT, RIGHT, SOFTCAP, SINKS, PACKED,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["lq", "lk", "left", "right", "heads", "group", "tiles", "total", "sequences"])
def attention_forward_hopper(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, q_starts_ptr, k_starts_ptr, sinks_ptr, lq, lk, left, right, heads, group,
    tiles, total, sequences, scale, cap,
    CONSUMERS: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, LEFT: gl.constexpr,
    RIGHT: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr, PACKED: gl.constexpr, LOWER_RIGHT: gl.constexpr,
):  # fmt: skip
    """Attention: o and lse [B, H, Lq] of q, k and v [B, H, L, D], or of packed sequences, whose descriptors differ.

    left, right: row i sees the keys from i + left (LEFT) to i + right (RIGHT), to which the offset of a packed
    sequence is added for LOWER_RIGHT; group: heads of q that share one of k and v; tiles: tiles of queries of a head;
    total: of all; scale: of the scores in base 2. SOFTCAP: scale is twice that over the soft cap, cap the soft cap in
    base 2. What a flag is not set for is not read.
    """
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS] + q_desc.block_type.shape, q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)
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
    problem = (lq, lk, left, right, heads, group, tiles, total, sequences)
    descs = (q_desc, k_desc, v_desc)
    starts = (q_starts_ptr, k_starts_ptr)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (o_desc, lse_ptr, sinks_ptr, scale, cap, buffers, barriers, problem, starts, 0, LEFT, RIGHT,
                     SOFTCAP, SINKS, PACKED, LOWER_RIGHT),
                ),
                (
                    _consume,
                    (o_desc, lse_ptr, sinks_ptr, scale, cap, buffers, barriers, problem, starts, 1, LEFT, RIGHT,
                     SOFTCAP, SINKS, PACKED, LOWER_RIGHT),
                ),
                (_produce, (descs, buffers, barriers, problem, starts, LEFT, RIGHT, PACKED, LOWER_RIGHT)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (o_desc, lse_ptr, sinks_ptr, scale, cap, buffers, barriers, problem, starts, 0, LEFT, RIGHT,
                     SOFTCAP, SINKS, PACKED, LOWER_RIGHT),
                ),
                (
                    _consume,
                    (o_desc, lse_ptr, sinks_ptr, scale, cap, buffers, barriers, problem, starts, 1, LEFT, RIGHT,
                     SOFTCAP, SINKS, PACKED, LOWER_RIGHT),
                ),
                (
                    _consume,
                    (o_desc, lse_ptr, sinks_ptr, scale, cap, buffers, barriers, problem, starts, 2, LEFT, RIGHT,
                     SOFTCAP, SINKS, PACKED, LOWER_RIGHT),
                ),
                (_produce, (descs, buffers, barriers, problem, starts, LEFT, RIGHT, PACKED, LOWER_RIGHT)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )  # fmt: skip
