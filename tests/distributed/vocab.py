"""Rows whose classes are spread over ranks; each function runs on the ranks of a pool and returns what a rank saw.

What is whole is computed on the CPU, the parts on a device.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from misuse import raised
from torch import Tensor

import isograd.torch as igt

cross_entropy = igt.distributed.vocab_parallel_cross_entropy
SOFTMAX = {
    igt.softmax: igt.distributed.vocab_parallel_softmax, igt.log_softmax: igt.distributed.vocab_parallel_log_softmax,
}  # fmt: skip
OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {"reduction": "sum", "label_smoothing": 0.1}, {"reduction": "none", "z_loss": 1e-3, "ignore_index": 3},
    {"label_smoothing": 0.3, "z_loss": 0.1},
)  # fmt: skip


def cuts(classes: int, ranks: int, kind: str) -> list[int]:
    """Where parts begin and end: as even as can be, uneven, or nothing on every other rank but the last."""
    if kind == "even":
        return [i * classes // ranks for i in range(ranks + 1)]
    if kind == "uneven":
        return [0, *[min(i * i + 1, classes) for i in range(1, ranks)], classes]
    return [0, *[min(i // 2 * 3, classes) for i in range(1, ranks)], classes]


def rows(dtype: str, classes: int, special: bool) -> Tensor:
    """Logits of all sizes; the special ones have rows that are not finite, and single infinities."""
    x = torch.randn(9, classes, generator=torch.Generator().manual_seed(classes), dtype=torch.float64)
    x[1] *= 30
    x[2] = x[2] * 0.01 + 300
    x[3] = 1.5
    x[4, -1] = 40.0
    if special:
        inf = float("inf")
        x[0, classes // 2] = -inf
        x[1, -1], x[2] = float("nan"), -inf
        x[5, 0] = inf
        x[6, : classes - 1] = -inf
        x[7, 0], x[7, -1] = inf, -inf
        x[8] = 0.0
        x[8, ::2] = -0.0
    return x.to(getattr(torch, dtype))


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bits."""
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    a, b = a.detach().cpu().contiguous(), b.detach().cpu().contiguous()
    return a.dtype is b.dtype and torch.equal(a.view(words), b.view(words))


def cast(loss: Tensor) -> Tensor:
    """A loss that torch has cast, whose NaN differs by device and dtype."""
    found = loss.detach().cpu()
    return found.masked_fill(found.isnan(), float("nan"))


def part(x: Tensor, group: Any, kind: str, device: str = "cpu") -> tuple[Tensor, slice]:
    """The part of this rank as a leaf, its rows apart in memory."""
    ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    bounds = cuts(x.shape[-1], ranks, kind)
    here = slice(bounds[rank], bounds[rank + 1])
    return x.to(device)[..., here].detach().requires_grad_(), here


def losses_differ(
    group: Any, dtypes: list[str], sizes: list[int], kind: str, special: bool, device: str = "cpu"
) -> list[str]:
    """The problems whose loss or gradient is not that of the whole logits."""
    found = []
    for dtype in dtypes:
        for classes in sizes:
            x = rows(dtype, classes, special)
            targets = torch.arange(9) * 7 % classes
            for options in OPTIONS:
                targets[4] = options.get("ignore_index", -100)
                whole, (own, here) = x.clone().requires_grad_(), part(x, group, kind, device)
                right = igt.cross_entropy(whole, targets, **options)
                loss = cross_entropy(own, targets.to(device), group, **options)
                g = torch.linspace(-1, 3, right.numel()).view(right.shape).to(right.dtype)
                right.backward(g)
                loss.backward(g.to(device))
                if not (equal(cast(loss), cast(right)) and equal(own.grad, whole.grad[:, here])):
                    found.append(f"{dtype} {classes} {options}")
    return found


def softmax_differs(
    group: Any, dtypes: list[str], sizes: list[int], kind: str, special: bool, device: str = "cpu"
) -> list[str]:
    """The problems whose result or gradient is not that of whole rows."""
    found = []
    for dtype in dtypes:
        for classes in sizes:
            x = rows(dtype, classes, special).view(3, 3, classes)
            dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(x.dtype)
            if special:
                dy[0, 1, 0], dy[2, 2, -1], dy[1, 1, 0] = float("inf"), float("-inf"), float("nan")
            for function, parallel in SOFTMAX.items():
                whole, (own, here) = x.clone().requires_grad_(), part(x, group, kind, device)
                right, y = function(whole, -1), parallel(own, group)
                right.backward(dy)
                y.backward(dy[..., here].to(device))
                if not (equal(y, right[..., here]) and equal(own.grad, whole.grad[..., here])):
                    found.append(f"{dtype} {classes} {function.__name__}")
    return found


