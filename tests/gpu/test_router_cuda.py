"""The router family on a real GPU: the bits of the NumPy reference, whatever the shape, the strides and the tiling."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

sys.path.append(str(Path(__file__).parents[1] / "router"))
import router_problems as problems  # noqa: E402
from router_problems import SUITES  # noqa: E402

import isograd as ig  # noqa: E402
from isograd.core.arrays import numpy_dtype  # noqa: E402
from isograd.core.cases import Case  # noqa: E402
from isograd.ops.router import reference  # noqa: E402
from isograd.ops.router import triton_launch as launch  # noqa: E402

INTEGER = {2: np.int16, 4: np.int32, 8: np.int64}
LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
    "every other": lambda t: torch.stack([t, t], -1)[..., 0],
    "unaligned": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
}


def to_torch(x: Any) -> Any:
    bits = torch.from_numpy(np.array(x, order="C").view(INTEGER[x.dtype.itemsize]).copy())
    return bits.cuda().view(getattr(torch, x.dtype.name))


def to_numpy(t: Any) -> Any:
    dtype = numpy_dtype(str(t.dtype).removeprefix("torch."))
    integer = getattr(torch, np.dtype(INTEGER[dtype.itemsize]).name)
    return t.contiguous().view(integer).cpu().numpy().view(dtype)


def compute(operation: str, case: Case, dtype: str, layout: str = "contiguous") -> list[Any]:
    suite, change = SUITES[operation], LAYOUTS[layout]
    descriptor = suite.descriptor(case, dtype).validated()
    arguments = {name: change(to_torch(a)) for name, a in case.inputs.items()}
    for operand in descriptor.operands():
        if operand.output:
            empty = torch.full(operand.shape, 7, dtype=getattr(torch, operand.dtype), device="cuda")
            arguments[operand.name] = change(empty)
    problems.launch(descriptor, arguments)
    return [to_numpy(arguments[o.name]) for o in descriptor.operands() if o.output]


def check(operation: str, case: Case, dtype: str, layout: str = "contiguous") -> None:
    got = compute(operation, case, dtype, layout)
    assert [problems.raw(x) for x in got] == [problems.raw(x) for x in problems.expected(operation, case)], case.name


@pytest.mark.parametrize(("operation", "dtype"), problems.EACH)
def test_cases_of_verify(operation: str, dtype: str) -> None:
    for case in SUITES[operation].cases(dtype):
        if operation.startswith("renormalize") and case.inputs["w"].shape[-1] > 16384:
            continue
        check(operation, case, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("operation", SUITES)
def test_random_problems(operation: str, layout: str) -> None:
    for seed in range(12):
        rng = np.random.default_rng(seed)
        dtypes = problems.dtypes_of(operation)
        dtype = dtypes[seed % len(dtypes)]
        check(operation, problems.problem(operation, rng, dtype, problems.FLAVOURS[seed % 6]), dtype, layout)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("n", "k"), [(64, 6), (128, 8), (200, 1), (256, 8), (300, 31), (1024, 8), (1024, 100)])
def test_routers(dtype: str, n: int, k: int) -> None:
    rng = np.random.default_rng(n + k)
    for flavour in ("normal", "ties", "special", "masked"):
        logits = problems.values(rng, flavour, (203, n), dtype)
        for options in ({}, {"renormalize": True, "scale": 2.5}):
            case = Case(flavour, {"logits": logits}, {"k": k, **options})
            check("moe_router", case, dtype)
            experts = problems.expected("moe_router", case)[1]
            inputs = {"dweights": rng.standard_normal((203, k)).astype(np.float32), "logits": logits}
            check("moe_router_backward", Case(flavour, {**inputs, "experts": experts}, options), dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tilings_give_equal_bits(dtype: str) -> None:
    x = torch.randn(1003, 256, device="cuda").to(getattr(torch, dtype))
    found, gradients = set(), set()
    for rows, group, warps, registers in (
        (8, 8, 4, None), (4, 16, 4, None), (8, 16, 4, None), (2, 8, 1, None), (2, 16, 1, 80), (16, 16, 8, None),
    ):  # fmt: skip
        tile = launch.Tile(256, rows, group, 16 // x.element_size(), warps)
        for kernel in ("tile", "lanes", "separated"):
            w = torch.full((1003, 8), 7.0, device="cuda")
            e = torch.full((1003, 8), 7, dtype=torch.int64, device="cuda")
            config = launch.RouterConfiguration(tile, kernel, registers)
            launch.moe_router(x, None, w, e, renormalize=True, config=config)
            found.add((to_numpy(w).tobytes(), to_numpy(e).tobytes()))
        dx = torch.full_like(x, 7)
        launch.moe_router_backward(w, x, e, dx, renormalize=True, config=tile)
        gradients.add(to_numpy(dx).tobytes())
    assert len(found) == len(gradients) == 1


def test_the_short_cut_agrees_on_many_tokens() -> None:
    # Some hundred thousand rows, so that every doubt about the order occurs.
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(1 << 18, 256, device="cuda").to(dtype)
        results = []
        for kernel in ("tile", "lanes", "separated"):
            w = torch.empty(1 << 18, 8, device="cuda")
            e = torch.empty(1 << 18, 8, dtype=torch.int64, device="cuda")
            tile = launch.router_configuration(256, 8, x.element_size(), True).tile
            launch.moe_router(x, None, w, e, config=launch.RouterConfiguration(tile, kernel))
            results.append((w, e))
        for w, e in results[1:]:
            assert torch.equal(results[0][0].view(torch.int32), w.view(torch.int32))
            assert torch.equal(results[0][1], e)


def test_groups_and_bias_have_the_same_experts_by_every_kernel() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x, bias = torch.randn(1 << 16, 256, device="cuda").to(dtype), torch.randn(256, device="cuda") / 100
        results = []
        for kernel in ("tile", "lanes"):
            w = torch.empty(1 << 16, 8, device="cuda")
            e = torch.empty(1 << 16, 8, dtype=torch.int64, device="cuda")
            config = launch.router_configuration(256, 8, x.element_size(), False, 8)._replace(kernel=kernel)
            options = {"softmax": False, "renormalize": True, "groups": 8, "group_k": 4, "scale": 2.5}
            launch.moe_router(x, bias, w, e, config=config, **options)
            results.append((w, e))
        assert torch.equal(results[0][0].view(torch.int32), results[1][0].view(torch.int32))
        assert torch.equal(results[0][1], results[1][1])


def test_many_entries_are_sorted_across_stretches() -> None:
    experts = torch.randint(0, 7, (3 << 20,), device="cuda")
    order, offsets = (torch.empty(n, dtype=torch.int64, device="cuda") for n in (len(experts), 8))
    launch.expert_permutation(experts, order, offsets)
    assert torch.equal(order, torch.sort(experts, stable=True).indices)
    assert torch.equal(offsets[1:], torch.bincount(experts, minlength=7).cumsum(0))


def test_long_rows_and_many_elements() -> None:
    rng = np.random.default_rng(2)
    for shape, k, axis in (((3, 50_000), 50, -1), ((2, 600), 300, 1), ((5000, 3), 9, 0)):
        for dtype in problems.DTYPES:
            case = Case("", {"x": problems.values(rng, "ties", shape, dtype)}, {"k": k, "axis": axis})
            check("top_k", case, dtype)
    for count, bound in ((100_000, 256), (5000, 3000), (1, 1)):
        case = Case("", {"experts": rng.integers(0, bound, count)}, {"num_experts": bound})
        check("expert_permutation", case, "int64")
        check("expert_counts", case, "int64")
    order = problems.permutation(rng, 3 * 300)
    for dtype in problems.DTYPES:
        rows = problems.values(rng, "normal", (900, 70), dtype)
        check("moe_permute_backward", Case("", {"dy": rows, "order": order}, {"k": 300}), dtype)


def test_in_place() -> None:
    x = torch.randn(301, 256, device="cuda")
    w, e = ig.moe_router(x, 8)
    expected = ig.moe_router_backward(w, x, e)
    launch.moe_router_backward(w, x, e, x)
    assert torch.equal(x, expected)


def test_the_api_takes_tensors_on_the_gpu() -> None:
    x = torch.randn(70, 64, device="cuda").bfloat16()
    w, e = ig.moe_router(x, 4, renormalize=True)
    assert w.is_cuda
    assert w.dtype is torch.float32
    assert torch.equal(w.cpu(), ig.moe_router(x.cpu(), 4, renormalize=True)[0])
    order, offsets = ig.expert_permutation(e, 64)
    rows = ig.moe_permute(x, order, 4)
    assert torch.equal(ig.moe_combine(rows, w * 0 + 0.25, order), x)
    assert offsets[-1].item() == 280
    for loss in (ig.load_balancing_loss(ig.softmax(x), e), ig.router_z_loss(x)):
        assert loss.shape == ()
    with pytest.raises(ig.UnsupportedError, match="4096 experts"):
        ig.moe_router(torch.randn(2, 5000, device="cuda"), 2)


def test_faults() -> None:
    x, g = torch.randn(4, 6, device="cuda"), torch.ones(4, 2, device="cuda")
    experts = torch.tensor([[0, 1], [2, 3], [6, 5], [0, -1]], device="cuda")
    dx = ig.moe_router_backward(g, x, experts)
    with pytest.raises(ig.IndexOutOfRangeError, match="moe_router_backward: experts has 6 at flat position 4"):
        ig.check()
    assert torch.isnan(dx[2:]).all()
    assert torch.isfinite(dx[:2]).all()
    ig.check()
    with ig.debug(), pytest.raises(ig.IndexOutOfRangeError, match="expert_counts"):
        ig.expert_counts(experts, 6)
    order = torch.tensor([3, 1, 99, 0], device="cuda")
    y = ig.moe_combine(torch.ones(4, 3, device="cuda"), torch.ones(2, 2, device="cuda"), order)
    with pytest.raises(ig.IndexOutOfRangeError, match="moe_combine: order has 99 at flat position 2"):
        ig.check()
    assert torch.isnan(y[1]).all()
    assert torch.isfinite(y[0]).all()


def test_repetitions_under_load_give_equal_bits() -> None:
    x = torch.randn(4096, 256, device="cuda")
    noise, side = torch.empty(1 << 26, device="cuda"), torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    first: list[Any] = []
    for _ in range(1000):
        with torch.cuda.stream(side):
            noise.add_(1)
        w, e = ig.moe_router(x, 8, renormalize=True)
        order, offsets = ig.expert_permutation(e, 256)
        results = [w, e, order, offsets, ig.moe_router_backward(w, x, e, renormalize=True)]
        results.append(ig.moe_permute_backward(ig.moe_permute(x, order, 8), order, 8))
        results.append(ig.load_balancing_loss(x, e))
        first = first or results
        for a, b in zip(first, results, strict=True):
            wrong += (a.view(torch.int32) != b.view(torch.int32)).sum() if a.dim() else (a != b).sum()
    assert wrong.item() == 0


def test_the_order_of_tokens_leaves_no_trace_in_losses() -> None:
    x = torch.randn(5000, 64, device="cuda")
    _, e = ig.moe_router(x, 4)
    turn = torch.randperm(5000, device="cuda")
    for loss in (lambda x, e: ig.load_balancing_loss(x, e), lambda x, e: ig.router_z_loss(x)):
        assert torch.equal(loss(x, e), loss(x[turn], e[turn]))


def test_more_than_2_31_elements() -> None:
    rows, n = (1 << 23) + 3, 256
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GB of device memory")
    x = torch.zeros(rows, n, device="cuda", dtype=torch.bfloat16)
    x[-1] = torch.randn(n, device="cuda")
    w, e = ig.moe_router(x, 8)
    expected = reference.moe_router(to_numpy(x[-1:]), 8)
    assert [problems.raw(to_numpy(t[-1:])) for t in (w, e)] == [problems.raw(a) for a in expected]
    assert bool((e[:-1] == torch.arange(8, device="cuda")).all())
