"""The gather family and order-free sums on a real GPU: the bits of the NumPy reference."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import isograd  # noqa: E402
from isograd.gather import reference  # noqa: E402
from isograd.gather import triton_launch as launch  # noqa: E402
from isograd.reduction import cuda as reduction  # noqa: E402
from isograd.reduction import reference as reduction_reference  # noqa: E402

NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
INTEGER = {"float16": np.int16, "bfloat16": np.int16, "float32": np.int32, "float64": np.int64}
INDEX = ("int64", "int32", "uint32")


def to_torch(x: Any) -> Any:
    if x.dtype.name == "uint32":
        return torch.from_numpy(x.view(np.int32)).cuda().view(torch.uint32)
    if x.dtype.name not in NUMPY:
        return torch.from_numpy(np.array(x)).cuda()
    return (
        torch.from_numpy(np.array(x, order="C").view(INTEGER[x.dtype.name])).cuda().view(getattr(torch, x.dtype.name))
    )


def bits(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        name = np.dtype(INTEGER[str(x.dtype).removeprefix("torch.")]).name
        return x.contiguous().view(getattr(torch, name)).cpu().numpy()
    return np.array(x, order="C").view(INTEGER[x.dtype.name])


def same(found: Any, expected: Any) -> None:
    np.testing.assert_array_equal(bits(found).reshape(-1), bits(expected).reshape(-1))


def values(generator: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Any:
    """Terms of many magnitudes, with special values and pairs that cancel."""
    x = generator.standard_normal(shape) * generator.choice([1e-4, 1, 100], size=shape)
    flat = x.reshape(-1)
    for value in (np.inf, -np.inf, np.nan, -0.0, np.inf) if x.size > 50 else ():
        flat[generator.integers(x.size)] = value
    half = x.size // 2
    flat[:half:3] = -flat[half : 2 * half : 3]
    with np.errstate(all="ignore"):
        return x.astype(NUMPY[dtype])


LINES = [
    ((70, 256), 8, 1),
    ((33, 100), 3, 1),
    ((9, 40), 60, 1),
    ((5, 300), 500, 1),
    ((40, 70), 16, 0),
    ((3, 20, 6, 5), 4, 1),
    ((3000,), 5000, 0),
    ((1, 1), 1, 0),
]


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize(("shape", "k", "axis"), LINES)
def test_lines(dtype: str, shape: tuple[int, ...], k: int, axis: int) -> None:
    generator = np.random.default_rng(k)
    sources = (*shape[:axis], k, *shape[axis + 1 :])
    index = INDEX[k % 3]
    indices = generator.integers(0 if index == "uint32" else -shape[axis], shape[axis], sources).astype(index)
    x, v = values(generator, shape, dtype), values(generator, sources, dtype)
    taken = torch.empty_like(to_torch(v))
    launch.take_along_axis(to_torch(x), to_torch(indices), taken, axis)
    same(taken, reference.take_along_axis(x, indices, axis))
    for base in (None, x):
        expected = reference.scatter_sum(shape, indices, v, axis, base)
        for atomics in (False, True):
            out = torch.full_like(to_torch(x), 7)
            given = None if base is None else to_torch(base)
            launch.scatter_sum(to_torch(indices), to_torch(v), out, axis, given, atomics=atomics)
            same(out, expected)
    out = to_torch(x)
    launch.scatter_sum(to_torch(indices), to_torch(v), out, axis, out)
    same(out, expected)


@pytest.mark.parametrize("k", [8, 40, 200])
def test_distinct_indices(k: int) -> None:
    generator = np.random.default_rng(k)
    indices = np.argsort(generator.random((50, 256)), axis=1)[:, :k]
    v = values(generator, (50, k), "float32")
    for unique in (False, True):
        out = torch.full((50, 256), 7.0, device="cuda")
        launch.scatter_sum(to_torch(indices), to_torch(v), out, 1, unique=unique)
        same(out, reference.scatter_sum((50, 256), indices, v, 1))


@pytest.mark.parametrize("variant", ["few", "pairs"])
@pytest.mark.parametrize("rows", [8, 32, 64])
@pytest.mark.parametrize("fill", [True, False])
def test_configurations_give_equal_bits(variant: str, rows: int, fill: bool) -> None:
    generator = np.random.default_rng(1)
    indices, v = generator.integers(0, 90, (200, 7)), values(generator, (200, 7), "float32")
    config = launch.ScatterConfiguration(variant, rows, 64, 4, fill)
    out = torch.full((200, 90), 7.0, device="cuda")
    launch.scatter_sum(to_torch(indices), to_torch(v), out, 1, config=config)
    same(out, reference.scatter_sum((200, 90), indices, v, 1))


ROWS = [((60, 100), 300, 0.3), ((7, 5), 900, 0.0), ((3000, 1), 2000, 0.5), ((50, 3, 33), 40, 0), ((9, 1500), 200, 0.6)]


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize(("shape", "count", "hot"), ROWS)
def test_rows(dtype: str, shape: tuple[int, ...], count: int, hot: float) -> None:
    generator = np.random.default_rng(count)
    indices = generator.integers(-shape[0], shape[0], count).astype(INDEX[count % 2])
    indices[generator.random(count) < hot] = 5
    v, x = values(generator, (count, *shape[1:]), dtype), values(generator, shape, dtype)
    for skipped in (None, 3):
        for base in (None, x):
            out = torch.full_like(to_torch(x), 7)
            launch.index_sum(to_torch(indices), to_torch(v), out, None if base is None else to_torch(base), skipped)
            same(out, reference.index_sum(shape, indices, v, base, skipped))
    out = to_torch(x)
    launch.index_sum(to_torch(indices), to_torch(v), out, out, skipped)
    same(out, reference.index_sum(shape, indices, v, x, skipped))
    selected = torch.empty_like(to_torch(v))
    launch.index_select(to_torch(x), to_torch(indices), selected)
    same(selected, reference.index_select(x, indices))


@pytest.mark.parametrize("seed", range(5))
def test_permutations_of_the_sources_give_equal_bits(seed: int) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    v = torch.randn(20_000, 96, device="cuda", generator=generator) * 1e3
    indices = torch.randint(0, 3000, (20_000,), device="cuda", generator=generator)
    indices[::4] = 11
    found = []
    for order in (torch.arange(20_000, device="cuda"), torch.randperm(20_000, device="cuda", generator=generator)):
        out = torch.empty(3000, 96, device="cuda")
        launch.index_sum(indices[order], v[order], out)
        lines = torch.empty(3000, 96, device="cuda")
        launch.scatter_sum(indices[order][:, None].expand(-1, 96), v[order], lines, 0)
        found += [out, lines]
    for out in found[1:]:
        assert torch.equal(out.view(torch.int32), found[0].view(torch.int32))


def test_a_million_terms_that_cancel_on_one_row() -> None:
    generator = np.random.default_rng(0)
    half = generator.standard_normal(500_000).astype(np.float32)
    v = np.concatenate([half, -half, np.float32([1e-6])])
    generator.shuffle(v)
    indices = np.zeros(v.size, np.int64)
    exact = reduction_reference.sum(v, 0)
    out = torch.empty(2, device="cuda")
    launch.index_sum(to_torch(indices), to_torch(v), out)
    same(out, np.float32([exact, 0]))
    launch.scatter_sum(to_torch(indices), to_torch(v), out, 0)
    same(out, np.float32([exact, 0]))
    same(reduction.sum(to_torch(v)), np.float32([exact]))


def _repeated(call: Callable[[Any], None], shape: tuple[int, ...]) -> None:
    out, first = torch.empty(shape, device="cuda"), torch.empty(shape, device="cuda")
    call(first)
    noise, side = torch.empty(1 << 26, device="cuda"), torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        with torch.cuda.stream(side):
            noise.add_(1)
        call(out)
        wrong += (out.view(torch.int32) != first.view(torch.int32)).sum()
    assert wrong.item() == 0


def test_repetitions_under_load_give_equal_bits() -> None:
    indices, dv = torch.randint(0, 256, (4096, 8), device="cuda"), torch.randn(4096, 8, device="cuda")
    _repeated(lambda out: launch.scatter_sum(indices, dv, out, 1), (4096, 256))


def test_repetitions_of_hot_rows_under_load_give_equal_bits() -> None:
    indices, v = torch.randint(0, 3000, (4096,), device="cuda"), torch.randn(4096, 256, device="cuda")
    indices[::3] = 17
    _repeated(lambda out: launch.index_sum(indices, v, out), (3000, 256))


def test_repetitions_of_atomics_under_load_give_equal_bits() -> None:
    indices, v = torch.randint(0, 500, (50_000,), device="cuda"), torch.randn(50_000, device="cuda")
    _repeated(lambda out: launch.scatter_sum(indices, v, out, 0), (500,))


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((5000,), 0),
        ((40, 300), 1),
        ((3000, 40), 0),
        ((200_000,), None),
        ((4, 50, 6), 1),
        ((3, 4, 5), (0, 2)),
        ((0, 3), 0),
    ],
)
def test_sums(dtype: str, shape: tuple[int, ...], axis: Any) -> None:
    generator = np.random.default_rng(3)
    for x in (values(generator, shape, dtype), generator.standard_normal(shape).astype(NUMPY[dtype])):
        for operation in ("sum", "mean"):
            found = getattr(reduction, operation)(to_torch(x), axis, True)
            expected = np.asarray(getattr(reduction_reference, operation)(x, axis, True))
            assert tuple(found.shape) == expected.shape
            same(found, expected)


def test_faults() -> None:
    x, v = torch.randn(40, 30, device="cuda"), torch.full((40, 3), 7.0, device="cuda")
    indices = torch.zeros(40, 3, dtype=torch.int32, device="cuda")
    indices[20, 1] = 30
    launch.take_along_axis(x, indices, v, 1)
    message = "take_along_axis: indices has 30 at flat position 61; accepted: -30 to 29"
    with pytest.raises(isograd.IndexOutOfRangeError, match=message):
        isograd.check()
    isograd.check()
    assert v.isnan().nonzero().tolist() == [[20, 1]]
    with isograd.debug(), pytest.raises(isograd.IndexOutOfRangeError, match=message):
        launch.take_along_axis(x, indices, v, 1)
    out = torch.full((40, 30), 7.0, device="cuda")
    with isograd.debug(), pytest.raises(isograd.IndexOutOfRangeError, match="scatter_sum: indices has 30"):
        launch.scatter_sum(indices, v.nan_to_num(), out, 1)
    assert not out.isnan().any()
    tokens = torch.tensor([1, 2, -1, 3], device="cuda")
    rows = torch.empty(4, 30, device="cuda")
    with isograd.debug(), pytest.raises(isograd.IndexOutOfRangeError, match="indices has -1 at flat position 2"):
        launch.index_select(x, tokens, rows, negative=False)
    assert rows.isnan().any(1).tolist() == [False, False, True, False]


def test_faults_inside_a_graph() -> None:
    """Every replay sets the flag."""
    x, v = torch.randn(4, 30, device="cuda"), torch.empty(4, 3, device="cuda")
    indices = torch.zeros(4, 3, dtype=torch.int64, device="cuda")
    launch.take_along_axis(x, indices, v, 1)
    isograd.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), isograd.debug():
        launch.take_along_axis(x, indices, v, 1)
    graph.replay()
    isograd.check()
    indices[1, 1] = 99
    for _ in range(2):
        graph.replay()
        with pytest.raises(isograd.IndexOutOfRangeError, match="indices has 99 at flat position 4"):
            isograd.check()


def test_other_stream() -> None:
    indices, v = torch.randint(0, 300, (4000,), device="cuda"), torch.randn(4000, 64, device="cuda")
    expected, out = torch.empty(300, 64, device="cuda"), torch.empty(300, 64, device="cuda")
    launch.index_sum(indices, v, expected)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch.index_sum(indices, v, out)
    stream.synchronize()
    assert torch.equal(out, expected)


def test_plans() -> None:
    from isograd.gather.plans import IndexSumDescriptor, IndexSumPlan, TakeAlongAxisBackwardDescriptor
    from isograd.gather.plans import TakeAlongAxisBackwardPlan as Backward

    generator = np.random.default_rng(0)
    indices, dv = generator.integers(0, 9, (6, 4)), values(generator, (6, 4), "bfloat16")
    plan = Backward.select(TakeAlongAxisBackwardDescriptor((6, 9), (6, 4), "bfloat16"), "cuda")
    dx = torch.empty(6, 9, dtype=torch.bfloat16, device="cuda")
    plan.run(indices=to_torch(indices), dv=to_torch(dv), dx=dx)
    same(dx, reference.take_along_axis_backward(dv, indices, (6, 9)))
    sum_plan = IndexSumPlan.select(IndexSumDescriptor((9, 4), (6, 4), "float32", skipped=2), "cuda")
    v = values(generator, (6, 4, 4), "float32")
    out = torch.empty(9, 4, device="cuda")
    sum_plan.run(indices=to_torch(indices), values=to_torch(v), out=out)
    same(out, reference.index_sum((9, 4), indices, v, None, 2))


def test_more_than_2_31_elements() -> None:
    rows, n = (1 << 21) + 3, 1024
    if torch.cuda.mem_get_info()[0] < 2 * rows * n * 2:
        pytest.skip("needs 9 GB of device memory")
    out = torch.full((rows, n), 7, device="cuda", dtype=torch.bfloat16)
    indices, v = torch.randint(0, n, (rows, 2), device="cuda"), torch.ones(rows, 2, device="cuda", dtype=torch.bfloat16)
    launch.scatter_sum(indices, v, out, 1)
    assert bool((out.sum(1, dtype=torch.float32) == 2).all())
    few = torch.tensor([0, rows - 1], device="cuda")
    launch.index_sum(few, torch.ones(2, n, device="cuda", dtype=torch.bfloat16), out)
    assert out[-1].tolist() == [1.0] * n
    assert bool((out[1:-1] == 0).all())
