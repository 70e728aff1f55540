"""Descriptors, selection, and what a plan says about itself."""

import dataclasses
import inspect

import numpy as np
import pytest

import isograd as ig
from isograd.core import arrays
from isograd.ops.softmax import reference as ref

DTYPES = ["float16", "bfloat16", "float32", "float64"]
CASES = [
    (ig.SoftmaxPlan, ig.SoftmaxDescriptor, "softmax"),
    (ig.LogSoftmaxPlan, ig.LogSoftmaxDescriptor, "log_softmax"),
    (ig.SoftmaxBackwardPlan, ig.SoftmaxBackwardDescriptor, "softmax_backward"),
    (ig.LogSoftmaxBackwardPlan, ig.LogSoftmaxBackwardDescriptor, "log_softmax_backward"),
]
each_case = pytest.mark.parametrize(("plan_type", "descriptor_type", "operation"), CASES)


@each_case
def test_select_puts_a_descriptor_into_its_plain_form(plan_type, descriptor_type, operation):
    loose = descriptor_type([np.int64(4), np.uint8(8)], "float32", np.int8(-2))
    plan = plan_type.select(loose)
    assert plan.descriptor == descriptor_type((4, 8), "float32", 0)
    assert type(plan.descriptor.axis) is int
    assert [type(size) for size in plan.descriptor.shape] == [int, int]
    assert plan.descriptor.validated() == plan.descriptor
    assert plan.device == "cpu"
    assert plan_type.select(plan.descriptor, device="cpu", preference="numba").kernel is plan.kernel


@pytest.mark.parametrize("dtype", DTYPES)
@each_case
def test_sku_and_guarantee(plan_type, descriptor_type, operation, dtype):
    plan = plan_type.select(descriptor_type((4, 8), dtype))
    sku = plan.sku
    assert (sku.category, sku.op, sku.dtype, sku.backend, sku.arch) == ("softmax", operation, dtype, "numba", "cpu")
    assert (sku.layout, sku.epilogue) == ("strided", "none")
    assert sku.aux_dtype == ("float64" if dtype == "float64" else "float32")
    guarantee = plan.precision_guarantee
    assert guarantee is sku.precision_guarantee
    assert guarantee.math_precision == sku.aux_dtype
    assert "integer" in guarantee.accumulator
    promises = (
        guarantee.deterministic,
        guarantee.bit_stable_on_same_hardware,
        guarantee.batch_invariant,
        guarantee.order_invariant,
        guarantee.bit_stable_across_hardware,
    )
    assert promises == (True,) * 5
    assert plan.workspace_size == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        guarantee.deterministic = False


@pytest.mark.parametrize("dtype", DTYPES)
@each_case
def test_error_bound_is_a_formula_and_a_function(plan_type, descriptor_type, operation, dtype):
    shape, axis = (5, 3, 4), 1
    plan = plan_type.select(descriptor_type(shape, dtype, axis))
    bound = plan.precision_guarantee.error_bound
    assert isinstance(bound.formula, str)
    assert "ulp" in bound.formula
    rng = np.random.default_rng(50)
    inputs = {
        name: rng.standard_normal(shape).astype(arrays.numpy_dtype(dtype)) for name in plan.descriptor.declared.inputs
    }
    value = np.asarray(bound(**inputs, axis=axis))
    assert value.shape == shape
    assert value.dtype.itemsize >= 8
    assert (value > 0).all()
    # The bound follows the axis: with the axis moved it is the same bound, moved.
    moved = {name: np.moveaxis(x, axis, -1) for name, x in inputs.items()}
    np.testing.assert_allclose(np.moveaxis(value, axis, -1), bound(**moved).astype(value.dtype), rtol=1e-12)
    out = np.empty(shape, arrays.numpy_dtype(dtype))
    plan.run(**inputs, **{plan.outputs[0]: out})
    oracle = getattr(ref, f"oracle_{operation}")(*inputs.values(), axis)
    assert (np.abs(out.astype(np.longdouble) - oracle) <= value).all()


