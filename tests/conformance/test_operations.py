"""Every operation of `isograd.ops`: its CPU kernels, the function of arrays, the tape, and the torch operator.

Nothing here names an operation: what is tried follows from the declarations.
"""

import copy
import dataclasses
import importlib.util
import itertools
import pickle
from pathlib import Path

import numpy as np
import pytest
from operations import FLAVOURS, NAMES, NUMPY, ROOTS, descriptor, expected, fits, inputs, options, ran, raw, settings_of

import isograd as ig
from isograd.cli.suites import SUITES
from isograd.core import call
from isograd.core.operands import Like
from isograd.ops import FOLDERS, OPERATIONS, files

SHAPES = (((4, 6), -1), ((5, 3), 0), ((2, 3, 4), 1), ((1, 1), 1), ((7,), 0), ((2, 5000), 1), ((0, 4), 1), ((3, 0), 1))
DIFFERENTIABLE = [name for name in NAMES if OPERATIONS[name].vjp]


def scattered(rng, x):
    """The same values in memory with gaps, axes in another order, some backwards."""
    if x.ndim == 0:
        return x
    order = rng.permutation(x.ndim)
    base = np.empty([2 * x.shape[d] for d in order], x.dtype)
    view = base[tuple(slice(None, None, -2 if rng.random() < 0.5 else 2) for _ in order)].transpose(np.argsort(order))
    view[...] = x
    return view


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("name", NAMES)
def test_the_function_returns_the_bits_of_the_reference(name, dtype):
    op = OPERATIONS[name]
    for i, (shape, axis) in enumerate(SHAPES):
        if not fits(op, shape, axis):
            continue
        rng, settings, given = np.random.default_rng(i), settings_of(op, axis, i), options(op, i)
        made = inputs(op, rng, FLAVOURS[i % 5], shape, dtype, settings, given)
        right = list(map(raw, expected(op, made, settings, given)))
        for arrays in (made, {key: scattered(rng, a) for key, a in made.items()}):
            found = ran(call.function(op), op, arrays, settings, given)
            assert list(map(raw, found)) == right, (shape, axis, given)


@pytest.mark.parametrize("name", NAMES)
def test_an_output_may_overwrite_the_inputs_that_the_declaration_names(name):
    op = OPERATIONS[name]
    settings, given, shape = settings_of(op, 1), list(op.optional), (3, 5)
    made = inputs(op, np.random.default_rng(0), "normal", shape, "float32", settings, given)
    plan = op.plan_type.select(descriptor(op, shape, "float32", settings, given))
    right = list(map(raw, expected(op, made, settings, given)))
    operands = {o.name: o for o in plan.descriptor.operands()}
    for output, key in itertools.product(op.outputs, made):
        arrays = {k: a.copy() for k, a in made.items()}
        arrays |= {k: np.empty(o.shape, o.dtype) for k, o in operands.items() if o.output}
        if (arrays[output].shape, arrays[output].dtype) != (arrays[key].shape, arrays[key].dtype):
            continue
        arrays[output] = arrays[key]
        if key in op.outputs[output].over:
            plan.run(**arrays)
            assert [raw(arrays[k]) for k in op.outputs] == right, (output, key)
        else:
            with pytest.raises(ig.InvalidProblemError, match=f"{name}: {output} overlaps {key}"):
                plan.run(**arrays)


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_runs_again_on_new_contents(name):
    op = OPERATIONS[name]
    settings, given = settings_of(op, 1), list(op.optional)
    first, second = (inputs(op, np.random.default_rng(i), "normal", (3, 5), "float32", settings, given) for i in (0, 1))
    with ig.Encoder() as encoder:
        found = ran(call.function(op), op, first, settings, given)
    assert [raw(r.result()) for r in found] == list(map(raw, expected(op, first, settings, given)))
    for key, a in first.items():
        a[...] = second[key]
    encoder.replay()
    assert [raw(r.result()) for r in found] == list(map(raw, expected(op, second, settings, given)))


