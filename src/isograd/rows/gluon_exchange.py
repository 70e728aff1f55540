# mypy: ignore-errors
# ruff: noqa: N803
"""What the threads of a row tell each other: extreme keys and integer sums, over a block or a cluster of blocks.

Gluon has no word for distributed shared memory, so this is PTX. Every warp reduces its values with `redux`, one lane
for each block of the cluster sends the result there, and every warp combines what its block received. Within a cluster
the value itself signals its arrival (`st.async` on an mbarrier), and nobody waits for anything else.

There are two boxes, `first` for keys and `second` for sums, and a kernel uses them in turn. A box is written again
only by threads that took part in the exchange in between, which every reader of the box joined after reading. The
parity says whether an exchange of a kind is an even or an odd one, from 0.

`setup`, `maximum`, `extremes`, `total` and `totals` serve a row that all threads share. The functions on strips serve
neighbouring rows: LANES lanes hold different rows, RV of them each; warps, or the two halves of a warp, hold different
columns of all of them.
"""

import itertools

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_HEAD = """{
.reg .pred p; .reg .b32 t, lane, a, b, x, y, z; .reg .b64 d, e;
mov.u32 t, %tid.x; mov.u32 lane, %laneid;
"""


def _deliver(ctas: int, warps: int, box: str, width: int) -> str:
    """Bring the warp's result, x or d, to the box of every block, and wait for what every warp sent to this one.

    `@parity` stands for the parity's operand.
    """
    if ctas == 1:
        return f"""shr.u32 a, t, 2; and.b32 a, a, 0xfffffff8; mov.u32 b, isograd_{box}; add.u32 a, a, b;
setp.eq.u32 p, lane, 0;
@p st.shared.b64 [a], d;
bar.sync 0;
"""
    payload = "d" if width == 8 else "x"
    return f"""mov.u32 a, %cluster_ctarank; shr.u32 z, t, 5; mad.lo.u32 a, a, {warps}, z; shl.b32 a, a, 3;
mov.u32 b, isograd_{box}; add.u32 a, a, b; mov.u32 z, isograd_{box}_arrival;
setp.lt.u32 p, lane, {ctas};
@p mapa.shared::cluster.u32 a, a, lane;
@p mapa.shared::cluster.u32 b, z, lane;
@p st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b{8 * width} [a], {payload}, [b];
setp.eq.u32 p, t, 0;
@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [z], {ctas * warps * width};
wait: mbarrier.try_wait.parity.shared::cta.b64 p, [z], @parity;
@!p bra wait;
bar.warp.sync 0xffffffff;
"""


def _collect(ctas: int, warps: int, box: str, read: str) -> str:
    """Read the box, one slot a lane and round."""
    slots = ctas * warps
    lines = [f"setp.lt.u32 p, lane, {slots};\n" if slots < 32 else ""]
    lines.append(f"mov.u32 b, isograd_{box}; mad.lo.u32 a, lane, 8, b;\n")
    lines += [read.format(at=8 * i, guard="@p " if slots < 32 else "") for i in range(0, slots, 32)]
    return "".join(lines)


def _maximum(ctas: int, warps: int) -> str:
    """$0 = maximum of $1; parity $2."""
    text = (
        _HEAD
        + "redux.sync.max.s32 x, $1, 0xffffffff; mov.b64 d, {x, x};\n"
        + _deliver(ctas, warps, "first", 4)
        + "mov.b32 x, 0x80000000;\n"
        + _collect(ctas, warps, "first", "{guard}ld.shared.b32 y, [a+{at}]; {guard}max.s32 x, x, y;\n")
        + "redux.sync.max.s32 $0, x, 0xffffffff;\n}"
    )
    return text.replace("@parity", "$2")


def _maximum_again(ctas: int, warps: int) -> str:
    """$0 = what the last exchange of maxima found; $1 is any number."""
    read = "{guard}ld.shared.b32 y, [a+{at}]; {guard}max.s32 x, x, y;\n"
    text = "{ .reg .pred p; .reg .b32 lane, a, b, x, y; mov.u32 lane, %laneid; mov.b32 x, 0x80000000;\n"
    return text + _collect(ctas, warps, "first", read) + "redux.sync.max.s32 $0, x, 0xffffffff;\n}"


