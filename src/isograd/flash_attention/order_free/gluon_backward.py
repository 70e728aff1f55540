# mypy: ignore-errors
# ruff: noqa: N803, N806, RUF005, RUF059
"""The backward pass of order-free attention on Hopper, in Gluon: the bits of `triton_backward.py`.

One kernel in three forms. For dq a program keeps 64 queries and goes over keys; for dk and for dv it keeps 64 keys and
goes over queries. The scores are computed three times, which costs less than to hold the sums of dk and dv at once: a
thread has the registers for one of them. Programs are those of `gluon_forward.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from isograd.flash_attention import gluon_steps as steps
from isograd.flash_attention import triton_masks as masks
from isograd.flash_attention.order_free import gluon_integers as products
from isograd.flash_attention.order_free import triton_backward as anywhere
from isograd.flash_attention.order_free import triton_integers as integers
from isograd.flash_attention.order_free import triton_scores as scoring
from isograd.numerics import triton_ops as ops
from isograd.products.triton_slices import exponent_of

BLOCK, ROWS = products.BLOCK, products.ROWS
DQ, DK, DV = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)


@gluon.jit
def _tile(
    starts, problem,
    KIND: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, PACKED: gl.constexpr, LOWER_RIGHT: gl.constexpr,
):  # fmt: skip
    """Where a program works.

    (sequence, batch element, head), (first row in memory, in the sequence, slots of the own and of the other rows),
    (queries, keys, ends of the window), blocks of the other rows. The own rows are queries for DQ and keys otherwise.
    """
    tiles, batch, heads, group, together, lq, lk, left, right, sequences = problem
    q_starts_ptr, k_starts_ptr = starts
    if KIND == DQ:
        tile, h, z = masks.place(tiles, heads, batch, together, RIGHT)
        all_own = lq
        all_other = lk
        own_ptr = q_starts_ptr
        other_ptr = k_starts_ptr
    else:
        tile, h, z = masks.place(tiles, heads // group, batch, together, False)
        all_own = lk
        all_other = lq
        own_ptr = k_starts_ptr
        other_ptr = q_starts_ptr
    z, zb, tile, memory, own, _, other = masks.locate(
        own_ptr, other_ptr, z, tile, all_own, all_other, sequences, ROWS, PACKED
    )
    first = tile * ROWS
    lq = own if KIND == DQ else other
    lk = other if KIND == DQ else own
    if LOWER_RIGHT:
        left += lk - lq
        right += lk - lq
    own_slot = first
    other_slot = tile * 0
    if PACKED:
        own_slot += masks.slot_of_sequence(own_ptr, z, all_own).to(gl.int32)
        other_slot = masks.slot_of_sequence(other_ptr, z, all_other).to(gl.int32)
    if KIND == DQ:
        begin, full, full_end, end = masks.other_tiles(first, lk, left, right, ROWS, BLOCK, LEFT, RIGHT)
    else:
        # Queries and keys beyond the ends see and are seen like others: their rows of zeros add nothing, or stay here.
        begin, full, full_end, end = masks.other_tiles(first, lq, -right, -left, ROWS, BLOCK, RIGHT, LEFT)
        if not LEFT:
            full_end = end
    return (z, zb, h), (memory, first, own_slot, other_slot), (lq, lk, left, right), (begin, full, full_end, end)


@gluon.jit
def _produce(
    descs, q_numbers_ptr, k_numbers_ptr, buffers, barriers, starts, problem, own_pitch, other_pitch,
    KIND: gl.constexpr, BD: gl.constexpr, BDV: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    PACKED: gl.constexpr, LOWER_RIGHT: gl.constexpr,
):  # fmt: skip
    """Bring the digits of the own rows, then those of the other ones block by block."""
    a_desc, c_desc, b_desc, d_desc, w_desc = descs
    a_smem, c_smem, b_smem, d_smem, w_smem, numbers = buffers
    own_full, b_full, b_empty, d_full, d_empty, w_full, w_empty, n_full, n_empty = barriers
    where, places, sizes, blocks = _tile(starts, problem, KIND, LEFT, RIGHT, PACKED, LOWER_RIGHT)
    z, zb, h = where
    _, first, own_slot, other_slot = places
    lq, lk, _, _ = sizes
    begin, _, _, end = blocks
    NUMBERS: gl.constexpr = numbers.shape[0] // products.NUMBER_SLOTS
    _, batch, heads, group, _, _, _, _, _, _ = problem
    kv_heads = heads // group
    WIDTH: gl.constexpr = BDV if KIND == DV else BD  # of what is weighed
    PARTS: gl.constexpr = WIDTH // 64
    B_ROWS: gl.constexpr = b_smem.shape[1]
    B_SLOTS: gl.constexpr = b_smem.shape[0] // 2
    D_SLOTS: gl.constexpr = d_smem.shape[0] // 2
    W_SLOTS: gl.constexpr = w_smem.shape[0] // (2 * PARTS)
    own = lq if KIND == DQ else lk
    if first < own:
        own_heads = heads if KIND == DQ else kv_heads
        own_row = (zb * own_heads + h).to(gl.int32) * own_pitch + own_slot
        mbarrier.expect(own_full, 2 * ROWS * (BD if KIND == DV else BD + BDV))
        for digit in gl.static_range(2):
            steps.load(a_desc, [own_row, digit * BD], own_full, a_smem.index(digit))
            if KIND != DV:
                steps.load(c_desc, [own_row, digit * BDV], own_full, c_smem.index(digit))
        step = 0
        for member in range(1 if KIND == DQ else group):
            if KIND == DQ:
                other_head = (zb * kv_heads + h // group).to(gl.int32)
                numbers_ptr = k_numbers_ptr
                stride = other_pitch.to(gl.int64) * kv_heads * batch
            else:
                other_head = (zb * heads + h * group + member).to(gl.int32)
                numbers_ptr = q_numbers_ptr
                stride = other_pitch.to(gl.int64) * heads * batch
            for n in range(begin, end):
                column = other_slot + n * BLOCK
                at = step % products.NUMBER_SLOTS
                mbarrier.wait(n_empty.index(at), (step // products.NUMBER_SLOTS & 1) ^ 1)
                row = other_head.to(gl.int64) * other_pitch + column
                products.bring_numbers(numbers_ptr + row, stride, numbers, at, NUMBERS)
                mbarrier.arrive(n_full.index(at))
                for part in gl.static_range(BLOCK // B_ROWS):
                    row = other_head * other_pitch + column + B_ROWS * part
                    turn = step * (BLOCK // B_ROWS) + part
                    at = turn % B_SLOTS
                    mbarrier.wait(b_empty.index(at), (turn // B_SLOTS & 1) ^ 1)
                    mbarrier.expect(b_full.index(at), 2 * B_ROWS * BD)
                    for digit in gl.static_range(2):
                        steps.load(b_desc, [row, digit * BD], b_full.index(at), b_smem.index(2 * at + digit))
                    if KIND != DV:
                        turn = step * 2 + part
                        at = turn % D_SLOTS
                        mbarrier.wait(d_empty.index(at), (turn // D_SLOTS & 1) ^ 1)
                        mbarrier.expect(d_full.index(at), 2 * 64 * BDV)
                        for digit in gl.static_range(2):
                            steps.load(d_desc, [row, digit * BDV], d_full.index(at), d_smem.index(2 * at + digit))
                at = step % W_SLOTS
                mbarrier.wait(w_empty.index(at), (step // W_SLOTS & 1) ^ 1)
                mbarrier.expect(w_full.index(at), 2 * BLOCK * WIDTH)
                for part in gl.static_range(2 * PARTS):
                    row = other_head * (2 * WIDTH) + 64 * part
                    steps.load(w_desc, [row, column], w_full.index(at), w_smem.index(2 * PARTS * at + part))
                step += 1


@gluon.jit
def _weights(left, right, operand: gl.constexpr):
    """(high digits, low digits, exponents G, which are not finite) of rows of weights, as `triton_integers.weights`."""
    key = gl.maximum(gl.max(ops.magnitude_key(left), 1), gl.max(ops.magnitude_key(right), 1))
    exponent = gl.maximum(exponent_of(key), integers.LEAST)
    scale = ops.pow2_32(15 - exponent)[:, None]
    high, low = products.operand(products.for_digits(left * scale), products.for_digits(right * scale), operand)
    return high, low, exponent, key >= integers.INFINITY


@gluon.jit
def _step(
    sum0, sum1, bad, a, of_own, other_ptr, stride, mine, column, sizes, buffers, barriers, step, factor, kept, cap,
    whole: gl.constexpr, half: gl.constexpr, KIND: gl.constexpr, PARTS: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, SOFTCAP: gl.constexpr, SPECIAL: gl.constexpr,
):  # fmt: skip
    """A block of the other rows. SPECIAL: some pairs are hidden by their positions, or scores may be out of reach."""
    a_smem, c_smem, b_smem, d_smem, w_smem, numbers = buffers
    own_full, b_full, b_empty, d_full, d_empty, w_full, w_empty, n_full, n_empty = barriers
    lq, lk, left, right = sizes
    B_SLOTS: gl.constexpr = b_smem.shape[0] // 2
    D_SLOTS: gl.constexpr = d_smem.shape[0] // 2
    W_SLOTS: gl.constexpr = w_smem.shape[0] // (2 * PARTS)
    WHOLE: gl.constexpr = b_smem.shape[1] == BLOCK
    held: gl.constexpr = mine.type.layout.parent
    half_lines: gl.constexpr = gl.SliceLayout(1, half)
    operand: gl.constexpr = gl.DotOperandLayout(0, half, 4)
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, held))
    a_high, a_low = a
    if WHOLE:
        at = step % B_SLOTS
        mbarrier.wait(b_full.index(at), step // B_SLOTS & 1)
        total = products.exact(a_high, a_low, b_smem.index(2 * at), b_smem.index(2 * at + 1), whole)
        mbarrier.arrive(b_empty.index(at))
        total0, total1 = products.halves(total)
    slot = step % products.NUMBER_SLOTS
    NUMBERS: gl.constexpr = numbers.shape[0] // products.NUMBER_SLOTS
    own_lines: gl.constexpr = gl.SliceLayout(0, held)
    for part in gl.static_range(2):
        if WHOLE:
            total = total0 if part == 0 else total1
        else:
            turn = 2 * step + part
            at = turn % B_SLOTS
            mbarrier.wait(b_full.index(at), turn // B_SLOTS & 1)
            total = products.exact(a_high, a_low, b_smem.index(2 * at), b_smem.index(2 * at + 1), half)
            mbarrier.arrive(b_empty.index(at))
        if part == 0:
            mbarrier.wait(n_full.index(slot), step // products.NUMBER_SLOTS & 1)
        at = NUMBERS * slot
        here = column + 64 * part + columns
        if KIND == DQ:
            of_a, of_c, level, delta, raw_ptr = of_own
            i = mine[:, None]
            j = here[None, :]
            of_b = products.number(numbers, at, part, own_lines)
            of_scores = of_a[:, None] * of_b[None, :]
        else:
            of_a, of_c = of_own
            i = here[None, :]
            j = mine[:, None]
            of_b = products.number(numbers, at + 2, part, own_lines)
            of_scores = (of_b * factor)[None, :] * of_a[:, None]
            level = products.number(numbers, at, part, own_lines)[None, :]
        t, slope = scoring.scores(
            total, of_scores, i, j, lq, lk, left, right, cap, of_a, of_a, of_a, of_a, of_a, of_a, SPECIAL, LEFT, RIGHT,
            SOFTCAP, False, False, False, SPECIAL,
        )  # fmt: skip
        w = anywhere.probabilities(t, level, SPECIAL)
        if KIND != DV:
            turn = 2 * step + part
            d_at = turn % D_SLOTS
            mbarrier.wait(d_full.index(d_at), turn // D_SLOTS & 1)
            g = products.exact(
                c_smem.index(0), c_smem.index(1), d_smem.index(2 * d_at), d_smem.index(2 * d_at + 1), half
            )
            mbarrier.arrive(d_empty.index(d_at))
        if KIND == DQ:
            of_d = products.number(numbers, at + 1, part, own_lines)
            of_products = of_c[:, None] * of_d[None, :]
            of_b = products.number(numbers, at, part, own_lines)
        else:
            of_d = products.number(numbers, at + 3, part, own_lines)
            if KIND == DK:
                of_products = (of_d * kept)[None, :] * of_c[:, None]
                delta = products.number(numbers, at + 1, part, own_lines)[None, :]
                of_b = products.number(numbers, at + 2, part, own_lines)
        if KIND == DV:
            w = w * of_d[None, :]
        else:
            w = anywhere.gradient(w, g.to(gl.float32) * of_products, delta, slope, w, SOFTCAP, False)
            w = w * of_b[None, :]
        if SPECIAL:
            # Positions once more instead of the scores, whose registers are needed.
            if KIND == DQ:
                present = gl.load(raw_ptr) != float("-inf")
            else:
                present = (gl.load(other_ptr + 4 * stride + 64 * part + columns) != float("-inf"))[None, :]
            seen = (j < lk) & present
            if LEFT:
                seen = seen & (j >= i + left)
            if RIGHT:
                seen = seen & (j <= i + right)
            w = gl.where(seen, w, 0.0)
        if part == 0:
            w0 = w
        else:
            w1 = w
    mbarrier.arrive(n_empty.index(slot))
    high, low, exponent, wrong = _weights(w0, w1, operand)
    bad |= wrong.to(gl.int32)
    unit = gl.convert_layout(integers.power(exponent - 20), half_lines)[:, None]
    at = step % W_SLOTS
    mbarrier.wait(w_full.index(at), step // W_SLOTS & 1)
    slot = 2 * PARTS * at
    y = products.exact(high, low, w_smem.index(slot), w_smem.index(slot + PARTS), half)
    if PARTS == 2:
        sum0 = gl.fma(y.to(gl.float32), unit, sum0)
        y = products.exact(high, low, w_smem.index(slot + 1), w_smem.index(slot + 3), half)
        mbarrier.arrive(w_empty.index(at))
        sum1 = gl.fma(y.to(gl.float32), unit, sum1)
    else:
        mbarrier.arrive(w_empty.index(at))
        sum0 = gl.fma(y.to(gl.float32), unit, sum0)
    return sum0, sum1, bad


@gluon.jit
def _consume(
    q_numbers_ptr, k_numbers_ptr, out_ptr, buffers, barriers, starts, problem, own_pitch, other_pitch, out_strides,
    factor, cap, reach, kept, scale, KIND: gl.constexpr, D: gl.constexpr, BD: gl.constexpr,
    BDV: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, SOFTCAP: gl.constexpr, PACKED: gl.constexpr,
    LOWER_RIGHT: gl.constexpr,
):  # fmt: skip
    """64 of the own rows. D: elements of a row of the result."""
    a_smem, c_smem, b_smem, d_smem, w_smem, numbers = buffers
    own_full, b_full, b_empty, d_full, d_empty, w_full, w_empty, n_full, n_empty = barriers
    where, places, sizes, blocks = _tile(starts, problem, KIND, LEFT, RIGHT, PACKED, LOWER_RIGHT)
    z, zb, h = where
    memory, first, own_slot, other_slot = places
    lq, lk, left, right = sizes
    begin, full, full_end, end = blocks
    tiles, batch, heads, group, together, _, _, _, _, sequences = problem
    kv_heads = heads // group
    PARTS: gl.constexpr = (BDV if KIND == DV else BD) // 64
    WHOLE: gl.constexpr = b_smem.shape[1] == BLOCK
    whole: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    split, _ = products.halves(gl.zeros([ROWS, BLOCK], gl.int32, whole))
    held: gl.constexpr = split.type.layout if WHOLE else half
    lines: gl.constexpr = gl.SliceLayout(1, held)
    half_lines: gl.constexpr = gl.SliceLayout(1, half)
    own = lq if KIND == DQ else lk
    if first < own:
        if KIND == DQ:
            own_at = (zb * heads + h) * own_pitch + own_slot
            each = own_pitch.to(gl.int64) * heads * batch  # of queries
            count = other_pitch.to(gl.int64) * kv_heads * batch  # of keys
        else:
            own_at = (zb * kv_heads + h) * own_pitch + own_slot
            each = other_pitch.to(gl.int64) * heads * batch
            count = own_pitch.to(gl.int64) * kv_heads * batch
        row = gl.arange(0, ROWS, layout=lines)
        mine = first + row
        if KIND == DQ:
            at_ptr = q_numbers_ptr + own_at + row
            level = gl.load(at_ptr)[:, None]
            delta = gl.load(at_ptr + each)[:, None]
            of_a = gl.load(at_ptr + 2 * each) * (factor * integers.TINY)
            of_c = gl.load(at_ptr + 3 * each) * (kept * integers.TINY)
            worst = gl.load(q_numbers_ptr + 5 * each + own_at // BLOCK)
            of_own = (of_a, of_c, level, delta, (at_ptr + 4 * each)[:, None])
            stride = count
        else:
            at_ptr = k_numbers_ptr + own_at + row
            of_a = gl.load(at_ptr)
            of_c = gl.load(at_ptr + count)
            worst = gl.load(k_numbers_ptr + 2 * count + own_at // BLOCK)
            of_own = (of_a, of_c)
            stride = each
        sum0 = gl.zeros([ROWS, 64], gl.float32, half)
        sum1 = sum0
        bad = gl.zeros([ROWS], gl.int32, lines)
        mbarrier.wait(own_full, 0)
        a = (a_smem.index(0), a_smem.index(1))
        step = 0
        for member in range(1 if KIND == DQ else group):
            if KIND == DQ:
                other_at = (zb * kv_heads + h // group) * other_pitch + other_slot
                other_ptr = k_numbers_ptr + other_at
                worst_ptr = k_numbers_ptr + 2 * count + other_at // BLOCK
            else:
                other_at = (zb * heads + h * group + member) * other_pitch + other_slot
                other_ptr = q_numbers_ptr + other_at
                worst_ptr = q_numbers_ptr + 5 * each + other_at // BLOCK
            other_worst = gl.load(worst_ptr + begin, mask=begin < end, other=0.0)
            for n in range(begin, end):
                special = (n < full) | (n >= full_end) | scoring.is_careful(worst, other_worst, reach)
                other_worst = gl.load(worst_ptr + gl.minimum(n + 1, end - 1))
                if SOFTCAP:
                    special = True
                if special:
                    sum0, sum1, bad = _step(
                        sum0, sum1, bad, a, of_own, other_ptr + n * BLOCK, stride, mine, n * BLOCK, sizes, buffers,
                        barriers, step, factor * integers.TINY, kept * integers.TINY, cap, whole, half, KIND, PARTS,
                        LEFT, RIGHT, SOFTCAP, True,
                    )  # fmt: skip
                else:
                    sum0, sum1, bad = _step(
                        sum0, sum1, bad, a, of_own, other_ptr + n * BLOCK, stride, mine, n * BLOCK, sizes, buffers,
                        barriers, step, factor * integers.TINY, kept * integers.TINY, cap, whole, half, KIND, PARTS,
                        LEFT, RIGHT, SOFTCAP, False,
                    )  # fmt: skip
                step += 1

        if PACKED and KIND == DQ:
            scale = gl.where(z < sequences, scale, 0.0)  # rows behind the last sequence are +0 for any scale
        wrong = gl.convert_layout(bad, half_lines)[:, None] > 0
        row = first + gl.arange(0, ROWS, layout=half_lines)
        out_ptr += masks.offset(zb, h, memory, out_strides)
        for part in gl.static_range(PARTS):
            value = gl.where(wrong, float("nan"), (sum0 if part == 0 else sum1) * scale)
            d = 64 * part + gl.arange(0, 64, layout=gl.SliceLayout(0, half))
            at = out_ptr + row.to(gl.int64)[:, None] * out_strides[2] + d[None, :]
            value = ops.narrow(value, out_ptr.dtype.element_ty, False)
            gl.store(at, value, mask=(row < own)[:, None] & (d < D)[None, :])


@gluon.jit
def order_free_backward_hopper(
    a_desc, c_desc, b_desc, d_desc, w_desc, q_numbers_ptr, k_numbers_ptr, out_ptr, q_starts_ptr, k_starts_ptr,
    tiles, batch, heads, group, lq, lk, own_pitch, other_pitch, sequences, together, out_strides, left, right, factor,
    cap, reach, kept, scale,
    KIND: gl.constexpr, D: gl.constexpr, BD: gl.constexpr, BDV: gl.constexpr, LOWER_RIGHT: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, SOFTCAP: gl.constexpr, PACKED: gl.constexpr, B_SLOTS: gl.constexpr,
    D_SLOTS: gl.constexpr, W_SLOTS: gl.constexpr,
):  # fmt: skip
    """A tile of dq, dk or dv; arguments as in `order_free_backward_keys`.

    Descriptors of digits: a and c, rows of q and do for DQ, of k and v otherwise; b and d, the other ones; w, columns
    of k for DQ, of q for DK, of do for DV. scale: of the result; kept: the factor of do.
    """
    PARTS: gl.constexpr = (BDV if KIND == DV else BD) // 64
    a_smem = gl.allocate_shared_memory(gl.int8, [2, ROWS, BD], a_desc.layout)
    b_smem = gl.allocate_shared_memory(gl.int8, [2 * B_SLOTS] + b_desc.block_type.shape, b_desc.layout)
    if KIND == DV:  # neither is used
        c_smem = a_smem
        d_smem = b_smem
    else:
        c_smem = gl.allocate_shared_memory(gl.int8, [2, ROWS, BDV], c_desc.layout)
        d_smem = gl.allocate_shared_memory(gl.int8, [2 * D_SLOTS, 64, BDV], d_desc.layout)
    w_smem = gl.allocate_shared_memory(gl.int8, [2 * PARTS * W_SLOTS, 64, BLOCK], w_desc.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    own_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    b_full = gl.allocate_shared_memory(gl.int64, [B_SLOTS, 1], barrier)
    b_empty = gl.allocate_shared_memory(gl.int64, [B_SLOTS, 1], barrier)
    d_full = gl.allocate_shared_memory(gl.int64, [D_SLOTS, 1], barrier)
    d_empty = gl.allocate_shared_memory(gl.int64, [D_SLOTS, 1], barrier)
    NUMBERS: gl.constexpr = products.NUMBER_SLOTS * (2 if KIND == DQ else 4)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    numbers = gl.allocate_shared_memory(gl.float32, [NUMBERS, BLOCK], plain)
    n_full = gl.allocate_shared_memory(gl.int64, [products.NUMBER_SLOTS, 1], barrier)
    n_empty = gl.allocate_shared_memory(gl.int64, [products.NUMBER_SLOTS, 1], barrier)
    w_full = gl.allocate_shared_memory(gl.int64, [W_SLOTS, 1], barrier)
    w_empty = gl.allocate_shared_memory(gl.int64, [W_SLOTS, 1], barrier)
    mbarrier.init(own_full, count=1)
    for i in gl.static_range(B_SLOTS):
        mbarrier.init(b_full.index(i), count=1)
        mbarrier.init(b_empty.index(i), count=1)
    for i in gl.static_range(D_SLOTS):
        mbarrier.init(d_full.index(i), count=1)
        mbarrier.init(d_empty.index(i), count=1)
    for i in gl.static_range(W_SLOTS):
        mbarrier.init(w_full.index(i), count=1)
        mbarrier.init(w_empty.index(i), count=1)
    for i in gl.static_range(products.NUMBER_SLOTS):
        mbarrier.init(n_full.index(i), count=1)
        mbarrier.init(n_empty.index(i), count=1)
    fence_async_shared()
    descs = (a_desc, c_desc, b_desc, d_desc, w_desc)
    buffers = (a_smem, c_smem, b_smem, d_smem, w_smem, numbers)
    barriers = (own_full, b_full, b_empty, d_full, d_empty, w_full, w_empty, n_full, n_empty)
    problem = (tiles, batch, heads, group, together, lq, lk, left, right, sequences)
    starts = (q_starts_ptr, k_starts_ptr)
    gl.warp_specialize(
        [
            (
                _consume,
                (q_numbers_ptr, k_numbers_ptr, out_ptr, buffers, barriers, starts, problem, own_pitch, other_pitch,
                 out_strides, factor, cap, reach, kept, scale, KIND, D, BD, BDV, LEFT, RIGHT, SOFTCAP, PACKED,
                 LOWER_RIGHT),
            ),
            (
                _produce,
                (descs, q_numbers_ptr, k_numbers_ptr, buffers, barriers, starts, problem, own_pitch, other_pitch, KIND,
                 BD, BDV, LEFT, RIGHT, PACKED, LOWER_RIGHT),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip
