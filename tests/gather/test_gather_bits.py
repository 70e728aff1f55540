"""The CPU kernels return the reference's bits for every layout, and the same bits however sources and work are cut."""

import numpy as np
import pytest
from gather_problems import INDEX_DTYPES, SUMS, each_dtype, each_sum, ordinary, raw, reference, run, values_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import isograd as ig
from isograd.core import arrays
from isograd.gather import cpu
from isograd.gather import reference as ref
from isograd.numerics import reference as numerics
from isograd.numerics.numba_memory import BLOCK, LANES
from isograd.runtime import parallel

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in cast:RuntimeWarning")


# --- any shape, stride, axis, dtype ---------------------------------------------------------------------------------
class Stored:
    """An array of `shape` whose dimensions are stored in any order, forwards or backwards, with gaps."""

    def __init__(self, shape, dtype, order, steps):
        self.base = np.full([shape[d] * abs(steps[d]) for d in order], np.array(7, dtype))
        cut = tuple(slice(None, None, steps[d]) for d in order)
        self.view = self.base[cut].transpose(np.argsort(order)) if shape else self.base
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


def sizes(draw, rank, room=200):
    shape = []
    for _ in range(rank):
        size = draw(st.sampled_from([0, 1, 1, 2, 3, 3, 5, 7, 12, 40]))
        size = size if size <= room else 1
        room = room // size if size else room
        shape.append(size)
    return list(draw(st.permutations(shape)))


@st.composite
def problems(draw):
    operation = draw(st.sampled_from(["take_along_axis", "index_select", *SUMS]))
    rank = draw(st.integers(1, 8))
    shape = sizes(draw, rank)
    if operation in ("take_along_axis", "take_along_axis_backward", "scatter_sum"):
        axis = draw(st.integers(0, rank - 1))
        chosen = list(shape)
        chosen[axis] = draw(st.sampled_from([0, 1, 2, 5, 9, 30])) if shape[axis] else 0
        rows = chosen
    else:
        axis = 0
        leading = draw(st.integers(0, min(9 - rank, 3)))
        chosen = sizes(draw, leading, 30) if shape[0] else [0] * max(leading, 1)
        rows = [*chosen, *shape[1:]]
        if len(rows) > 8:
            chosen, rows = chosen[1:], rows[1:]
    return {
        "operation": operation,
        "shape": tuple(shape),
        "indices_shape": tuple(chosen),
        "rows": tuple(rows),
        "axis": axis,
        "kind": draw(st.sampled_from(INDEX_DTYPES)),
        "flavour": draw(st.sampled_from(["normal", "normal", "spread", "special", "zeros"])),
        "layouts": [draw(layouts(rank)), draw(layouts(len(chosen))), draw(layouts(len(rows))), draw(layouts(rank))],
        "expanded": [draw(st.sets(st.integers(0, 7), max_size=2)) for _ in range(3)],
        "seed": draw(st.integers(0, 2**32)),
        "in_place": draw(st.booleans()),
        "skipped": draw(st.sampled_from([None, None, 0, -1, 2, 99])),
    }


def laid_out(x, layout, expanded):
    """The array in a given layout; along the expanded axes its first element is repeated with stride 0."""
    small = x[tuple(slice(0, 1) if d in expanded else slice(None) for d in range(x.ndim))] if x.size else x
    stored = Stored(small.shape, x.dtype, *layout)
    stored.view[...] = small
    return np.broadcast_to(stored.view, x.shape)


def random_indices(rng, problem):
    size = problem["shape"][problem["axis"]]
    low = 0 if problem["kind"] == "uint32" else -size
    indices = rng.integers(low, max(size, low + 1), problem["indices_shape"])
    return np.asarray(np.where(rng.random(indices.shape) < 0.3, size // 2, indices)).astype(problem["kind"])


@each_dtype
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problem=problems())
def test_any_layout(dtype, problem):
    rng = np.random.default_rng(problem["seed"])
    operation, shape = problem["operation"], problem["shape"]
    x = laid_out(values_of(rng, problem["flavour"], shape, dtype), problem["layouts"][0], set())
    indices = laid_out(random_indices(rng, problem), problem["layouts"][1], problem["expanded"][1])
    values = values_of(rng, problem["flavour"], problem["rows"], dtype)
    values = laid_out(values, problem["layouts"][2], problem["expanded"][2])
    given = {"shape": shape, "indices": indices, "axis": problem["axis"], "x": x}
    if operation in SUMS:
        given["values"] = values
    if operation.startswith("index_sum"):
        given["skipped"] = problem["skipped"]
    expected = raw(reference(operation, **given))
    before = [raw(a) for a in (x, indices, values)]
    out = Stored(*((shape if operation in SUMS else problem["rows"]), x.dtype),
                 *problem["layouts"][3 if operation in SUMS else 2])  # fmt: skip
    assert raw(run(operation, out=out.view, **given)) == expected
    assert out.gaps_untouched()
    assert [raw(a) for a in (x, indices, values)] == before
    if operation in ("scatter_sum", "index_sum onto x") and problem["in_place"]:
        given["x"] = Stored(shape, x.dtype, *problem["layouts"][0]).view
        given["x"][...] = x
        assert raw(run(operation, out=given["x"], **given)) == expected


@each_sum
def test_a_reference_without_the_last_source_is_noticed(operation):
    given = ordinary(operation, np.random.default_rng(1), np.float32)
    right = raw(reference(operation, **given))
    assert raw(run(operation, **given)) == right
    last = {**given, "indices": given["indices"][:-1], "values": given["values"][:-1]}
    assert raw(reference(operation, **last)) != right


def test_a_sum_in_floats_is_noticed(monkeypatch):
    given = ordinary("take_along_axis_backward", np.random.default_rng(2), np.float32)
    right = raw(run("take_along_axis_backward", **given))
    monkeypatch.setattr(numerics, "order_free_sum", lambda p: np.cumsum(p, axis=1, dtype=np.float32)[:, -1])
    assert raw(reference("take_along_axis_backward", **given)) != right


# --- sizes around those at which the kernels change their way -------------------------------------------------------
@each_dtype
def test_copies_of_critical_lengths(dtype):
    rng = np.random.default_rng(3)
    for n in (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5):
        x = rng.standard_normal((3, 50)).astype(dtype)
        indices = rng.integers(-50, 50, (3, n))
        expected = np.take_along_axis(x, indices, 1)
        assert raw(run("take_along_axis", shape=x.shape, indices=indices, x=x, axis=1)) == raw(expected), n
        wide = rng.standard_normal((5, n)).astype(dtype)
        tokens = rng.integers(-5, 5, (2, 2))
        assert raw(run("index_select", shape=wide.shape, indices=tokens, x=wide)) == raw(wide[tokens]), n


@each_dtype
@each_sum
def test_sums_of_critical_sizes(operation, dtype):
    rng = np.random.default_rng(4)
    few, wide = cpu._FEW_COLUMNS, LANES
    for others in ((), (1,), (few - 1,), (few,), (few + 1,), (wide + 1,), (2, 2 * wide)):
        k = 12 if others and others[-1] > few + 1 else 50
        given = ordinary(operation, rng, dtype, 9, k, others)
        assert raw(run(operation, **given)) == raw(reference(operation, **given)), others


@each_dtype
@pytest.mark.parametrize("operation", ["take_along_axis_backward", "scatter_sum"])
def test_lines_around_the_dense_class(operation, dtype):
    # From one source in four destinations on, every destination of a line gets an integer sum.
    rng = np.random.default_rng(5)
    for n in (200, 4 * 30 - 1, 4 * 30, 4 * 30 + 1, 31, 1):
        for flavour in ("normal", "spread", "special"):
            indices = np.minimum(rng.integers(0, n, (30, 3)), rng.integers(0, n, (30, 3)))
            given = {
                "shape": (n, 3),
                "indices": indices,
                "values": values_of(rng, flavour, (30, 3), dtype),
                "x": values_of(rng, flavour, (n, 3), dtype),
            }
            assert raw(run(operation, **given)) == raw(reference(operation, **given)), (n, flavour)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(40,), (2_000_000,), (4, 8)], ids=["dense line", "sparse line", "rows"])
def test_more_sources_than_an_int64_holds(shape, dtype):
    # 2**18 terms as large as a term can be, of one sign: 2**63 quanta and more.
    count = (1 << 18) + 3
    term = np.array(2 - 2.0**-20, dtype)
    if len(shape) == 1:
        given = {"shape": shape, "indices": np.full(count, 7), "values": np.full(count, term), "axis": 0}
        out = run("take_along_axis_backward", **given)
    else:
        given = {"shape": shape, "indices": np.full(count, 2), "values": np.full((count, *shape[1:]), term)}
        out = run("index_sum", **given)
    expected = np.zeros(shape, dtype)
    expected[given["indices"][0]] = dtype(count * float(term))
    assert raw(out) == raw(expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(40,), (40_000,), (4, 8)], ids=["dense line", "sparse line", "rows"])
