"""Operations as functions of arrays: NumPy's, tensors, any with DLPack, and what a front end registers for its own.

    _sparsemax = call.function(SPARSEMAX)

    def sparsemax(x, axis=-1):
        return _sparsemax((x,), (axis,))

The result is of the first input's kind. Inside an `Encoder` the plan is recorded and the result a promise.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np

from isograd.core import arrays, encoder, functional
from isograd.core.faults import named
from isograd.core.operation import Operation
from isograd.errors import InvalidProblemError, IsogradError

# For a type of arrays of its own, a front end's (operation with a vjp, inputs, attributes) -> outputs.
front_ends: dict[type, Callable[[Operation, tuple[Any, ...], tuple[Any, ...]], Any]] = {}
P = ParamSpec("P")
R = TypeVar("R")
_PLAIN = {"int": int, "float": float}  # by what schemas call them: attributes that are plain as they come


def added(name: str, x: Any, residual: Any) -> Any:
    """The sum of two of one shape by the front end that has either, or None if none has."""
    if not any(type(a) in front_ends for a in (x, residual)):
        return None
    shapes = [getattr(a, "shape", type(a).__name__) for a in (x, residual)]
    if shapes[0] != shapes[1]:
        raise InvalidProblemError(f"{name}: x has shape {shapes[0]} and residual {shapes[1]}; expected the same")
    return x + residual


@functools.cache
def function(op: Operation) -> Callable[..., Any]:
    """The function (inputs, attributes, names of the optional outputs that are asked for, out) -> outputs.

    Inputs and attributes are tuples in the order of their declaration, None for an optional input that is not given;
    one output comes alone, several as a tuple without those that were not asked for. out: an array for the output of an
    operation that has one, which comes back. Tensors go to torch's front end, where gradients are recorded.
    """
    name, run = op.name, planned(op)
    checks = [(key, a.plain, _PLAIN.get(a.kind)) for key, a in op.arguments.items()]
    differentiable = op.differentiable

    def called(
        inputs: tuple[Any, ...], attributes: tuple[Any, ...], wanted: tuple[str, ...] = (), out: Any = None
    ) -> Any:
        values = attributes
        for (_, _, plain), value in zip(checks, attributes, strict=True):
            if type(value) is not plain:
                values = tuple([check(name, key, v) for (key, check, _), v in zip(checks, attributes, strict=True)])
                break
        for value in inputs:
            if type(value) is not np.ndarray:
                if differentiable and (front_end := front_ends.get(type(value))) is not None:
                    return front_end(op, inputs, values)
                if arrays.is_tensor(value):
                    from isograd.torch import bind

                    return bind.applied(op, inputs, values, wanted, out)
        return run(inputs, values, wanted, out)

    return called


@functools.cache
def planned(op: Operation) -> Callable[..., Any]:
    """The same for attributes that were checked, by a plan for any kind of arrays; gradients are refused."""
    name, names, alike = op.name, tuple(op.inputs), op.alike
    like_of = names[0] if op.shaped else op.problem
    shaped, integral, bare = op.shaped, op.integral, {key for key, a in op.inputs.items() if a.dtype}
    absent = any(a.optional for a in op.inputs.values())
    optional = [i for i, key in enumerate(names) if key in op.optional]
    asked = [key for key, a in op.outputs.items() if a.optional]
    measured = len(op.given) < len(op.attributes)

    def run(inputs: tuple[Any, ...], values: tuple[Any, ...], wanted: tuple[str, ...], out: Any) -> Any:
        operands = dict(zip(names, inputs, strict=True))
        if absent:
            operands = {key: a for key, a in operands.items() if a is not None or not op.inputs[key].optional}
        restore = None
        for value in operands.values():
            if type(value) is not np.ndarray:
                taken, restore = functional.inputs(name, **operands)
                operands = dict(zip(operands, taken, strict=True))
                where = "by an encoder" if out is None else "where out is given"
                functional.refuse_gradients(name, operands, f"{where}; use")
                break
        like = operands[like_of]
        device, dtype = arrays.describe(like, name, like_of, integral or like_of in bare)
        shape = like.shape
        if shaped:
            shape, dtype, values = values[0], values[1], values[2:]
        if measured:
            values = op.complete(values, operands)
        if op.shape_of is not None:
            shape = op.shape_of(name, operands, dict(zip(op.attributes, values, strict=False)))
        if optional or asked:
            values = (*values, *[inputs[i] is not None for i in optional], *[key in wanted for key in asked])
        plan, _, outputs = op.planned(device, shape, dtype, *values)
        if out is None:
            for key, size, of in outputs:
                operands[key] = functional.empty_like(like) if key in alike else functional.empty(size, of, like)
            plan.run(**operands)
            results = [operands[key] for key in plan.outputs]
            if encoder.recordings:
                results = [functional.promised(name, result) for result in results]
            if restore is not None:
                results = [restore(result) for result in results]
            return results[0] if len(results) == 1 else tuple(results)
        ((key, _, _),) = outputs
        operands[key] = out
        try:
            plan.run(**operands)
        except IsogradError as error:
            raise named(name, at=None, **{key: "out"}).renamed(error) from None
        return out

    return run


def replayed(function: Callable[P, R]) -> Callable[P, R]:
    """A function of arrays; what it does with tensors on a GPU is recorded, and repeated where a problem comes again.

    Arguments have to decide all that it does: no global state, no random numbers. See `isograd.torch.replay`.
    """
    signature = inspect.signature(function).parameters
    names = list(signature)
    places = {name: i for i, name in enumerate(names)}
    defaults = [p.default for p in signature.values()]
    positional = sum(p.kind is not p.KEYWORD_ONLY for p in signature.values())
    required = sum(default is inspect.Parameter.empty for default in defaults)
    of_tensors: Callable[..., R] | None = None

    def flat(*args: Any) -> R:
        return function(*args[:positional], **dict(zip(names[positional:], args[positional:], strict=True)))

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal of_tensors
        tensors = args and type(args[0]) is not np.ndarray and arrays.is_tensor(args[0])
        if not tensors or encoder.recordings or len(args) > positional or not places.keys() >= kwargs.keys():
            return function(*args, **kwargs)
        if len(args) < required and not kwargs.keys() >= set(names[len(args) : required]):
            return function(*args, **kwargs)  # the error for an argument that is missing
        given = [*args, *defaults[len(args) :]]
        for name, value in kwargs.items():
            if places[name] < len(args):
                return function(*args, **kwargs)  # the error for an argument that is given twice
            given[places[name]] = value
        if of_tensors is None:
            from isograd.torch import define

            of_tensors = define.repeated(flat)
        return of_tensors(*given)

    return called
