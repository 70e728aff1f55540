"""Attention over spread sequences; each function runs on the ranks of a pool and returns what a rank saw.

What is whole is computed on the same device: the bits of its kernels are its own, but for those of "int16".
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from linears import place
from misuse import raised
from torch import Tensor
from vocab import equal

import isograd.torch as igt
from isograd.torch import ops_attention

attention = igt.distributed.context_parallel_attention
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "sinks": {"causal": True, "sinks": True},
    "short window": {"causal": True, "window": (70, None), "sinks": True},
    "long window": {"causal": True, "window": (500, None)},
    "both sides": {"window": (390, 130), "scale": 0.3},
    "narrow window": {"window": (45, 20)},
    "left side": {"window": (384, None)},
    "right side": {"window": (None, 5), "softcap": 2.0},
    "everything": {"causal": True, "window": (40, 3), "softcap": 1.5, "scale": 0.4, "sinks": True, "layout": "BLHD"},
}


class Shape(NamedTuple):
    """Sizes of a sequence; its length is no multiple of any tile, and more than two steps of what is cut out."""

    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    length: int = 1000
    head_dim: int = 24
    v_dim: int = 16


SHAPE = Shape()
KINDS = [("float32", None), ("bfloat16", None), ("bfloat16", "int16")]
_CUTS = {"uneven": (0.013, 0.4, 0.43), "ends": (0.384, 0.512, 0.768), "empty": (0.0, 0.6, 0.6)}


def cuts(total: int, ranks: int, kind: str) -> list[int]:
    """Where pieces begin and end: even ones, uneven ones, such that end where tiles do, or nothing on some ranks."""
    if kind == "even":
        return [i * total // ranks for i in range(ranks + 1)]
    return [0, *[int(total * part) for part in _CUTS[kind][: ranks - 1]], total]


def sequence(dtype: str, shape: Shape = SHAPE, special: bool = False, loud: float = 1) -> list[Tensor]:
    """q, k, v, the gradient of o, and sinks; special: with NaN and infinities, of which few rows hear.

    loud: how many times larger an early key is, which a window hides from most queries.
    """
    generator = torch.Generator().manual_seed(3)
    queries, keys = shape.batch * shape.heads, shape.batch * shape.kv_heads
    sizes = (queries, shape.head_dim), (keys, shape.head_dim), (keys, shape.v_dim), (queries, shape.v_dim)
    q, k, v, g = (
        torch.randn(n, shape.length, d, generator=generator).view(shape.batch, -1, shape.length, d) for n, d in sizes
    )
    sinks = torch.randn(shape.heads, generator=generator)
    q[0, 0] *= 5
    k[:, :, 1] *= loud
    if special:
        q[0, 1, 700, 3], k[0, 1, 650, 2], v[1, 0, 520, 1], g[1, 3, 600, 0] = math.nan, math.inf, -math.inf, math.nan
    return [x.to(getattr(torch, dtype)) for x in (q, k, v, g, sinks)]


def differ(
    group: Any,
    kind: str,
    cases: list[str] | None = None,
    kinds: Any = None,
    special: bool = False,
    loud: float = 1,
    shape: Shape = SHAPE,
    device: str = "cpu",
) -> list[str]:
    """The results and gradients that are not those of the whole sequence."""
    found = []
    for dtype, precision in kinds or KINDS:
        for case in cases or CASES:
            given = [x.to(device) for x in sequence(dtype, shape, special, loud)]
            found += [f"{dtype} {precision} {case} {what}" for what in _wrong(group, kind, given, case, precision)]
    return found


def _wrong(group: Any, kind: str, given: list[Tensor], case: str, precision: Any) -> list[str]:
    ranks, rank = place(group)
    options = {**CASES[case], "precision": precision}
    with_sinks, axis = options.pop("sinks", False), 1 if options.get("layout") == "BLHD" else 2
    *given, g, sinks = [x.transpose(1, 2) if axis == 1 and x.dim() == 4 else x for x in given]
    bounds = cuts(g.shape[axis], ranks, kind)
    here = slice(bounds[rank], bounds[rank + 1])

    def run(function: Callable[..., Tensor], leaves: list[Tensor], g: Tensor, **more: Any) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in leaves]
        if with_sinks:
            more["sinks"] = leaves[3]
        o = function(*leaves[:3], **options, **more)
        o.backward(g)
        return [o.detach(), *[x.grad for x in leaves[: 4 if with_sinks else 3]]]

    def part(x: Tensor) -> Tensor:
        return x[:, here] if axis == 1 else x[:, :, here]

    whole = run(igt.attention, [*given, sinks], g)
    mine = run(attention, [*[part(x) for x in given], sinks], part(g), group=group)
    wrong = [what for what, a, b in zip(("o", "dq", "dk", "dv"), mine, whole, strict=False) if not equal(a, part(b))]
    if with_sinks:
        total = mine[4].float()
        if group is not None:
            dist.all_reduce(total, group=group)
        if not equal(total, whole[4].float()):
            wrong.append("dsinks")
    return wrong


def use(launch: Any, put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let the operators of attention run these launchers on tensors of the CPU; `put` sets what a module has."""

    def run(plan_type: Any, device: Any, fields: tuple[Any, ...], preference: Any = None, **operands: Tensor) -> None:
        descriptor = plan_type.descriptor_type(*fields).validated()
        (launch.forward if descriptor.operation == "attention" else launch.backward)(descriptor, operands)

    put(ops_attention, "run", run)


