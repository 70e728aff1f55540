"""The CPU kernels return the reference's bits for every layout, and the same bits however the work is cut."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import isograd as ig
import isograd.core.arrays
from isograd.numerics import constants as c
from isograd.numerics import reference as numerics
from isograd.numerics.numba_memory import BLOCK, LANES
from isograd.ops.softmax import reference as ref
from isograd.runtime import parallel
from isograd.runtime.layout import plan_walk

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
FORWARD = ["softmax", "log_softmax"]
BACKWARD = ["softmax_backward", "log_softmax_backward"]
OPERATIONS = FORWARD + BACKWARD

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
each_operation = pytest.mark.parametrize("operation", OPERATIONS)
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in cast:RuntimeWarning")


def raw(x):
    return (x.dtype, x.shape, np.ascontiguousarray(x).tobytes())


def inputs(operation, rng, shape, dtype, axis=-1):
    """Ordinary arguments of an operation: logits, or a gradient and the result it belongs to."""
    x = (3 * rng.standard_normal(shape)).astype(dtype)
    if operation in FORWARD:
        return (x,)
    kind = operation.removesuffix("_backward")
    return rng.standard_normal(shape).astype(dtype), getattr(ig, kind)(x, axis)


def library(operation, arrays, axis=-1, out=None):
    return getattr(ig, operation)(*arrays, axis, out=out)


def reference(operation, arrays, axis=-1):
    return getattr(ref, operation)(*arrays, axis)


# --- any shape, stride, axis, dtype ---------------------------------------------------------------------------------
def values(rng, flavour, shape, dtype):
    x = rng.standard_normal(shape)
    if flavour == "offset":
        x = x + rng.choice([1e4, -300, 255.9])
    elif flavour == "spread":
        x = x * np.exp2(rng.uniform(-160, 140, shape))
    elif flavour == "special":
        tiny = float(np.finfo(dtype).smallest_subnormal) if dtype != ml_dtypes.bfloat16 else 2.0**-133
        pool = np.array([np.inf, -np.inf, np.nan, -np.nan, 0.0, -0.0, tiny, -3 * tiny, 3e38, -3e38, 6e4, -6e4])
        x = np.where(rng.random(shape) < 0.2, rng.choice(pool, shape), x)
    elif flavour == "masked":
        x = np.where(rng.random(shape) < 0.6, -np.inf, x)
    return x.astype(dtype)


class Stored:
    """An array of `shape` whose dimensions are stored in any order, forwards or backwards, with gaps."""

    def __init__(self, shape, dtype, order, steps):
        self.base = np.full([shape[d] * abs(steps[d]) for d in order], np.array(7, dtype))
        cut = tuple(slice(None, None, steps[d]) for d in order)
        inverse = np.argsort(order)
        self.view = self.base[cut].transpose(inverse)
        inside = np.zeros(self.base.shape, bool)
        inside[cut] = True
        self._outside = ~inside
        assert self.view.shape == tuple(shape)

    def gaps_untouched(self):
        return bool(np.all(self.base[self._outside] == np.array(7, self.base.dtype)))


@st.composite
def layouts(draw, rank):
    order = draw(st.permutations(range(rank)))
    return order, draw(st.lists(st.sampled_from([1, 1, 1, 2, -1, -2, 3]), min_size=rank, max_size=rank))


@st.composite
def problems(draw, operands):
    rank = draw(st.integers(1, 8))
    shape, room = [], 360
    for _ in range(rank):
        size = draw(st.sampled_from([0, 1, 1, 2, 3, 3, 5, 7, 12, 40]))
        size = size if size <= room else 1
        room = room // size if size else room
        shape.append(size)
    shape = draw(st.permutations(shape))
    return {
        "shape": tuple(shape),
        "axis": draw(st.integers(-rank, rank - 1)),
        "layouts": [draw(layouts(rank)) for _ in range(operands)],
        "expanded": [draw(st.sets(st.integers(0, rank - 1), max_size=2)) for _ in range(operands - 1)],
        "flavour": draw(st.sampled_from(["normal", "normal", "offset", "spread", "special", "masked"])),
        "seed": draw(st.integers(0, 2**32)),
        "alias": draw(st.sampled_from([None, None, 0, operands - 2])),
    }


def laid_out(x, layout, expanded):
    """The array in a given layout; along the expanded axes its first element is repeated with stride 0."""
    small = x[tuple(slice(0, 1) if d in expanded else slice(None) for d in range(x.ndim))]
    stored = Stored(small.shape, x.dtype, *layout)
    stored.view[...] = small
    return np.broadcast_to(stored.view, x.shape) if expanded else stored.view


def check_problem(dtype, problem, operation):
    rng = np.random.default_rng(problem["seed"])
    shape, axis = problem["shape"], problem["axis"]
    arrays = [values(rng, problem["flavour"], shape, dtype) for _ in problem["expanded"]]
    if operation in BACKWARD and problem["seed"] % 2:
        arrays[1] = reference(operation.removesuffix("_backward"), (arrays[1],), axis)
    parts = zip(arrays, problem["layouts"], problem["expanded"], strict=False)
    arrays = [laid_out(x, layout, expanded if 0 not in shape else set()) for x, layout, expanded in parts]
    with np.errstate(all="ignore"):
        expected = raw(reference(operation, arrays, axis))
    before = [raw(x) for x in arrays]
    assert raw(library(operation, arrays, axis)) == expected
    assert [raw(x) for x in arrays] == before

    alias = problem["alias"]
    if alias is not None and not isograd.core.arrays.overlaps_itself(arrays[alias]):
        arrays[alias].flags.writeable = True
        assert library(operation, arrays, axis, out=arrays[alias]) is arrays[alias]
        assert raw(arrays[alias]) == expected
    else:
        out = Stored(shape, dtype, *problem["layouts"][-1])
        assert library(operation, arrays, axis, out=out.view) is out.view
        assert raw(out.view) == expected
        assert out.gaps_untouched()


relaxed = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@each_dtype
@relaxed
@given(problem=problems(2), operation=st.sampled_from(FORWARD))
def test_forward_on_any_layout(dtype, problem, operation):
    check_problem(dtype, problem, operation)


@each_dtype
@relaxed
@given(problem=problems(3), operation=st.sampled_from(BACKWARD))
def test_backward_on_any_layout(dtype, problem, operation):
    check_problem(dtype, problem, operation)


def test_a_reference_without_the_correction_is_noticed(monkeypatch):
    # The same comparison fails if the reciprocal's low part is missing, the kind of slip it is there for.
    x = inputs("softmax", np.random.default_rng(0), (8, 40), np.float32)
    expected = raw(reference("softmax", x))
    assert raw(library("softmax", x)) == expected
    exact_fma = numerics.fma
    monkeypatch.setattr(
        numerics, "fma", lambda a, b, d: a * b if np.ndim(a) == 1 and len(a) == 40 else exact_fma(a, b, d)
    )
    assert raw(reference("softmax", x)) != expected


# --- sizes around those at which the kernels change their way -------------------------------------------------------
@each_dtype
@each_operation
def test_rows_of_critical_lengths(operation, dtype):
    rng = np.random.default_rng(20)
    for n in (1, 2, 255, 256, 257, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 300):
        arrays = inputs(operation, rng, (2, n), dtype)
        assert raw(library(operation, arrays)) == raw(reference(operation, arrays)), n
        tail = [np.ascontiguousarray(a.T).T for a in arrays]  # not contiguous along the axis
        assert raw(library(operation, tail)) == raw(reference(operation, arrays)), n


@each_dtype
@each_operation
def test_lanes_of_critical_counts(operation, dtype):
    rng = np.random.default_rng(21)
    for shape in ((2, LANES - 1), (3, LANES + 1), (2, 2 * LANES), (257, 3), (600, 2), (2, 5, LANES + 3)):
        axis = len(shape) - 2
        arrays = inputs(operation, rng, shape, dtype, axis)
        assert plan_walk(shape, tuple(tuple(s // a.itemsize for s in a.strides) for a in arrays), axis).lanes
        assert raw(library(operation, arrays, axis)) == raw(reference(operation, arrays, axis)), shape


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("operation", FORWARD)
def test_half_rows_on_both_sides_of_the_long_class(operation, dtype):
    # Up to 2**18 terms the quantum of 16-bit rows is coarser.
    rng = np.random.default_rng(22)
    for n in (c.SHORT_ROW, c.SHORT_ROW + 1):
        x = (rng.standard_normal((1, n))).astype(dtype)
        x[0, :3] = 12
        expected = np.ascontiguousarray(reference(operation, (x,)))
        assert raw(library(operation, (x,))) == raw(expected)
        two_lanes = np.repeat(x.T, 2, axis=1)
        assert raw(library(operation, (two_lanes,), 0)) == raw(np.repeat(expected.T, 2, axis=1))


# --- one result, however memory and work are cut --------------------------------------------------------------------
def check_invariances(function, operation, dtype):
    """function(operation, arrays, axis): bits must not depend on layout, batch, order of the axis, or padding."""
    rng = np.random.default_rng(23)
    n = 700
    arrays = inputs(operation, rng, (9, n), dtype)
    expected = function(operation, arrays, -1)

    lanes = [np.ascontiguousarray(a.T) for a in arrays]
    assert raw(function(operation, lanes, 0).T) == raw(expected), "rows against lanes"
    for cut in (1, 4, 8):
        parts = [function(operation, [a[part] for a in arrays], -1) for part in (slice(cut), slice(cut, None))]
        assert raw(np.concatenate(parts)) == raw(expected), "batch split"
    single = [function(operation, [a[i] for a in arrays], -1) for i in range(9)]
    assert raw(np.stack(single)) == raw(expected), "row by row"

    for order in (np.arange(n)[::-1], rng.permutation(n)):
        permuted = function(operation, [np.ascontiguousarray(a[:, order]) for a in arrays], -1)
        assert raw(permuted) == raw(np.ascontiguousarray(expected[:, order])), "permuted axis"
        assert raw(function(operation, [a[:, ::-1] for a in arrays], -1)[:, ::-1]) == raw(expected), "backwards"

    fills = [(-np.inf,)] if operation in FORWARD else [(0, 0), (0, -np.inf)]
    for fill in fills[: 1 if operation != "log_softmax_backward" else 2]:
        for before, after in ((0, 1), (3, 0), (500, 1000)):
            width = ((0, 0), (before, after))
            padded = [np.pad(a, width, constant_values=v) for a, v in zip(arrays, fill, strict=True)]
            kept = function(operation, padded, -1)[:, before : before + n]
            assert raw(kept) == raw(expected), "padding"


@each_dtype
@each_operation
def test_invariances(operation, dtype):
    check_invariances(library, operation, dtype)


@pytest.mark.parametrize("operation", ["softmax", "softmax_backward"])
def test_the_invariance_checks_catch_a_sum_in_floats(operation):
    def naive(operation, arrays, axis):
        if operation == "softmax":
            e = np.exp(arrays[0] - arrays[0].max(axis, keepdims=True))
            return e / e.sum(axis, keepdims=True)
        dy, y = arrays
        return y * (dy - (y * dy).sum(axis, keepdims=True))

    with pytest.raises(AssertionError):
        check_invariances(naive, operation, np.float32)


def test_long_half_rows_may_be_padded_too():
    x = np.random.default_rng(24).standard_normal((1, c.SHORT_ROW + 5)).astype(ml_dtypes.bfloat16)
    padded = np.pad(x, ((0, 0), (0, 3000)), constant_values=-np.inf)
    for operation in FORWARD:
        kept = library(operation, (padded,))[:, : x.shape[1]]
        assert raw(kept) == raw(library(operation, (x,)))


@pytest.mark.usefixtures("restore_threads")
@each_dtype
@each_operation
def test_threads(operation, dtype, monkeypatch):
    helpers = []
    submit = parallel._submit
    monkeypatch.setattr(parallel, "_SMALLEST", 1 << 15)  # chunks for every thread
    monkeypatch.setattr(parallel, "_submit", lambda task, count: helpers.append(count) or submit(task, count))
    rng = np.random.default_rng(25)
    ig.set_num_threads(1)
    rows = inputs(operation, rng, (300, 1000), dtype)
    lanes = inputs(operation, rng, (200, 6 * LANES + 7), dtype, 0)
    expected = raw(library(operation, rows)), raw(library(operation, lanes, 0))
    assert helpers == []
    for threads in (2, 5):
        ig.set_num_threads(threads)
        assert (raw(library(operation, rows)), raw(library(operation, lanes, 0))) == expected
    # The work really was shared: one helper beside the caller, then four.
    assert helpers == [1, 1, 4, 4]


@each_dtype
@each_operation
def test_results_too_large_for_the_cache(operation, dtype):
    # From some size on results may be stored another way; here they begin and end off any alignment.
    rng = np.random.default_rng(29)
    small = inputs(operation, rng, (2, 10_001), dtype)
    expected = library(operation, small)
    rows = (1 << 24) // small[0].nbytes + 1
    arrays = [np.tile(a, (rows, 1)) for a in small]
    base = np.full(arrays[0].size + 2, np.array(7, dtype))
    out = base[1:-1].reshape(arrays[0].shape)
    library(operation, arrays, out=out)
    assert out.nbytes > 1 << 24
    assert raw(out.reshape(rows, 2, -1)) == raw(np.broadcast_to(expected, (rows, 2, 10_001)))
    assert base[0] == base[-1] == 7
    first = out.copy()
    assert raw(library(operation, arrays, out=arrays[0])) == raw(first)


# --- special values -------------------------------------------------------------------------------------------------
CANONICAL = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def assert_canonical_nan(x):
    pattern = CANONICAL[x.dtype.itemsize]
    assert (np.ascontiguousarray(x).view(pattern) == np.array([np.nan], x.dtype).view(pattern)[0]).all()


@each_dtype
def test_special_rows(dtype):
    inf, nan = np.inf, np.nan
    big = float(ml_dtypes.finfo(dtype).max)
    rows = np.array(
        [
            [-inf, -inf, -inf, -inf],
            [inf, 0, 1, 2],
            [inf, inf, -inf, 0],
            [0, nan, 1, 2],
            [nan, inf, -inf, 0],
            [-inf, 5, -inf, -inf],
            [big, -big, -big, -inf],
            [0, 0, 0, 0],
        ],
        dtype,
    )
    for axis, x in ((1, rows), (0, np.ascontiguousarray(rows.T))):
        y, z = (np.moveaxis(f(x, axis), axis, 1) for f in (ig.softmax, ig.log_softmax))
        assert_canonical_nan(y[:5])
        assert_canonical_nan(z[:5])
        np.testing.assert_array_equal(y[5:7].astype(float), [[0, 1, 0, 0], [1, 0, 0, 0]])
        np.testing.assert_array_equal(z[5].astype(float), [-inf, 0, -inf, -inf])
        assert z[6, 0] == 0
        assert (z[6, 1:] < -big / 2).all()
        np.testing.assert_array_equal(y[7].astype(float), [0.25] * 4)
        np.testing.assert_array_equal(z[7], np.array([-np.log(4.0)] * 4).astype(dtype))
    assert ig.softmax(np.array([5], dtype))[0] == 1
    assert ig.log_softmax(np.array([5], dtype))[0] == 0


@each_dtype
@pytest.mark.parametrize("n", [40, BLOCK + 2])
def test_nan_at_each_position(n, dtype):
    positions = range(n) if n < 100 else [0, 1, 511, 512, BLOCK - 2, BLOCK - 1, BLOCK, BLOCK + 1]
    pattern = CANONICAL[np.dtype(dtype).itemsize]
    rng = np.random.default_rng(26)
    clean = rng.standard_normal((len(positions), n)).astype(dtype)
    # A quiet NaN, one with the sign, and signalling ones: bit tricks turn some of these into zeros or infinities.
    infinity = np.array([np.inf], dtype).view(pattern)[0]
    sign = pattern(1) << pattern(8 * pattern().itemsize - 1)
    payloads = [infinity | pattern(1), infinity | sign | pattern(1), np.array([np.nan], dtype).view(pattern)[0] | sign]
    for payload in payloads:
        x = clean.copy()
        for row, position in enumerate(positions):
            x.view(pattern)[row, position] = payload
        for operation in FORWARD:
            assert_canonical_nan(library(operation, (x,)))
            assert_canonical_nan(library(operation, (np.ascontiguousarray(x.T),), 0))
            # The row beside it is not touched.
            both = np.concatenate([x[:1], clean[1:2]])
            assert raw(library(operation, (both,))[1:]) == raw(library(operation, (clean[1:2],)))
        for operation in BACKWARD:
            for arrays in ((x, clean), (clean, x)):
                dx = library(operation, arrays)
                assert raw(dx) == raw(reference(operation, arrays))
                if operation == "softmax_backward" or arrays[0] is x:
                    assert_canonical_nan(dx)


# --- kinds of arrays ------------------------------------------------------------------------------------------------
def test_array_api_arrays_keep_their_kind():
    class Wrapped:
        """An array of some other library: DLPack and the array API's namespace."""

        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **keywords):
            return self.array.__dlpack__(**keywords)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

        def __array_namespace__(self):
            return type("namespace", (), {"from_dlpack": staticmethod(Wrapped)})

    x = np.random.default_rng(27).standard_normal((3, 5)).astype(np.float32)
    y = ig.softmax(Wrapped(x))
    assert isinstance(y, Wrapped)
    assert raw(y.array) == raw(ig.softmax(x))
    dx = ig.log_softmax_backward(Wrapped(x), Wrapped(x))
    assert isinstance(dx, Wrapped)
    assert raw(dx.array) == raw(ig.log_softmax_backward(x, x))


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_torch_tensors_keep_their_kind(name):
    torch = pytest.importorskip("torch")
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).to(getattr(torch, name))
    wide = x.to(torch.float64).numpy().astype(isograd.core.arrays.numpy_dtype(name))
    for operation in FORWARD:
        y = library(operation, (x,))
        assert isinstance(y, torch.Tensor)
        assert y.dtype == x.dtype
        expected = library(operation, (wide,)).astype(np.float64)
        np.testing.assert_array_equal(y.to(torch.float64).numpy(), expected)
        dx = library(f"{operation}_backward", (x.T, y.T), 0)
        assert isinstance(dx, torch.Tensor)
        expected = library(f"{operation}_backward", (wide, expected.astype(wide.dtype))).T.astype(np.float64)
        np.testing.assert_array_equal(dx.to(torch.float64).numpy(), expected)


def test_subclasses_of_ndarray_are_computed_as_arrays(tmp_path):
    x = np.random.default_rng(28).standard_normal((3, 5)).astype(np.float32)
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(3, 5))
    mapped[...] = x
    out = np.memmap(tmp_path / "y", np.float32, "w+", shape=(3, 5))
    assert raw(ig.softmax(mapped)) == raw(ig.softmax(x))
    ig.softmax(mapped, out=out)
    assert raw(np.asarray(out)) == raw(ig.softmax(x))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 100, 5000])
def test_equal_elements_share_exactly(dtype, n):
    # A rounding error that the elements have and the sum has not would show: 0.99999994 for a single element.
    values = 100 * np.random.default_rng(n).standard_normal(40)
    for value in values:
        for layout in (np.full(n, value, dtype), np.full((n, 3), value, dtype)[:, 1]):
            assert (ig.softmax(layout) == dtype(1) / dtype(n)).all(), value
        assert (ig.softmax(np.full((2, n, 4), value, dtype), axis=1) == dtype(1) / dtype(n)).all(), value