def _extremes(ctas: int, warps: int) -> str:
    """$0, $1 = maximum of $2, minimum of $3; parity $4."""
    read = (
        "{guard}ld.shared.b32 z, [a+{at}]; {guard}max.s32 x, x, z;\n"
        "{guard}ld.shared.b32 z, [a+{at}+4]; {guard}min.s32 y, y, z;\n"
    )
    text = (
        _HEAD
        + "redux.sync.max.s32 x, $2, 0xffffffff; redux.sync.min.s32 y, $3, 0xffffffff; mov.b64 d, {x, y};\n"
        + _deliver(ctas, warps, "first", 8)
        + "mov.b32 x, 0x80000000; mov.b32 y, 0x7fffffff;\n"
        + _collect(ctas, warps, "first", read)
        + "redux.sync.max.s32 $0, x, 0xffffffff; redux.sync.min.s32 $1, y, 0xffffffff;\n}"
    )
    return text.replace("@parity", "$4")


# An int64 below 2**60 is summed over a warp in three parts, one below 2**48 in two.
_WARP_SUM = """cvt.u32.u64 x, {value}; and.b32 x, x, 0xfffff;
shr.s64 e, {value}, 20; cvt.u32.u64 y, e; and.b32 y, y, 0xfffff;
shr.s64 e, {value}, 40; cvt.u32.u64 z, e;
redux.sync.add.s32 x, x, 0xffffffff; redux.sync.add.s32 y, y, 0xffffffff; redux.sync.add.s32 z, z, 0xffffffff;
cvt.s64.s32 {result}, z; shl.b64 {result}, {result}, 20; cvt.u64.u32 e, y; add.s64 {result}, {result}, e;
shl.b64 {result}, {result}, 20; cvt.u64.u32 e, x; add.s64 {result}, {result}, e;
"""
_WARP_SUM_SHORT = """cvt.u32.u64 x, {value}; and.b32 x, x, 0x3fffff; shr.s64 e, {value}, 22; cvt.u32.u64 y, e;
redux.sync.add.s32 x, x, 0xffffffff; redux.sync.add.s32 y, y, 0xffffffff;
cvt.s64.s32 {result}, y; shl.b64 {result}, {result}, 22; cvt.u64.u32 e, x; add.s64 {result}, {result}, e;
"""


def _sum_with(warp_sum: str, ctas: int, warps: int) -> str:
    """$0 = sum of $1; parity $2."""
    text = (
        _HEAD
        + warp_sum.format(value="$1", result="d")
        + _deliver(ctas, warps, "second", 8)
        + "mov.b64 d, 0;\n"
        + _collect(ctas, warps, "second", "{guard}ld.shared.b64 e, [a+{at}]; {guard}add.s64 d, d, e;\n")
        + warp_sum.format(value="d", result="$0")
        + "}"
    )
    return text.replace("@parity", "$2")


def _totals(ctas: int, warps: int) -> str:
    """$0, $1 = sums of $2 and $3; parity $4."""
    lines = [
        _HEAD + ".reg .b64 f, w;",
        _WARP_SUM.format(value="$2", result="d") + _WARP_SUM.format(value="$3", result="w"),
        "mov.u32 b, isograd_second;",
    ]
    if ctas == 1:
        lines.append("shr.u32 a, t, 1; and.b32 a, a, 0xfffffff0; add.u32 a, a, b; setp.eq.u32 p, lane, 0;")
        lines.append("@p st.shared.v2.b64 [a], {d, w}; bar.sync 0;")
    else:
        lines += [
            f"mov.u32 a, %cluster_ctarank; shr.u32 z, t, 5; mad.lo.u32 a, a, {warps}, z; mad.lo.u32 a, a, 16, b;",
            "mov.u32 z, isograd_second_arrival;",
            f"setp.lt.u32 p, lane, {ctas};",
            "@p mapa.shared::cluster.u32 a, a, lane; @p mapa.shared::cluster.u32 b, z, lane;",
            "@p st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [a], {d, w}, [b];",
            "setp.eq.u32 p, t, 0;",
            f"@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [z], {ctas * warps * 16};",
            "wait: mbarrier.try_wait.parity.shared::cta.b64 p, [z], $4;",
            "@!p bra wait;",
            "bar.warp.sync 0xffffffff;",
        ]
    slots = ctas * warps
    guard = "@p " if slots < 32 else ""
    lines.append("mov.u32 b, isograd_second; mad.lo.u32 a, lane, 16, b; mov.b64 d, 0; mov.b64 w, 0;")
    lines.append(f"setp.lt.u32 p, lane, {slots};")
    for i in range(0, slots, 32):
        lines.append(f"{guard}ld.shared.v2.b64 {{e, f}}, [a+{16 * i}]; {guard}add.s64 d, d, e; {guard}add.s64 w, w, f;")
    lines.append(_WARP_SUM.format(value="d", result="$0") + _WARP_SUM.format(value="w", result="$1"))
    return "\n".join([*lines, "}"])