def test_many_terms_of_one_sign(shape, dtype):
    # From 257 on the upper part of a binary64 sum is no binary64 number any more.
    rng = np.random.default_rng(17)
    for count in (255, 256, 257, 600, 3000):
        for _ in range(3):
            values = rng.uniform(1, 2, (count, *shape[1:])).astype(dtype)
            given = {"shape": shape, "indices": np.full(count, 2), "values": values}
            assert raw(run("index_sum", **given)) == raw(reference("index_sum", **given)), count


# --- one result, however sources and work are cut -------------------------------------------------------------------
def permuted(given, order):
    return {**given, "indices": given["indices"][order], "values": given["values"][order]}


def check_invariances(function, operation, dtype):
    rng = np.random.default_rng(6)
    for n, k, others in ((40, 90, (11,)), (500, 60, (3,)), (30, 400, ())):
        given = ordinary(operation, rng, dtype, n, k, others)
        expected = raw(function(operation, **given))
        for order in (np.arange(k)[::-1], rng.permutation(k), rng.permutation(k)):
            assert raw(function(operation, **permuted(given, order))) == expected, "order"
        # Sources that add a zero, and destinations at the end, change nothing.
        padded = {**given, "values": np.concatenate([given["values"], np.zeros_like(given["values"][:5])])}
        padded["indices"] = np.concatenate([given["indices"], given["indices"][:5]])
        assert raw(function(operation, **padded)) == expected, "zeros"
        longer = {**given, "shape": (n + 7, *others), "x": np.concatenate([given["x"], given["x"][:7]])}
        assert raw(function(operation, **longer)[:n]) == expected, "more destinations"
        if others:
            part = {key: given[key][..., 1:] for key in ("values", "x")}
            part["indices"] = given["indices"] if operation.startswith("index_sum") else given["indices"][..., 1:]
            part["shape"] = (n, others[0] - 1)
            assert raw(function(operation, **part)) == raw(function(operation, **given)[..., 1:]), "batch"


@each_dtype
@each_sum
def test_invariances(operation, dtype):
    check_invariances(run, operation, dtype)


@each_sum
def test_the_invariance_checks_catch_a_sum_in_floats(operation):
    def naive(operation, shape, indices, values, x, axis=0):
        out = np.zeros(shape, values.dtype) if operation in SUMS[::2] else x.copy()
        if operation.startswith("index_sum"):
            np.add.at(out, indices, values)
        else:
            np.add.at(out, (indices, *np.indices(indices.shape)[1:]), values)
        return out

    with pytest.raises(AssertionError, match="order"):
        check_invariances(naive, operation, np.float32)


@pytest.mark.usefixtures("restore_threads")
@each_dtype
@pytest.mark.parametrize("operation", ["take_along_axis", "index_select", *SUMS])
def test_threads(operation, dtype, monkeypatch):
    helpers = []
    submit = parallel._submit
    monkeypatch.setattr(parallel, "_submit", lambda task, count: helpers.append(count) or submit(task, count))
    rng = np.random.default_rng(7)
    given = ordinary(operation, rng, dtype, 600, 900, (700,))
    if operation not in SUMS:
        given.pop("values")
    if operation == "index_select":
        given["indices"] = given["indices"][:, 0]
    ig.set_num_threads(1)
    expected = raw(run(operation, **given))
    assert helpers == []
    for threads in (2, 5):
        ig.set_num_threads(threads)
        assert raw(run(operation, **given)) == expected
    assert set(helpers) >= {1, 4}


@each_sum
def test_the_function_and_the_plan_agree(operation):
    given = ordinary(operation, np.random.default_rng(8), np.float32)
    expected = raw(run(operation, **given))
    if operation == "take_along_axis_backward":
        result = ig.take_along_axis_backward(given["values"], given["indices"], given["shape"], 0)
    elif operation == "index_sum":
        result = ig.segment_sum(given["values"], given["indices"], 40)
    else:
        result = ig.scatter_sum(given["x"], given["indices"], given["values"], 0)
    assert raw(result) == expected


