"""Bad input gets the error that the design names, with a message that helps, and before anything is written."""

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import isograd as ig
from isograd.core import arrays

SHAPE = (4, 6)


def forward_plan(**changes):
    fields = {"shape": SHAPE, "dtype": "float32", "axis": -1} | changes
    return ig.SoftmaxPlan.select(ig.SoftmaxDescriptor(**fields))


def backward_plan(**changes):
    fields = {"shape": SHAPE, "dtype": "float32", "axis": -1} | changes
    return ig.LogSoftmaxBackwardPlan.select(ig.LogSoftmaxBackwardDescriptor(**fields))


def array(shape=SHAPE, dtype=np.float32):
    return np.random.default_rng(40).standard_normal(shape).astype(dtype)


def whole(x):
    """The array that owns the memory of a view."""
    while isinstance(x.base, np.ndarray):
        x = x.base
    return x


def refused(call, kind, *fragments, unchanged=()):
    """The call raises exactly this class, its message holds the fragments, and no array changes."""
    before = [whole(x).tobytes() for x in unchanged]
    with pytest.raises(ig.IsogradError) as caught:
        call()
    assert type(caught.value) is kind
    assert [f for f in fragments if f not in str(caught.value)] == [], str(caught.value)
    assert [whole(x).tobytes() for x in unchanged] == before


def refused_by_plan(plan, arguments, kind, *fragments):
    assert plan.can_implement(**arguments) is False
    kept = [x for x in arguments.values() if isinstance(x, np.ndarray)]
    refused(lambda: plan.run(**arguments), kind, plan.sku.op, *fragments, unchanged=kept)


def accepted_by_plan(plan, arguments):
    inputs = [np.array(arguments[name]) for name in plan.descriptor.declared.inputs]
    assert plan.can_implement(**arguments) is True
    plan.run(**arguments)
    expected = getattr(ig, plan.sku.op)(*inputs, plan.descriptor.axis)
    np.testing.assert_array_equal(arguments[plan.outputs[0]], expected)


def test_the_helper_notices_a_write_before_the_error():
    y = array()

    def writes_first():
        y[0, 0] = 1
        raise ig.InvalidProblemError("softmax")

    with pytest.raises(AssertionError):
        refused(writes_first, ig.InvalidProblemError, unchanged=[y])


def test_every_class_is_a_standard_one_too():
    pairs = {
        ig.InvalidProblemError: ValueError,
        ig.UnsupportedError: NotImplementedError,
        ig.BufferTooSmallError: ValueError,
        ig.WorkspaceTooSmallError: ValueError,
        ig.MisalignedOperandError: ValueError,
        ig.IndexOutOfRangeError: IndexError,
        ig.DeviceMismatchError: ValueError,
    }
    for own, standard in pairs.items():
        assert issubclass(own, ig.IsogradError)
        assert issubclass(own, standard)


# --- the functional API ---------------------------------------------------------------------------------------------
FORWARD = [ig.softmax, ig.log_softmax]
BACKWARD = [ig.softmax_backward, ig.log_softmax_backward]
each_function = pytest.mark.parametrize("function", FORWARD + BACKWARD, ids=lambda f: f.__name__)


def call(function, x, *rest, **keywords):
    return function(x, x, *rest, **keywords) if function in BACKWARD else function(x, *rest, **keywords)


@each_function
@pytest.mark.parametrize("axis", [2, -3, 10**30])
def test_axis_out_of_range(function, axis):
    out = array()
    refused(
        lambda: call(function, array(), axis, out=out),
        ig.InvalidProblemError,
        function.__name__,
        f"axis is {axis}",
        "-2 to 1",
        unchanged=[out],
    )


@each_function
@pytest.mark.parametrize("axis", ["1", None, 0.5, (0,)])
def test_axis_that_is_no_integer(function, axis):
    refused(lambda: call(function, array(), axis), ig.InvalidProblemError, function.__name__, repr(axis), "integers")


