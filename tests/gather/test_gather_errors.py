"""Bad input gets the error that the design names, with a message that helps, and before anything is written."""

import ml_dtypes
import numpy as np
import pytest

import isograd as ig

X = np.arange(12, dtype=np.float32).reshape(3, 4)
I64 = np.zeros((3, 2), np.int64)
V = np.ones((3, 2), np.float32)


def refused(call, kind, *fragments, unchanged=()):
    """The call raises exactly this class, its message holds the fragments, and no array changes."""
    before = [x.tobytes() for x in unchanged]
    with pytest.raises(ig.IsogradError) as caught:
        call()
    assert type(caught.value) is kind
    assert [f for f in fragments if f not in str(caught.value)] == [], str(caught.value)
    assert [x.tobytes() for x in unchanged] == before


# --- indices out of range --------------------------------------------------------------------------------------------
def plans():
    """Name → a function of indices that runs a plan on an output of its own, and that output."""
    out = np.full((3, 4), 7, np.float32)
    chosen = np.full((3, 2), 7, np.float32)
    rows = np.full((2, 4), 7, np.float32)
    values = np.ones((2, 4), np.float32)
    return {
        "take_along_axis": (
            lambda i: ig.TakeAlongAxisPlan.select(
                ig.TakeAlongAxisDescriptor((3, 4), (3, 2), "float32", i.dtype.name)
            ).run(x=X, indices=i, v=chosen),
            chosen,
        ),
        "take_along_axis_backward": (
            lambda i: ig.TakeAlongAxisBackwardPlan.select(
                ig.TakeAlongAxisBackwardDescriptor((3, 4), (3, 2), "float32", i.dtype.name)
            ).run(indices=i, dv=V, dx=out),
            out,
        ),
        "scatter_sum": (
            lambda i: ig.ScatterSumPlan.select(ig.ScatterSumDescriptor((3, 4), (3, 2), "float32", i.dtype.name)).run(
                indices=i, values=V, x=out, out=out
            ),
            out,
        ),
        "index_select": (
            lambda i: ig.IndexSelectPlan.select(ig.IndexSelectDescriptor((4, 4), (2,), "float32", i.dtype.name)).run(
                weight=np.ones((4, 4), np.float32), indices=i[1], y=rows
            ),
            rows,
        ),
        "index_sum": (
            lambda i: ig.IndexSumPlan.select(ig.IndexSumDescriptor((4, 3), (2,), "float32", i.dtype.name)).run(
                indices=i[1], values=values[:, :3], out=out.T
            ),
            out,
        ),
    }


OUTSIDE = [
    (kind, value)
    for kind in ("int64", "int32", "uint32")
    for value in (4, -5, 2**31 - 1, 2**31, 2**32 - 1, -(2**63), 2**63 - 1)
    if np.iinfo(kind).min <= value <= np.iinfo(kind).max
]


@pytest.mark.parametrize(("kind", "value"), OUTSIDE)
@pytest.mark.parametrize("operation", list(plans()))
def test_an_index_out_of_range_writes_nothing(operation, kind, value):
    call, out = plans()[operation]
    indices = np.array([[0, 1], [2, 3], [3, 3]], kind)
    call(indices)
    out[...] = 7
    indices[1, 1] = value
    position = "indices[1, 1]" if operation[:5] in ("take_", "scatt") else "indices[1]"
    fragments = (f"{operation}: {position} is {value}", "of size 4 accepts -4 to 3")
    refused(lambda: call(indices), ig.IndexOutOfRangeError, *fragments, unchanged=[out])


def test_the_first_of_several_is_named_also_in_a_large_array():
    indices = np.zeros((300, 1000), np.int64)
    indices[123, 45:] = 9
    indices[200] = -77
    x = np.zeros((300, 5), np.float32)
    for array in (indices, np.asfortranarray(indices)):
        refused(lambda array=array: ig.take_along_axis(x, array), ig.IndexOutOfRangeError, "indices[123, 45] is 9")


def test_functions_name_their_own_arguments():
    weight, tokens = np.ones((4, 2), np.float32), np.array([[0, 3], [4, 0]])
    dy = np.ones((2, 2, 2), np.float32)
    error = ig.IndexOutOfRangeError
    refused(lambda: ig.embedding(weight, tokens), error, "embedding: indices[1, 0] is 4", "0 to 3")
    refused(lambda: ig.embedding_backward(dy, tokens, 4), error, "embedding_backward: indices[1, 0] is 4")
    refused(lambda: ig.segment_sum(dy, tokens, 4), error, "segment_sum: segment_ids[1, 0] is 4", "-4 to 3")
    refused(lambda: ig.scatter_sum(weight, np.array([4]), weight[:1], 0), error, "scatter_sum: indices[0] is 4")
    refused(lambda: ig.scatter_sum(X, I64 + 4, V), error, "scatter_sum: indices[0, 0] is 4", "axis 1 of size 4")


