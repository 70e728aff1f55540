"""The fused router and its gradient for MLX arrays."""

from typing import Any

from isograd.core import arrays
from isograd.core.kernel import launcher
from isograd.devices import metal
from isograd.ops.router.metal import scale_bits, too_large

_ROUTING = """
  threadgroup long part[512];
  isograd::Routing routing;
  routing.experts = layout[1];
  routing.k = layout[2];
  routing.softmax = layout[3] != 0;
  routing.renormalize = layout[4] != 0;
  routing.scale_bits = int(layout[5]);
"""
_ROUTE = (
    _ROUTING
    + """
  threadgroup int keys[isograd::MOST_EXPERTS];
  threadgroup int choice_keys[isograd::MOST_CHOICES];
  routing.choices = layout[6];
  routing.chosen_choices = layout[7];
  routing.has_bias = HAS_BIAS;
  for (long token = group; token < layout[0]; token += groups) {
    isograd::route_token(logits + token * routing.experts, 1l, BIAS, 1l, weights + token * routing.k, 1l,
                         experts + token * routing.k, 1l, routing, lane, threads, keys, choice_keys, part);
  }
"""
)
_ROUTE_BACKWARD = (
    _ROUTING
    + """
  threadgroup float dy[isograd::MOST_EXPERTS];
  threadgroup uchar is_chosen[isograd::MOST_EXPERTS];
  for (long token = group; token < layout[0]; token += groups) {
    const long first = token * routing.experts, place = token * routing.k;
    isograd::route_token_backward(dweights + place, 1l, logits + first, 1l, experts + place, 1l, dlogits + first, 1l,
                                  routing, flag, 1l, place, lane, threads, dy, is_chosen, part);
  }
"""
)


def _evaluated(problem: Any, call: Any, body: str, options: list[int], inputs: dict[str, Any]) -> tuple[Any, ...]:
    """Lazy arrays."""
    import mlx.core as mx

    p, experts = problem, problem.shape[-1]
    tokens = arrays.size_of(p.shape[:-1])
    outputs = {o.name: (o.shape, o.dtype) for o in p.operands() if o.output}
    if tokens == 0:
        return tuple(mx.zeros(shape, getattr(mx, dtype)) for shape, dtype in outputs.values())
    layout = [tokens, experts, p.k, int(p.scoring == "softmax"), int(p.renormalize), scale_bits(p.scale), *options]
    if p.operation == "moe_router_backward":
        outputs["flag"] = (4,), "int64"
    threads = min(tokens, metal.MOST_GROUPS), metal.threads_for(experts)
    results = call(p.operation, body, inputs, layout, outputs, threads)
    return tuple(results[:1] if "flag" in outputs else results)


@launcher("moe_router", too_large)
def moe_router(problem: Any, call: Any, **inputs: Any) -> tuple[Any, ...]:
    """The router."""
    # Without a bias any other memory stands in its place, unread.
    body = _ROUTE.replace("HAS_BIAS", str(problem.bias).lower()).replace("BIAS", "bias" if problem.bias else "weights")
    return _evaluated(problem, call, body, [problem.groups, problem.group_k], inputs)


@launcher("moe_router_backward", too_large)
def moe_router_backward(problem: Any, call: Any, **inputs: Any) -> tuple[Any, ...]:
    """Its gradient. A token with an expert out of range gets a gradient of NaN."""
    return _evaluated(problem, call, _ROUTE_BACKWARD, [], inputs)
