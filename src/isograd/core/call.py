"""Operations as functions of arrays: NumPy's, tensors, any with DLPack, and what a front end registers for its own.

    _sparsemax = call.function(SPARSEMAX)

    def sparsemax(x, axis=-1):
        return _sparsemax((x,), (axis,))

The result is of the first input's kind. Inside an `Encoder` the plan is recorded and the result a promise.
"""

import functools
from collections.abc import Callable
from typing import Any

from isograd import arrays, functional
from isograd.core.operation import Operation

# For a type of arrays of its own, a front end's (operation with a vjp, inputs, attributes) -> outputs.
front_ends: dict[type, Callable[[Operation, tuple[Any, ...], tuple[Any, ...]], Any]] = {}


@functools.cache
def function(op: Operation) -> Callable[..., Any]:
    """The function (inputs, attributes, names of the optional outputs that are asked for) -> outputs.

    Inputs and attributes are tuples in the order of their declaration, None for an optional input that is not given;
    one output comes alone, several as a tuple without those that were not asked for.
    """
    name, problem, planned = op.name, op.problem, op.planned
    checks = [(key, a.plain) for key, a in op.attributes.items()]
    names = tuple(op.inputs)
    optional = [(i, key) for i, (key, a) in enumerate(op.inputs.items()) if a.optional]
    differentiable = op.vjp is not None
    asked = [key for key, a in op.outputs.items() if a.optional]

    def run(inputs: tuple[Any, ...], attributes: tuple[Any, ...], wanted: tuple[str, ...] = ()) -> Any:
        values = [check(name, key, value) for (key, check), value in zip(checks, attributes, strict=True)]
        if differentiable and front_ends:
            for value in inputs:
                if (front_end := front_ends.get(type(value))) is not None:
                    return front_end(op, inputs, tuple(values))
        given = dict(zip(names, inputs, strict=True))
        for i, key in optional:
            values.append(inputs[i] is not None)
            if inputs[i] is None:
                del given[key]
        for key in asked:
            values.append(key in wanted)
        taken, restore = functional.inputs(name, **given)
        operands = dict(zip(given, taken, strict=True))
        like = operands[problem]
        device, dtype = arrays.describe(like, name, problem)
        plan, _, outputs = planned(device, tuple(like.shape), dtype, *values)
        for key, shape, of in outputs:
            operands[key] = functional.empty(shape, of, like)
        results = functional.run(plan, **operands)
        return restore(results) if len(outputs) == 1 else tuple([restore(each) for each in results])

    return run
