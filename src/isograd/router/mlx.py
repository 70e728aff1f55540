"""The fused router and its gradient for MLX arrays."""

from collections.abc import Mapping
from typing import Any

from isograd.core import arrays
from isograd.core.checks import DTYPES
from isograd.core.registry import register_kernel
from isograd.devices import metal
from isograd.devices.mlx_kernel import HostKernel, MetalKernel
from isograd.router.metal import OPERATIONS, RouterInMetal, scale_bits

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


class MlxRouter(RouterInMetal, MetalKernel):
    """The family in Metal. A token with an expert out of range gets a gradient of NaN."""

    def evaluate(self, descriptor: Any, inputs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Lazy arrays."""
        import mlx.core as mx

        d, experts = descriptor, descriptor.shape[-1]
        tokens = arrays.size_of(d.shape[:-1])
        outputs = {o.name: (o.shape, o.dtype) for o in d.operands() if o.output}
        if tokens == 0:
            return tuple(mx.zeros(shape, getattr(mx, dtype)) for shape, dtype in outputs.values())
        layout = [tokens, experts, d.k, int(d.scoring == "softmax"), int(d.renormalize), scale_bits(d.scale)]
        threads = min(tokens, metal.MOST_GROUPS), metal.threads_for(experts)
        if d.operation == "moe_router":
            layout += [d.groups, d.group_k]
            # Without a bias any other memory stands in its place, unread.
            body = _ROUTE.replace("HAS_BIAS", str(d.bias).lower()).replace("BIAS", "bias" if d.bias else "weights")
            return tuple(self.call(d.operation, body, inputs, layout, outputs, threads))
        outputs["flag"] = (4,), "int64"
        return tuple(self.call(d.operation, _ROUTE_BACKWARD, inputs, layout, outputs, threads)[:1])


for _operation in OPERATIONS:
    for _dtype in metal.DTYPES:
        register_kernel(_operation, "mlx", _dtype, MlxRouter())
    for _dtype in DTYPES:
        register_kernel(_operation, "mlx", _dtype, HostKernel())  # the second choice