@each_function
def test_an_output_that_does_not_fit_is_called_out(function):
    for out, fragment in (
        (array(dtype=np.float64), "out has dtype float64; expected float32"),
        (array((6, 4)), "out has shape (6, 4); the result has shape (4, 6)"),
        ([1.0], "out is list"),
    ):
        refused(
            lambda out=out: call(function, array(), out=out), ig.InvalidProblemError, f"{function.__name__}: {fragment}"
        )


def test_axis_that_cannot_be_hashed():
    refused(lambda: ig.softmax(array(), [0]), ig.InvalidProblemError, "softmax", "axis", "[0]")


def test_axis_is_checked_also_when_an_equal_one_was_used_before():
    for _ in range(3):
        ig.softmax(array(), 1)
    refused(lambda: ig.softmax(array(), 1.0), ig.InvalidProblemError, "softmax", "1.0", "integers")


@each_function
def test_rank(function):
    name = function.__name__
    refused(lambda: call(function, np.float32(3) + array(())), ig.InvalidProblemError, name, "float32")
    refused(lambda: call(function, array(())), ig.InvalidProblemError, name, "rank 0", "rank 1 to 8")
    refused(lambda: call(function, array((1,) * 9)), ig.InvalidProblemError, name, "rank 9", "rank 1 to 8")
    assert call(function, array((1,) * 8)).shape == (1,) * 8


@each_function
@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "complex64", "longdouble", "object", "S3"])
def test_dtypes_outside_the_matrix(function, dtype):
    x = np.zeros(SHAPE, dtype)
    accepted = ("float16", "bfloat16", "float32", "float64")
    refused(lambda: call(function, x), ig.UnsupportedError, function.__name__, str(x.dtype), *accepted)


@each_function
def test_foreign_byte_order(function):
    x = array().astype(np.dtype(np.float32).newbyteorder())
    fragments = (function.__name__, str(x.dtype), "byte order", "float32")
    refused(lambda: call(function, x), ig.UnsupportedError, *fragments)


@each_function
def test_things_that_are_no_arrays(function):
    argument = "dy" if function in BACKWARD else "x"
    for thing in ([[1.0, 2.0]], 3.0, None, "text", np.float32(1)):
        fragments = (function.__name__, argument, type(thing).__name__, "expected")
        refused(lambda thing=thing: call(function, thing), ig.InvalidProblemError, *fragments)


@each_function
def test_masked_arrays(function):
    x = np.ma.masked_array(array(), mask=np.eye(4, 6))
    refused(lambda: call(function, x), ig.InvalidProblemError, function.__name__, "masked", "fill")
    out = np.ma.masked_array(array(), mask=np.eye(4, 6))
    refused(
        lambda: call(function, array(), out=out), ig.InvalidProblemError, function.__name__, "masked", unchanged=[out]
    )


class Foreign:
    """An array of another library, on a device of DLPack's numbering."""

    def __init__(self, device, error=None):
        self.device, self.error = device, error

    def __dlpack_device__(self):
        return self.device, 0

    def __dlpack__(self, **keywords):
        raise self.error


@each_function
def test_arrays_that_cannot_come_in(function):
    fragments = (function.__name__, "Foreign", "CPU")
    refused(lambda: call(function, Foreign(2)), ig.DeviceMismatchError, *fragments)
    for error in (BufferError("sparse"), RuntimeError("lazy"), TypeError("old")):
        fragments = (function.__name__, "Foreign", str(error))
        refused(lambda error=error: call(function, Foreign(1, error)), ig.InvalidProblemError, *fragments)


@pytest.mark.parametrize("function", BACKWARD, ids=lambda f: f.__name__)
def test_mismatched_gradients(function):
    name = function.__name__
    dx = array()
    refused(
        lambda: function(array(), array((6, 4)), out=dx),
        ig.InvalidProblemError,
        *(name, "y", "(6, 4)", "(4, 6)"),
        unchanged=[dx],
    )
    refused(
        lambda: function(array(), array(dtype=np.float64), out=dx),
        ig.InvalidProblemError,
        *(name, "y", "float64", "float32"),
        unchanged=[dx],
    )
    # Shapes that NumPy would broadcast are refused as well.
    refused(lambda: function(array(), array((1, 6))), ig.InvalidProblemError, name, "(1, 6)", "(4, 6)")
    refused(lambda: function(array(), [[1.0]]), ig.InvalidProblemError, name, "y", "list")


