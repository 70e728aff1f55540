# mypy: ignore-errors
# ruff: noqa: N803, N806, RUF059, SIM113
"""The forward pass of order-free attention on Hopper, in Gluon: the bits of `triton_forward.py`.

A program keeps 64 queries of a head. One warp, the producer, brings digits of queries, keys and values to shared memory
by TMA, and the numbers of keys besides; four others, the consumers, multiply and weigh. Two programs share a
multiprocessor: while one waits for the tensor cores, the other one works on its integers, which take as long. They run
the same instructions; two groups of consumers in one program would have copies of their own, which do not fit the
cache of instructions. For the same reason what few blocks need is a copy of a step of its own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from isograd.flash_attention import gluon_steps as steps
from isograd.flash_attention import triton_masks as masks
from isograd.flash_attention.order_free import gluon_integers as products
from isograd.flash_attention.order_free import triton_forward as anywhere
from isograd.flash_attention.order_free import triton_integers as integers
from isograd.flash_attention.order_free import triton_scores as scoring
from isograd.numerics import triton_ops as ops

BLOCK, ROWS = products.BLOCK, products.ROWS
_MAGIC_BITS = gl.constexpr((128 * ops.MAGIC_BITS_32.value + (1 << 31)) % (1 << 32) - (1 << 31))  # of a row's shares


@gluon.jit
def _tile(
    starts, problem,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, PACKED: gl.constexpr, LOWER_RIGHT: gl.constexpr, CACHED: gl.constexpr,
):  # fmt: skip
    """Where a program works.

    (sequence, batch element, head), (first row in memory, in the sequence), (queries, keys, ends of the window), slots
    of queries and of keys, 1 if the cache has a length that is out of range.
    """
    tiles, batch, heads, together, lq, lk, left, right, sequences = problem
    q_starts_ptr, k_starts_ptr, used_ptr = starts
    tile, h, z = masks.place(tiles, heads, batch, together, RIGHT)
    all_q = lq
    all_k = lk
    z, zb, tile, q_first, lq, _, lk = masks.locate(q_starts_ptr, k_starts_ptr, z, tile, lq, lk, sequences, ROWS, PACKED)
    first = tile * ROWS
    wrong = tile * 0
    if CACHED:
        used = gl.load(used_ptr + z)
        lk = gl.maximum(used, 0)
        wrong = (used < 0).to(gl.int32)
    if LOWER_RIGHT:
        left += lk - lq
        right += lk - lq
    q_slot = first
    k_slot = tile * 0
    if PACKED:
        q_slot += masks.slot_of_sequence(q_starts_ptr, z, all_q).to(gl.int32)
        k_slot = masks.slot_of_sequence(k_starts_ptr, gl.minimum(z, sequences), all_k).to(gl.int32)
    return (z, zb, h), (q_first, first), (lq, lk, left, right), (q_slot, k_slot), wrong


@gluon.jit
def _produce(
    descs, k_numbers_ptr, buffers, barriers, starts, problem, group, q_pitch, k_pitch,
    BD: gl.constexpr, BDV: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, PACKED: gl.constexpr,
    LOWER_RIGHT: gl.constexpr, CACHED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Bring the digits of queries, then those of keys and of values block by block."""
    q_desc, k_desc, v_desc = descs
    q_smem, k_smem, v_smem, o_smem, numbers = buffers
    q_full, k_full, k_empty, v_full, v_empty, n_full, n_empty = barriers
    where, places, sizes, slots, wrong = _tile(starts, problem, LEFT, RIGHT, PACKED, LOWER_RIGHT, CACHED)
    z, zb, h = where
    first = places[1]
    lq, lk, left, right = sizes
    q_slot, k_slot = slots
    heads = problem[2]
    if first < lq:
        begin, _, _, end = masks.other_tiles(first, lk, left, right, ROWS, BLOCK, LEFT, RIGHT)
        q_row = (zb * heads + h).to(gl.int32) * q_pitch + q_slot
        k_head = (zb * (heads // group) + h // group).to(gl.int32)
        mbarrier.expect(q_full, 2 * ROWS * BD)
        for digit in gl.static_range(2):
            steps.load(q_desc, [q_row, digit * BD], q_full, q_smem.index(digit))
        kv_heads = heads // group
        stride = k_pitch.to(gl.int64) * kv_heads * problem[1]
        numbers_ptr = k_numbers_ptr + k_head.to(gl.int64) * k_pitch + k_slot
        step = 0
        for n in range(begin, end):
            at = step % products.NUMBER_SLOTS
            mbarrier.wait(n_empty.index(at), (step // products.NUMBER_SLOTS & 1) ^ 1)
            products.bring_numbers(numbers_ptr + n * BLOCK, stride, numbers, at, 3)
            mbarrier.arrive(n_full.index(at))
            at = step % STAGES
            phase = (step // STAGES & 1) ^ 1
            mbarrier.wait(k_empty.index(at), phase)
            mbarrier.expect(k_full.index(at), 2 * BLOCK * BD)
            for digit in gl.static_range(2):
                row = k_head * k_pitch + k_slot + n * BLOCK
                steps.load(k_desc, [row, digit * BD], k_full.index(at), k_smem.index(2 * at + digit))
            mbarrier.wait(v_empty.index(at), phase)
            mbarrier.expect(v_full.index(at), 2 * BLOCK * BDV)
            for part in gl.static_range(2 * BDV // 64):
                row = k_head * (2 * BDV) + 64 * part
                steps.load(v_desc, [row, k_slot + n * BLOCK], v_full.index(at), v_smem.index(2 * BDV // 64 * at + part))
            step += 1


@gluon.jit
def _half(
    total, rows, scale, i, j, lq, lk, left, right, cap,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, SOFTCAP: gl.constexpr, SPECIAL: gl.constexpr,
):  # fmt: skip
    """(scores of 64 keys, which rows see a NaN)."""
    t, slope = scoring.scores(
        total, rows[:, None] * scale[None, :], i[:, None], j[None, :], lq, lk, left, right, cap, i, i, i, i, i, i,
        SPECIAL, LEFT, RIGHT, SOFTCAP, False, False, False, SPECIAL,
    )  # fmt: skip
    bad = i * 0
    if SPECIAL:
        bad = gl.max((t != t).to(gl.int32), 1)
        t = gl.where(t == t, t, 0.0)
    return t, bad


@gluon.jit
def _weights(t, exponent, of_shares, of_weights):
    """(sums of shares, each on top of MAGIC_BITS_32; integers of P for `operand`) of 64 keys."""
    m, k = integers.exp2_parts(t)
    shares = gl.sum(integers.rounded(m, k + of_shares), 1)
    places = k + (ops.as_int(exponent)[None, :] + of_weights)
    return shares, products.for_digits(integers.scaled(m, places))


@gluon.jit
def _step(
    o, sums, top, bad, q_high, q_low, k_smem, v_smem, o_smem, numbers, barriers, rows, i, column, lq, lk, left,
    right, cap, step, layout: gl.constexpr, half: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    SOFTCAP: gl.constexpr, STAGES: gl.constexpr, SPECIAL: gl.constexpr,
):  # fmt: skip
    """A block of keys. SPECIAL: some of its pairs are hidden by their positions, or scores may be out of reach."""
    q_full, k_full, k_empty, v_full, v_empty, n_full, n_empty = barriers
    held: gl.constexpr = rows.type.layout.parent
    weights: gl.constexpr = gl.DotOperandLayout(0, half, 4)
    half_lines: gl.constexpr = gl.SliceLayout(1, half)
    PARTS: gl.constexpr = v_smem.shape[0] // (2 * STAGES)
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, held))
    at = step % STAGES
    phase = step // STAGES & 1
    mbarrier.wait(k_full.index(at), phase)
    total = products.exact(q_high, q_low, k_smem.index(2 * at), k_smem.index(2 * at + 1), layout)
    mbarrier.arrive(k_empty.index(at))
    total0, total1 = products.halves(total)
    j = column + columns
    slot = step % products.NUMBER_SLOTS
    mbarrier.wait(n_full.index(slot), step // products.NUMBER_SLOTS & 1)
    numbers_at = 3 * slot
    own: gl.constexpr = gl.SliceLayout(0, held)
    scale0 = products.number(numbers, numbers_at, 0, own)
    scale1 = products.number(numbers, numbers_at, 1, own)
    t0, bad0 = _half(total0, rows, scale0, i, j, lq, lk, left, right, cap, LEFT, RIGHT, SOFTCAP, SPECIAL)
    t1, bad1 = _half(total1, rows, scale1, i, j + 64, lq, lk, left, right, cap, LEFT, RIGHT, SOFTCAP, SPECIAL)
    if SPECIAL:
        bad |= bad0 | bad1
    greatest = gl.maximum(gl.max(t0, 1), gl.max(t1, 1))
    level0 = products.number(numbers, numbers_at + 1, 0, own)[None, :]
    level1 = products.number(numbers, numbers_at + 1, 1, own)[None, :]
    weighed = gl.maximum(gl.max(t0 + level0, 1), gl.max(t1 + level1, 1))
    some = greatest >= -scoring.REACH
    u = integers.above(gl.where(some, weighed, -1.0))
    mine = integers.above(gl.where(some, greatest + integers.MARGIN, -1.0))
    new = gl.where(some, gl.maximum(top, mine), top)
    of_shares = ((22 - mine) - ops.MAGIC_BITS_32)[:, None]
    of_weights = ((15 - u) - ops.MAGIC_BITS_32)[:, None]
    shares0, p0 = _weights(t0, products.number(numbers, numbers_at + 2, 0, own), of_shares, of_weights)
    shares1, p1 = _weights(t1, products.number(numbers, numbers_at + 2, 1, own), of_shares, of_weights)
    mbarrier.arrive(n_empty.index(slot))
    shares = (shares0 + shares1) - _MAGIC_BITS
    high, low = products.operand(p0, p1, weights)
    fade = integers.power(top - new)
    added = gl.fma(shares.to(gl.float32), integers.power(mine - 22 - new), sums * fade)
    sums = gl.where(some, added, sums)
    # A block that hides everything from a row adds 0 times -0, which leaves zeros of either sign.
    # Triton before 3.9 takes -0.0 for 0.0.
    unit = ops.negate(gl.where(some, ops.negate(integers.power(u - 22 - new)), 0.0))
    unit = gl.convert_layout(unit, half_lines)[:, None]
    fade = gl.convert_layout(gl.where(some, fade, 1.0), half_lines)[:, None]
    mbarrier.wait(v_full.index(at), phase)
    v = 2 * PARTS * at
    y = products.exact(high, low, v_smem.index(v), v_smem.index(v + PARTS), half)
    o = gl.fma(y.to(gl.float32), unit, o * fade)
    if PARTS == 2:
        y = products.exact(high, low, v_smem.index(v + 1), v_smem.index(v + 3), half)
        mbarrier.arrive(v_empty.index(at))
        o_smem.store(gl.fma(y.to(gl.float32), unit, o_smem.load(half) * fade))
    else:
        mbarrier.arrive(v_empty.index(at))
    return o, sums, new, bad


@gluon.jit
def _consume(
    q_numbers_ptr, k_numbers_ptr, o_ptr, lse_ptr, sinks_ptr, buffers, barriers, starts, problem, group,
    q_pitch, k_pitch, o_strides, cap, reach, inverse, DV: gl.constexpr, BD: gl.constexpr,
    BDV: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, SOFTCAP: gl.constexpr, PACKED: gl.constexpr,
    LOWER_RIGHT: gl.constexpr, SINKS: gl.constexpr, CACHED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """64 of the queries."""
    q_smem, k_smem, v_smem, o_smem, numbers = buffers
    q_full, k_full, k_empty, v_full, v_empty, n_full, n_empty = barriers
    _, batch, heads, _, tokens, _, _, _, sequences = problem
    where, places, sizes, slots, wrong = _tile(starts, problem, LEFT, RIGHT, PACKED, LOWER_RIGHT, CACHED)
    z, zb, h = where
    q_first, first = places
    lq, lk, left, right = sizes
    q_slot, k_slot = slots
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    split, _ = products.halves(gl.zeros([ROWS, BLOCK], gl.int32, layout))
    held: gl.constexpr = split.type.layout
    lines: gl.constexpr = gl.SliceLayout(1, held)
    half_lines: gl.constexpr = gl.SliceLayout(1, half)
    PARTS: gl.constexpr = BDV // 64
    if first < lq:
        kv_heads = heads // group
        begin, full, full_end, end = masks.other_tiles(first, lk, left, right, ROWS, BLOCK, LEFT, RIGHT)
        head = zb * heads + h
        k_head = zb * kv_heads + h // group
        each = q_pitch.to(gl.int64) * heads * batch
        count = k_pitch.to(gl.int64) * kv_heads * batch
        q_at = head * q_pitch + q_slot
        worst_ptr = k_numbers_ptr + 3 * count + (k_head * k_pitch + k_slot) // BLOCK
        row = gl.arange(0, ROWS, layout=lines)
        i = first + row
        rows = gl.load(q_numbers_ptr + q_at + row)
        worst = gl.load(q_numbers_ptr + each + q_at // BLOCK)

        o = gl.zeros([ROWS, 64], gl.float32, half)
        if PARTS == 2:
            o_smem.store(o)
        sums = gl.zeros([ROWS], gl.float32, lines)
        top = gl.full([ROWS], anywhere.NOTHING, gl.int32, lines)
        bad = gl.zeros([ROWS], gl.int32, lines)
        if CACHED:
            bad += wrong
        if SINKS:
            sink = gl.load(sinks_ptr + h).to(gl.float32) + gl.zeros([ROWS], gl.float32, lines)
            if PACKED:
                sink = gl.where(z < sequences, sink, float("-inf"))
            top, sums, no_number = anywhere.with_sink(sink, top, sums)
            bad += no_number
        mbarrier.wait(q_full, 0)
        q_high = q_smem.index(0)
        q_low = q_smem.index(1)
        other_worst = gl.load(worst_ptr + begin, mask=begin < end, other=0.0)
        step = 0
        for n in range(begin, end):
            special = (n < full) | (n >= full_end) | scoring.is_careful(worst, other_worst, reach)
            other_worst = gl.load(worst_ptr + gl.minimum(n + 1, end - 1))
            if SOFTCAP:
                special = True
            if special:
                o, sums, top, bad = _step(
                    o, sums, top, bad, q_high, q_low, k_smem, v_smem, o_smem, numbers, barriers,
                    rows, i, n * BLOCK, lq, lk, left, right, cap, step, layout, half, LEFT, RIGHT, SOFTCAP, STAGES,
                    True,
                )  # fmt: skip
            else:
                o, sums, top, bad = _step(
                    o, sums, top, bad, q_high, q_low, k_smem, v_smem, o_smem, numbers, barriers,
                    rows, i, n * BLOCK, lq, lk, left, right, cap, step, layout, half, LEFT, RIGHT, SOFTCAP, STAGES,
                    False,
                )  # fmt: skip
            step += 1

        there = top > anywhere.NOTHING
        sums = gl.where(there, sums, 1.0)
        lse = gl.where(there, anywhere.log_sum(gl.where(there, top, 0), sums), float("-inf"))
        lse = gl.where(bad > 0, float("nan"), lse)
        gl.store(lse_ptr + head * tokens + q_first + i, ops.narrow(lse, gl.float32, False), mask=i < lq)
        factor = gl.where(there, ops.divide(1.0, sums) * inverse, 0.0)
        factor = gl.convert_layout(gl.where(bad > 0, float("nan"), factor), half_lines)[:, None]
        i = first + gl.arange(0, ROWS, layout=half_lines)
        o_ptr += masks.offset(zb, h, q_first, o_strides)
        for part in gl.static_range(PARTS):
            if part == 1:
                o = o_smem.load(half)
            d = 64 * part + gl.arange(0, 64, layout=gl.SliceLayout(0, half))
            at = o_ptr + i.to(gl.int64)[:, None] * o_strides[2] + d[None, :]
            value = ops.narrow(o * factor, o_ptr.dtype.element_ty, False)
            gl.store(at, value, mask=(i < lq)[:, None] & (d < DV)[None, :])


@gluon.jit
def order_free_forward_hopper(
    q_desc, k_desc, v_desc, q_numbers_ptr, k_numbers_ptr, o_ptr, lse_ptr, q_starts_ptr, k_starts_ptr, sinks_ptr,
    used_ptr, tiles, batch, heads, group, lq, lk, q_pitch, k_pitch, sequences, together, o_strides, left, right, cap,
    reach, inverse,
    DV: gl.constexpr, BD: gl.constexpr, BDV: gl.constexpr, LOWER_RIGHT: gl.constexpr, LEFT: gl.constexpr,
    RIGHT: gl.constexpr, SOFTCAP: gl.constexpr, PACKED: gl.constexpr, SINKS: gl.constexpr, CACHED: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """A tile of o and lse; arguments as in `order_free_forward`, with descriptors of the digits."""
    q_smem = gl.allocate_shared_memory(gl.int8, [2, ROWS, BD], q_desc.layout)
    k_smem = gl.allocate_shared_memory(gl.int8, [2 * STAGES, BLOCK, BD], k_desc.layout)
    v_smem = gl.allocate_shared_memory(gl.int8, [2 * BDV // 64 * STAGES, 64, BLOCK], v_desc.layout)
    # The right half of the sums: a thread has no registers for it beside its scores, and no other one reads its own.
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    o_smem = gl.allocate_shared_memory(gl.float32, [ROWS, 64 if BDV == 128 else 1], swizzled)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    numbers = gl.allocate_shared_memory(gl.float32, [3 * products.NUMBER_SLOTS, BLOCK], plain)
    n_full = gl.allocate_shared_memory(gl.int64, [products.NUMBER_SLOTS, 1], barrier)
    n_empty = gl.allocate_shared_memory(gl.int64, [products.NUMBER_SLOTS, 1], barrier)
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=1)
    for i in gl.static_range(products.NUMBER_SLOTS):
        mbarrier.init(n_full.index(i), count=1)
        mbarrier.init(n_empty.index(i), count=1)
    fence_async_shared()
    buffers = (q_smem, k_smem, v_smem, o_smem, numbers)
    barriers = (q_full, k_full, k_empty, v_full, v_empty, n_full, n_empty)
    problem = (tiles, batch, heads, together, lq, lk, left, right, sequences)
    starts = (q_starts_ptr, k_starts_ptr, used_ptr)
    descs = (q_desc, k_desc, v_desc)
    gl.warp_specialize(
        [
            (
                _consume,
                (q_numbers_ptr, k_numbers_ptr, o_ptr, lse_ptr, sinks_ptr, buffers, barriers, starts,
                 problem, group, q_pitch, k_pitch, o_strides, cap, reach, inverse, DV, BD, BDV, LEFT, RIGHT,
                 SOFTCAP, PACKED, LOWER_RIGHT, SINKS, CACHED, STAGES),
            ),
            (
                _produce,
                (descs, k_numbers_ptr, buffers, barriers, starts, problem, group, q_pitch, k_pitch, BD, BDV,
                 LEFT, RIGHT, PACKED, LOWER_RIGHT, CACHED, STAGES),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip
