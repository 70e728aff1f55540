"""Index arithmetic beyond 2**31 and 2**32 elements, on sparse files of which next to nothing is touched."""

import numpy as np
import pytest
from ml_dtypes import bfloat16

import isograd as ig
from isograd.numerics.numba_memory import STREAMED, row_offset
from isograd.runtime import parallel
from isograd.runtime.layout import plan_walk
from isograd.runtime.numba_compile import kernel

FAR = (1 << 31) + 7
OPERATIONS = ["softmax", "log_softmax", "softmax_backward", "log_softmax_backward"]
each_operation = pytest.mark.parametrize("operation", OPERATIONS)


@kernel
def run_row_offset(rows, shape, strides, offsets):
    for i in range(rows.size):
        offsets[i] = row_offset(rows[i], shape, strides)


def offset_of(row, shape, strides):
    """The same in Python's integers."""
    total = 0
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        row, index = divmod(row, size)
        total += index * stride
    return total


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((1 << 33,), (3,)),
        ((5, FAR), (1 << 34, 2)),
        ((1 << 16, 1 << 16, 5), (5 << 17, 5, 1)),
        ((1 << 20, 1 << 20), (-(1 << 21), 1)),
        ((3, 1 << 31, 2), (0, -4, 1 << 40)),
        ((2,) * 7, (1 << 32, 1 << 31, -(1 << 33), 0, 1 << 36, 3, 1)),
        ((1, 1 << 32, 1), (9, 1, 9)),
    ],
)
def test_row_offset(shape, strides):
    count = int(np.prod(shape, dtype=object))
    rng = np.random.default_rng(80)
    rows = np.unique(np.concatenate([[0, 1, count // 2, count - 2, count - 1], rng.integers(0, count, 200)]))
    offsets = np.empty_like(rows)
    run_row_offset(rows, np.array(shape, np.int64), np.array(strides, np.int64), offsets)
    expected = [offset_of(int(row), shape, strides) for row in rows]
    assert offsets.tolist() == expected
    # In 32 bits these would come out wrong.
    wrapped = [(offset + (1 << 31)) % (1 << 32) - (1 << 31) for offset in expected]
    assert wrapped != expected


def test_walks_of_huge_arrays():
    # Contiguous: everything but the axis is one dimension of 2**33 rows.
    rows = plan_walk((1 << 16, 1 << 17, 8), ((1 << 20, 8, 1),) * 2, 2)
    assert (rows.shape, rows.strides, rows.lanes, rows.length) == ((1 << 33,), ((8,), (8,)), 0, 8)
    lanes = plan_walk((2, 1 << 33), ((1 << 33, 1),) * 2, 0)
    assert (lanes.shape, lanes.lanes, lanes.axis_strides) == ((1,), 1 << 33, (1 << 33, 1 << 33))


class Sparse:
    """bfloat16 arrays in files that take no room on the disk; the files go with the fixture."""

    def __init__(self, folder):
        self.folder, self.count = folder, 0

    def __call__(self, shape):
        self.count += 1
        try:
            mapped = np.memmap(self.folder / f"{self.count}", bfloat16, "w+", shape=shape)
        except OSError as error:
            pytest.skip(f"no sparse file of {2 * np.prod(shape, dtype=object)} bytes here: {error}")
        return mapped.view(np.ndarray)


@pytest.fixture
def sparse(tmp_path):
    return Sparse(tmp_path)


def ordinary(operation, shape, seed=81):
    """Arguments of usual size, by name."""
    x = np.random.default_rng(seed).standard_normal(shape).astype(bfloat16)
    names = ("dy", "y") if operation.endswith("_backward") else ("x",)
    return {name: x * bfloat16(i + 1) for i, name in enumerate(names)}


def expected_of(operation, inputs, axis):
    return getattr(ig, operation)(*inputs.values(), axis).tobytes()


@each_operation
@pytest.mark.parametrize("axis", [0, 1])
def test_strides_beyond_32_bits(operation, axis, sparse):
    # Three rows of 40, each 2**31 elements from the next: rows far apart for axis 1, an axis of far steps for axis 0.
    inputs = ordinary(operation, (3, 40))
    far = {}
    for name, value in inputs.items():
        far[name] = sparse((3, FAR))[:, -40:]
        far[name][...] = value
    out = sparse((3, FAR))[:, 60:100]
    getattr(ig, operation)(*far.values(), axis, out=out)
    assert out.tobytes() == expected_of(operation, inputs, axis)
    assert not out.base[:, :60].any()
    # The other way round in memory: backwards, and without contiguous neighbours.
    out = sparse((3, FAR))[::-1, -100:-20:2]
    turned = [value[:, ::-1] for value in far.values()]
    getattr(ig, operation)(*turned, axis, out=out)
    reversed_inputs = {name: np.ascontiguousarray(value[:, ::-1]) for name, value in inputs.items()}
    assert out.tobytes() == expected_of(operation, reversed_inputs, axis)


@each_operation
@pytest.mark.parametrize("walk", ["rows", "lanes"])
def test_the_last_of_more_than_two_to_the_31_rows(operation, walk, sparse, monkeypatch):
    # The whole call is planned as it stands; of its work only the first and the last piece are done.
    planned = []

    def ends_only(function, count, grain, *arguments):
        planned.append(count)
        with parallel.fenv.default_environment():
            function(*arguments, 0, 1)
            function(*arguments, count - 1, count)

    rows = FAR + 100
    axis = 1 if walk == "rows" else 0
    shape = (rows, 4) if walk == "rows" else (4, rows)
    last = slice(rows - 1, None)
    inputs = ordinary(operation, (1, 4) if walk == "rows" else (4, 1))
    huge = {}
    for name, value in inputs.items():
        huge[name] = sparse(shape)
        huge[name][(last, slice(None)) if walk == "rows" else (slice(None), last)] = value
    out = sparse(shape)
    expected = expected_of(operation, inputs, axis)
    monkeypatch.setattr(parallel, "for_ranges", ends_only)
    getattr(ig, operation)(*huge.values(), axis, out=out)
    result = out[last] if walk == "rows" else out[:, last]
    assert result.tobytes() == expected
    assert planned == [rows] if walk == "rows" else planned[0] > rows // 1024
    middle = out[rows // 2] if walk == "rows" else out[:, rows // 2]
    assert not middle.any()


@each_operation
@pytest.mark.parametrize(("dtype", "axis", "shape"), [
    (np.float32, 1, (2053, 8209)), (np.float32, 0, (61, 275_037)), (bfloat16, 1, (4099, 8219))
], ids=["float32 rows", "float32 columns", "bfloat16 rows"])  # fmt: skip
def test_results_that_go_past_the_caches(operation, dtype, axis, shape):
    inputs = {name: value.astype(dtype) for name, value in ordinary(operation, (53, shape[1])).items()}
    rows = np.arange(shape[0]) % 53
    inputs = {name: value[rows] for name, value in inputs.items()}
    count = np.prod(shape)
    whole = np.full(count + 64, 7, dtype)
    assert whole.nbytes >= STREAMED
    out = whole[3 : count + 3].reshape(shape)  # neither it nor its rows begin with a line of memory
    getattr(ig, operation)(*inputs.values(), axis, out=out)
    if axis == 1:
        assert out[:53].tobytes() == expected_of(operation, {name: value[:53] for name, value in inputs.items()}, axis)
        assert out[53:].tobytes() == out[:-53].tobytes()
    else:
        some = slice(-100, None)
        part = {name: value[:, some] for name, value in inputs.items()}
        assert out[:, some].tobytes() == expected_of(operation, part, axis)
    assert (whole[:3] == 7).all()
    assert (whole[count + 3 :] == 7).all()


def test_an_expanded_input_of_more_than_two_to_the_31_elements():
    # Stride 0 makes it small in memory; sizes and bounds of such arrays must not overflow either.
    x = np.broadcast_to(np.float32([1, 2, 3]), (1 << 20, 1 << 12, 3))
    assert x.size > 1 << 33
    plan = ig.SoftmaxPlan.select(ig.SoftmaxDescriptor(x.shape, "float32"))
    small = np.zeros((4, 3), np.float32)
    with pytest.raises(ig.BufferTooSmallError):
        plan.run(x=x, y=small)
    with pytest.raises(ig.InvalidProblemError, match="read-only"):
        plan.run(x=x, y=x)
    assert not small.any()


def test_long_rows_keep_their_scratch_memory(run_python):
    # With this setting memory of more than 64 KiB leaves the process as soon as it is freed.
    code = """
        import numpy as np, isograd as ig
        x = np.random.default_rng(0).standard_normal((2, 70_001)).astype(np.float32)
        y = ig.softmax(x)
        ig.log_softmax_backward(x, ig.log_softmax(x))
        print(bool(abs(y.sum(1) - 1).max() < 1e-5))
    """
    assert run_python(code, MALLOC_MMAP_THRESHOLD_="65536") == "True"