def test_a_token_is_not_counted_from_the_end():
    weight, dy = np.ones((4, 2), np.float32), np.ones((2, 2), np.float32)
    tokens = np.array([0, -1])
    refused(lambda: ig.embedding(weight, tokens), ig.IndexOutOfRangeError, "indices[1] is -1", "0 to 3")
    refused(lambda: ig.embedding_backward(dy, tokens, 4), ig.IndexOutOfRangeError, "indices[1] is -1", "0 to 3")
    # A plan may leave out what would be out of range.
    plan = ig.IndexSumPlan.select(ig.IndexSumDescriptor((4, 2), (2,), "float32", "int64", False, skipped=-1))
    out = np.full((4, 2), 7, np.float32)
    plan.run(indices=tokens, values=dy, out=out)
    assert out.tolist() == [[1, 1], [0, 0], [0, 0], [0, 0]]


def test_indices_into_nothing():
    empty = np.zeros((3, 0), np.float32)
    refused(lambda: ig.take_along_axis(empty, I64), ig.IndexOutOfRangeError, "indices[0, 0] is 0", "no index")
    refused(lambda: ig.segment_sum(V, np.zeros(3, int), 0), ig.IndexOutOfRangeError, "segment_ids[0] is 0", "no index")
    assert ig.take_along_axis(empty, I64[:, :0]).shape == (3, 0)
    assert ig.segment_sum(V[:0], np.zeros(0, int), 0).shape == (0, 2)


def test_indices_are_checked_again_when_a_recording_is_replayed():
    indices, values = np.array([0, 2]), np.ones(2, np.float32)
    with ig.Encoder() as encoder:
        out = ig.segment_sum(values, indices, 3)
    assert out.tolist() == [1, 0, 1]
    indices[1] = 1
    encoder.replay()
    assert out.tolist() == [1, 1, 0]
    indices[1] = 3
    refused(encoder.replay, ig.IndexOutOfRangeError, "is 3", unchanged=[out.result()])


# --- types and shapes ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["int16", "uint64", "bool", "float32", "int8"])
def test_other_index_types(dtype):
    indices = np.zeros((3, 2), dtype)
    accepted = ("indices", dtype, "int32", "int64", "uint32")
    refused(lambda: ig.take_along_axis(X, indices), ig.UnsupportedError, "take_along_axis", *accepted)
    refused(lambda: ig.embedding(X, indices), ig.UnsupportedError, "embedding", *accepted)
    refused(lambda: ig.scatter_sum(X, indices, V), ig.UnsupportedError, "scatter_sum", *accepted)


@pytest.mark.parametrize("dtype", ["int64", "complex64", "longdouble", "bool"])
def test_other_value_types(dtype):
    x = np.zeros((3, 4), dtype)
    refused(lambda: ig.take_along_axis(x, I64), ig.UnsupportedError, "take_along_axis", "x", x.dtype.name, "bfloat16")
    refused(lambda: ig.embedding(x, I64), ig.UnsupportedError, "embedding", "weight", x.dtype.name)
    refused(lambda: ig.segment_sum(x, np.zeros(3, int), 2), ig.UnsupportedError, "segment_sum", "values", x.dtype.name)


def test_mixed_value_types():
    refused(
        lambda: ig.scatter_sum(X, I64, V.astype(ml_dtypes.bfloat16)),
        ig.InvalidProblemError,
        *("scatter_sum", "values", "bfloat16", "float32"),
    )


def test_shapes_that_do_not_match():
    error = ig.InvalidProblemError
    refused(lambda: ig.take_along_axis(X, I64[:2]), error, "take_along_axis", "(2, 2)", "(3, 4)")
    refused(lambda: ig.take_along_axis(X, I64[0]), error, "take_along_axis", "(2,)", "rank")
    refused(lambda: ig.take_along_axis(X[0, 0], I64[0]), error, "x", "float32")
    refused(lambda: ig.take_along_axis_backward(V[:, :1], I64, (3, 4)), error, "dv", "(3, 1)", "(3, 2)")
    refused(lambda: ig.take_along_axis_backward(V, I64, (3, 4, 1)), error, "take_along_axis_backward", "(3, 4, 1)")
    refused(lambda: ig.scatter_sum(X, I64, V[:, :1].T), error, "scatter_sum", "values", "(1, 3)", "(3, 2)")
    refused(lambda: ig.scatter_sum(X[:1], I64, V), error, "scatter_sum", "indices", "(3, 2)", "(1, 4)")
    refused(lambda: ig.scatter_sum(X, I64[0], X, 0), error, "scatter_sum", "values", "(3, 4)", "(2, 4)")
    refused(lambda: ig.segment_sum(V, np.zeros(2, int), 3), error, "segment_sum", "values", "(3, 2)", "(2,)")
    refused(lambda: ig.segment_sum(V, np.zeros(3, int), -1), error, "segment_sum", "-1")
    refused(lambda: ig.embedding(X[0, 0], I64), error, "weight", "float32")
    refused(lambda: ig.embedding(np.zeros((), np.float32), I64), error, "weight", "rank 0")