# --- outputs --------------------------------------------------------------------------------------------------------
def both_plans():
    yield forward_plan(), {"x": array()}, "y"
    yield backward_plan(), {"dy": array(), "y": array()}, "dx"


def test_outputs_of_a_wrong_kind():
    for plan, inputs, key in both_plans():
        small, big, turned = array((4, 5)), array((4, 7)), array((6, 4))
        refused_by_plan(plan, inputs | {key: small}, ig.BufferTooSmallError, key, "(4, 5)", "(4, 6)")
        refused_by_plan(plan, inputs | {key: array((0,))}, ig.BufferTooSmallError, key, "(0,)", "(4, 6)")
        refused_by_plan(plan, inputs | {key: big}, ig.InvalidProblemError, key, "(4, 7)", "(4, 6)")
        refused_by_plan(plan, inputs | {key: turned}, ig.InvalidProblemError, key, "(6, 4)", "(4, 6)")
        wide = array(dtype=np.float64)
        refused_by_plan(plan, inputs | {key: wide}, ig.InvalidProblemError, key, "float64", "float32")
        half = array(dtype=ml_dtypes.bfloat16)
        refused_by_plan(plan, inputs | {key: half}, ig.InvalidProblemError, key, "bfloat16", "float32")
        whole_number = np.zeros(SHAPE, np.int32)
        refused_by_plan(plan, inputs | {key: whole_number}, ig.UnsupportedError, key, "int32", "float32")
        refused_by_plan(plan, inputs | {key: [[1.0]]}, ig.InvalidProblemError, key, "list", "NumPy array")


def test_read_only_output():
    for plan, inputs, key in both_plans():
        out = array()
        out.flags.writeable = False
        refused_by_plan(plan, inputs | {key: out}, ig.InvalidProblemError, key, "read-only", "writeable")
        frozen = np.broadcast_to(array((1, 6)), SHAPE)
        refused_by_plan(plan, inputs | {key: frozen}, ig.InvalidProblemError, key, "read-only")
        # Inputs may be read-only.
        for x in inputs.values():
            x.flags.writeable = False
        accepted_by_plan(plan, inputs | {key: array()})


def test_output_that_overlaps_an_input_in_part():
    for plan, inputs, key in both_plans():
        for name in inputs:
            base = array((5, 6))
            shifted = inputs | {name: base[:-1], key: base[1:]}
            refused_by_plan(plan, shifted, ig.InvalidProblemError, key, name, "overlaps", "in part")
            line = array((25,))
            by_one = inputs | {name: line[:24].reshape(SHAPE), key: line[1:].reshape(SHAPE)}
            refused_by_plan(plan, by_one, ig.InvalidProblemError, key, name, "overlaps")
            base = array()
            backwards = inputs | {name: base, key: base[:, ::-1]}
            refused_by_plan(plan, backwards, ig.InvalidProblemError, key, name, "overlaps")
            wide = array((4, 18))
            crossing = inputs | {name: wide[:, :12:2], key: wide[:, 6::2]}
            refused_by_plan(plan, crossing, ig.InvalidProblemError, key, name, "overlaps")
    square = array((5, 5))
    refused_by_plan(
        forward_plan(shape=(5, 5)), {"x": square, "y": square.T}, ig.InvalidProblemError, "y", "x", "overlaps"
    )
    # An expanded input, one element of which is the output's.
    line = array((6,))
    expanded = {"x": np.broadcast_to(line, (1, 6)), "y": array((1, 6))}
    accepted_by_plan(forward_plan(shape=(1, 6)), expanded)
    two = {"x": np.broadcast_to(line, (2, 6)), "y": as_strided(line, (2, 6), (24, 4))[:1].repeat(2, 0)}
    accepted_by_plan(forward_plan(shape=(2, 6)), two)


