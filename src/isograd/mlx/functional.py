"""The functions of isograd.mlx: checks, a plan for "mlx", and its kernel, in functions that MLX differentiates."""

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import mlx.core as mx

from isograd.core import functional
from isograd.core.operation import Operation
from isograd.devices.mlx_kernel import dtype_name
from isograd.errors import InvalidProblemError, UnsupportedError
from isograd.flash_attention.descriptors import (
    AttentionBackwardDescriptor,
    AttentionDeltaDescriptor,
    AttentionDescriptor,
)
from isograd.flash_attention.options import AttentionOptions
from isograd.flash_attention.plans import AttentionBackwardPlan, AttentionDeltaPlan, AttentionPlan
from isograd.flash_attention.problem import sizes
from isograd.gather.plans import (
    TakeAlongAxisBackwardDescriptor,
    TakeAlongAxisBackwardPlan,
    TakeAlongAxisDescriptor,
    TakeAlongAxisPlan,
)
from isograd.ops import OPERATIONS
from isograd.ops.router.operation import MOE_ROUTER, MOE_ROUTER_BACKWARD
from isograd.ops.softmax.operation import LOG_SOFTMAX, SOFTMAX
from isograd.runtime.fenv import default_environment
from isograd.typing import Alignment, Scoring

Function = Callable[..., Any]


def _require_array(operation: str, argument: str, value: Any) -> None:
    if not isinstance(value, mx.array):
        raise InvalidProblemError(f"{operation}: {argument} is {type(value).__name__}; expected an MLX array")


def _computed(plan_type: Any, descriptor: Any, **inputs: Any) -> Any:
    plan = functional.plan(plan_type, descriptor, "mlx")
    kernel: Any = plan.kernel
    with default_environment():
        results = kernel.evaluate(plan.descriptor, inputs)
    return results[0] if len(results) == 1 else results


def _differentiable(operation: str, forward: Function, backward: Function | None) -> Function:
    """A function of arrays whose gradient is `backward(primals, cotangents, outputs)`, or that has none."""

    def refuse(what: str) -> Function:
        def rule(*_: Any) -> NoReturn:
            raise UnsupportedError(f"{operation}: {what} is not supported for MLX arrays")

        return rule

    function: Any = mx.custom_function(forward)
    function.vjp(backward or refuse("its own gradient"))
    function.jvp(refuse("forward-mode differentiation"))
    function.vmap(refuse("vmap"))
    return function  # type: ignore[no-any-return]


# --- operations that are declared -------------------------------------------------------------------------------------
@functools.lru_cache(maxsize=256)
def _declared(op: Operation, *attributes: Any) -> Function:
    """An operation of one input and one output."""
    assert op.vjp is not None
    vjp, (argument,), (result,) = OPERATIONS[op.vjp], op.inputs, op.outputs
    settings = dict(zip(op.attributes, attributes, strict=True))

    def planned(of: Operation, **arrays: Any) -> Any:
        like, given = arrays[of.problem], {key: settings[key] for key in of.attributes}
        make: Function = of.descriptor_type
        return _computed(of.plan_type, make(tuple(like.shape), dtype_name(like), **given), **arrays)

    def gradient(*arrays: Any) -> Any:
        return planned(vjp, **dict(zip(vjp.inputs, arrays, strict=True)))

    def backward(x: Any, dy: Any, y: Any) -> Any:
        among = {argument: x, f"d{result}": dy, result: y}
        return once(*[among[key] for key in vjp.inputs])

    once = _differentiable(vjp.name, gradient, None)
    return _differentiable(op.name, lambda x: planned(op, **{argument: x}), backward)


def softmax(x: mx.array, axis: int = -1) -> Any:
    """Softmax along an axis, see `isograd.softmax`; float16, bfloat16, float32, and float64 on the CPU.

    Raises InvalidProblemError for anything but an array, a wrong axis or rank, and UnsupportedError for another dtype.
    """
    _require_array("softmax", "x", x)
    return _declared(SOFTMAX, functional.integer("softmax", "axis", axis))(x)


def log_softmax(x: mx.array, axis: int = -1) -> Any:
    """Logarithm of the softmax along an axis, see `isograd.log_softmax`; arguments and errors as for `softmax`."""
    _require_array("log_softmax", "x", x)
    return _declared(LOG_SOFTMAX, functional.integer("log_softmax", "axis", axis))(x)


