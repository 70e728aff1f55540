"""Problems for every operation of `isograd.ops`, made from its declaration."""

import importlib
import inspect
from typing import Any

import ml_dtypes
import numpy as np

import isograd as ig
from isograd.core.attributes import Batched, Choice, Flag, Integer, Scale, Word, signed
from isograd.core.operands import AlongAxis, Like, PerRow, Sized
from isograd.core.operation import Operation
from isograd.numerics.storage import compute_dtype
from isograd.ops import OPERATIONS

# Those on rows that are given; what has other arrays is tested by its family.
NAMES = [
    name
    for name, op in OPERATIONS.items()
    if not op.shaped and not any(isinstance(a, Sized) for a in (*op.inputs.values(), *op.outputs.values()))
]
NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
FLAVOURS = ("normal", "spread", "special", "masked", "offset")
ROOTS = {op.vjp: op for op in OPERATIONS.values() if op.vjp}  # the operation that each one is the vjp of


def values(rng: Any, flavour: str, shape: tuple[int, ...], dtype: Any) -> Any:
    """Ordinary numbers, far from zero, of every magnitude, special, or masked."""
    x = np.asarray(rng.standard_normal(shape) * 2)
    if flavour == "offset":
        x = x + rng.choice([1e4, -300, 255.9])
    elif flavour == "spread":
        x = x * np.exp2(rng.uniform(-160, 140, shape))
    elif flavour == "special":
        tiny = float(ml_dtypes.finfo(dtype).smallest_subnormal)
        pool = np.array([np.inf, -np.inf, np.nan, -np.nan, 0.0, -0.0, tiny, -3 * tiny, 3e38, -3e38, 6e4, -6e4])
        x = np.where(rng.random(shape) < 0.15, rng.choice(pool, shape), x)
    elif flavour == "masked":
        x = np.where(rng.random(shape) < 0.6, -np.inf, x)
    with np.errstate(all="ignore"):
        return np.asarray(x).astype(dtype)


def axis_of(settings: Any, shape: Any) -> int:
    """The axis of settings counted from the front; the last one where they have none."""
    return int(settings.get("axis", -1)) % max(len(shape), 1)


def options(op: Operation, i: int) -> list[str]:
    """The optional arrays of the i-th choice: all, none, or one."""
    return [list(op.optional), [], list(op.optional[:1]), list(op.optional[1:])][i % 4]


def counts(op: Operation) -> dict[str, int]:
    """How many elements of each row an input has, where that is measured from it."""
    return {key: 1 for key, a in op.attributes.items() if a.required and key not in op.given}


def fits(op: Operation, shape: Any, axis: int) -> bool:
    """Whether an operation takes a shape."""
    least = max(op.least_size, "k" in op.attributes)  # of k elements along the axis there are as many
    return bool(shape[axis_of({"axis": axis} if "axis" in op.attributes else {}, shape)] >= least)


def inputs(op: Operation, rng: Any, flavour: str, shape: Any, dtype: str, settings: Any, given: Any) -> dict[str, Any]:
    """Inputs by name; what an operation's vjp reads of its results are those that belong to its inputs."""
    root, made, settings = ROOTS.get(op.name), {}, counts(op) | settings
    for key, array in op.inputs.items():
        if array.optional and key not in given:
            continue
        if array.dtype == "index_dtype":  # places in a row
            made[key] = rng.integers(0, max(shape[-1], 1), array.shape(shape, axis_of(settings, shape), settings))
            continue
        of = NUMPY[compute_dtype(dtype) if array.compute else dtype]
        made[key] = values(rng, flavour, array.shape(shape, axis_of(settings, shape), settings), of)
        if key == "target" and flavour == "normal":  # probabilities are positive
            made[key] = np.abs(made[key]) + np.asarray(0.1, of)
        if isinstance(array, AlongAxis) and flavour == "offset":  # a weight near one
            made[key] = np.asarray(1 + made[key].astype(np.float64) * 1e-5).astype(of)
    if root is not None:
        of_root = {key: made[key] if key in made else values(rng, flavour, shape, NUMPY[dtype]) for key, a in
                   root.inputs.items() if not a.optional or key in made}  # fmt: skip
        known = settings_of(root, axis_of(settings, shape)) | {k: v for k, v in settings.items() if k in root.given}
        with np.errstate(all="ignore"):
            results = root.reference(**of_root, **known)
        results = results if isinstance(results, tuple) else (results,)
        made |= {key: r for key, r in zip(root.outputs, results, strict=True) if key in op.inputs}
    return made


