"""The fused router and its gradient on Apple GPUs, one threadgroup a token."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from isograd.core import arrays, faults
from isograd.core.kernel import launcher
from isograd.devices import metal

_MOST_EXPERTS = 4096  # whose keys fit into threadgroup memory
_MOST_GROUPS = 1024  # of experts


def too_large(problem: Any) -> str | None:
    """Say what does not fit into threadgroup memory, or has no kernel."""
    if problem.shape[-1] > _MOST_EXPERTS:
        return f"more than {_MOST_EXPERTS} experts"
    if getattr(problem, "groups", 1) > _MOST_GROUPS:
        return f"more than {_MOST_GROUPS} groups of experts"
    if getattr(problem, "bias_rows", False):
        return "a bias for every token"
    return None


def scale_bits(scale: float) -> int:
    """The bits of a float32, as kernels take numbers beside their layout."""
    return int(np.float32(scale).view(np.int32))


def _launch(
    problem: Any, name: str, options: list[int], operands: tuple[Any, ...], more: Any
) -> Iterator[metal.Launch]:
    """One launch, unless there are no tokens; more: (operands, layout) -> the buffers."""
    outer, experts = problem.shape[:-1], problem.shape[-1]
    tokens = arrays.size_of(outer)
    if tokens == 0:
        return
    layout = [tokens, experts, problem.k, *options, len(outer), *outer]
    for tensor in operands:
        *steps, step = tensor.stride()
        layout += [step, *steps]
    groups = min(tokens, metal.MOST_GROUPS)
    yield metal.Launch(name, more(layout), groups, metal.threads_for(experts))


@launcher("moe_router", too_large)
def moe_router(problem: Any, logits: Any, weights: Any, experts: Any, bias: Any = None) -> Iterator[metal.Launch]:
    """The router."""
    p = problem
    options = [p.groups, p.group_k, int(p.scoring == "softmax"), int(p.renormalize), int(p.bias), scale_bits(p.scale)]
    options.append(0 if bias is None else bias.stride(0))
    # Without a bias any other memory stands in its place, unread.
    buffers = logits, weights if bias is None else bias, weights, experts
    operands = logits, weights, experts
    yield from _launch(p, f"route_{p.dtype}", options, operands, lambda layout: (*buffers, layout))


@launcher("moe_router_backward", too_large)
def moe_router_backward(problem: Any, dweights: Any, logits: Any, experts: Any, dlogits: Any) -> Iterator[metal.Launch]:
    """Its gradient."""
    p, code = problem, faults.code(problem.operation, "experts", False)
    options = [int(p.scoring == "softmax"), int(p.renormalize), scale_bits(p.scale), code]
    operands, name = (dweights, logits, experts, dlogits), f"route_backward_{p.dtype}_{p.index_dtype}"
    yield from _launch(p, name, options, operands, lambda layout: (*operands, layout, faults.flag(logits.device)))
