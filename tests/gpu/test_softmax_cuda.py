"""The softmax family on a real GPU: the bits of the NumPy reference, whatever the shape, the strides and the tiling."""

import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from isograd.ops.softmax import reference  # noqa: E402
from isograd.ops.softmax.triton import launch  # noqa: E402
from isograd.rows.triton_configuration import Configuration  # noqa: E402

OPERATIONS = ("softmax", "log_softmax", "softmax_backward", "log_softmax_backward")
NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
INTEGER = {"float16": np.int16, "bfloat16": np.int16, "float32": np.int32, "float64": np.int64}


def to_torch(x: Any) -> Any:
    bits = torch.from_numpy(np.ascontiguousarray(x).view(INTEGER[x.dtype.name]))
    return bits.cuda().view(getattr(torch, x.dtype.name))


def to_numpy(t: Any) -> Any:
    name = str(t.dtype).removeprefix("torch.")
    bits = t.contiguous().view(getattr(torch, np.dtype(INTEGER[name]).name)).cpu().numpy()
    return bits.view(NUMPY[name])


def bits(x: Any) -> Any:
    return np.ascontiguousarray(x).view(INTEGER[x.dtype.name])


def inputs(operation: str, dtype: str, shape: Sequence[int], axis: int, seed: int = 0) -> list[Any]:
    generator = np.random.default_rng(seed)
    x = (generator.standard_normal(shape) * 4).astype(NUMPY[dtype])
    if not operation.endswith("backward"):
        return [x]
    y = getattr(reference, operation.removesuffix("_backward"))(x, axis)
    return [generator.standard_normal(shape).astype(NUMPY[dtype]), y]


def check(
    operation: str, arrays: Sequence[Any], tensors: Sequence[Any], out: Any, axis: int, config: Any = None
) -> None:
    expected = getattr(reference, operation)(*arrays, axis)
    launch(operation, (*tensors, out), axis, config)
    np.testing.assert_array_equal(bits(to_numpy(out)), bits(expected))


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((33, 1), 1),
        ((1, 1), 0),
        ((70, 3), 1),
        ((40, 255), 1),
        ((9, 4096), 1),
        ((3, 20000), 1),
        ((2, 65536), 1),
        ((3, 128, 64), 1),
        ((2, 1000, 66), 1),
        ((2, 300, 7), 1),
        ((5, 600), 0),
    ],
)
def test_shapes(operation: str, dtype: str, shape: tuple[int, ...], axis: int) -> None:
    arrays = inputs(operation, dtype, shape, axis)
    tensors = [to_torch(a) for a in arrays]
    check(operation, arrays, tensors, torch.full_like(tensors[0], 7), axis)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("n", [16000, 50000, 131072, 300000])
def test_long_rows(operation: str, dtype: str, n: int) -> None:
    arrays = inputs(operation, dtype, (1, n), 1)
    tensors = [to_torch(a) for a in arrays]
    check(operation, arrays, tensors, torch.full_like(tensors[0], 7), 1)


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda t: t.mT.contiguous().mT,
    "every other row": lambda t: torch.stack([t, t], 1)[:, 0],
    "every other column": lambda t: torch.stack([t, t], 2)[:, :, 0],
    "unaligned": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
    "padded rows": lambda t: torch.nn.functional.pad(t, (1, 2))[:, 1:-2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(24, 100), (16, 8192)])
def test_strides(layout: str, operation: str, dtype: str, shape: tuple[int, int]) -> None:
    arrays = inputs(operation, dtype, shape, 1)
    tensors = [LAYOUTS[layout](to_torch(a)) for a in arrays]
    check(operation, arrays, tensors, LAYOUTS[layout](torch.full_like(to_torch(arrays[0]), 7)), 1)
    check(operation, arrays, tensors, torch.full_like(to_torch(arrays[0]), 7), 1)


@pytest.mark.parametrize("operation", ["softmax_backward", "log_softmax_backward"])
def test_expanded_gradient(operation: str) -> None:
    for shape in ((8, 1), (1, 4096), (1, 1)):
        arrays = inputs(operation, "float32", (8, 4096), 1)
        dy = np.broadcast_to(np.random.default_rng(1).standard_normal(shape).astype(np.float32), (8, 4096))
        tensors = [torch.from_numpy(dy[: shape[0], : shape[1]].copy()).cuda().expand(8, 4096), to_torch(arrays[1])]
        check(operation, [np.ascontiguousarray(dy), arrays[1]], tensors, torch.empty(8, 4096, device="cuda"), 1)


