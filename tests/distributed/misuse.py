"""What may go wrong in a step; each function runs on the ranks of a pool and returns what a rank saw."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import isograd.torch as igt
from isograd.core import arrays
from isograd.torch.distributed import reference

GradientSum = igt.distributed.GradientSum


def small(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, outputs))


def raised(function: Callable[[], Any]) -> tuple[str, str]:
    """The class and message of what a function raises."""
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def unit(model: nn.Module, seed: int, only_first: bool = False) -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
    (model[0](x) if only_first else model(x)).square().mean().backward()


def gradients(model: nn.Module) -> list[bytes]:
    return [b"" if p.grad is None else p.grad.numpy().tobytes() for p in model.parameters()]


def expected(units: list[tuple[int, bool]]) -> list[bytes]:
    """The reference's gradients for units of (seed, only the first layer)."""
    model, each = small(), []
    for seed, only_first in units:
        unit(model, seed, only_first)
        each.append([torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()])
        model.zero_grad()
    return [reference.gradient_sum([e[i].numpy() for e in each]).tobytes() for i in range(len(each[0]))]


def works(model: nn.Module, total: Any) -> bool:
    """Whether the next step has the right gradients."""
    model.zero_grad()
    ranks = dist.get_world_size(total._group)
    unit(model, dist.get_rank(total._group))
    total.finish()
    return gradients(model) == expected([(rank, False) for rank in range(ranks)])


def mismatched(group: Any, what: str) -> list[tuple[str, str]]:
    """Other parameters or settings on the last rank; then, on all ranks, a sum that works."""
    last = dist.get_rank(group) == dist.get_world_size(group) - 1
    model = small(2 if last and what == "shape" else 3)
    if last and what == "frozen":
        model[0].bias.requires_grad_(False)
    given = {
        "quantum": {"quantum": -40}, "invalid": {"quantum": 999}, "bucket": {"bucket_bytes": 64},
    }.get(what, {}) if last else {}  # fmt: skip
    found = raised(lambda: GradientSum(model, group, **given))
    model = small()
    return [found, works(model, GradientSum(model, group))]


def missing_on_one_rank(group: Any, ahead: bool) -> bool:
    """The first rank's unit leaves the second layer out."""
    model, rank, ranks = small(), dist.get_rank(group), dist.get_world_size(group)
    total = GradientSum(model, group, units=1 if ahead else None, bucket_bytes=64)
    unit(model, rank, only_first=rank == 0)
    total.finish()
    return gradients(model) == expected([(r, r == 0) for r in range(ranks)])


def sent_ahead(group: Any) -> list[bool]:
    """Whether all buckets but the last were sent in the pass: never, in the last of two units, in the only one."""
    found = []
    for units in (None, 2, 1):
        model = small()
        total = GradientSum(model, group, units=units, bucket_bytes=64)
        for seed in range(units or 1):
            found.append(total._ahead > 0)
            unit(model, seed)
        found.append(total._ahead == len(total._buckets) - 1 > 0)
        total.finish()
    return found


