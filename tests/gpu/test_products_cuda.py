"""The product of 16-bit integers on a real GPU: the CPU's bits, for every layout, size, tile, batch and gradient."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

import isograd as ig  # noqa: E402
import isograd.torch as igt  # noqa: E402
from isograd.cli import check, suites  # noqa: E402
from isograd.core import registry  # noqa: E402
from isograd.errors import IndexOutOfRangeError, InvalidProblemError, UnsupportedError  # noqa: E402
from isograd.numerics import int16  # noqa: E402
from isograd.products import cuda, grouped, tiles  # noqa: E402
from isograd.torch.ops_grouped import GROUPED_MATMUL, GROUPED_OUTER  # noqa: E402

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WORDS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}


def equal(gpu: torch.Tensor, cpu: torch.Tensor) -> bool:
    word = WORDS[cpu.dtype]
    return gpu.shape == cpu.shape and torch.equal(gpu.cpu().view(word), cpu.view(word))


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int, spread: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-spread, spread + 1, shape, generator=generator)
    return torch.ldexp(torch.randn(shape, generator=generator), powers).to(dtype)


def transposed(t: torch.Tensor) -> torch.Tensor:
    return t.mT.contiguous().mT


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    expected = igt.matmul(a, b, precision="int16")
    assert equal(igt.matmul(a.cuda(), b.cuda(), precision="int16"), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("m", "k", "n"), [(1, 1, 1), (17, 130, 33), (300, 513, 259), (1, 4096, 700), (640, 1000, 1), (1024, 768, 512)]
)
def test_bits_of_every_layout(dtype: torch.dtype, m: int, k: int, n: int) -> None:
    a, b = random((m, k), dtype, 1), random((k, n), dtype, 2)
    expected = igt.matmul(a, b, precision="int16")
    for left in (a.cuda(), transposed(a.cuda()), a.cuda().repeat_interleave(2, 1)[:, ::2]):
        for right in (b.cuda(), transposed(b.cuda()), b.cuda().repeat_interleave(3, 0)[::3]):
            assert equal(igt.matmul(left, right, precision="int16"), expected)


@pytest.mark.parametrize(
    "tile", [tiles.HOPPER, tiles.HOPPER_TALL, *tiles._TMA, tiles._PARTS[90]._replace(pieces=3), *tiles._TABLE[80]]
)
def test_tiles_leave_no_trace(tile: tiles.Tiles) -> None:
    capability = torch.cuda.get_device_capability()
    if (tile.consumers and capability != (9, 0)) or (tile.tma and capability < (9, 0)):
        pytest.skip("a tile of other GPUs")
    a, b = random((333, 1030), torch.bfloat16, 3), random((1030, 401), torch.bfloat16, 4)
    c = torch.empty(333, 401, dtype=a.dtype, device="cuda")
    cuda.product(a.cuda(), b.cuda(), c, None, tile)
    assert equal(c, igt.matmul(a, b))


def test_neither_the_order_of_the_terms_nor_a_split_leaves_a_trace() -> None:
    a, b = random((700, 3000), torch.bfloat16, 5).cuda(), random((3000, 900), torch.bfloat16, 6).cuda()
    c = igt.matmul(a, b)
    order = torch.randperm(3000, device="cuda")
    assert torch.equal(igt.matmul(a[:, order], b[order]), c)
    padded = torch.nn.functional.pad
    assert torch.equal(igt.matmul(padded(a, (100, 5)), padded(b, (0, 0, 100, 5))), c)
    assert torch.equal(torch.cat([igt.matmul(a[:1], b), igt.matmul(a[1:129], b), igt.matmul(a[129:], b)]), c)
    assert torch.equal(torch.cat([igt.matmul(a, b[:, :257]), igt.matmul(a, b[:, 257:])], 1), c)


@pytest.mark.parametrize(("shape", "other"), [
    ((5, 70, 96), (96, 65)), ((5, 70, 96), (5, 96, 65)), ((70, 96), (3, 96, 65)), ((2, 1, 70, 96), (4, 96, 65)),
    ((64, 33, 64), (64, 64, 33)), ((6, 1030, 256), (6, 256, 1100)), ((3, 1, 1030, 256), (1, 2, 256, 1100)),
])  # fmt: skip
def test_batches(shape: tuple[int, ...], other: tuple[int, ...]) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        a, b = random(shape, dtype, 7), random(other, dtype, 8)
        same(a, b)
        same(transposed(a), transposed(b))


@pytest.mark.parametrize("k", [65536, 65537, 200_000])
@pytest.mark.parametrize("value", [32639.0, -32639.0, 32384.0, 32513.0])
def test_extreme_digits_of_long_axes(k: int, value: float) -> None:
    a, b = torch.full((130, k), value), torch.full((k, 128), value)
    b[:, 1::2] *= -1
    b[::7, 3] = 127.0
    same(a, b)
    whole = tiles._TABLE[90][0] if torch.cuda.get_device_capability() >= (9, 0) else tiles._TABLE[80][0]
    if k == 65536:
        c = torch.empty(130, 128, device="cuda")
        cuda.product(a.cuda(), b.cuda(), c, None, whole)
        assert equal(c, igt.matmul(a, b, precision="int16"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_ends_of_the_range(dtype: torch.dtype) -> None:
    low, high = {torch.float16: (-24, 15), torch.bfloat16: (-133, 127), torch.float32: (-149, 127)}[dtype]
    generator = torch.Generator().manual_seed(9)
    for at in (low, low // 2, 0, high // 2, high):
        for to in (-at, 0, at):
            powers = (at + torch.randint(-6, 7, (130, 70), generator=generator)).clamp(low, high)
            others = (to + torch.randint(-6, 7, (70, 90), generator=generator)).clamp(low, high)
            a = torch.ldexp(torch.rand(130, 70, generator=generator, dtype=torch.float64) * 3.9 - 1.95, powers).to(
                dtype
            )
            b = torch.ldexp(torch.rand(70, 90, generator=generator, dtype=torch.float64) * 3.9 - 1.95, others).to(dtype)
            same(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.00002, 0.002, 0.2])
def test_what_is_not_finite(dtype: torch.dtype, share: float) -> None:
    a, b = random((200, 300), dtype, 10), random((300, 2100), dtype, 11)
    generator = torch.Generator().manual_seed(12)
    for x in (a, b):
        for value in (float("nan"), float("inf"), -float("inf"), 0.0, -0.0):
            x[torch.rand(x.shape, generator=generator) < share] = value
    same(a, b)
    same(transposed(a), transposed(b))


@pytest.mark.parametrize(("k", "n"), [(1, 1), (300, 700), (4096, 130), (20_000, 5), (37, 30_000)])
def test_balances(k: int, n: int) -> None:
    for dtype in DTYPES:
        a, b = random((70, k), dtype, 13, 7), random((k, n), dtype, 14, 7)
        b[torch.rand(k) < 0.2] = 0
        a[:, torch.rand(k) < 0.1] = 0
        b[k // 2, n // 2] = float("inf")
        wide = [x.float().numpy() for x in (a, b)]  # an exponent does not know the dtype
        for right in (b.cuda(), transposed(b.cuda())):
            assert np.array_equal(cuda.balance_of(right).cpu().numpy(), int16.balance_of(wide[1]))
            for left in (a.cuda(), transposed(a.cuda())):
                found = cuda.balance_between(left, right).cpu().numpy()
                assert np.array_equal(found, int16.balance_between(*wide))


def step(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, g: torch.Tensor, linear=igt.linear
) -> list[torch.Tensor]:
    leaves = [t.detach().requires_grad_() for t in (x, w, bias)]
    y = linear(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, g)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 77, 1024])
def test_linear_and_its_gradients(dtype: torch.dtype, tokens: int) -> None:
    sizes = ((2, tokens, 192), (320, 192), (320,), (2, tokens, 320))
    given = [random(s, dtype, 20 + i) for i, s in enumerate(sizes)]
    expected = step(*given)
    moved = [t.cuda() for t in given]
    for _ in range(4):  # recorded, confirmed and replayed
        assert all(equal(gpu, cpu) for gpu, cpu in zip(step(*moved), expected, strict=True))


def test_compiled_and_captured() -> None:
    sizes = ((256, 192), (320, 192), (320,), (256, 320))
    given = [random(s, torch.bfloat16, 30 + i).cuda() for i, s in enumerate(sizes)]
    expected = step(*given)
    compiled = torch.compile(igt.linear, fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(step(*given, compiled), expected, strict=True))
    graph = torch.cuda.CUDAGraph()
    inputs = [torch.zeros_like(t) for t in given]
    step(*inputs)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = step(*inputs)
    for place, t in zip(inputs, given, strict=True):
        place.copy_(t)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_nothing_waits() -> None:
    given = [random(s, torch.bfloat16, 40 + i).cuda() for i, s in enumerate(((64, 96), (32, 96), (32,), (64, 32)))]
    step(*given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_wide_is_refused() -> None:
    a = torch.ones(2, 2, device="cuda")
    with pytest.raises(UnsupportedError, match="'wide'"):
        igt.matmul(a, a)
    with pytest.raises(UnsupportedError, match="'wide'"):
        igt.linear(a.bfloat16(), a.bfloat16(), precision="wide")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_verify_finds_all_as_promised(dtype: str) -> None:
    (entry,) = [e for e in registry.kernels() if e[:3] == ("matmul", "cuda", dtype)]
    report = check.verify_kernel(entry, suites.cases("matmul", dtype), check.published())
    assert report.failures == []
    assert report.digests_equal == report.cases == 14


# --- experts ---------------------------------------------------------------------------------------------------------
def experts(device: str, dtype: torch.dtype, ends: list[int], features: int, outputs: int) -> list[torch.Tensor]:
    """The result and all gradients of a grouped layer."""
    sizes = ((ends[-1], features), (len(ends) - 1, outputs, features), (len(ends) - 1, outputs), (ends[-1], outputs))
    x, w, bias, g = (random(s, dtype, 40 + i) for i, s in enumerate(sizes))
    x[::7, 3], w[0, :, 5] = 300, 1e-4
    if ends[-1] > 3:
        x[1, 0], w[-1, 2, 1], g[2, 0] = float("inf"), float("nan"), -float("inf")
    leaves = [t.to(device).requires_grad_() for t in (x, w, bias)]
    y = igt.grouped_linear(leaves[0], leaves[1], torch.tensor(ends, device=device), leaves[2], precision="int16")
    return [y.detach(), *torch.autograd.grad(y, leaves, g.to(device))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "ends",
    [[0, 5, 5, 6, 300], [0, 0, 1024], [0, 1], [0, 0, 0], [0, *range(128, 4097, 128)], [0, 130, 700, 701]],
    ids=str,
)
def test_experts_have_the_bits_of_the_cpu(dtype: torch.dtype, ends: list[int]) -> None:
    expected = experts("cpu", dtype, ends, 200, 330)
    for _ in range(3):  # recorded, seen to be the same, replayed
        assert all(map(equal, experts("cuda", dtype, ends, 200, 330), expected))


@pytest.mark.parametrize("tile", [*tiles._TABLE[90], *tiles._TABLE[80]])
def test_tiles_leave_no_trace_of_experts(tile: tiles.Tiles) -> None:
    ends = torch.tensor([0, 100, 100, 433])
    x, w, g = random((433, 300), DTYPES[1], 50), random((3, 300, 401), DTYPES[1], 51), random((433, 401), DTYPES[1], 52)
    clean = grouped.checked_offsets("grouped_linear", ends.cuda(), 433)
    c, along = (torch.empty(s, dtype=x.dtype, device="cuda") for s in ((433, 401), (3, 300, 401)))
    grouped.product_of_rows(x.cuda(), w.cuda(), clean, c, True, tile)
    grouped.product_along_rows(x.cuda(), g.cuda(), clean, along, True, tile)
    assert equal(c, GROUPED_MATMUL(x, w, ends, True))
    assert equal(along, GROUPED_OUTER(x, g, ends, True))


def test_experts_with_more_rows_than_an_accumulator_holds() -> None:
    ends = torch.tensor([0, 100, 70_000, 140_100])
    for value in (1.0, 32639.0):
        x, g = random((140_100, 70), torch.float32, 53) * value, torch.full((140_100, 65), value)
        x[70_000:] = value
        found = GROUPED_OUTER(x.cuda(), g.cuda(), ends.cuda(), True)
        assert equal(found, GROUPED_OUTER(x, g, ends, True))
    x, w = torch.full((3, 70_000), 32639.0), torch.full((2, 70_000, 5), -32639.0)
    ends = torch.tensor([0, 1, 3])
    assert equal(GROUPED_MATMUL(x.cuda(), w.cuda(), ends.cuda(), True), GROUPED_MATMUL(x, w, ends, True))


def test_experts_are_not_waited_for() -> None:
    x = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(4, 32, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    bias = torch.randn(4, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    offsets = torch.tensor([0, 10, 10, 200, 300], device="cuda")
    for step in range(4):
        if step == 3:  # kernels are compiled, memory is there
            torch.cuda.set_sync_debug_mode("error")
        try:
            igt.grouped_linear(x, w, offsets, bias).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_offsets_of_experts_that_do_not_fit() -> None:
    x = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(4, 32, 64, device="cuda", dtype=torch.bfloat16)
    y = igt.grouped_linear(x, w, torch.tensor([0, 10, 5, 200, 300], device="cuda"))
    assert bool(y.isnan().all())
    with pytest.raises(IndexOutOfRangeError, match="grouped_linear: offsets has 5 at flat position 2"):
        ig.check()
    with pytest.raises(InvalidProblemError, match="offsets go from 0 to 299 for 300 rows"):
        igt.grouped_linear(x, w, [0, 10, 20, 200, 299])
    with pytest.raises(InvalidProblemError, match="expected integers, 5 for 4 experts"):
        igt.grouped_linear(x, w, torch.tensor([0, 300], device="cuda"))