@pytest.mark.parametrize("operation", ["softmax_backward", "log_softmax_backward"])
@pytest.mark.parametrize("shape", [(8, 256), (8, 16384), (1, 150000), (4, 96, 40)])
def test_in_place(operation: str, shape: tuple[int, ...]) -> None:
    arrays = inputs(operation, "float32", shape, 1)
    dy, y = (to_torch(a) for a in arrays)
    check(operation, arrays, [dy, y], dy, 1)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("axis", range(8))
def test_rank_8_permuted(operation: str, axis: int) -> None:
    shape = (2, 3, 2, 5, 2, 3, 2, 4)
    order = (3, 0, 7, 2, 5, 1, 6, 4)
    arrays = inputs(operation, "float32", shape, axis)
    tensors = [to_torch(np.transpose(a, order)).permute(*np.argsort(order).tolist()) for a in arrays]
    check(operation, arrays, tensors, torch.full_like(to_torch(arrays[0]), 7), axis)


@pytest.mark.parametrize("n", [40, 4096, 20000])
@pytest.mark.parametrize("dtype", NUMPY)
def test_special_values(dtype: str, n: int) -> None:
    generator = np.random.default_rng(3)
    x = generator.standard_normal((12, n)).astype(NUMPY[dtype])
    g = generator.standard_normal((12, n)).astype(NUMPY[dtype])
    for row, value in enumerate((np.inf, -np.inf, np.nan, 0.0, -0.0)):
        x[row, 7], g[row, 9] = value, value
    x[5], g[5] = -np.inf, 0
    x[6, 1:] = -np.inf
    x[10, ::3], x[11] = 9, 0.25  # equal elements share exactly
    g[7, 3], g[7, 5] = np.inf, -np.inf
    # The reference emulates the binary64 fma, which is not exact where its products leave the range.
    margin = 2.0**200 if dtype == "float64" else 1
    g[8] = generator.standard_normal(n) * float(ml_dtypes.finfo(NUMPY[dtype]).tiny) * margin
    g[9] = generator.standard_normal(n) / 8 * (float(ml_dtypes.finfo(NUMPY[dtype]).max) / margin)
    for operation in ("softmax", "log_softmax"):
        y = getattr(reference, operation)(x, 1)
        y[10, 2] = -0.0
        for axis in (1, 0) if n == 4096 else (1,):
            for name, arrays in ((operation, [x]), (operation + "_backward", [g, y])):
                turned = [np.ascontiguousarray(np.moveaxis(a, 1, axis)) for a in arrays]
                check(name, turned, [to_torch(a) for a in turned], torch.empty_like(to_torch(turned[0])), axis)


