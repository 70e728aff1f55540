"""Linear layers that are spread over ranks; each function runs on the ranks of a pool and returns what a rank saw.

What is whole is computed on the CPU, the parts on a device.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from misuse import raised
from torch import Tensor
from vocab import cuts, equal

import isograd.torch as igt

column, row = igt.distributed.column_parallel_linear, igt.distributed.row_parallel_linear
TOKENS, FEATURES, OUTPUTS = 6, 21, 13


def place(group: Any) -> tuple[int, int]:
    """(ranks, this one's number)."""
    return (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))


def layer(dtype: str, special: bool) -> list[Tensor]:
    """Input, weight, bias and the result's gradient, of outlier channels, weak and zero rows, and no finite numbers."""
    generator = torch.Generator().manual_seed(1)
    shapes = (TOKENS, FEATURES), (OUTPUTS, FEATURES), (OUTPUTS,), (TOKENS, OUTPUTS)
    x, w, bias, g = (torch.randn(shape, generator=generator) for shape in shapes)
    x[:, 3] *= 300
    w[:, 3] /= 300
    w[:, 5:9] /= 5000
    w[12, 6:8] *= 5000  # so that the parts of a row, or of a column, ask for other balances
    w[2:5] /= 5000
    w[2:4, 20] *= 5000
    w[7], w[:, 11], g[2], x[4] = 0, 0, 0, 0
    x[:, 11] *= 1e4
    g[:, 0] *= 1e3
    if special:
        inf, nan = float("inf"), float("nan")
        x[0, 2], x[1, -1], w[3, 2], w[5, -1], g[3, 0], g[5, -1] = inf, nan, -inf, inf, inf, nan
        x[2, 0], x[2, -1], x[5, 11] = inf, -inf, inf
    return [t.to(getattr(torch, dtype)) for t in (x, w, bias, g)]


def leaf(x: Tensor, device: str = "cpu") -> Tensor:
    """A leaf of its own, whose columns do not lie together."""
    return x.to(device).t().contiguous().t().detach().requires_grad_()


def differ(group: Any, dtypes: list[str], kind: str, special: bool, device: str = "cpu") -> list[str]:
    """The layers whose result or a gradient is not that of the whole one."""
    ranks, rank = place(group)
    found = []
    for dtype in dtypes:
        x, w, bias, g = layer(dtype, special)
        whole = [leaf(t) for t in (x, w, bias)]
        y = igt.linear(*whole, precision="int16")
        y.backward(g)
        bounds = cuts(OUTPUTS, ranks, kind)
        here = slice(bounds[rank], bounds[rank + 1])
        mine = [leaf(x, device), leaf(w[here], device), leaf(bias[here], device)]
        out = column(*mine, group)
        out.backward(g[:, here].to(device))
        pairs = [(out, y[:, here]), (mine[0].grad, whole[0].grad)]
        pairs += [(mine[i].grad, whole[i].grad[here]) for i in (1, 2)]
        found += [f"{dtype} column {i}" for i, (a, b) in enumerate(pairs) if not equal(a, b)]
        bounds = cuts(FEATURES, ranks, kind)
        here = slice(bounds[rank], bounds[rank + 1])
        mine = [leaf(x[:, here], device), leaf(w[:, here], device), leaf(bias, device)]
        out = row(mine[0][None], *mine[1:], group)[0]
        out.backward(g.to(device))
        pairs = [(out, y), (mine[2].grad, whole[2].grad)]
        pairs += [(mine[i].grad, whole[i].grad[:, here]) for i in (0, 1)]
        found += [f"{dtype} row {i}" for i, (a, b) in enumerate(pairs) if not equal(a, b)]
    return found


def mlp_differs(group: Any, device: str = "cpu") -> bool:
    """A gated MLP, whose inner width is spread."""
    ranks, rank = place(group)
    generator = torch.Generator().manual_seed(2)
    x, up, down = (torch.randn(shape, generator=generator).bfloat16() for shape in ((5, 16), (24, 16), (16, 24)))
    bounds = cuts(24, ranks, "even")
    here = slice(bounds[rank], bounds[rank + 1])

    def of(place: str, tensors: tuple[Tensor, ...], first: Callable[..., Tensor], second: Callable[..., Tensor]) -> Any:
        leaves = [leaf(t, place) for t in tensors]
        h = first(leaves[0], leaves[1])
        y = second(igt.silu_mul(h, h), leaves[2])
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y))
        return [y.detach(), *[t.grad for t in leaves]]

    y, dx, dup, ddown = of("cpu", (x, up, down), igt.linear, igt.linear)
    spread = (lambda *a: column(*a, group=group), lambda *a: row(*a, group=group))
    found = of(device, (x, up[here], down[:, here]), *spread)
    return not all(map(equal, found, (y, dx, dup[here], ddown[:, here])))


def wrong_calls(group: Any, device: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What goes wrong on all ranks because of this one or of all."""
    last = dist.get_rank(group) == dist.get_world_size(group) - 1
    x, w, bias = (torch.randn(s, device=device) for s in ((4, 3), (5, 3), (5,)))
    yield "tokens", lambda: row(x[:3] if last else x, w, bias, group)
    yield "dtypes", lambda: column(*[t.bfloat16() if last else t for t in (x, w, bias)], group)
    yield "features", lambda: column(*([x[:, :2], w[:, :2]] if last else [x, w]), bias, group)
    yield "outputs", lambda: row(x, w[:4] if last else w, None, group)
    yield "bias", lambda: row(x, w, None if last else bias, group)
    yield "gradient", lambda: column(x.clone().requires_grad_(last), w, bias, group)
    yield "shape", lambda: column(x[:, :2] if last else x, w, bias, group)
    yield "mixed", lambda: column(x, w.half() if last else w, bias, group)
    yield "length", lambda: row(x, w, bias[:3] if last else bias, group)
    yield "tensor", lambda: row(x, None if last else w, bias, group)
    yield "float64", lambda: column(x.double(), w.double(), None, group)
    yield "group", lambda: column(x, w, bias, "world")


def mistakes(group: Any, device: str = "cpu") -> dict[str, tuple[str, str]]:
    """What every wrong call raises; after each a right one has the right bits."""
    found = {}
    for what, call in wrong_calls(group, device):
        found[what] = raised(call)
        assert not differ(group, ["bfloat16"], "even", False, device), what
    return found


def empty(group: Any, device: str = "cpu") -> list[Any]:
    """No tokens, and no features on any rank."""
    x, w = (torch.ones(n, 3, requires_grad=True, device=device) for n in (0, 2))
    row(x, w, None, group).sum().backward()
    column(x, w, None, group).sum().backward()
    y = row(torch.zeros(2, 0, device=device), torch.zeros(3, 0, device=device), None, group)
    return [tuple(x.grad.shape), w.grad.abs().sum().item(), y.tolist()]


def autocast(group: Any, device: str = "cpu") -> bool:
    """Under autocast the product is that of its dtype."""
    x, w, bias, _ = layer("float32", False)
    with torch.autocast(device, torch.bfloat16):
        y = column(x.to(device), w.to(device), bias.to(device), group)
    ranks, _ = place(group)
    whole = igt.linear(x.bfloat16(), w.bfloat16().repeat(ranks, 1), bias.bfloat16().repeat(ranks))
    return equal(y, whole[:, :OUTPUTS])
