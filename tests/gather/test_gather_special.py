"""Special values, negative zeros and untouched destinations in gathers and scatter sums."""

import numpy as np
import pytest
from gather_problems import each_dtype, each_sum, raw, reference, run, values_of

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in cast:RuntimeWarning")


def assert_canonical_nan(x):
    pattern = f"u{x.dtype.itemsize}"
    assert (np.ascontiguousarray(x).view(pattern) == np.array(np.nan, x.dtype).view(pattern)).all()


@each_dtype
@pytest.mark.parametrize("n", [6, 100], ids=["dense", "sparse"])
@pytest.mark.parametrize("others", [(), (16,)], ids=["line", "rows"])
def test_special_values_reach_their_own_destination_only(n, others, dtype):
    inf, nan = np.inf, np.nan
    #          0: NaN  1: inf       2: both            3: -inf    4: ordinary 5: zeros
    indices = np.array([0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 4, 4, 5, 5])
    column = np.array([1, -nan, 2, inf, 1, inf, 3, -inf, -inf, -inf, 1, 2, -0.0, -0.0])
    values = np.broadcast_to(column.reshape(-1, *(1,) * len(others)), (14, *others)).astype(dtype)
    shape = (n, *others)
    out = run("index_sum", shape=shape, indices=indices, values=values)
    assert_canonical_nan(out[[0, 2]])
    assert (out[1] == inf).all()
    assert (out[3] == -inf).all()
    assert (out[4] == 3).all()
    assert raw(out[5:]) == raw(np.zeros((n - 5, *others), dtype))
    for order in (slice(None, None, -1), np.random.default_rng(9).permutation(14)):
        assert raw(run("index_sum", shape=shape, indices=indices[order], values=values[order])) == raw(out)


@each_dtype
@each_sum
@pytest.mark.parametrize("others", [(), (16,)], ids=["line", "rows"])
def test_a_negative_zero_alone_sums_to_a_positive_one(others, operation, dtype):
    for n in (3, 100):
        rows = operation.startswith("index_sum")
        values, x = np.full((1, *others), -0.0, dtype), np.full((n, *others), -0.0, dtype)
        out = run(operation, shape=x.shape, indices=np.ones((1,) if rows else values.shape, int), values=values, x=x)
        assert raw(out[1]) == raw(np.zeros(others, dtype))


@each_dtype
def test_one_column_alone_is_not_finite(dtype):
    values = np.ones((3, 20), dtype)
    values[1, 7] = np.nan
    out = run("index_sum", shape=(2, 20), indices=np.array([1, 1, 1]), values=values)
    assert_canonical_nan(out[1, 7])
    assert (np.delete(out[1], 7) == 3).all()
    assert (out[0] == 0).all()


@each_dtype
@pytest.mark.parametrize("others", [(), (16,)], ids=["line", "rows"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_destination_without_sources_keeps_its_bits(in_place, others, dtype):
    width = np.dtype(dtype).itemsize
    shape = (5, *others)
    x = np.zeros(shape, dtype)
    x.view(f"u{width}")[...] = np.array(-1).astype(f"u{width}")  # a NaN with every bit set
    x[1], x[2] = -0.0, np.array(-0.0, dtype)
    before = x.copy()
    values = np.full((2, *others), -0.0, dtype)
    out = x if in_place else np.empty_like(x)
    run("index_sum onto x", shape=shape, indices=np.array([2, 4]), values=values, x=x, out=out)
    kept = [0, 1, 3]
    assert raw(out[kept]) == raw(before[kept])
    assert raw(out[2]) == raw(np.zeros(others, dtype))  # -0 + (+0), the sum of zeros being +0
    assert_canonical_nan(out[4])


@each_dtype
def test_copies_keep_every_bit(dtype):
    width = np.dtype(dtype).itemsize
    bits = np.random.default_rng(10).integers(0, 1 << 16, (40, 8 * width), dtype=np.uint16).view(f"u{width}")
    x = bits.view(dtype)
    indices = np.random.default_rng(11).integers(-40, 40, (70, x.shape[1]))
    v = run("take_along_axis", shape=x.shape, indices=indices, x=x)
    assert raw(v.view(bits.dtype)) == raw(np.take_along_axis(bits, indices, 0))
    y = run("index_select", shape=x.shape, indices=indices[:, 0], x=x)
    assert raw(y.view(bits.dtype)) == raw(bits[indices[:, 0]])


@each_dtype
def test_distinct_indices_have_the_same_bits_when_they_are_promised(dtype):
    rng = np.random.default_rng(12)
    indices = np.argsort(rng.random((20, 50)), axis=1)[:, :13]
    values = values_of(rng, "special", indices.shape, dtype)
    given = {"shape": (20, 50), "indices": indices, "values": values, "axis": 1}
    expected = raw(reference("take_along_axis_backward", **given))
    assert raw(run("take_along_axis_backward", unique_indices=True, **given)) == expected
    assert raw(run("take_along_axis_backward", unique_indices=False, **given)) == expected


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", [15, 20, 21, 22, 23, 30, 34, 35, 36, 37, 38, 50])
def test_a_dense_line_takes_one_quantum_only_where_that_is_exact(width, dtype):
    # Up to 21 (36) places between the largest and the smallest value all of them are multiples of the largest's
    # quantum. One destination has the largest value and the others the smallest ones, in which its quantum would show.
    rng = np.random.default_rng(16)
    indices = np.arange(1200) % 600
    exponents = np.where(indices == 0, 0, -width)
    values = (rng.uniform(1, 2, 1200) * np.exp2(exponents)).astype(dtype)
    given = {"shape": (600,), "indices": indices, "values": values, "axis": 0}
    assert raw(run("take_along_axis_backward", **given)) == raw(reference("take_along_axis_backward", **given))


def test_a_broken_promise_takes_one_of_the_sources():
    indices, values = np.array([1, 1, 0]), np.array([2, 5, 3], np.float32)
    out = run("take_along_axis_backward", shape=(4,), indices=indices, values=values, axis=0, unique_indices=True)
    assert out[1] in (2, 5)
    assert out.tolist()[0] == 3
    assert out.tolist()[2:] == [0, 0]