def digest(t: Any) -> str:
    return hashlib.sha256(to_numpy(t).tobytes()).hexdigest()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_tilings_give_equal_bits(operation: str, dtype: str) -> None:
    n, size = 4096, np.dtype(NUMPY[dtype]).itemsize
    generator = torch.Generator("cuda").manual_seed(1)
    count = 3 if operation.endswith("backward") else 2
    tensors = [torch.randn(64, n, device="cuda", generator=generator).to(getattr(torch, dtype)) for _ in range(count)]
    configurations: list[Configuration | None] = [None]  # what the rule says
    for warps, rows in itertools.product((4, 8), (1, 2)):
        configurations.append(Configuration("tile", n, rows, warps, rows * n // (32 * warps), 16 // size))
    configurations.append(Configuration("loop", 1024, 2, 4, 16, 16 // size))
    if torch.cuda.get_device_capability()[0] >= 9:
        for ctas, warps in ((1, 8), (2, 2), (4, 4), (8, 2)):
            group = n // (ctas * warps * 32)
            variants, parts = [("cluster", 1), ("staged", 1)], max(group // 16, 1)
            if count == 2 and parts > 1:
                variants.append(("staged", parts))
            if operation == "softmax" and size == 2:
                variants.append(("piped", parts))
            for variant, chunks in variants:
                configurations.append(
                    Configuration(variant, n // ctas, 1, warps, group, 16 // size, ctas, True, chunks=chunks)
                )
    found = set()
    for config in configurations:
        tensors[-1].fill_(7)
        launch(operation, tensors, 1, config)
        found.add(digest(tensors[-1]))
    assert len(found) == 1


@pytest.mark.skipif(torch.cuda.get_device_capability()[0] < 9, reason="needs clusters of blocks")
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_strips_give_equal_bits(operation: str, dtype: str) -> None:
    n, rv = 512, 4 // np.dtype(NUMPY[dtype]).itemsize
    arrays = inputs(operation, dtype, (2, n, 192), 1)
    tensors = [to_torch(a) for a in arrays]
    out = torch.empty_like(tensors[0])
    for lanes, ctas, warps, chunks in ((32, 1, 16, 1), (32, 2, 8, 4), (16, 1, 8, 8), (16, 4, 4, 2), (16, 8, 2, 1)):
        group = n // (ctas * warps * (32 // lanes))
        config = Configuration("strip", n, lanes * rv, warps, group, rv, ctas, True, chunks=chunks)
        check(operation, arrays, tensors, out.fill_(7), 1, config)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("inner", [64, 72])
@pytest.mark.parametrize("n", [100, 256, 512, 700, 1024, 2048, 3000, 4096])
def test_strips_of_the_rule(operation: str, dtype: str, n: int, inner: int) -> None:
    arrays = inputs(operation, dtype, (2, n, inner), 1)
    tensors = [to_torch(a) for a in arrays]
    check(operation, arrays, tensors, torch.empty_like(tensors[0]).fill_(7), 1)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_batch_splits_give_equal_bits(operation: str) -> None:
    tensors = [torch.randn(96, 3000, device="cuda") for _ in range(3 if operation.endswith("backward") else 2)]
    launch(operation, tensors, 1)
    whole = tensors[-1].clone()
    for size in (1, 7, 32):
        parts = torch.empty_like(whole)
        for start in range(0, 96, size):
            chunk = slice(start, start + size)
            launch(operation, (*(t[chunk] for t in tensors[:-1]), parts[chunk]), 1)
        assert torch.equal(whole.view(torch.int32), parts.view(torch.int32))


@pytest.mark.parametrize("n", [1000, 32768])
def test_repetitions_under_load_give_equal_bits(n: int) -> None:
    dy, y = torch.randn(200, n, device="cuda"), torch.rand(200, n, device="cuda")
    out, first = torch.empty_like(dy), torch.empty_like(dy)
    launch("softmax_backward", (dy, y, first), 1)
    noise, side = torch.empty(1 << 26, device="cuda"), torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        with torch.cuda.stream(side):
            noise.add_(1)
        launch("softmax_backward", (dy, y, out), 1)
        wrong += (out.view(torch.int32) != first.view(torch.int32)).sum()
    assert wrong.item() == 0


def test_other_stream_and_graph() -> None:
    x = torch.randn(64, 5000, device="cuda")
    expected, out = torch.empty_like(x), torch.empty_like(x)
    launch("softmax", (x, expected), 1)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch("softmax", (x, out), 1)
    stream.synchronize()
    assert torch.equal(out, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch("softmax", (x, out), 1)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_device_that_is_not_current() -> None:
    x = torch.randn(64, 5000, device="cuda:1")
    out, expected = torch.empty_like(x), torch.empty(64, 5000, device="cuda:0")
    launch("softmax", (x, out), 1)
    launch("softmax", (x.to("cuda:0"), expected), 1)
    assert torch.equal(out.cpu(), expected.cpu())


def test_more_than_2_31_elements() -> None:
    rows, n = (1 << 21) + 3, 1024
    if torch.cuda.mem_get_info()[0] < 3 * rows * n * 2:
        pytest.skip("needs 13 GB of device memory")
    x = torch.zeros(rows, n, device="cuda", dtype=torch.bfloat16)
    x[-1] = torch.randn(n, device="cuda")
    out = torch.empty_like(x)
    launch("softmax", (x, out), 1)
    expected = reference.softmax(to_numpy(x[-1:]), 1)
    np.testing.assert_array_equal(bits(to_numpy(out[-1:])), bits(expected))
    assert bool((out[:-1] == out[0, 0]).all())
