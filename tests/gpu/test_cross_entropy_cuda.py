"""Cross entropy and linear cross entropy on a real GPU: the reference's bits, faults, in place, and the pieces."""

import itertools
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "losses"))
from cross_entropy_problems import NUMPY, Problem, by_definition, problem, raw, with_zeros  # noqa: E402

import isograd as ig  # noqa: E402
import isograd.torch as igt  # noqa: E402
from isograd.losses import cross_entropy_reference as reference  # noqa: E402
from isograd.losses import linear_bounds, linear_reference  # noqa: E402
from isograd.losses import triton_cross_entropy_launch as triton_launch  # noqa: E402

INTEGER = {"float16": np.int16, "bfloat16": np.int16, "float32": np.int32, "float64": np.int64}
KINDS = ("hard", "smooth", "probabilities")


def to_torch(x: Any) -> Any:
    if x.dtype.name == "uint32":
        return torch.from_numpy(x.view(np.int32)).cuda().view(torch.uint32)
    if x.dtype.name not in INTEGER:
        return torch.from_numpy(np.array(x)).cuda()
    contiguous = np.array(x, order="C")
    return torch.from_numpy(contiguous.view(INTEGER[x.dtype.name])).cuda().view(getattr(torch, x.dtype.name))


def to_numpy(t: Any) -> Any:
    name = str(t.dtype).removeprefix("torch.")
    bits = t.contiguous().view(getattr(torch, np.dtype(INTEGER[name]).name)).cpu().numpy()
    return bits.view(NUMPY[name])


def by_gpu(p: Problem, layout: Any = lambda t: t) -> list[Any]:
    """(losses, state, gradient from the state, losses and gradient at once, in place) of the plans."""
    rows, of = p.dlosses.shape, getattr(torch, p.dlosses.dtype.name)
    plans = [
        plan.select(kind(*p.fields), "cuda")
        for plan, kind in (
            (ig.CrossEntropyPlan, ig.CrossEntropyDescriptor),
            (ig.CrossEntropyBackwardPlan, ig.CrossEntropyBackwardDescriptor),
            (ig.CrossEntropyGradientPlan, ig.CrossEntropyGradientDescriptor),
        )
    ]
    given = {name: to_torch(a) for name, a in p.given.items()}
    given["logits"] = layout(given["logits"])
    losses, again = torch.full(rows, 7, dtype=of, device="cuda"), torch.full(rows, 7, dtype=of, device="cuda")
    state = torch.full((4, *rows), 7, dtype=of, device="cuda")
    dx, g = layout(torch.full_like(given["logits"], 7)), to_torch(p.dlosses)
    plans[0].run(**given, losses=losses, state=state)
    plans[1].run(**given, dlosses=g, state=state, dlogits=dx)
    other = torch.full_like(dx, 7)
    plans[2].run(**given, dlosses=g, losses=again, dlogits=other)
    assert raw(to_numpy(other)) == raw(to_numpy(dx))
    plans[2].run(**given, dlosses=g, losses=again, dlogits=given["logits"])
    return [to_numpy(t) for t in (losses, state, dx, again, given["logits"])]