def many_classes_differ(group: Any, dtype: str, device: str = "cpu") -> list[str]:
    """A row of more classes than 2**18, where the quantum of 16 bits changes."""
    return losses_differ(group, [dtype], [(1 << 18) + 5], "even", False, device)


def wrong_calls(group: Any, device: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What goes wrong on all ranks because of this one or of all."""
    last = dist.get_rank(group) == dist.get_world_size(group) - 1
    x, targets = torch.randn(4, 3, device=device), torch.tensor([0, 1, 2, 3], device=device)
    yield "tokens", lambda: cross_entropy(x[:3] if last else x, targets[:3] if last else targets, group)
    yield "dtypes", lambda: cross_entropy(x.double() if last else x, targets, group)
    yield "targets", lambda: cross_entropy(x, targets.flip(0) if last else targets, group)
    yield "options", lambda: cross_entropy(x, targets, group, label_smoothing=0.1 if last else 0.0)
    yield "shape", lambda: cross_entropy(x, targets[:3] if last else targets, group)
    yield "tensor", lambda: cross_entropy(None if last else x, targets, group)
    yield "storage", lambda: cross_entropy(x.int() if last else x, targets, group)
    yield "range", lambda: cross_entropy(x, targets + 3, group)
    yield "smoothing", lambda: cross_entropy(x, targets, group, label_smoothing=2.0)
    yield "reduction", lambda: cross_entropy(x, targets, group, reduction="avg")
    yield "classes", lambda: cross_entropy(x[:, :0], targets, group)
    yield "rows", lambda: igt.distributed.vocab_parallel_softmax(x[:3] if last else x, group)
    yield "softmax storage", lambda: igt.distributed.vocab_parallel_softmax(x.int() if last else x, group)
    yield "device", lambda: igt.distributed.vocab_parallel_softmax(x.to("meta") if last else x, group)
    yield "gradient", lambda: igt.distributed.vocab_parallel_log_softmax(x.requires_grad_(last), group)
    yield "group", lambda: igt.distributed.vocab_parallel_softmax(x, "world")


def mistakes(group: Any, device: str = "cpu") -> dict[str, tuple[str, str]]:
    """What every wrong call raises; after each a right one has the right bits."""
    found = {}
    for what, call in wrong_calls(group, device):
        found[what] = raised(call)
        assert not losses_differ(group, ["float32"], [5], "even", False, device), what
    return found


def empty(group: Any, device: str = "cpu") -> list[Any]:
    """No tokens, and no classes on any rank."""
    x = torch.zeros(0, 3, requires_grad=True, device=device)
    loss = cross_entropy(x, torch.zeros(0, dtype=torch.int64, device=device), group, reduction="sum")
    loss.backward()
    y = igt.distributed.vocab_parallel_softmax(torch.zeros(2, 0, device=device), group)
    return [loss.item(), tuple(x.grad.shape), tuple(y.shape)]


def autocast(group: Any, device: str = "cpu") -> bool:
    """Under autocast narrow logits give float32, as in the whole."""
    x, targets = rows("bfloat16", 11, False), torch.arange(9)
    with torch.autocast("cpu", torch.bfloat16), torch.autocast(device, torch.bfloat16):
        loss = cross_entropy(part(x, group, "even", device)[0], targets.to(device), group)
        return equal(loss, igt.cross_entropy(x, targets))


def layouts_differ(group: Any, device: str = "cpu") -> bool:
    """Logits whose rows, or whose classes, do not lie together."""
    x, targets = rows("float32", 11, False), torch.arange(9)
    right = igt.cross_entropy(x, targets)
    own, _ = part(x, group, "uneven", device)
    turned, apart = own.t().contiguous().t(), own.repeat_interleave(2, 1)[:, ::2]
    return not all(equal(cross_entropy(t, targets.to(device), group), right) for t in (turned, apart))
