"""The derivatives of operators from declarations: by the vjp that is an operation itself, or by functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isograd.core.operation import Operation
from isograd.errors import UnsupportedError
from isograd.torch import define
from isograd.torch.tensors import work_dtype

if TYPE_CHECKING:
    from isograd.torch.bind import Bound

Values = tuple[Any, ...]
Named = Mapping[str, Any]


def linear(bound: Bound, name: str) -> define.Gradient:
    """Of an operation that is linear in one input, with a symmetric Jacobian, and constant in the others."""
    place = list(bound.op.inputs).index(name)

    def save(node: Any, args: Values, output: Tensor) -> Values:
        inputs, node.settings = bound.split(args)
        return (*inputs[:place], *inputs[place + 1 :])

    def again(node: Any, saved: Values, h: Tensor | None) -> Tensor:
        inputs = [*saved[:place], torch.zeros_like(saved[0]) if h is None else h, *saved[place:]]
        result: Tensor = bound.call(*inputs, *node.settings)
        return result

    return define.Gradient(
        save,
        lambda node, saved, h: (*[None] * place, again(node, saved, h)),
        lambda node, saved, *tangents: again(node, saved, tangents[place]),
    )


def by_vjp(bound: Bound, vjp: Bound, tangent: Callable[..., Any] | None) -> define.Gradient:
    """Of an operation with a vjp, which reads what is saved; tangent: where the Jacobian is not symmetric."""
    op = bound.op
    arrays, attributes = [*op.inputs, *op.outputs], list(op.given)
    of_problem = list(op.inputs).index(op.problem) if vjp.op.shaped else None
    upstream = {f"d{key}": i for i, key in enumerate(op.outputs) if f"d{key}" in vjp.op.inputs}
    required = {i for key, i in upstream.items() if not vjp.op.inputs[key].optional}
    kept = [key for key in vjp.op.inputs if key not in upstream]
    # For each input of the vjp: its place among the gradients, or behind them among what is saved.
    order = [upstream[key] if key in upstream else len(op.outputs) + kept.index(key) for key in vjp.op.inputs]
    saved_places = [arrays.index(key) for key in kept]
    handed = [None if key == "wrt" else attributes.index(key) for key in vjp.op.given]
    one_by_one = None in handed
    found_in = {key: list(vjp.op.outputs).index(name) for key, name in op.gradients(vjp.op).items()}
    gradients = [found_in.get(key) for key in op.inputs]
    flags = [list(op.inputs).index(key.removeprefix("d")) for key in vjp.flags]
    without = [i for i, key in enumerate(op.outputs) if f"d{key}" not in upstream]

    through = {attributes.index(key): value for key, value in op.straight_through.items()}

    def read(inputs: Values, output: Any) -> Values:
        """What the vjp reads."""
        everything = (*inputs, *output) if isinstance(output, tuple) else (*inputs, output)
        return tuple([everything[i] for i in saved_places])

    def save(node: Any, args: Values, output: Any) -> Values:
        inputs, node.settings = bound.split(args)
        if without:
            node.mark_non_differentiable(*[output[i] for i in without])
        node.again = any(node.settings[i] != value for i, value in through.items())
        node.problem = () if of_problem is None else (inputs[of_problem].shape, inputs[of_problem].dtype)
        return inputs if node.again else read(inputs, output)

    def pulled(node: Any, saved: Values, grads: Values, asked: list[bool], wrt: str = "") -> Any:
        if node.again:
            settings = [through.get(i, value) for i, value in enumerate(node.settings)]
            saved = read(saved, bound.call(*saved, *settings))
        if bound.narrow(node.settings):
            grads = tuple([g.to(work_dtype(g.dtype)) for g in grads])
        # Where a result was not used, the vjp may take nothing or else takes zeros.
        if any(grads[i] is None for i in required):
            zeros = torch.zeros_like(next(g for g in grads if g is not None))
            grads = tuple([zeros if g is None and i in required else g for i, g in enumerate(grads)])
        given = (*grads, *saved)
        return vjp.call(
            *[given[i] for i in order], *node.problem, *[wrt if i is None else node.settings[i] for i in handed], *asked
        )

    def backward(node: Any, saved: Values, *grads: Tensor | None) -> Values:
        if all(grads[i] is None for i in upstream.values()):
            return (None,)
        needs = node.needs_input_grad
        if one_by_one:
            every = enumerate(op.inputs)
            return tuple([pulled(node, saved, grads, [], key) if needs[i] else None for i, key in every])
        found = pulled(node, saved, grads, [needs[i] for i in flags])
        if isinstance(found, Tensor):
            return (found,)
        return tuple([None if place is None or not needs[i] else found[place] for i, place in enumerate(gradients)])

    def push(node: Any, saved: Values, *tangents: Tensor | None) -> Any:
        if op.symmetric:  # in its only input, so that the vjp serves
            return pulled(node, saved, tangents[:1], [])
        found = _pushed(op, tangent, dict(zip(kept, saved, strict=True)), node.settings, tangents)
        return found.to(saved[0].dtype) if bound.narrow(node.settings) else found

    return define.Gradient(save, backward, push)


def by_function(
    bound: Bound, derivative: Callable[..., Named] | None, tangent: Callable[..., Any] | None
) -> define.Gradient:
    """Of an operation without a vjp, by functions of arrays by their names."""
    op = bound.op

    def save(node: Any, args: Values, output: Any) -> Values:
        inputs, node.settings = bound.split(args)
        return inputs

    def backward(node: Any, saved: Values, *grads: Tensor | None) -> Values:
        if derivative is None:
            raise UnsupportedError(f"{op.name}: its own derivative is not available; differentiate once")
        needs = dict(zip(op.inputs, node.needs_input_grad, strict=False))
        inputs = dict(zip(op.inputs, saved, strict=True))
        found = derivative(inputs, node.settings, needs, dict(zip(op.outputs, grads, strict=True)))
        return tuple([found.get(key) for key in op.inputs])

    def push(node: Any, saved: Values, *tangents: Tensor | None) -> Any:
        return _pushed(op, tangent, dict(zip(op.inputs, saved, strict=True)), node.settings, tangents)

    return define.Gradient(save, backward, push)


def _pushed(op: Operation, tangent: Callable[..., Any] | None, saved: Named, settings: Values, tangents: Values) -> Any:
    if tangent is None:
        raise UnsupportedError(f"{op.name}: there is no forward mode for it; use reverse mode")
    return tangent(saved, settings, dict(zip(op.inputs, tangents, strict=False)))