def one_unit(group: Any, dtypes: list[str]) -> list[Any]:
    """One unit on every rank, announced: what is sent, the bits, then a step without a unit on the first rank."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)

    def made() -> nn.Module:
        model = small()
        for layer, dtype in zip((model[0], model[2]), dtypes, strict=True):
            layer.to(getattr(torch, dtype))
        return model

    def run(model: nn.Module, seed: int) -> None:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
        y = model[1](model[0](x.to(model[0].weight.dtype)))
        model[2](y.to(model[2].weight.dtype)).square().mean().backward()

    def right(seeds: list[int]) -> list[bytes]:
        each = []
        for seed in seeds:
            run(alone := made(), seed)
            each.append([arrays.numpy_view(p.grad) for p in alone.parameters()])
        return [reference.gradient_sum(units).tobytes() for units in zip(*each, strict=True)]

    model = made()
    total = GradientSum(model, group, units=1, bucket_bytes=64)
    found: list[Any] = [{str(b.dtype).removeprefix("torch."): b.parts is not None for b in total._buckets}]
    for first in (0, 1):
        if rank >= first:
            run(model, rank)
        report = total.finish()
        got = [arrays.numpy_view(p.grad).tobytes() for p in model.parameters()]
        found += [report.units == ranks - first, got == right(list(range(first, ranks)))]
        model.zero_grad()
    return found


def second_gradient(group: Any) -> list[Any]:
    """In the only unit, of a layer that two reentrant checkpoints share; and announcing another number of units."""
    model = small()
    total = GradientSum(model, group, units=1)
    announced = raised(lambda: setattr(total, "units", 2))
    x = torch.ones(4, 5, requires_grad=True)
    y = sum(checkpoint(model, x * i, use_reentrant=True) for i in (1, 2))
    y.square().mean().backward()
    return [announced, raised(total.finish), works(model, total)]


def uneven(group: Any, ahead: bool) -> list[Any]:
    """Three units on the first rank, one on the second, none on others; then none on the first."""
    model, rank = small(), dist.get_rank(group)
    own = {0: [0, 1, 2], 1: [3]}.get(rank, [])
    total = GradientSum(model, group, units=len(own) if ahead else None, bucket_bytes=64)
    for seed in own:
        unit(model, seed)
    report = total.finish()
    found = [report.units, report.fits, gradients(model) == expected([(s, False) for s in range(4)])]
    model.zero_grad()
    total.units = None
    if rank:
        unit(model, rank)
    report = total.finish()
    ranks = range(1, dist.get_world_size(group))
    return [*found, report.units, gradients(model) == expected([(r, False) for r in ranks])]


def too_large(group: Any, value: float) -> list[Any]:
    """A gradient outside of the range on the last rank."""
    model, last = small(), dist.get_rank(group) == dist.get_world_size(group) - 1
    total = GradientSum(model, group)
    if last:
        model[2].bias.register_hook(lambda g: torch.full_like(g, value))
    unit(model, 1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        report = total.finish()
    nan = all(p.grad is not None and bool(p.grad.isnan().all()) for p in model.parameters())
    model[2].bias._backward_hooks = None
    return [nan, report.fits, report.exceeded, [str(w.message) for w in told], works(model, total)]


def twice(group: Any) -> list[Any]:
    model = small()
    total = GradientSum(model, group)
    first = raised(total.finish)
    unit(model, 0)
    total.finish()
    return [first, raised(total.finish), works(model, total)]


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("planted")


def broken_backward(group: Any, everywhere: bool, ahead: bool, retry: bool = False) -> list[Any]:
    """An exception between the layers of a backward pass, on the last rank or on all."""
    model, last = small(), dist.get_rank(group) == dist.get_world_size(group) - 1
    total = GradientSum(model, group, units=1 if ahead else None, bucket_bytes=64)
    if last or everywhere:
        x = torch.ones(4, 5)
        first = raised(lambda: model[2](Broken.apply(model[1](model[0](x)))).sum().backward())
        if retry:  # as if nothing had happened
            unit(model, 0)
    else:
        unit(model, 0)
        first = ("", "")
    if everywhere:
        total.reset()
        second = ("", "")
    else:
        second = raised(total.finish)
    return [first, second, works(model, total)]


def more_than_announced(group: Any) -> list[Any]:
    """A second unit on the last rank."""
    model, last = small(), dist.get_rank(group) == dist.get_world_size(group) - 1
    total = GradientSum(model, group, units=1)
    for seed in range(2 if last else 1):
        unit(model, seed)
    return [raised(total.finish), works(model, total)]


def left_over(group: Any) -> list[Any]:
    """Nobody called zero_grad on the last rank."""
    model, last = small(), dist.get_rank(group) == dist.get_world_size(group) - 1
    total = GradientSum(model, group)
    unit(model, 0)
    total.finish()
    if not last:
        model.zero_grad()
    unit(model, 0)
    return [raised(total.finish), works(model, total)]


def fsdp_settings(group: Any) -> list[Any]:
    """Ranges in one reduction of FSDP2's, gradients synchronized or not, a gradient outside of the range."""
    import training

    model = training.made("fsdp", group, dtype=torch.float32)
    total = GradientSum(model, range={"blocks.1.up.*": -20})
    model.set_requires_gradient_sync(False)
    training.loss_of(model, 0, 0).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = total.finish()
    nan = all(bool(p.grad.to_local().isnan().all()) for p in model.parameters() if p.requires_grad)
    total.remove()
    model.zero_grad()
    training.loss_of(model, 0, 0)  # a model of FSDP2's own again
    return [nan, report.units, report.exceeded, "set_requires_gradient_sync" in vars(model)]