@pytest.mark.parametrize("choice", [0, 1])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_the_gradients_on_the_tape_are_the_vjp(name, choice):
    op = OPERATIONS[name]
    vjp, settings = OPERATIONS[op.vjp], settings_of(op, 0, choice)
    made = inputs(op, np.random.default_rng(0), "normal", (4, 3), "float32", settings, op.optional)
    tape = ig.Tape()
    found_of = op.gradients(vjp)
    leaves = {key: tape.leaf(a) if key in found_of else a for key, a in made.items()}
    results = ran(call.function(op), op, leaves, settings, ())
    right = expected(op, made, settings, ())
    assert raw(results[0].value) == raw(right[0])
    assert [raw(r) for r in results[1:]] == [raw(r) for r in right[1:]]
    g = np.random.default_rng(1).standard_normal(right[0].shape).astype(np.float32)
    right = expected(op, made, settings | op.straight_through, ())
    everything = made | dict(zip(op.outputs, right, strict=True)) | {f"d{next(iter(op.outputs))}": g}
    found = tape.backward(results[0], g)
    for key, of in found_of.items():
        of_problem = {"shape": made[op.problem].shape, "dtype": "float32"}
        handed = {attribute: (settings | {"wrt": key} | of_problem)[attribute] for attribute in vjp.arguments}
        gradients = expected(vjp, {key: everything.get(key) for key in vjp.inputs}, handed, vjp.optional)
        assert raw(found[leaves[key]]) == raw(dict(zip(vjp.outputs, gradients, strict=True))[of])


@pytest.mark.parametrize("name", NAMES)
def test_descriptors_are_values(name):
    op = OPERATIONS[name]
    made = descriptor(op, (2, 3), "float32", settings_of(op, -1), list(op.optional))
    assert made == pickle.loads(pickle.dumps(made)) == copy.copy(made)
    assert hash(made) == hash(copy.copy(made))
    assert "axis" not in op.attributes or made.axis == 1
    assert type(made) is getattr(ig, type(made).__name__)
    wrong = {"shape": (2, -1), "dtype": "int32"} | ({"axis": 2} if "axis" in op.attributes else {})
    for field, value in wrong.items():
        with pytest.raises(ig.IsogradError, match=f"^{name}: {field}"):
            op.plan_type.select(dataclasses.replace(made, **{field: value}))
    for key in op.optional:
        with pytest.raises(ig.InvalidProblemError, match=f"^{name}: {key} is 1"):
            op.plan_type.select(dataclasses.replace(made, **{key: 1}))


@pytest.mark.parametrize("name", [name for name in NAMES if len(OPERATIONS[name].outputs) == 1])
def test_the_function_writes_where_it_is_told(name):
    op = OPERATIONS[name]
    settings, (output,) = settings_of(op, 0), op.outputs
    for dtype in ("float32", "bfloat16"):
        made = inputs(op, np.random.default_rng(3), "normal", (5, 4), dtype, settings, ())
        (right,) = expected(op, made, settings, ())
        arguments = tuple([made.get(key) for key in op.inputs]), tuple(settings.values()), ()
        out = np.empty((10, *right.shape[1:]), right.dtype)[::2] if right.ndim else np.empty_like(right)
        assert call.function(op)(*arguments, out) is out
        assert raw(out) == raw(right)
        with pytest.raises(ig.IsogradError, match=f"^{name}: out has shape"):
            call.function(op)(*arguments, np.empty((4, 4), right.dtype))
        for key in op.outputs[output].over:
            if made[key].shape == out.shape:
                before = made[key].copy()
                assert call.function(op)(*arguments, made[key]) is made[key]
                assert raw(made[key]) == raw(right)
                made[key][...] = before


@pytest.mark.parametrize("name", NAMES)
def test_results_are_laid_out_as_the_problem(name):
    op, settings = OPERATIONS[name], settings_of(OPERATIONS[name], 0)
    made = inputs(op, np.random.default_rng(4), "normal", (5, 4, 3), "float32", settings, ())
    made[op.problem] = np.asfortranarray(made[op.problem])
    results = ran(call.function(op), op, made, settings, ())
    for key, result in zip([key for key, a in op.outputs.items() if not a.optional], results, strict=True):
        assert key not in op.alike or result.strides == made[op.problem].strides


# --- what a folder holds ---------------------------------------------------------------------------------------------
def test_every_operation_has_what_it_needs():
    assert set(ROOTS) <= set(OPERATIONS)
    for folder in FOLDERS:
        assert files(folder) >= {"operation", "reference", "bounds", "cases", "api", "torch", "numba", "triton"}
    for name, op in OPERATIONS.items():
        assert name in SUITES
        assert callable(getattr(ig, name))
        if name not in NAMES:
            continue
        assert isinstance(op.inputs[op.problem], Like)
        assert op.plan_type.select(descriptor(op, (2, 3), "float32", settings_of(op, 1), [])).kernel.name == "numba"


def test_exported_names_are_those_of_the_folders():
    pytest.importorskip("torch", reason="needs torch")
    tool = Path(__file__).parents[2] / "tools" / "update_names.py"
    spec = importlib.util.spec_from_file_location("update_names", tool)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for target in module.SOURCES:
        assert (module.PACKAGE / target).read_text("utf-8") == module.text(target), f"run python {tool}"
