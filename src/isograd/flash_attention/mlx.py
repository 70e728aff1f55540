"""The attention family for MLX arrays."""

from collections.abc import Mapping
from typing import Any

from isograd.core import arrays
from isograd.core.registry import register_kernel
from isograd.devices import metal
from isograd.devices.mlx_kernel import HostKernel, MetalKernel, contiguous_strides
from isograd.flash_attention.metal import THREADS, AttentionInMetal, delta_layout, groups_of, pieces, problem_layout
from isograd.flash_attention.plans import OPERATIONS, dtypes_of

_DELTA = """
  threadgroup long part[512];
  isograd::delta_rows(o, gradient, delta, layout, group, groups, lane, threads, part);
"""
_PLACE = """
  threadgroup float own[isograd::ROWS * isograd::PITCH];
  threadgroup float others[isograd::LANES * isograd::PITCH];
  threadgroup float weights[isograd::ROWS * isograd::LANES];
  isograd::Place place;
  place.thread_index = lane;
  place.lane = thread_index_in_simdgroup;
  place.simd = simdgroup_index_in_threadgroup;
  place.own = own;
  place.others = others;
  place.weights = weights;
"""
_FORWARD = _PLACE + "  isograd::attention<PIECES>(q, k, v, o, lse, layout, group, groups, place);\n"
_INPUTS = "gradient, q, k, v, lse, delta, dlse"
_DK_DV = _PLACE + f"  isograd::attention_dk_dv<PIECES>({_INPUTS}, dk, dv, layout, group, groups, place);\n"
_DQ = _PLACE + f"  isograd::attention_dq<PIECES>({_INPUTS}, dq, layout, group, groups, place);\n"


class MlxAttention(AttentionInMetal, MetalKernel):
    """The family in Metal, for the options that its kernels have."""

    def evaluate(self, descriptor: Any, inputs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Lazy arrays."""
        import mlx.core as mx

        d = descriptor
        outputs = {o.name: (o.shape, o.dtype) for o in d.operands() if o.output}
        if any(arrays.size_of(tuple(a.shape)) == 0 for a in inputs.values()):
            empty = {name: mx.zeros(shape, getattr(mx, dtype)) for name, (shape, dtype) in outputs.items()}
            if "lse" in empty:
                empty["lse"] = mx.full(d.lse_shape, float("-inf"))
            return tuple(empty.values())
        if d.operation == "attention_delta":
            return (self._delta(d.dtype, inputs["o"], inputs["do"]),)
        shapes = {name: tuple(a.shape) for name, a in inputs.items()} | {n: s for n, (s, _) in outputs.items()}
        layout = problem_layout(d, {name: tuple(contiguous_strides(shape)) for name, shape in shapes.items()})

        def run(name: str, body: str, given: Mapping[str, Any], results: tuple[str, ...], keys: bool) -> list[Any]:
            made = {result: outputs[result] for result in results}
            groups = groups_of(d, keys), THREADS
            return self.call(name, body.replace("PIECES", str(pieces(d))), given, layout, made, groups)

        if d.operation == "attention":
            return tuple(run("attention", _FORWARD, inputs, ("o", "lse"), False))
        given = {"gradient": inputs["do"], **{name: inputs[name] for name in ("q", "k", "v", "lse")}}
        given["delta"] = self._delta(d.dtype, inputs["o"], inputs["do"])
        given["dlse"] = inputs.get("dlse", inputs["lse"])
        dk, dv = run("attention_key_gradient", _DK_DV, given, ("dk", "dv"), True)
        (dq,) = run("attention_query_gradient", _DQ, given, ("dq",), False)
        return dq, dk, dv

    def _delta(self, dtype: str, o: Any, gradient: Any) -> Any:
        shape = tuple(o.shape)
        layout = delta_layout(*shape, *[tuple(contiguous_strides(s)) for s in (shape, shape, shape[:3])])
        groups = min(arrays.size_of(shape[:3]), metal.MOST_GROUPS), metal.threads_for(shape[3])
        given, made = {"o": o, "gradient": gradient}, {"delta": (shape[:3], "float32")}
        return self.call(f"attention_delta_{dtype}", _DELTA, given, layout, made, groups)[0]


for _operation in OPERATIONS:
    for _dtype in metal.DTYPES:
        register_kernel(_operation, "mlx", _dtype, MlxAttention())
    for _dtype in dtypes_of("cpu"):
        register_kernel(_operation, "mlx", _dtype, HostKernel())  # the second choice
