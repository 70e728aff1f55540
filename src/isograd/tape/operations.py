"""Operations on the tape: their rules follow from the declarations."""

import functools
from typing import Any

from isograd.core import arrays, call, encoder
from isograd.core.operation import Operation
from isograd.ops import OPERATIONS
from isograd.tape.rules import Array, Gradient, Result
from isograd.tape.variable import Variable, apply


@functools.cache
def _vjp_of(op: Operation) -> tuple[Operation, str, dict[str, str]]:
    """The operation that computes an operation's gradients, what it calls the upstream one, and outputs by input."""
    assert op.vjp is not None
    vjp = OPERATIONS[op.vjp]
    return vjp, f"d{next(iter(op.outputs))}", op.gradients(vjp)


def record(op: Operation, inputs: tuple[Any, ...], attributes: tuple[Any, ...]) -> Any:
    """Compute an operation and record it: its first output is a variable, others are arrays, which get no gradient."""
    encoder.refuse(op.name, "an input is a tape variable")
    if op.vjp is None:
        return _pulled_back(op, inputs, attributes)
    vjp, upstream, gradients = _vjp_of(op)
    given = {key: value for key, value in zip(op.inputs, inputs, strict=True) if value is not None}
    constants = {key: _copied(op.name, key, value) for key, value in given.items() if key not in gradients}
    given = {key: value for key, value in given.items() if key in gradients}
    wanted = tuple([gradients[key] for key, value in given.items() if isinstance(value, Variable)])
    computed = tuple([key for key, a in vjp.outputs.items() if not a.optional or key in wanted])
    handed: dict[str, Any] = dict(zip(op.given, attributes, strict=True))
    through = tuple((handed | dict(op.straight_through)).values())
    others: list[Array] = []

    def rule(*values: Array) -> Result:
        arrays: dict[str, Any] = dict.fromkeys(op.inputs) | constants | dict(zip(given, values, strict=True))
        taken = tuple(arrays.values())
        results = _several(call.function(op)(taken, attributes))
        # The caller may overwrite what the vjp reads.
        others.extend([r.copy() for r in results[1:]])
        arrays |= zip(op.outputs, results, strict=True)
        if vjp.shaped:
            handed.update(shape=arrays[op.problem].shape, dtype=arrays[op.problem].dtype.name)
        again = functools.partial(call.function(op), taken, through) if through != attributes else None
        saved = {key: arrays[key] for key in vjp.inputs if key in (arrays if again is None else op.inputs)}
        latest: list[tuple[Array, dict[str, Array]]] = []

        def gradient(name: str) -> Gradient:
            def of(g: Array) -> Array:
                # All are computed together when the first one is due, unless the vjp computes one at a time.
                if not latest or latest[0][0] is not g or "wrt" in vjp.attributes:
                    among = saved | {upstream: g}
                    if again is not None:
                        among |= zip(op.outputs, _several(again()), strict=True)
                    settings = tuple([name if key == "wrt" else handed[key] for key in vjp.arguments])
                    found = call.function(vjp)(tuple([among.get(key) for key in vjp.inputs]), settings, wanted)
                    latest[:] = [(g, dict(zip(computed, _several(found), strict=True)))]
                return latest[0][1][gradients[name]]

            return of

        return results[0], tuple([gradient(name) for name in given])

    rule.__name__ = op.name
    one_dtype = not any(op.inputs[key].compute or op.inputs[key].dtype for key in given)
    value = apply(rule, *given.values(), one_dtype=one_dtype)
    return (value, *others) if others else value


def _pulled_back(op: Operation, inputs: tuple[Any, ...], attributes: tuple[Any, ...]) -> Any:
    """The same for an operation whose gradient no operation is."""
    assert op.pullback is not None
    pull, others = op.pullback, list[Array]()

    def rule(*values: Array) -> Result:
        results = _several(call.function(op)(values, attributes))
        others.extend([r.copy() for r in results[1:]])
        arrays, handed = zip(op.inputs, values, strict=True), dict(zip(op.given, attributes, strict=True))
        saved = dict(arrays), dict(zip(op.outputs, results, strict=True)), handed
        return results[0], tuple([lambda g, key=key: pull(g, *saved)[key] for key in op.inputs])

    rule.__name__ = op.name
    value = apply(rule, *inputs)
    return (value, *others) if others else value


def _copied(operation: str, argument: str, value: Any) -> Array:
    """What gets no gradient, as it is now: the caller may overwrite it before gradients are due."""
    array = value.value if isinstance(value, Variable) else arrays.to_numpy(value, operation, argument)[0]
    return array.copy()


def _several(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


call.front_ends[Variable] = record