def _accepted(attribute: Any) -> tuple[Any, ...]:
    """Values of an attribute, its default first."""
    if isinstance(attribute, Choice):
        return attribute.accepted
    if isinstance(attribute, Integer | Batched):
        return (1 if attribute.required else attribute.default,)
    for kind, others in ((Flag, (True,)), (Scale, (0.5, 3.7)), (Word, (8, 2**34 - 3, 2**63 + 5, 2**64 - 9))):
        if isinstance(attribute, kind):
            return attribute.default, *others
    return (attribute.default,)


def settings_of(op: Operation, axis: int, i: int = 0) -> dict[str, Any]:
    """The i-th choice of attributes, the first one their defaults, along an axis."""
    chosen = {}
    for step, (key, a) in enumerate(op.given.items(), 1):
        values = _accepted(a)
        chosen[key] = values[i * step % len(values)]
    return chosen | ({"axis": axis} if "axis" in op.attributes else {})


def spelled(op: Operation, settings: Any) -> list[Any]:
    """Settings as an operator of torch takes them."""
    return [signed(v) if isinstance(op.attributes[key], Word) else v for key, v in settings.items()]


def expected(op: Operation, made: Any, settings: Any, given: Any) -> tuple[Any, ...]:
    """The reference's outputs, those of the optional ones that are asked for."""
    asked = {key: True for key, a in op.outputs.items() if a.optional and key in given}
    with np.errstate(all="ignore"):
        results = op.reference(**made, **settings, **asked)
    return results if isinstance(results, tuple) else (results,)


def descriptor(op: Operation, shape: Any, dtype: str, settings: Any, given: Any) -> Any:
    known = counts(op) | dict.fromkeys(given, True)
    return op.descriptor_type(shape=shape, dtype=dtype, **known, **settings).validated()


def raw(x: Any) -> tuple[Any, ...]:
    x = np.asarray(x)
    return x.dtype, x.shape, np.ascontiguousarray(x).tobytes()


def ran(function: Any, op: Operation, made: Any, settings: Any, given: Any) -> tuple[Any, ...]:
    """The outputs of a function (inputs, attributes, optional outputs), as `isograd.core.call` makes it."""
    asked = tuple([key for key in given if key in op.outputs])
    found = function(tuple([made.get(key) for key in op.inputs]), tuple(settings.values()), asked)
    return found if isinstance(found, tuple) else (found,)


def launch_of(name: str) -> Any:
    """The function that launches an operation's Triton kernels."""
    return _triton(name).launch


def refused(problem: Any) -> str | None:
    """Why Triton kernels do not take a problem."""
    return _triton(problem.operation).reject(problem)


def _triton(name: str) -> Any:
    from isograd.core import kernel

    module = OPERATIONS[name].plan_type.__module__.replace(".operation", ".triton")
    importlib.import_module(module)
    return kernel.functions[name, module]


# --- the public function of an operation -----------------------------------------------------------------------------
X = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)


def arrays_of(op: Operation, dtype: str = "float32") -> tuple[Any, ...]:
    """Arrays that its function takes."""
    made = inputs(op, np.random.default_rng(1), "normal", X.shape, dtype, settings_of(op, -1), op.optional)
    return tuple([made.get(key) for key in op.inputs])


def wrong_of(op: Operation) -> dict[str, tuple[Any, ...]]:
    """For each argument of its function what it does not take."""
    made = dict(zip(op.inputs, arrays_of(op), strict=True))
    wrong: dict[str, tuple[Any, ...]] = {}
    for key, array in op.inputs.items():
        if (good := made[key]) is None:
            continue
        if key == op.problem:
            wrong[key] = (X.astype(np.int32), "x", None)
            if len(op.inputs) == 1 or not any(isinstance(a, Like | PerRow) for k, a in op.inputs.items() if k != key):
                wrong[key] += (np.zeros([1] * 9, np.float32),)
        else:
            shorter = good[:1] if good.ndim else good.reshape(1)
            wrong[key] = (shorter, good.astype(np.float64), *([] if array.optional else [None]))
    for key, attribute in op.given.items():
        if key in inspect.signature(getattr(ig, op.name)).parameters:
            wrong[key] = (7, 0.5) if attribute.kind == "int" else ("a", -1.0)
    return wrong


def required_of(op: Operation) -> dict[str, Any]:
    """The attributes that its function has no defaults of."""
    given = inspect.signature(getattr(ig, op.name)).parameters
    return {key: a.default for key, a in op.given.items() if key in given and given[key].default is inspect._empty}