def _pipe(ctas: int, warps: int) -> str:
    """$0, $1 = sum of $2, below 2**48, and maximum of $3; number $4 of the exchange, from 0.

    Even and odd exchanges have boxes of their own. A box is written again only by threads that took part in the
    exchange in between, which every reader of the box joined after reading.
    """
    lines = [
        _HEAD + ".reg .b32 n, f; .reg .b64 w;",
        f"and.b32 n, $4, 1; mul.lo.u32 n, n, {16 * ctas * warps}; mov.u32 b, isograd_pipe; add.u32 n, n, b;",
        _WARP_SUM_SHORT.format(value="$2", result="d") + "redux.sync.max.s32 x, $3, 0xffffffff; mov.b64 e, {x, x};",
    ]
    if ctas == 1:
        lines.append("shr.u32 a, t, 1; and.b32 a, a, 0xfffffff0; add.u32 a, a, n; setp.eq.u32 p, lane, 0;")
        lines.append("@p st.shared.v2.b64 [a], {d, e}; bar.sync 0;")
    else:
        lines += [
            f"mov.u32 a, %cluster_ctarank; shr.u32 z, t, 5; mad.lo.u32 a, a, {warps}, z; mad.lo.u32 a, a, 16, n;",
            "and.b32 f, $4, 1; mov.u32 z, isograd_pipe_arrival; mad.lo.u32 z, f, 8, z;",
            f"setp.lt.u32 p, lane, {ctas};",
            "@p mapa.shared::cluster.u32 a, a, lane; @p mapa.shared::cluster.u32 b, z, lane;",
            "@p st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [a], {d, e}, [b];",
            "setp.eq.u32 p, t, 0; shr.u32 f, $4, 1; and.b32 f, f, 1;",
            f"@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [z], {ctas * warps * 16};",
            "wait: mbarrier.try_wait.parity.shared::cta.b64 p, [z], f;",
            "@!p bra wait;",
            "bar.warp.sync 0xffffffff;",
        ]
    slots = ctas * warps
    guard = "@p " if slots < 32 else ""
    lines.append("mad.lo.u32 a, lane, 16, n; mov.b64 d, 0; mov.b32 f, 0x80000000;")
    lines.append(f"setp.lt.u32 p, lane, {slots};")
    for i in range(0, slots, 32):
        lines.append(f"{guard}ld.shared.v2.b64 {{e, w}}, [a+{16 * i}]; {guard}add.s64 d, d, e;")
        lines.append(f"{guard}cvt.u32.u64 x, w; {guard}max.s32 f, f, x;")
    lines.append("redux.sync.max.s32 $1, f, 0xffffffff;")
    return "\n".join([*lines, _WARP_SUM_SHORT.format(value="d", result="$0"), "}"])


def _arrivals(first: str, second: str) -> str:
    """Prepare the barriers on which values arrive, two at these addresses, in every block of the cluster."""
    return f"""{{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;
@p mbarrier.init.shared::cta.b64 [{first}], 1;
@p mbarrier.init.shared::cta.b64 [{second}], 1;
@p fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; }}
"""


_ARRIVALS = """.shared .align 8 .b64 isograd_first_arrival;
.shared .align 8 .b64 isograd_second_arrival;
""" + _arrivals("isograd_first_arrival", "isograd_second_arrival")


def _setup(ctas: int, warps: int, sums: int = 1) -> str:
    """Declare the boxes, and wait until every block of the cluster has prepared its own; $0 = $1."""
    sizes = {"first": 8, "second": 8 * sums}
    text = "".join(f".shared .align 16 .b8 isograd_{box}[{size * ctas * warps}];\n" for box, size in sizes.items())
    return text + (_ARRIVALS if ctas > 1 else "") + "mov.b32 $0, $1;"


def _pipe_setup(ctas: int, warps: int) -> str:
    """As `_setup`, with two boxes of 16 bytes a warp."""
    text = f".shared .align 16 .b8 isograd_pipe[{32 * ctas * warps}];\n"
    if ctas > 1:
        text += ".shared .align 8 .b64 isograd_pipe_arrival[2];\n"
        text += _arrivals("isograd_pipe_arrival", "isograd_pipe_arrival+8")
    return text + "mov.b32 $0, $1;"