def test_outputs_that_only_seem_to_overlap():
    for plan, inputs, key in both_plans():
        for name in inputs:
            base = array((4, 12))
            accepted_by_plan(plan, inputs | {name: base[:, ::2], key: base[:, 1::2]})
            accepted_by_plan(plan, inputs | {name: base[:, 1::2][:, ::-1], key: base[:, ::2]})
            rows = array((8, 6))
            accepted_by_plan(plan, inputs | {name: rows[::2], key: rows[1::2]})
            same = array()
            accepted_by_plan(plan, inputs | {name: same, key: same})
            turned = array((12, 8)).T[::2, ::-2]
            accepted_by_plan(plan, inputs | {name: turned, key: whole(turned).T[::2, ::-2]})
    # Both inputs one array, and the output the same again.
    one = array()
    accepted_by_plan(backward_plan(), {"dy": one, "y": one, "dx": one})
    # A dimension of size 1 may have any stride.
    x = array((1, 6))
    accepted_by_plan(forward_plan(shape=(1, 6)), {"x": x, "y": as_strided(x, (1, 6), (8, 4))})


def test_output_that_overlaps_itself():
    for plan, inputs, key in both_plans():
        line = array((60,))
        for strides in ((4, 4), (0, 4), (8, 4), (20, 4), (8, 0), (12, 8)):
            out = as_strided(line, SHAPE, strides)
            refused_by_plan(plan, inputs | {key: out}, ig.InvalidProblemError, key, "share memory", "one address")
        down = as_strided(line[30:], SHAPE, (-8, 4))
        refused_by_plan(plan, inputs | {key: down}, ig.InvalidProblemError, key, "share memory")
        # Interleaved dimensions whose elements are apart all the same: 13 i + 2 j repeats nothing here.
        accepted_by_plan(plan, inputs | {key: as_strided(array((80,)), SHAPE, (4 * 13, 4 * 2))})
        accepted_by_plan(plan, inputs | {key: as_strided(array((80,)), SHAPE, (4 * 9, 4 * 2))})


def test_misaligned_operands():
    size = 4 * 24
    for plan, inputs, key in both_plans():
        for name in [*inputs, key]:
            raw = np.zeros(size + 16, np.uint8)
            raw = raw[-raw.ctypes.data % 4 + 1 :]
            off = raw[:size].view(np.float32).reshape(SHAPE)
            arguments = inputs | {key: array()} | {name: off}
            refused_by_plan(plan, arguments, ig.MisalignedOperandError, name, "multiple", "element size")
            packed = np.zeros(SHAPE, [("x", "f4"), ("tag", "u1")])["x"]
            arguments = inputs | {key: array()} | {name: packed}
            refused_by_plan(plan, arguments, ig.MisalignedOperandError, name, "multiple", "element size")


# --- plans ----------------------------------------------------------------------------------------------------------
def test_arguments_by_wrong_names():
    for plan, inputs, key in both_plans():
        complete = inputs | {key: array()}
        names = sorted(complete)
        for missing in names:
            rest = {k: v for k, v in complete.items() if k != missing}
            refused_by_plan(plan, rest, ig.InvalidProblemError, str(sorted(rest)), str(names))
        refused_by_plan(plan, complete | {"out": array()}, ig.InvalidProblemError, "'out'", str(names))


def test_inputs_that_are_not_the_plans():
    for plan, inputs, key in both_plans():
        for name in inputs:
            turned = inputs | {key: array(), name: array((6, 4))}
            refused_by_plan(plan, turned, ig.InvalidProblemError, name, "(6, 4)", "(4, 6)")
            wide = inputs | {key: array(), name: array(dtype=np.float64)}
            refused_by_plan(plan, wide, ig.InvalidProblemError, name, "float64", "float32")
            swapped = inputs | {key: array(), name: array().astype(np.dtype(np.float32).newbyteorder())}
            refused_by_plan(plan, swapped, ig.UnsupportedError, name, "byte order")
            masked = inputs | {key: array(), name: np.ma.masked_array(array())}
            refused_by_plan(plan, masked, ig.InvalidProblemError, name, "masked")


def test_a_stream_on_the_cpu():
    x, y = array(), array()
    refused(
        lambda: forward_plan().run(x=x, y=y, stream=object()),
        ig.InvalidProblemError,
        "softmax",
        "stream",
        "None",
        unchanged=[y],
    )


