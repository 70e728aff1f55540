"""Problems for every operation of `isograd.ops`, made from its declaration."""

from typing import Any

import ml_dtypes
import numpy as np

from isograd.core.operands import AlongAxis, Array, Like
from isograd.core.operation import Operation
from isograd.numerics.storage import compute_dtype
from isograd.ops import OPERATIONS

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


def shape_of(array: Array, shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return array.shape(shape, axis % len(shape))


def options(op: Operation, i: int) -> list[str]:
    """The optional arrays of the i-th choice."""
    return [key for k, key in enumerate(op.optional) if i >> k & 1]


def inputs(op: Operation, rng: Any, flavour: str, shape: Any, dtype: str, settings: Any, given: Any) -> dict[str, Any]:
    """Inputs by name; what an operation's vjp reads of its results are those that belong to its inputs."""
    root, made = ROOTS.get(op.name), {}
    for key, array in op.inputs.items():
        if array.optional and key not in given:
            continue
        of = NUMPY[compute_dtype(dtype) if array.compute else dtype]
        made[key] = values(rng, flavour, shape_of(array, shape, settings["axis"]), of)
        if isinstance(array, AlongAxis) and flavour == "offset":  # a weight near one
            made[key] = np.asarray(1 + made[key].astype(np.float64) * 1e-5).astype(of)
    if root is not None:
        of_root = {key: made[key] if key in made else values(rng, flavour, shape, NUMPY[dtype]) for key, a in
                   root.inputs.items() if not a.optional or key in made}  # fmt: skip
        known = {key: settings.get(key, a.default) for key, a in root.attributes.items()}
        with np.errstate(all="ignore"):
            results = root.reference(**of_root, **known)
        results = results if isinstance(results, tuple) else (results,)
        made |= {key: r for key, r in zip(root.outputs, results, strict=True) if key in op.inputs}
    return made


def settings_of(op: Operation, axis: int) -> dict[str, Any]:
    return {key: a.default for key, a in op.attributes.items()} | {"axis": axis}


def expected(op: Operation, made: Any, settings: Any, given: Any) -> tuple[Any, ...]:
    """The reference's outputs, those of the optional ones that are asked for."""
    asked = {key: True for key, a in op.outputs.items() if a.optional and key in given}
    with np.errstate(all="ignore"):
        results = op.reference(**made, **settings, **asked)
    return results if isinstance(results, tuple) else (results,)


def descriptor(op: Operation, shape: Any, dtype: str, settings: Any, given: Any) -> Any:
    return op.descriptor_type(shape, dtype, **settings, **dict.fromkeys(given, True)).validated()


def raw(x: Any) -> tuple[Any, ...]:
    x = np.asarray(x)
    return x.dtype, x.shape, np.ascontiguousarray(x).tobytes()


def likes(op: Operation) -> list[str]:
    return [key for key, a in op.inputs.items() if isinstance(a, Like)]