def removed_from_fsdp(group: Any) -> bool:
    """Whether FSDP2's gradients are its own again, of a model whose root has no parameters."""
    from torch.distributed.fsdp import fully_shard

    model = small()
    for module in (model[0], model[2], model):
        fully_shard(module)
    total = GradientSum(model)
    unit(model, 0)
    total.finish()
    total.remove()
    found = [p.grad.full_tensor() for p in model.parameters()]
    model.zero_grad()
    unit(model, 0)
    return all(torch.allclose(p.grad.full_tensor(), g) for p, g in zip(model.parameters(), found, strict=True))


def loaded(group: Any) -> list[Any]:
    """A state that differs on the last rank, one of another model, and one in the middle of a step."""
    model, last = small(), dist.get_rank(group) == dist.get_world_size(group) - 1
    total = GradientSum(model, group, quantum=-44)
    state = total.state_dict()
    other = {**state, "quantum": {**state["quantum"], "0.bias": -45}, "range": {**state["range"], "0.bias": 3}}
    different = raised(lambda: total.load_state_dict(other if last else state))
    wrong = {**state, "quantum": {**state["quantum"], "9.bias": -44}}
    unknown = raised(lambda: total.load_state_dict(wrong if last else state))
    unit(model, 0)
    unfinished = [raised(total.state_dict), raised(lambda: total.load_state_dict(state))]
    total.finish()
    return [different, unknown, *unfinished, total.state_dict() == state]


def sums_on_gpu(group: Any) -> list[bool]:
    """On GPUs: other numbers of units, a missing gradient, one that does not fit, and an exception on one rank."""
    rank, found = dist.get_rank(group), []
    model = small().cuda()
    total = GradientSum(model, group, bucket_bytes=64)
    zeros = [torch.zeros_like(p) for p in model.parameters()]

    def add(values: list[float], only: int | None = None) -> None:
        """A unit whose gradients are a number."""
        for value in values:
            taken = [p for i, p in enumerate(model.parameters()) if only is None or i == only]
            torch.autograd.backward([p * 1 for p in taken], [torch.full_like(p, value) for p in taken])

    def right(*means: float) -> bool:
        model_has = [p.grad for p in model.parameters()]
        model.zero_grad()
        means = means if len(means) > 1 else means * len(zeros)
        return all(torch.equal(g, z + m) for g, z, m in zip(model_has, zeros, means, strict=True))

    add([1.0, 2.0, 3.0] if rank == 0 else [6.0])
    total.finish()
    found.append(right(3.0))
    add([4.0], only=None if rank else 1)
    total.finish()
    found.append(right(2.0, 4.0, 2.0, 2.0))
    add([float("nan") if rank else 1.0])
    found.append(len(total.finish().exceeded) == 4)
    model.zero_grad()
    add([1.0])
    if rank:
        raised(lambda: Broken.apply(next(model.parameters()) * 1).sum().backward())
        total._passes._tasks.add(-1)  # as an exception behind the first gradient leaves it
        said = raised(total.finish)
        found.append("an exception ended a backward pass" in said[1])
    else:
        report = total.finish()
        found.append(report.problem is not None and not report.fits)
    return found