@pytest.mark.parametrize("axis", [2, -3, 10**30])
def test_axis_out_of_range(axis):
    fragments = (f"axis is {axis}", "-2 to 1")
    refused(lambda: ig.take_along_axis(X, I64, axis), ig.InvalidProblemError, "take_along_axis", *fragments)
    refused(
        lambda: ig.take_along_axis_backward(V, I64, (3, 4), axis),
        ig.InvalidProblemError,
        *("take_along_axis_backward", *fragments),
    )
    refused(lambda: ig.scatter_sum(X, I64, V, axis), ig.InvalidProblemError, "scatter_sum", *fragments)


@pytest.mark.parametrize("axis", ["1", None, 1.0, (0,)])
def test_axis_that_is_no_integer(axis):
    refused(lambda: ig.take_along_axis(X, I64, axis), ig.InvalidProblemError, "take_along_axis", repr(axis), "integers")


def test_numbers_that_are_no_integers():
    for bad in (2.0, "2", None):
        refused(
            lambda bad=bad: ig.segment_sum(V, np.zeros(3, int), bad), ig.InvalidProblemError, "num_segments", repr(bad)
        )
        refused(
            lambda bad=bad: ig.embedding_backward(V, np.zeros(3, int), bad),
            ig.InvalidProblemError,
            *("num_embeddings", repr(bad)),
        )
    for bad in (3, -4):
        refused(lambda bad=bad: ig.embedding(X, I64, bad), ig.InvalidProblemError, "padding_idx", str(bad), "-3 to 2")
    refused(lambda: ig.embedding(X, I64, 1.0), ig.InvalidProblemError, "padding_idx", "1.0")


def test_too_many_distinct_indices():
    indices = np.zeros((3, 5), np.int64)
    refused(
        lambda: ig.take_along_axis_backward(np.ones((3, 5), np.float32), indices, (3, 4), unique_indices=True),
        ig.InvalidProblemError,
        *("take_along_axis_backward", "unique_indices", "5", "4"),
    )
    broadcast = np.zeros((3, 2), np.int64)
    refused(
        lambda: ig.take_along_axis_backward(V, broadcast, (1, 4), unique_indices=True),
        ig.InvalidProblemError,
        *("unique_indices", "(1, 4)", "broadcast"),
    )


def test_rank():
    nine = np.zeros((1,) * 9, np.float32)
    refused(lambda: ig.take_along_axis(nine, nine.astype(int)), ig.InvalidProblemError, "rank 9", "1 to 8")
    eight = np.zeros((1,) * 8, np.float32)
    refused(lambda: ig.embedding(eight, I64), ig.InvalidProblemError, "embedding: ", "rank 9")
    assert ig.embedding(eight, np.array([0])).shape == eight.shape
    assert ig.embedding(X, np.array(1)).tolist() == X[1].tolist()


def test_things_that_are_no_arrays():
    for thing in ([[0, 1]], 3, None, "text"):
        refused(lambda thing=thing: ig.take_along_axis(thing, I64), ig.InvalidProblemError, "x", type(thing).__name__)
        refused(lambda thing=thing: ig.embedding(X, thing), ig.InvalidProblemError, "indices", type(thing).__name__)


def test_masked_arrays():
    masked = np.ma.masked_array(X, mask=X > 3)
    refused(lambda: ig.take_along_axis(masked, I64), ig.InvalidProblemError, "x", "masked")
    refused(lambda: ig.take_along_axis(X, np.ma.masked_array(I64)), ig.InvalidProblemError, "indices", "masked")


def test_tensors_that_need_a_gradient():
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(X.copy()).requires_grad_()
    refused(
        lambda: ig.take_along_axis(x, torch.from_numpy(I64)), ig.UnsupportedError, "x requires a gradient", "no_grad"
    )
    with torch.no_grad():
        assert ig.take_along_axis(x, torch.from_numpy(I64)).tolist() == X[:, :1].repeat(2, 1).tolist()