def check(p: Problem, **options: Any) -> None:
    with np.errstate(all="ignore"):
        expected = by_definition(p)
    wrong = [i for i, (a, b) in enumerate(zip(by_gpu(p, **options), expected, strict=True)) if raw(a) != raw(b)]
    assert wrong == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((33, 1), 1),
        ((7,), 0),
        ((40, 255), 1),
        ((9, 4096), 1),
        ((3, 20_000), 1),
        ((2, 19, 300), 1),
        ((2, 300, 7), 1),
        ((5, 600), 0),
        ((2, 3, 4, 5, 3, 2), 3),
    ],
)
def test_shapes(kind: str, dtype: str, shape: tuple[int, ...], axis: int) -> None:
    for seed, (weighted, z) in enumerate(((False, 0.0), (True, 1e-3))):
        index = (np.int64, np.int32, np.uint32)[(len(shape) + seed) % 3]
        check(problem(np.random.default_rng(seed), shape, NUMPY[dtype], axis, kind, weighted, z, index=index))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "n", [8192, 16_384, 20_008, 32_000, 50_257, 65_536, 128_256, 131_072, 200_000, 262_144, 300_000]
)
def test_long_rows(dtype: str, n: int) -> None:
    rng = np.random.default_rng(n)
    p = problem(rng, (3, n), NUMPY[dtype], weighted=bool(n % 3), z_loss=1e-4 if n % 5 else 0.0, ignored=0.3)
    check(p)
    # Targets at the edges of what a block holds.
    p.targets[:] = [0, n - 1, n // 2]
    check(p)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rows_of_a_warp(dtype: str) -> None:
    rng = np.random.default_rng(13)
    for n, weighted in ((1024, False), (1000, False), (1024, True)):
        p = problem(rng, (131, n), NUMPY[dtype], weighted=weighted, z_loss=1e-3 if weighted else 0.0, ignored=0.1)
        p.logits[::3, ::5] = -np.inf  # probabilities of 0 under gradients of both signs
        p.logits[1, 7], p.logits[2, 7] = np.inf, np.nan
        check(p)


def test_more_rows_than_clusters() -> None:
    rng = np.random.default_rng(1)
    check(problem(rng, (700, 16_384), ml_dtypes.bfloat16))
    check(problem(rng, (300, 8192), np.float32))


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("n", [40, 20_000])
def test_special_values(dtype: str, n: int) -> None:
    rng = np.random.default_rng(2)
    pool = np.array([np.inf, -np.inf, np.nan, -np.nan, 0.0, -0.0, 6e4, -6e4])
    for kind in KINDS:
        p = problem(rng, (24, n), NUMPY[dtype], kind=kind, weighted=True, z_loss=1e-3)
        with np.errstate(all="ignore"):
            share = rng.random((24, 1)) * 2 / n
            x = np.where(rng.random(p.logits.shape) < share, rng.choice(pool, p.logits.shape), p.logits)
        x[0], x[1, 1:] = -np.inf, -np.inf
        # Rows whose largest elements are zeros of both signs.
        x[2:10] = np.where(rng.random((8, n)) < 0.5, -np.abs(x[2:10]), rng.choice([0.0, -0.0], (8, n)))
        check(p._replace(logits=x.astype(p.logits.dtype)))


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("n", [9, 20_000])
def test_zeros_of_both_signs_in_weights_and_operands(dtype: str, n: int) -> None:
    rng = np.random.default_rng(12)
    for kind, z in itertools.product(KINDS, (0.0, 1e-3)):
        p = with_zeros(rng, problem(rng, (24, n), NUMPY[dtype], kind=kind, weighted=True, z_loss=z))
        check(p)
        check(p, layout=LAYOUTS["transposed"])


LAYOUTS = {
    "transposed": lambda t: t.mT.contiguous().mT,
    "every other row": lambda t: torch.stack([t, t], 1)[:, 0],
    "every other column": lambda t: torch.stack([t, t], 2)[:, :, 0],
    "unaligned": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
    "padded rows": lambda t: torch.nn.functional.pad(t, (8, 8))[:, 8:-8],
    "rows padded to whole accesses": lambda t: torch.nn.functional.pad(t, (0, -t.shape[1] % 8))[:, : t.shape[1]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(24, 100), (16, 16_384), (16, 20_001)])
def test_strides(layout: str, dtype: str, shape: tuple[int, int]) -> None:
    for kind in ("hard", "smooth"):
        check(problem(np.random.default_rng(3), shape, NUMPY[dtype], kind=kind), layout=LAYOUTS[layout])


# --- faults ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("shape", "bad"), [((6, 40), 40), ((6, 40), -1), ((4, 16_384), 2**40), ((4, 16_384), 16_384)])
def test_a_target_that_is_no_class(shape: tuple[int, int], bad: int) -> None:
    p = problem(np.random.default_rng(4), shape, ml_dtypes.bfloat16, ignored=0)
    expected = by_definition(p)
    p.targets[2] = bad
    ig.check()
    got = by_gpu(p)
    message = f"targets has {bad} at flat position 2; accepted: 0 to {shape[1] - 1}"
    with pytest.raises(ig.IndexOutOfRangeError, match=message):
        ig.check()
    ig.check()
    others = np.arange(shape[0]) != 2
    for i in (0, 3):
        assert np.isnan(got[i][2])
        assert raw(got[i][others]) == raw(expected[i][others])
    for i in (2, 4):
        assert np.isnan(got[i][2].astype(np.float32)).all()
        assert raw(got[i][others]) == raw(expected[i][others])
    assert np.isnan(got[1][:, 2]).all()
    with ig.debug(), pytest.raises(ig.IndexOutOfRangeError, match=str(bad)):
        ig.cross_entropy(to_torch(p.logits), to_torch(p.targets))


# --- functions -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", NUMPY)
def test_functions_have_the_bits_of_the_cpu(dtype: str, reduction: str) -> None:
    for kind, weighted in itertools.product(KINDS, (False, True)):
        p = problem(np.random.default_rng(5), (50, 300), NUMPY[dtype], kind=kind, weighted=weighted, z_loss=1e-3)
        options = {"reduction": reduction, "return_gradient": True} | p.options
        expected = ig.cross_entropy(p.logits, p.targets, p.weight, **options)
        weight = None if weighted is False else to_torch(p.weight)
        got = ig.cross_entropy(to_torch(p.logits), to_torch(p.targets), weight, **options)
        assert [raw(to_numpy(t)) for t in got] == [raw(a) for a in expected]
        del options["return_gradient"]
        loss, state = ig.cross_entropy(to_torch(p.logits), to_torch(p.targets), weight, **options, return_state=True)
        assert raw(to_numpy(loss)) == raw(expected[0])
        g = torch.ones_like(loss)
        back = ig.cross_entropy_backward(g, to_torch(p.logits), to_torch(p.targets), weight, state=state, **options)
        assert raw(to_numpy(back)) == raw(expected[1])


def test_many_losses_in_a_mean() -> None:
    losses = np.random.default_rng(6).standard_normal(300_000).astype(np.float32)
    got = ig.cross_entropy(
        torch.zeros(300_000, 2, device="cuda"), torch.zeros(300_000, dtype=torch.int64, device="cuda")
    )
    assert abs(got.item() - np.log(2)) < 1e-6
    from isograd.losses import reductions

    assert raw(to_numpy(reductions.total(to_torch(losses)))) == raw(reference.reduced(losses, "sum"))


def test_accumulated_on_the_gpu() -> None:
    losses = np.random.default_rng(7).standard_normal(1000).astype(np.float32)
    total, on_gpu = ig.LossAccumulator(), ig.LossAccumulator()
    total.add(losses)
    for piece in np.array_split(losses[::-1], 7):
        on_gpu.add(to_torch(piece))
    assert on_gpu.total() == total.total()


def test_captured_in_a_graph() -> None:
    p = problem(np.random.default_rng(8), (40, 16_384), ml_dtypes.bfloat16)
    x, t = to_torch(p.logits), to_torch(p.targets)
    out = torch.empty_like(x)
    expected = ig.cross_entropy(x, t, return_gradient=True, out=out)[0].clone(), out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, _ = ig.cross_entropy(x, t, return_gradient=True, out=out)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(loss, expected[0])
    assert torch.equal(out, expected[1])


def test_a_hundred_runs_under_load() -> None:
    p = problem(np.random.default_rng(9), (300, 20_000), ml_dtypes.bfloat16)
    x, t = to_torch(p.logits), to_torch(p.targets)
    expected = ig.cross_entropy(x, t, return_gradient=True)
    busy, other = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    for _ in range(100):
        with torch.cuda.stream(other):
            busy = busy @ busy / 50
        loss, dx = ig.cross_entropy(x, t, return_gradient=True)
        assert torch.equal(loss, expected[0])
        assert torch.equal(dx, expected[1])


def test_more_than_2_31_elements() -> None:
    rows, n = (1 << 21) + 3, 1024
    if torch.cuda.mem_get_info()[0] < 3 * rows * n * 2:
        pytest.skip("needs 13 GB of device memory")
    x = torch.zeros(rows, n, device="cuda", dtype=torch.bfloat16)
    x[-1] = torch.randn(n, device="cuda")
    t = torch.zeros(rows, dtype=torch.int32, device="cuda")
    last = ig.cross_entropy(x[-1:].clone(), t[-1:], reduction="sum", return_gradient=True)
    losses, dx = ig.cross_entropy(x, t, reduction="none", return_gradient=True)
    assert torch.equal(losses[-1], last[0])
    assert torch.equal(dx[-1:], last[1])
    assert bool((dx[:-1] == dx[0]).all())


# --- linear ----------------------------------------------------------------------------------------------------------
def gradient_and_state(p: Problem) -> list[Any]:
    """(losses, gradient in place, state) of the kernel that the second pass of linear cross entropy relies on."""
    of = getattr(torch, p.dlosses.dtype.name)
    given = {name: to_torch(a) for name, a in p.given.items()} | {"dlosses": to_torch(p.dlosses)}
    losses, state = torch.full((len(p.dlosses),), 7, dtype=of, device="cuda"), torch.full((4, 64), 7, dtype=of).cuda()
    descriptor = ig.CrossEntropyGradientDescriptor(*p.fields).validated()
    place = given["logits"]
    state = state[:, 3 : 3 + len(losses)]
    triton_launch.cross_entropy(descriptor, given | {"losses": losses, "state": state, "dlogits": place})
    return [to_numpy(t) for t in (losses, place, state)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("n", [300, 32_000, 128_256, 300_000])
def test_linear_cross_entropy_has_the_gradient_and_the_state_at_once(dtype: str, n: int) -> None:
    for kind, weighted, z in (("hard", False, 0.0), ("hard", True, 1e-3), ("smooth", True, 0.0)):
        p = problem(np.random.default_rng(n), (6, n), NUMPY[dtype], kind=kind, weighted=weighted, z_loss=z)
        p.logits[0, n // 2] = np.inf
        p.logits[1, 0] = np.nan
        p.targets[:2] = 0
        with np.errstate(all="ignore"):
            losses, state, dx, *_ = by_definition(p)
        assert [raw(a) for a in gradient_and_state(p)] == [raw(a) for a in (losses, dx, state)], kind


# Shapes and chunks of which dweight keeps nothing, a part or everything between the passes, or that are one piece.
@pytest.mark.parametrize(
    ("rows", "features", "classes", "chunk"),
    [
        (200, 64, 500, None),
        (200, 64, 500, 32),
        (200, 64, 500, 64),
        (200, 64, 500, 100),
        (40, 64, 500, 16),
        (48, 24, 20_000, 8),
    ],
)
@pytest.mark.parametrize("dtype", NUMPY)
def test_linear_cross_entropy_within_its_bound(
    dtype: str, rows: int, features: int, classes: int, chunk: int | None
) -> None:
    rng = np.random.default_rng(10)
    of, work = NUMPY[dtype], np.float64 if dtype == "float64" else np.float32
    inputs = {
        "hidden": rng.standard_normal((rows, features)).astype(of),
        "weight": rng.standard_normal((classes, features)).astype(of),
        "targets": np.where(rng.random(rows) < 0.1, -100, rng.integers(0, classes, rows)),
        "bias": rng.standard_normal(classes).astype(of),
        "class_weight": rng.random(classes).astype(work),
    }
    g = rng.standard_normal(rows).astype(work)
    for plain in (False, True):
        options = {} if plain else {"label_smoothing": 0.1, "z_loss": 1e-3}
        if plain:
            del inputs["bias"], inputs["class_weight"]
        given = {name: to_torch(a) for name, a in inputs.items()}
        more = options | {"reduction": "none", "chunk": chunk, "return_gradient": True}
        got = ig.linear_cross_entropy(**given, **more, dloss=to_torch(g))
        bounds = linear_bounds.error_bound("linear_cross_entropy_gradient", linear_bounds.accumulated)(
            dlosses=g, **inputs, **options
        )
        truth = linear_reference.oracle_linear_cross_entropy_gradient(g, **inputs, **options)
        for tensor, right, limit in zip(got, truth, bounds, strict=True):
            assert (np.abs(to_numpy(tensor).astype(np.longdouble) - right) <= limit).all()
        again = ig.linear_cross_entropy(**given, **more, dloss=to_torch(g))
        assert [raw(to_numpy(t)) for t in again] == [raw(to_numpy(t)) for t in got]


def test_linear_cross_entropy_rounds_the_gradient_of_the_weight_once() -> None:
    """A sum of chunks in bfloat16 would be off by several units in the last place."""
    rows, features, classes = 4096, 256, 8000
    generator = torch.Generator("cuda").manual_seed(0)
    hidden, weight = (
        torch.randn(n, features, device="cuda", dtype=torch.bfloat16, generator=generator) for n in (rows, classes)
    )
    targets = torch.randint(0, classes, (rows,), device="cuda", generator=generator)
    _, _, dweight = ig.linear_cross_entropy(hidden, weight / 16, targets, return_gradient=True, chunk=128)
    logits = (hidden @ (weight / 16).T).double()
    dlogits = logits.softmax(1)
    dlogits[torch.arange(rows, device="cuda"), targets] -= 1
    right = (dlogits / rows).T @ hidden.double()
    error = (dweight.double() - right).square().mean().sqrt() / right.square().mean().sqrt()
    # Roundings of the results and of the logits' gradients leave 0.9 of this; those of 32 sums would leave 3.6.
    assert error < 1.5 * 2**-9


def test_linear_cross_entropy_and_a_fault_in_a_later_chunk() -> None:
    hidden = torch.randn(700, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(900, 64, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(0, 900, (700,), device="cuda")
    targets[650] = 900
    losses = ig.linear_cross_entropy(hidden, weight, targets, reduction="none", chunk=128)
    assert losses.isnan().nonzero().flatten().tolist() == [650]
    with pytest.raises(ig.IndexOutOfRangeError, match="linear_cross_entropy: targets has 900 at flat position 650"):
        ig.check()


def test_linear_cross_entropy_holds_its_results_and_a_slab() -> None:
    rows, features, classes = 8192, 1024, 32_000
    hidden = torch.randn(rows, features, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(classes, features, device="cuda", dtype=torch.bfloat16) / 32
    targets = torch.randint(0, classes, (rows,), device="cuda")
    ig.linear_cross_entropy(hidden, weight, targets, return_gradient=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ig.linear_cross_entropy(hidden, weight, targets, return_gradient=True)
    held = torch.cuda.max_memory_allocated() - before
    # The slab is as large as hidden, of whose gradient it is no part.
    assert held < 2 * hidden.nbytes + weight.nbytes + (1 << 20)


# --- linear, in no order ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rows", "features", "classes"), [(200, 64, 500), (70, 24, 20_000), (1, 1, 1), (300, 513, 1031)]
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_order_free_linear_cross_entropy_has_the_bits_of_the_cpu(
    dtype: str, rows: int, features: int, classes: int
) -> None:
    rng = np.random.default_rng(12)
    of = NUMPY[dtype]
    inputs = {
        "hidden": rng.standard_normal((rows, features)).astype(of),
        "weight": rng.standard_normal((classes, features)).astype(of),
        "targets": np.where(rng.random(rows) < 0.1, -100, rng.integers(0, classes, rows)),
        "bias": rng.standard_normal(classes).astype(of),
        "class_weight": rng.random(classes).astype(np.float32),
    }
    g = rng.standard_normal(rows).astype(np.float32)
    for kind in ("all", "plain", "special"):
        options = {} if kind == "plain" else {"label_smoothing": 0.1, "z_loss": 1e-3}
        if kind == "plain":
            del inputs["bias"], inputs["class_weight"]
        if kind == "special":
            inputs["hidden"][rows // 2, 0], inputs["weight"][classes // 2, 0] = np.nan, np.inf
        more = options | {"reduction": "none", "return_gradient": True, "preference": "order_free"}
        with np.errstate(all="ignore"):
            expected = [raw(a) for a in ig.linear_cross_entropy(**inputs, **more, dloss=g)]
        given = {name: to_torch(a) for name, a in inputs.items()}
        for chunk in (None, 1, 32, 64, 100, rows)[:: 3 if rows * classes > 200_000 else 1]:
            got = ig.linear_cross_entropy(**given, **more, dloss=to_torch(g), chunk=chunk)
            assert [raw(to_numpy(t)) for t in got] == expected, (kind, chunk)
            losses = ig.linear_cross_entropy(
                **given, **options, reduction="none", preference="order_free", chunk=chunk
            )  # fmt: skip
            assert raw(to_numpy(losses)) == expected[0], (kind, chunk)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_order_free_linear_cross_entropy_through_torch(dtype: torch.dtype, reduction: str) -> None:
    generator = torch.Generator().manual_seed(3)
    given = [torch.randn(s, generator=generator).to(dtype) for s in ((3, 40, 64), (900, 64), (900,))]
    targets = torch.randint(0, 900, (3, 40), generator=generator)
    targets[0, 5] = -100
    found = []
    for device in ("cpu", "cuda", "cuda", "cuda"):  # recorded, seen to be the same, replayed
        leaves = [t.to(device).requires_grad_() for t in given]
        loss = igt.linear_cross_entropy(
            *leaves[:2], targets.to(device), leaves[2], reduction=reduction, preference="order_free"
        )  # fmt: skip
        gradients = torch.autograd.grad(loss * 3, leaves)
        found.append([t.detach().cpu().view(torch.uint8) for t in (loss.reshape(1), *gradients)])
    for others in found[1:]:
        assert all(map(torch.equal, others, found[0]))
    if hasattr(torch.nn.functional, "linear_cross_entropy"):  # torch 2.13
        with igt.use(products="int16") as switch:
            loss = torch.nn.functional.linear_cross_entropy(
                given[0].cuda().flatten(0, 1), given[1].cuda(), targets.cuda().flatten(), linear_bias=given[2].cuda(),
                reduction=reduction,
            )  # fmt: skip
        assert switch.report().replaced == {"torch.nn.functional.linear_cross_entropy": 1}
        assert torch.equal(loss.cpu(), found[0][0].view(torch.float32)[0].to(dtype))


def test_order_free_linear_cross_entropy_of_float32_has_no_kernel_here() -> None:
    hidden, weight = torch.randn(3, 4, device="cuda"), torch.randn(5, 4, device="cuda")
    targets = torch.zeros(3, dtype=torch.int64, device="cuda")
    with pytest.raises(ig.UnsupportedError, match=r"preference is 'order_free'; registered for float32 on cuda"):
        ig.linear_cross_entropy(hidden, weight, targets, preference="order_free")


def test_order_free_linear_cross_entropy_holds_integers_and_a_slab() -> None:
    rows, features, classes = 8192, 1024, 32_000
    hidden = torch.randn(rows, features, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(classes, features, device="cuda", dtype=torch.bfloat16) / 32
    targets = torch.randint(0, classes, (rows,), device="cuda")
    more = {"return_gradient": True, "preference": "order_free"}
    ig.linear_cross_entropy(hidden, weight, targets, **more)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ig.linear_cross_entropy(hidden, weight, targets, **more)
    held = torch.cuda.max_memory_allocated() - before
    # The results; integers of hidden, of the weight along either axis and of a chunk's logits' gradient.
    assert held < 5 * hidden.nbytes + 4 * weight.nbytes + (1 << 21)
    assert held < rows * classes * 2


def test_the_general_kernel_serves_long_rows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "staged", lambda *_: None)
    for dtype in ("bfloat16", "float32"):
        check(problem(np.random.default_rng(11), (3, 128_256), NUMPY[dtype], weighted=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_encoder_replays_with_class_weights_that_were_changed(dtype: Any) -> None:
    logits = torch.randn(64, 500, device="cuda").to(dtype)
    targets = torch.randint(0, 500, (64,), device="cuda")
    weight = torch.rand(500, device="cuda").to(dtype)
    with ig.Encoder("cuda") as encoder:
        losses = ig.cross_entropy(logits, targets, weight, reduction="none")
    before = ig.cross_entropy(logits, targets, weight, reduction="none")
    assert torch.equal(losses, before)
    weight.copy_(torch.rand(500, device="cuda"))
    for _ in range(2):  # the first one captures the graph
        encoder.replay()
        after = ig.cross_entropy(logits, targets, weight, reduction="none")
        assert torch.equal(losses, after)
        assert not torch.equal(after, before)
        weight.copy_(torch.rand(500, device="cuda"))
        before = after