_SIZES = [(ctas, warps) for ctas in (1, 2, 4, 8, 16) for warps in (1, 2, 4, 8, 16, 32)]
_TEXT = {
    "setup": {size: _setup(*size) for size in _SIZES},
    "setup_for_two": {size: _setup(*size, 2) for size in _SIZES},
    "maximum": {size: _maximum(*size) for size in _SIZES},
    "maximum_again": {size: _maximum_again(*size) for size in _SIZES},
    "extremes": {size: _extremes(*size) for size in _SIZES},
    "sum": {size: _sum_with(_WARP_SUM, *size) for size in _SIZES},
    "short_sum": {size: _sum_with(_WARP_SUM_SHORT, *size) for size in _SIZES},
    "totals": {size: _totals(*size) for size in _SIZES},
    "pipe_setup": {size: _pipe_setup(*size) for size in _SIZES},
    "pipe": {size: _pipe(*size) for size in _SIZES},
}


@gluon.constexpr_function
def _text(name, ctas, warps):
    return _TEXT[name][ctas, warps]


@gluon.jit
def setup(v, ctas: gl.constexpr):
    """Before the exchanges; v is any int32 a thread."""
    asm: gl.constexpr = _text("setup", ctas, gl.num_warps())
    return gl.inline_asm_elementwise(asm, "=r,r", [v], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def setup_for_two(v, ctas: gl.constexpr):
    """As `setup`, where `totals` is used."""
    asm: gl.constexpr = _text("setup_for_two", ctas, gl.num_warps())
    return gl.inline_asm_elementwise(asm, "=r,r", [v], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def maximum(key, parity, ctas: gl.constexpr):
    """The maximum of an int32 a thread."""
    asm: gl.constexpr = _text("maximum", ctas, gl.num_warps())
    return gl.inline_asm_elementwise(asm, "=r,r,r", [key, parity], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def maximum_again(ctas: gl.constexpr):
    """What the last `maximum` found, as a number by which a program may branch."""
    asm: gl.constexpr = _text("maximum_again", ctas, gl.num_warps())
    return gl.inline_asm_elementwise(asm, "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def of_neighbour(v):
    """What the other lane of each two has."""
    asm: gl.constexpr = "shfl.sync.bfly.b32 $0, $1, 1, 31, 0xffffffff;"
    return gl.inline_asm_elementwise(asm, "=f,f", [v], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def extremes(most, least, parity, ctas: gl.constexpr):
    """The maximum of one int32 a thread and the minimum of another."""
    asm: gl.constexpr = _text("extremes", ctas, gl.num_warps())
    return gl.inline_asm_elementwise(
        asm, "=&r,=&r,r,r,r", [most, least, parity], dtype=(gl.int32, gl.int32), is_pure=False, pack=1
    )


@gluon.jit
def total(value, parity, short: gl.constexpr, ctas: gl.constexpr):
    """The sum of an int64 a thread; `short` sums stay below 2**48."""
    asm: gl.constexpr = _text("short_sum" if short else "sum", ctas, gl.num_warps())
    return gl.inline_asm_elementwise(asm, "=l,l,r", [value, parity], dtype=gl.int64, is_pure=False, pack=1)


@gluon.jit
def totals(value, other, parity, ctas: gl.constexpr):
    """The sums of two int64 a thread."""
    asm: gl.constexpr = _text("totals", ctas, gl.num_warps())
    return gl.inline_asm_elementwise(
        asm, "=&l,=&l,l,l,r", [value, other, parity], dtype=(gl.int64, gl.int64), is_pure=False, pack=1
    )


@gluon.jit
def pipe_setup(v, ctas: gl.constexpr):
    """Before the exchanges that carry two rows; v is any int32 a thread."""
    asm: gl.constexpr = _text("pipe_setup", ctas, gl.num_warps())
    return gl.inline_asm_elementwise(asm, "=r,r", [v], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def sum_and_maximum(value, key, number, ctas: gl.constexpr):
    """The sum, below 2**48, of an int64 a thread and the maximum of an int32; `number` counts these exchanges."""
    asm: gl.constexpr = _text("pipe", ctas, gl.num_warps())
    return gl.inline_asm_elementwise(
        asm, "=&l,=&r,l,r,r", [value, key, number], dtype=(gl.int64, gl.int32), is_pure=False, pack=1
    )


# --- strips ----------------------------------------------------------------------------------------------------------
# Blocks, warps, lanes, rows a lane.
_STRIP_SIZES = list(itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8, 16), (16, 32), (1, 2)))
# Of every kind of exchange: its box, values a row, and bytes of what crosses threads.
_KINDS = {"maximum": ("first", 1, 4), "extremes": ("first", 2, 8), "sum": ("second", 1, 8)}
# How what a row has, in a or in a and b, is combined with another, v.
_COMBINE = {
    "maximum": "max.s32 {a}, {a}, {v};",
    "extremes": "mov.b64 {{x, y}}, {v}; max.s32 {a}, {a}, x; min.s32 {b}, {b}, y;",
    "sum": "add.s64 {a}, {a}, {v};",
}
_IDENTITY = {
    "maximum": "mov.b32 {a}, 0x80000000;",
    "extremes": "mov.b32 {a}, 0x80000000; mov.b32 {b}, 0x7fffffff;",
    "sum": "mov.b64 {a}, 0;",
}


def _strip(kind: str, ctas: int, warps: int, lanes: int, rv: int) -> str:
    """Combine values over the warps of a block and the blocks of a cluster, for each of lanes * rv rows."""
    (box, values, width), rows = _KINDS[kind], lanes * rv
    outputs, bits = values * rv, 8 * width
    # What a row has, as one word or two, and what of one or two rows arrives.
    whole, other = ("u", ("f", "g")) if width == 4 else ("d", ("e", "h"))
    combine, identity = _COMBINE[kind], _IDENTITY[kind]
    own = {"a": "d" if kind == "sum" else "u", "b": "v"}
    pack = "mov.b64 d, {u, v};" if kind == "extremes" else ""
    lines = [
        "{ .reg .pred p; .reg .b32 t, lane, warp, a, b, c, x, y, u, v, f, g; .reg .b64 d, e, h;",
        f"mov.u32 t, %tid.x; mov.u32 lane, %laneid; shr.u32 warp, t, 5; mov.u32 b, isograd_{box};",
        f"and.b32 lane, lane, {lanes - 1};",
        f"mad.lo.u32 a, lane, {width * rv}, b; mad.lo.u32 c, warp, {width * rows}, a;",
    ]
    for j in range(rv):
        if kind == "extremes":
            lines.append(f"mov.b32 u, ${outputs + j}; mov.b32 v, ${outputs + rv + j}; {pack}")
        else:
            lines.append(f"mov.b{bits} {whole}, ${outputs + j};")
        if lanes == 16:
            if width == 4:
                lines.append("shfl.sync.bfly.b32 f, u, 16, 31, 0xffffffff;")
            else:
                lines.append("mov.b64 {x, y}, d; shfl.sync.bfly.b32 x, x, 16, 31, 0xffffffff;")
                lines.append("shfl.sync.bfly.b32 y, y, 16, 31, 0xffffffff; mov.b64 e, {x, y};")
            lines.append(f"{combine.format(v=other[0], **own)} {pack}")
        lines.append(f"st.shared.b{bits} [c+{width * j}], {whole};")
    lines.append("bar.sync 0;")
    if ctas > 1:
        # One thread a row combines the warps and sends the result to every block; most warps have none.
        lines += [f"setp.lt.u32 p, t, {rows}; @!p bra sent;", f"mad.lo.u32 c, t, {width}, b; {identity.format(**own)}"]
        for w in range(warps):
            lines.append(f"ld.shared.b{bits} {other[0]}, [c+{width * rows * w}];")
            lines.append(combine.format(v=other[0], **own))
        lines.append(f"{pack} mov.u32 b, isograd_{box}_rows; mov.u32 a, %cluster_ctarank;")
        lines.append(f"mad.lo.u32 a, a, {width * rows}, b; mad.lo.u32 a, t, {width}, a;")
        lines.append(f"mov.u32 c, isograd_{box}_arrival;")
        send = f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b{bits} [x], {whole}, [y];"
        for k in range(ctas):
            lines.append(f"mapa.shared::cluster.u32 x, a, {k}; mapa.shared::cluster.u32 y, c, {k};")
            lines.append(send)
        lines.append(f"sent: mov.u32 b, isograd_{box}_rows; mov.u32 c, isograd_{box}_arrival; setp.eq.u32 p, t, 0;")
        lines.append(f"@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [c], {width * rows * ctas};")
        lines.append("wait: mbarrier.try_wait.parity.shared::cta.b64 p, [c], 0; @!p bra wait;")
        lines.append(f"bar.warp.sync 0xffffffff; mad.lo.u32 a, lane, {width * rv}, b;")
    slots = ctas if ctas > 1 else warps
    results = [{"a": f"r{j}", "b": f"s{j}"} for j in range(rv)]  # of the rows, which are read together
    for names in results:
        lines.append(f".reg .b{64 if kind == 'sum' else 32} {names['a']}, {names['b']}; {identity.format(**names)}")
    vector = f"v2.b{bits} {{{other[0]}, {other[1]}}}" if rv == 2 else f"b{bits} {other[0]}"
    for k in range(slots):
        lines.append(f"ld.shared.{vector}, [a+{width * rows * k}];")
        lines += [combine.format(v=v, **names) for v, names in zip(other, results, strict=False)]
    for j, names in enumerate(results):
        lines.append(f"mov.b{64 if kind == 'sum' else 32} ${j}, {names['a']};")
        if kind == "extremes":
            lines.append(f"mov.b32 ${rv + j}, {names['b']};")
    return "\n".join([*lines, "}"])


def _strip_setup(ctas: int, warps: int, lanes: int, rv: int) -> str:
    """As `_setup`, with a slot a row."""
    boxes = {
        f"{box}{part}": 8 * lanes * rv * n for box in ("first", "second") for part, n in (("", warps), ("_rows", ctas))
    }
    text = "".join(f".shared .align 16 .b8 isograd_{name}[{size}];\n" for name, size in boxes.items())
    return text + (_ARRIVALS if ctas > 1 else "") + "".join(f"mov.b32 ${j}, ${rv + j}; " for j in range(rv))


_STRIP_TEXT = {
    "setup": {size: _strip_setup(*size) for size in _STRIP_SIZES},
    "maximum": {size: _strip("maximum", *size) for size in _STRIP_SIZES},
    "extremes": {size: _strip("extremes", *size) for size in _STRIP_SIZES},
    "sum": {size: _strip("sum", *size) for size in _STRIP_SIZES},
}


@gluon.constexpr_function
def _strip_text(name, ctas, warps, lanes, rv):
    return _STRIP_TEXT[name][ctas, warps, lanes, rv]


@gluon.constexpr_function
def _constraints(letter, values):
    return ",".join(["=" + letter] * values + [letter] * values)


@gluon.jit
def strip_setup(v, LANES: gl.constexpr, RV: gl.constexpr, ctas: gl.constexpr):
    """Before the exchanges of a strip; v is any int32 a row."""
    asm: gl.constexpr = _strip_text("setup", ctas, gl.num_warps(), LANES, RV)
    names: gl.constexpr = _constraints("r", RV)
    return gl.inline_asm_elementwise(asm, names, [v], dtype=gl.int32, is_pure=False, pack=RV)


@gluon.jit
def strip_maximum(key, LANES: gl.constexpr, RV: gl.constexpr, ctas: gl.constexpr):
    """The maximum of an int32 a row."""
    asm: gl.constexpr = _strip_text("maximum", ctas, gl.num_warps(), LANES, RV)
    names: gl.constexpr = _constraints("r", RV)
    return gl.inline_asm_elementwise(asm, names, [key], dtype=gl.int32, is_pure=False, pack=RV)


@gluon.jit
def strip_extremes(most, least, LANES: gl.constexpr, RV: gl.constexpr, ctas: gl.constexpr):
    """The maximum of one int32 a row and the minimum of another."""
    asm: gl.constexpr = _strip_text("extremes", ctas, gl.num_warps(), LANES, RV)
    names: gl.constexpr = _constraints("r", 2 * RV)
    return gl.inline_asm_elementwise(asm, names, [most, least], dtype=(gl.int32, gl.int32), is_pure=False, pack=RV)


@gluon.jit
def strip_total(value, LANES: gl.constexpr, RV: gl.constexpr, ctas: gl.constexpr):
    """The sum of an int64 a row."""
    asm: gl.constexpr = _strip_text("sum", ctas, gl.num_warps(), LANES, RV)
    names: gl.constexpr = _constraints("l", RV)
    return gl.inline_asm_elementwise(asm, names, [value], dtype=gl.int64, is_pure=False, pack=RV)
