"""The functions of isograd.mlx: checks, a plan for "mlx", and its kernel, in functions that MLX differentiates."""

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import mlx.core as mx

from isograd import functional
from isograd.errors import InvalidProblemError, UnsupportedError
from isograd.gather.plans import (
    TakeAlongAxisBackwardDescriptor,
    TakeAlongAxisBackwardPlan,
    TakeAlongAxisDescriptor,
    TakeAlongAxisPlan,
)
from isograd.mlx_kernel import dtype_name
from isograd.router.descriptors import MoeRouterBackwardDescriptor, MoeRouterDescriptor, checked_options
from isograd.router.plans import MoeRouterBackwardPlan, MoeRouterPlan
from isograd.softmax.plans import SoftmaxBackwardDescriptor, SoftmaxBackwardPlan, SoftmaxDescriptor, SoftmaxPlan

Function = Callable[..., Any]


def _require_array(operation: str, argument: str, value: Any) -> None:
    if not isinstance(value, mx.array):
        raise InvalidProblemError(f"{operation}: {argument} is {type(value).__name__}; expected an MLX array")


def _computed(plan_type: Any, descriptor: Any, **inputs: Any) -> Any:
    plan = functional.plan(plan_type, descriptor, "mlx")
    kernel: Any = plan.kernel
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


# --- softmax ---------------------------------------------------------------------------------------------------------
@functools.lru_cache(maxsize=256)
def _softmax(kind: str, axis: int) -> Function:
    def forward(x: Any) -> Any:
        return _computed(SoftmaxPlan, SoftmaxDescriptor(kind, tuple(x.shape), dtype_name(x), axis), x=x)

    def gradient(dy: Any, y: Any) -> Any:
        descriptor = SoftmaxBackwardDescriptor(kind, tuple(y.shape), dtype_name(y), axis)
        return _computed(SoftmaxBackwardPlan, descriptor, dy=dy, y=y)

    once = _differentiable(f"{kind}_backward", gradient, None)
    return _differentiable(kind, forward, lambda x, dy, y: once(dy, y))


def softmax(x: mx.array, axis: int = -1) -> Any:
    """Softmax along an axis, see `isograd.softmax`; float16, bfloat16, float32, and float64 on the CPU.

    Raises InvalidProblemError for anything but an array, a wrong axis or rank, and UnsupportedError for another dtype.
    """
    _require_array("softmax", "x", x)
    return _softmax("softmax", functional.integer("softmax", "axis", axis))(x)


def log_softmax(x: mx.array, axis: int = -1) -> Any:
    """Logarithm of the softmax along an axis, see `isograd.log_softmax`; arguments and errors as for `softmax`."""
    _require_array("log_softmax", "x", x)
    return _softmax("log_softmax", functional.integer("log_softmax", "axis", axis))(x)


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
    def forward(logits: Any, *bias: Any) -> Any:
        inputs = {"logits": logits} | ({"bias": bias[0]} if bias else {})
        options = scoring, renormalize, bool(bias), groups, group_k, scale
        descriptor = MoeRouterDescriptor(tuple(logits.shape), k, dtype_name(logits), *options)
        return _computed(MoeRouterPlan, descriptor, **inputs)

    def gradient(dweights: Any, logits: Any, experts: Any) -> Any:
        options = scoring, renormalize, scale, dtype_name(experts)
        descriptor = MoeRouterBackwardDescriptor(tuple(logits.shape), k, dtype_name(logits), *options)
        return _computed(MoeRouterBackwardPlan, descriptor, dweights=dweights, logits=logits, experts=experts)

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
    scoring: str = "softmax",
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
    checked_options(name, scoring, renormalize, scale)
    numbers = [functional.integer(name, n, v) for n, v in (("k", k), ("groups", groups), ("group_k", group_k))]
    route = _router(numbers[0], scoring, renormalize, *numbers[1:], float(scale))
    if bias is None:
        return route(logits)
    _require_array(name, "bias", bias)
    given, expected = (tuple(bias.shape), dtype_name(bias)), (tuple(logits.shape[-1:]), "float32")
    if given != expected:
        raise InvalidProblemError(
            f"{name}: bias has shape {given[0]} and dtype {given[1]}; expected {expected[0]} and {expected[1]}"
        )
    return route(logits, bias)