@each_case
def test_one_plan_runs_on_arrays_of_any_strides(plan_type, descriptor_type, operation):
    rng = np.random.default_rng(51)
    plan = plan_type.select(descriptor_type((6, 7), "float32", 0))
    for order in ("C", "F"):
        inputs = {
            name: np.array(rng.standard_normal((6, 7)), np.float32, order=order)
            for name in plan.descriptor.declared.inputs
        }
        out = np.zeros((12, 14), np.float32)[::2, 1::2]
        arguments = inputs | {plan.outputs[0]: out}
        assert plan.can_implement(**arguments) is True
        assert plan.run(**arguments) is None
        expected = getattr(ref, operation)(*inputs.values(), 0)
        assert np.ascontiguousarray(out).tobytes() == np.ascontiguousarray(expected).tobytes()


def test_functional_calls_share_plans_by_problem(monkeypatch):
    shape = (3, 11)  # one that no other test uses
    x = np.zeros(shape, np.float32)
    for _ in range(2):  # the first call may still load families of kernels
        ig.softmax(x, 1)
    select, made = ig.SoftmaxPlan.select, []
    monkeypatch.setattr(ig.SoftmaxPlan, "select", lambda *args: made.append(args) or select(*args))
    ig.softmax(x, 1)
    ig.softmax(np.zeros((11, 3), np.float32).T, 1)
    assert not made
    ig.softmax(x, 0)
    ig.softmax(x.astype(np.float64), 1)
    assert len(made) == 2


def test_public_names_exist_and_are_documented():
    for name in ig.__all__:
        thing = getattr(ig, name)
        assert inspect.getdoc(thing), name
    assert ig.__version__.count(".") == 2


# --- the short look at tensors ----------------------------------------------------------------------------------------
def tensors_of_every_kind():
    """Arguments of a gradient of [2, 3]: what they are like, dy, y, dx, and whether a short look finds them sound."""
    torch = pytest.importorskip("torch")
    a, b, c, memory = torch.randn(2, 3), torch.randn(2, 3), torch.empty(2, 3), torch.randn(13)
    parts = [memory[start : start + 6].view(2, 3) for start in (0, 3, 6)]
    yield "apart", (a, b, c), True
    yield "the result is an input", (a, b, b), True
    yield "inputs are the same", (a, a, c), True
    yield "neighbours", (parts[0], a, parts[2]), True
    yield "inputs overlap", (parts[0], parts[1], c), True
    yield "the result overlaps an input", (parts[0], a, parts[1]), False
    yield "the result overlaps the other input", (a, parts[1], parts[2]), False
    yield "columns first", (a.T.contiguous().T, b, c), False
    yield "expanded", (a[:1].expand(2, 3), b, c), False
    yield "an expanded result", (a, b, c[:1].expand(2, 3)), False
    yield "another dtype", (a.double(), b, c), False
    yield "another shape", (a, b.view(3, 2), c), False
    yield "a smaller result", (a, b, c[:1]), False
    yield "negated", (torch._neg_view(a), b, c), False
    yield "sparse", (a.to_sparse(), b, c), False
    yield "no memory", (a, b, c.to("meta")), False
    yield "parameters", (torch.nn.Parameter(a), b, c), False
    yield "an array", (a.numpy(), b, c), False
    yield "a list", (a.tolist(), b, c), False


def test_a_short_look_at_tensors_decides_as_the_long_one(monkeypatch):
    plan = ig.SoftmaxBackwardPlan.select(ig.SoftmaxBackwardDescriptor((2, 3), "float32"))

    def outcome(arguments):
        try:
            return {key: (arrays.placement(a), a.dtype) for key, a in plan._check(arguments).items()}
        except ig.IsogradError as error:
            return type(error), str(error)

    for what, given, sound in tensors_of_every_kind():
        arguments = dict(zip(("dy", "y", "dx"), given, strict=True))
        found = outcome(arguments)
        assert plan._holds_for_tensors(arguments) == sound, what
        with monkeypatch.context() as patch:
            patch.setattr(type(plan), "_holds_for_tensors", lambda self, arguments: False)
            assert outcome(arguments) == found, what
        assert not sound or isinstance(found, dict), what