def test_workspaces():
    plan, x, y = forward_plan(), array(), array()
    for workspace in ([], 7, "bytes", np.zeros((8, 8))[:, ::2], np.zeros((8, 8)).T):
        fragments = ("softmax", "workspace", type(workspace).__name__, "contiguous")
        refused(
            lambda workspace=workspace: plan.run(x=x, y=y, workspace=workspace),
            ig.InvalidProblemError,
            *fragments,
            unchanged=[y],
        )
    frozen = np.zeros(64, np.uint8)
    frozen.flags.writeable = False
    refused(lambda: plan.run(x=x, y=y, workspace=frozen), ig.InvalidProblemError, "writeable", unchanged=[y])
    raw = np.zeros(256, np.uint8)
    start = -raw.ctypes.data % 64
    refused(
        lambda: plan.run(x=x, y=y, workspace=raw[start + 8 :]),
        ig.MisalignedOperandError,
        *("softmax", "workspace", hex(raw.ctypes.data + start + 8), "64"),
        unchanged=[y],
    )
    plan.run(x=x, y=y, workspace=raw[start : start + 64])
    np.testing.assert_array_equal(y, ig.softmax(x))


def test_descriptors_that_make_no_sense():
    accepted = "float16, bfloat16, float32, float64"
    for dtype in ("int32", "Float32", np.float32, np.dtype(np.float32), None):
        fragments = ("softmax", "dtype", repr(dtype), accepted)
        refused(lambda dtype=dtype: forward_plan(dtype=dtype), ig.UnsupportedError, *fragments)
    bad = [
        ({"shape": (4, 6.0)}, ("softmax", "shape", "6.0", "integers")),
        ({"shape": ()}, ("softmax", "shape ()", "rank 0", "1 to 8")),
        ({"shape": (1,) * 9}, ("softmax", "rank 9", "1 to 8")),
        ({"shape": (4, -6)}, ("softmax", "(4, -6)", "negative")),
        ({"shape": 24}, ("softmax", "shape", "24")),
        ({"axis": 2}, ("softmax", "axis is 2", "(4, 6)", "-2 to 1")),
        ({"axis": "last"}, ("softmax", "'last'", "integers")),
    ]
    for changes, fragments in bad:
        refused(lambda changes=changes: forward_plan(**changes), ig.InvalidProblemError, *fragments)
    for descriptor in ("softmax", None, ig.SoftmaxBackwardDescriptor(SHAPE, "float32")):
        refused(
            lambda descriptor=descriptor: ig.SoftmaxPlan.select(descriptor),
            ig.InvalidProblemError,
            *("SoftmaxPlan.select", type(descriptor).__name__, "SoftmaxDescriptor"),
        )


def test_devices_and_preferences_that_nobody_serves():
    descriptor = ig.SoftmaxDescriptor(SHAPE, "float32")
    refused(
        lambda: ig.SoftmaxPlan.select(descriptor, device="abacus"), ig.UnsupportedError, "softmax", "'abacus'", "cpu"
    )
    refused(
        lambda: ig.SoftmaxPlan.select(descriptor, preference="fastest"),
        ig.UnsupportedError,
        *("softmax", "'fastest'", "numba", "float32", "cpu"),
    )


def test_tensors_on_another_device():
    torch = pytest.importorskip("torch")
    x = torch.zeros(SHAPE, device="meta")
    with pytest.raises(ig.IsogradError) as caught:
        forward_plan().run(x=x, y=array())
    assert type(caught.value) is ig.DeviceMismatchError
    assert "x is on meta" in str(caught.value)
    assert "cpu" in str(caught.value)


def test_empty_arrays_are_no_error():
    for shape in ((0,), (0, 6), (4, 0), (2, 0, 3)):
        for dtype in ("float16", "bfloat16", "float32", "float64"):
            x = np.zeros(shape, arrays.numpy_dtype(dtype))
            for axis in range(len(shape)):
                for function in FORWARD + BACKWARD:
                    y = call(function, x, axis)
                    assert (y.shape, y.dtype) == (x.shape, x.dtype)
                    assert call(function, x, axis, out=x) is x