def some_gradients_differ(group: Any, device: str = "cpu") -> list[str]:
    """Where only some of q, k, v and sinks want a gradient, and head dimensions that are padded."""
    ranks, rank = place(group)
    q, k, v, g, sinks = (x.to(device) for x in sequence("bfloat16", Shape(length=500, head_dim=20, v_dim=9)))
    bounds = cuts(500, ranks, "uneven")
    here = slice(bounds[rank], bounds[rank + 1])
    found = []
    for wanted in (["q"], ["k"], ["v"], ["sinks"], ["k", "v"], []):
        of_whole = {"q": q, "k": k, "v": v, "sinks": sinks}
        of_part = {name: x if name == "sinks" else x[:, :, here] for name, x in of_whole.items()}
        for given in (of_whole, of_part):
            for name, x in given.items():
                given[name] = x.clone().requires_grad_(name in wanted)
        o = igt.attention(**of_whole, causal=True)
        mine = attention(**of_part, causal=True, group=group)
        pairs = {"o": (mine, o[:, :, here])}
        if wanted:
            o.backward(g)
            mine.backward(g[:, :, here])
        for name, x in of_part.items():
            if x.grad is not None and name != "sinks":
                pairs[name] = (x.grad, of_whole[name].grad[:, :, here])
        found += [f"{wanted}: {name}" for name, (a, b) in pairs.items() if not equal(a, b)]
        got = [name for name, x in of_part.items() if x.grad is not None]
        found += [] if got == wanted else [f"{wanted}: gradients of {got}"]
    return found


def autocast(group: Any, device: str = "cpu") -> bool:
    """Under autocast the bits are those of its dtype, with sinks in float32."""
    ranks, rank = place(group)
    given = [x.to(device) for x in sequence("float32", Shape(length=50))]
    bounds = cuts(50, ranks, "even")
    here = slice(bounds[rank], bounds[rank + 1])
    *rows, _, sinks = given
    with torch.autocast(device, torch.bfloat16):
        o = attention(*[x[:, :, here] for x in rows], group, sinks=sinks, precision="int16")
        whole = igt.attention(*rows, sinks=sinks, precision="int16")
    return o.dtype is torch.bfloat16 and equal(o, whole[:, :, here])


def empty(group: Any, device: str = "cpu") -> list[Any]:
    """No rows on any rank, and no heads."""
    q = torch.ones(1, 2, 0, 16, requires_grad=True, device=device)
    sinks = torch.ones(2, requires_grad=True, device=device)
    o = attention(q, q, q, group, sinks=sinks)
    o.sum().backward()
    none = torch.ones(1, 0, 3, 16, device=device)
    return [tuple(o.shape), tuple(q.grad.shape), sinks.grad.tolist(), tuple(attention(none, none, none, group).shape)]


def wrong_calls(group: Any, device: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What goes wrong on all ranks because of this one or of all."""
    last = dist.get_rank(group) == dist.get_world_size(group) - 1
    q, k, v = (torch.randn(1, heads, 5, 16, device=device) for heads in (4, 2, 2))
    sinks = torch.zeros(4, device=device)

    def call(q: Any = q, k: Any = k, v: Any = v, **options: Any) -> Any:
        return attention(q, k, v, group, **options)

    yield "heads", lambda: call(q[:, :2] if last else q)
    yield "batch", lambda: call(*[x.expand(2, -1, -1, -1) if last else x for x in (q, k, v)])
    yield "dtypes", lambda: call(*[x.bfloat16() if last else x for x in (q, k, v)])
    yield "sinks", lambda: call(sinks=sinks if last else None)
    yield "causal", lambda: call(causal=last)
    yield "window", lambda: call(window=(3, 4) if last else (3, 3))
    yield "scale", lambda: call(scale=0.5 if last else None)
    yield "precision", lambda: call(*[x.half() for x in (q, k, v)], precision="int16" if last else None)
    yield "gradient", lambda: call(q.clone().requires_grad_(last))
    yield "length", lambda: call(q[:, :, :4] if last else q)
    yield "rank", lambda: call(k[0] if last else q)
    yield "values", lambda: call(v=v[:, :, :4] if last else v)
    yield "groups", lambda: call(q[:, :3] if last else q)
    yield "mixed", lambda: call(v=v.half() if last else v)
    yield "tensor", lambda: call(k=None if last else k)
    yield "many", lambda: call(sinks=sinks[:3] if last else sinks)
    yield "negative", lambda: call(window=(-1, 0) if last else (1, 0))
    yield "axes", lambda: call(layout="LBHD" if last else "BHLD")
    yield "dropout", lambda: call(dropout_p=0.1)
    yield "int16", lambda: call(precision="int16")
    yield "fp8", lambda: call(precision="fp8")
    yield "wide", lambda: call(*[x.repeat(1, 1, 1, 17) for x in (q, k, v)])
    yield "group", lambda: attention(q, k, v, "world")


def mistakes(group: Any, device: str = "cpu") -> dict[str, tuple[str, str]]:
    """What every wrong call raises; after each a right one has the right bits."""
    found = {}
    for what, call in wrong_calls(group, device):
        found[what] = raised(call)
        assert autocast(group, device), what
    return found