# --- gather ----------------------------------------------------------------------------------------------------------
@functools.lru_cache(maxsize=256)
def _take(axis: int) -> Function:
    def forward(x: Any, indices: Any) -> Any:
        names = dtype_name(x), dtype_name(indices)
        descriptor = TakeAlongAxisDescriptor(tuple(x.shape), tuple(indices.shape), *names, axis)
        return _computed(TakeAlongAxisPlan, descriptor, x=x, indices=indices)

    def backward(primals: Any, dv: Any, v: Any) -> Any:
        x, indices = primals
        shape, names = tuple(x.shape), (dtype_name(x), dtype_name(indices))

        def scatter(dv: Any, indices: Any) -> Any:
            descriptor = TakeAlongAxisBackwardDescriptor(shape, tuple(indices.shape), *names, axis)
            return _computed(TakeAlongAxisBackwardPlan, descriptor, indices=indices, dv=dv)

        # The sum is linear: its own gradient takes along the axis again.
        again = _differentiable(
            "take_along_axis_backward", scatter, lambda p, g, _: (_take(axis)(g, p[1]), mx.zeros_like(p[1]))
        )
        return again(dv, indices), mx.zeros_like(indices)

    return _differentiable("take_along_axis", forward, backward)


def take_along_axis(x: mx.array, indices: mx.array, axis: int = -1) -> Any:
    """The values of x along an axis, one for every index, see `isograd.take_along_axis`.

    indices: int32, int64 or uint32, of x's shape but for any size along the axis. Its gradient is an order-free sum.
    On an Apple GPU an index out of range gives NaN, and no gradient; on the CPU it raises IndexOutOfRangeError.

    Raises InvalidProblemError for shapes that do not fit, and UnsupportedError for another dtype.
    """
    _require_array("take_along_axis", "x", x)
    _require_array("take_along_axis", "indices", indices)
    return _take(functional.integer("take_along_axis", "axis", axis))(x, indices)


# --- routing ---------------------------------------------------------------------------------------------------------
@functools.lru_cache(maxsize=256)
def _router(k: int, scoring: str, renormalize: bool, groups: int, group_k: int, scale: float) -> Function:
    def planned(op: Operation, options: dict[str, Any], logits: Any, **inputs: Any) -> Any:
        make: Function = op.descriptor_type
        options |= {"scoring": scoring, "renormalize": renormalize, "scale": scale}
        return _computed(
            op.plan_type, make(tuple(logits.shape), k, dtype_name(logits), **options), logits=logits, **inputs
        )

    def forward(logits: Any, *bias: Any) -> Any:
        inputs = {"logits": logits} | ({"bias": bias[0]} if bias else {})
        options = {"groups": groups, "group_k": group_k, "bias": bool(bias)}
        return planned(MOE_ROUTER, options, **inputs)

    def gradient(dweights: Any, logits: Any, experts: Any) -> Any:
        inputs, options = (
            {"dweights": dweights, "logits": logits, "experts": experts},
            {"index_dtype": dtype_name(experts)},
        )
        return planned(MOE_ROUTER_BACKWARD, options, **inputs)

    once = _differentiable("moe_router_backward", gradient, None)

    def backward(primals: Any, cotangents: Any, outputs: Any) -> Any:
        logits, *bias = primals if isinstance(primals, (tuple, list)) else (primals,)
        dlogits = once(cotangents[0], logits, outputs[1])
        return (dlogits, *map(mx.zeros_like, bias)) if bias else dlogits

    return _differentiable("moe_router", forward, backward)


def moe_router(
    logits: mx.array,
    k: int,
    *,
    scoring: Scoring = "softmax",
    renormalize: bool = False,
    bias: mx.array | None = None,
    groups: int = 1,
    group_k: int = 1,
    scale: float = 1.0,
) -> Any:
    """The weights of a token's k experts and their indices, see `isograd.moe_router`.

    logits: (..., E). bias: [E] in float32. Returns weights and int64 experts, (..., k). The bias has no gradient.

    Raises InvalidProblemError for arguments that make no sense, and UnsupportedError for another dtype.
    """
    name = "moe_router"
    _require_array(name, "logits", logits)
    given = {
        "k": k,
        "scoring": scoring,
        "renormalize": renormalize,
        "groups": groups,
        "group_k": group_k,
        "scale": scale,
    }
    route = _router(**{key: MOE_ROUTER.given[key].plain(name, key, value) for key, value in given.items()})
    if bias is None:
        return route(logits)
    _require_array(name, "bias", bias)
    found, expected = (tuple(bias.shape), dtype_name(bias)), (tuple(logits.shape[-1:]), "float32")
    if found != expected:
        raise InvalidProblemError(
            f"{name}: bias has shape {found[0]} and dtype {found[1]}; expected {expected[0]} and {expected[1]}"
        )
    return route(logits, bias)