# --- descriptors and outputs -----------------------------------------------------------------------------------------
def test_descriptors_that_make_no_sense():
    invalid, unsupported = ig.InvalidProblemError, ig.UnsupportedError
    once = ig.TakeAlongAxisBackwardDescriptor((3,), (3,), "float32", unique_indices=1)
    cases = [
        (ig.TakeAlongAxisPlan, ig.TakeAlongAxisDescriptor((3, 4), (2, 4), "float32"), invalid, "indices_shape"),
        (ig.TakeAlongAxisPlan, ig.TakeAlongAxisDescriptor((3, 4), (3, 4, 1), "float32"), invalid, "indices_shape"),
        (ig.TakeAlongAxisPlan, ig.TakeAlongAxisDescriptor((3, -4), (3, 4), "float32"), invalid, "shape"),
        (ig.TakeAlongAxisPlan, ig.TakeAlongAxisDescriptor((3, 4), (3, 4), "float8"), unsupported, "dtype"),
        (ig.TakeAlongAxisPlan, ig.TakeAlongAxisDescriptor((3,), (3,), "float32", "int8"), unsupported, "index_dtype"),
        (ig.ScatterSumPlan, ig.ScatterSumDescriptor((3, 4), (3, 4), "float32", "int64", 2), invalid, "axis"),
        (ig.TakeAlongAxisBackwardPlan, once, invalid, "unique_indices"),
        (ig.IndexSelectPlan, ig.IndexSelectDescriptor((), (3,), "float32"), invalid, "rank 0"),
        (ig.IndexSelectPlan, ig.IndexSelectDescriptor((3,), (3,), "float32", negative=None), invalid, "negative"),
        (ig.IndexSumPlan, ig.IndexSumDescriptor((3,), (3,), "float32", accumulate=2), invalid, "accumulate"),
        (ig.IndexSumPlan, ig.IndexSumDescriptor((3,), (3,), "float32", skipped=1.5), invalid, "skipped"),
        (ig.IndexSumPlan, ig.IndexSumDescriptor((3,), (3,), "float32", skipped=1 << 63), invalid, "skipped"),
    ]  # fmt: skip
    for plan, descriptor, kind, fragment in cases:
        refused(lambda plan=plan, d=descriptor: plan.select(d), kind, descriptor.operation, fragment)


def test_what_a_plan_says_about_itself():
    for descriptor, plan_type in (
        (ig.TakeAlongAxisDescriptor((3, 4), (3, 2), "bfloat16", "int32"), ig.TakeAlongAxisPlan),
        (ig.IndexSumDescriptor([3, 4], [np.int8(2)], "bfloat16", "int32"), ig.IndexSumPlan),
    ):
        plan = plan_type.select(descriptor)
        sku = plan.sku
        assert (sku.category, sku.op, sku.dtype, sku.aux_dtype) == ("gather", descriptor.operation, "bfloat16", "int32")
        assert plan.precision_guarantee.math_precision == "float32"
        assert plan.precision_guarantee.order_invariant
        assert plan.workspace_size == 0
        assert plan.descriptor.validated() == plan.descriptor
        assert {type(size) for size in (*plan.descriptor.shape, *plan.descriptor.indices_shape)} == {int}


def test_outputs_that_overlap_an_input():
    x = X.copy()
    plan = ig.ScatterSumPlan.select(ig.ScatterSumDescriptor((2, 4), (2, 2), "float32"))
    given = {"indices": I64[:2], "values": V[:2]}
    refused(lambda: plan.run(x=x[:2], out=x[1:], **given), ig.InvalidProblemError, "out overlaps x", unchanged=[x])
    values = np.zeros((3, 4), np.float32)
    square = ig.ScatterSumPlan.select(ig.ScatterSumDescriptor((3, 4), (3, 4), "float32"))
    refused(
        lambda: square.run(indices=np.zeros((3, 4), int), values=values, x=X, out=values),
        ig.InvalidProblemError,
        "out overlaps values",
        unchanged=[values],
    )
    take = ig.TakeAlongAxisPlan.select(ig.TakeAlongAxisDescriptor((3, 4), (3, 4), "float32"))
    refused(
        lambda: take.run(x=x, indices=np.zeros((3, 4), int), v=x), ig.InvalidProblemError, "v overlaps x", unchanged=[x]
    )


def test_the_axis_of_slices_is_the_callers():
    slices = np.ones((3, 2), np.float32)
    for axis in (1, -1):
        call = lambda axis=axis: ig.scatter_sum(X, np.array([0, 4]), slices, axis)  # noqa: E731
        refused(call, ig.IndexOutOfRangeError, "scatter_sum: indices[1] is 4; axis 1 of size 4 accepts -4 to 3")