# --- memory ---------------------------------------------------------------------------------------------------------
@each_sum
def test_empty_problems(operation):
    x, values = np.zeros((5, 3), np.float32) - 2, np.zeros((0, 3), np.float32)
    rows = operation.startswith("index_sum")
    none = np.zeros(0 if rows else (0, 3), np.int64)
    expected = x if operation in ("scatter_sum", "index_sum onto x") else np.zeros((5, 3), np.float32)
    assert raw(run(operation, shape=(5, 3), indices=none, values=values, x=x)) == raw(expected)
    for shape in ((5, 0), (0, 3), (0, 0)):
        k = 4 if shape[0] else 0
        indices = np.zeros(k if rows else (k, *shape[1:]), np.int64)
        given = {"indices": indices, "values": np.zeros((k, *shape[1:]), np.float32), "x": np.zeros(shape, np.float32)}
        assert run(operation, shape=shape, **given).shape == shape


def test_empty_copies():
    x = np.zeros((5, 3), np.float32)
    none = np.zeros((0, 3), np.int64)
    assert run("take_along_axis", shape=(5, 3), indices=none, x=x).shape == (0, 3)
    assert run("take_along_axis", shape=(0, 3), indices=none, x=x[:0]).shape == (0, 3)
    assert run("index_select", shape=(5, 3), indices=none, x=x).shape == (0, 3, 3)
    assert run("index_select", shape=(5, 0), indices=np.array([1, 2]), x=x[:, :0]).shape == (2, 0)


def test_indices_and_values_of_stride_zero():
    rng = np.random.default_rng(13)
    x = rng.standard_normal((30, 40)).astype(np.float32)
    line = rng.integers(0, 30, (25, 1))
    indices = np.broadcast_to(line, (25, 40))
    values = np.broadcast_to(np.float32(0.1), (25, 40))
    for operation in ("take_along_axis_backward", "scatter_sum"):
        given = {"shape": x.shape, "indices": indices, "values": values, "x": x}
        assert raw(run(operation, **given)) == raw(reference(operation, **given))
    assert raw(run("take_along_axis", shape=x.shape, indices=indices, x=x)) == raw(x[line[:, 0]])


@pytest.mark.parametrize("dtype", [np.float32, np.uint32])
def test_offsets_beyond_32_bits(tmp_path, dtype):
    # Sparse files, of which next to nothing is touched. float32: what is indexed is far; uint32: the index is large.
    far = (1 << 31) + 7
    x = np.memmap(tmp_path / "x", np.float32, "w+", shape=(2, far) if dtype == np.float32 else (far, 2))
    x = np.asarray(x)
    if dtype == np.float32:
        x[1, 3], x[0, far - 1] = 5, 7
        indices = np.array([[-1], [3]])
        assert ig.take_along_axis(x, indices, 1).tolist() == [[7], [5]]
        out = run("scatter_sum", shape=x.shape, indices=indices, values=np.ones((2, 1), np.float32), x=x, axis=1, out=x)
        assert (out[0, far - 1], out[1, 3]) == (8, 6)
    else:
        x[far - 1] = 3, 4
        tokens = np.array([far - 1], np.uint32)
        assert ig.embedding(x, tokens).tolist() == [[3, 4]]
        with pytest.raises(ig.IndexOutOfRangeError, match=str(far)):
            ig.embedding(x, tokens + np.uint32(1))


@pytest.mark.skipif(not hasattr(np, "memmap"), reason="needs files")
def test_scratch_memory_lasts_as_long_as_the_kernel(run_python):
    # With this threshold glibc gives freed memory back at once: a kernel that frees its scratch too early dies.
    code = """
        import numpy as np
        import isograd as ig
        v = np.ones(300_000, np.float32)
        for n in (100_000, 3_000_000):
            indices = np.arange(300_000) % (n // 2)
            dx = ig.take_along_axis_backward(v, indices, (n,))
            print(int(dx.astype(np.float64).sum()))
    """
    assert run_python(code, MALLOC_MMAP_THRESHOLD_="65536") == "300000\n300000"


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_arrays_of_the_other_kinds(name):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(14)
    dtype = arrays.numpy_dtype(name)
    given = ordinary("scatter_sum", rng, dtype)
    x, values = (torch.from_numpy(given[key].astype(np.float64)).to(getattr(torch, name)) for key in ("x", "values"))
    indices = torch.from_numpy(given["indices"])
    results = {
        "take": (ig.take_along_axis(x, indices, 0), ref.take_along_axis(given["x"], given["indices"], 0)),
        "sum": (ig.scatter_sum(x, indices, values, 0), reference("scatter_sum", **given)),
        "embedding": (ig.embedding(x, indices[:, 0]), ref.index_select(given["x"], given["indices"][:, 0])),
    }
    for key, (tensor, expected) in results.items():
        assert tensor.dtype == x.dtype, key
        assert raw(arrays.numpy_view(tensor)) == raw(expected), key