# --- attention -------------------------------------------------------------------------------------------------------
def _fields(operation: str, q: Any, k: Any, v: Any) -> dict[str, Any]:
    """What a descriptor says of sizes and dtype; InvalidProblemError where the arrays do not fit."""
    shapes = {"q": tuple(q.shape), "k": tuple(k.shape), "v": tuple(v.shape)}
    for name, shape in shapes.items():
        if len(shape) != 4:
            raise InvalidProblemError(
                f"{operation}: {name} has shape {shape}; expected [batch, heads, length, columns]"
            )
    (batch, _, _, dim), (_, kv_heads, k_length, _) = shapes["q"], shapes["k"]
    expected = {"k": (batch, kv_heads, k_length, dim), "v": (batch, kv_heads, k_length, shapes["v"][3])}
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise InvalidProblemError(f"{operation}: {name} has shape {shapes[name]}; expected {shape}")
    for name, array in (("k", k), ("v", v)):
        if array.dtype != q.dtype:
            raise InvalidProblemError(
                f"{operation}: {name} has dtype {dtype_name(array)} and q {dtype_name(q)}; expected the same"
            )
    return sizes(q, k, v) | {"dtype": dtype_name(q)}


@functools.lru_cache(maxsize=256)
def _attention(options: AttentionOptions) -> Function:
    def forward(q: Any, k: Any, v: Any) -> Any:
        descriptor = AttentionDescriptor(**_fields("attention", q, k, v), options=options)
        return _computed(AttentionPlan, descriptor, q=q, k=k, v=v)

    def gradient(q: Any, k: Any, v: Any, o: Any, lse: Any, do: Any, dlse: Any) -> Any:
        fields = _fields("attention_backward", q, k, v)
        descriptor = AttentionBackwardDescriptor(**fields, options=options, dlse=True)
        inputs = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse, "dlse": dlse}
        return _computed(AttentionBackwardPlan, descriptor, **inputs)

    once = _differentiable("attention_backward", gradient, None)
    return _differentiable("attention", forward, lambda primals, g, outputs: once(*primals, *outputs, *g))


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    causal: bool = False,
    alignment: Alignment = "lower_right",
    scale: float | None = None,
    return_lse: bool = False,
) -> Any:
    """softmax(scale · q kᵀ) v over the visible keys, see `isograd.attention`.

    q: [B, Hq, Lq, D]. k: [B, Hkv, Lk, D]. v: [B, Hkv, Lk, Dv], Hq a multiple of Hkv; of one dtype. Returns
    [B, Hq, Lq, Dv], and with return_lse also the logarithms of the sums, [B, Hq, Lq]; both are differentiable.

    Raises InvalidProblemError for arguments that do not fit, and UnsupportedError for another dtype or dimension.
    """
    for name, array in (("q", q), ("k", k), ("v", v)):
        _require_array("attention", name, array)
    options = AttentionOptions(causal=causal, alignment=alignment, scale=scale).validated("attention", q.shape[-1])
    o, lse = _attention(options)(q, k, v)
    return (o, lse) if return_lse else o


def attention_delta(o: mx.array, do: mx.array) -> Any:
    """The order-free sums of o · do over the last axis, see `isograd.attention_delta`; not differentiable.

    o, do: [B, H, L, D] of one dtype. Returns [B, H, L]. Errors as for `attention`.
    """
    _require_array("attention_delta", "o", o)
    _require_array("attention_delta", "do", do)
    if o.shape != do.shape or o.dtype != do.dtype or len(o.shape) != 4:
        raise InvalidProblemError(
            f"attention_delta: o has shape {tuple(o.shape)} and dtype {dtype_name(o)}, do {tuple(do.shape)} and "
            f"{dtype_name(do)}; expected one shape of four dimensions and one dtype"
        )
    return _delta(o, do)


def _delta_rows(o: Any, do: Any) -> Any:
    batch, heads, length, v_dim = o.shape
    return _computed(
        AttentionDeltaPlan, AttentionDeltaDescriptor(batch, heads, length, v_dim, dtype_name(o)), o=o, do=do
    )


_delta = _differentiable("attention_delta", _delta_rows, None)
