"""GradientSum on GPUs: the CPU's bits, no wait for the device, NCCL with one rank and with two."""

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
import contexts  # noqa: E402
import linears  # noqa: E402
import test_context_attention  # noqa: E402
import test_parallel_linear  # noqa: E402
import test_vocab  # noqa: E402
import vocab  # noqa: E402
from gradients import DTYPES, SETTINGS, as_torch, gradient, totals  # noqa: E402
from pool import Ranks  # noqa: E402
from torch import nn  # noqa: E402

import isograd.torch as igt  # noqa: E402
from isograd.core import arrays  # noqa: E402
from isograd.errors import StepError  # noqa: E402
from isograd.torch.distributed import kernels, reference  # noqa: E402

GradientSum = igt.distributed.GradientSum
SIZES = (1, 5, 2048, 4099, 1_000_003)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_the_reference(dtype: str) -> None:
    for i, (quantum, limit) in enumerate(SETTINGS):
        for n in SIZES:
            total = torch.full((n,), 7, dtype=torch.int64, device="cuda")
            peaks = torch.zeros(3, dtype=torch.int64, device="cuda")
            right, peak = np.zeros(n, np.int64), 0
            for unit in range(3):
                g = gradient(dtype, n, 3 * i + unit, special=unit == 1)
                kernels.accumulate(as_torch(g).cuda(), total, peaks, 1, quantum, limit, unit == 0)
                found = reference.quanta(g, quantum, limit)
                right, peak = right + found.units, max(peak, found.peak)
            assert (total.cpu().numpy() == right).all(), (quantum, n)
            before, found_peak, after = peaks.tolist()
            assert before == after == 0
            of = DTYPES[dtype]
            np.testing.assert_equal(
                reference.magnitude(found_peak, of), reference.magnitude(peak, of)
            )  # any NaN is one
            whole = totals(n)
            for units, flag in ((1, 0), (3, 0), ((1 << 24) + 1, 0), (3, 1)):
                y = torch.full((n,), 7, dtype=getattr(torch, dtype), device="cuda")
                kernels.mean(torch.from_numpy(whole).cuda(), torch.tensor([units, flag, 5], device="cuda"), y, quantum)
                wanted = reference.mean(whole, units, quantum, DTYPES[dtype])
                wanted = np.full(n, np.nan, DTYPES[dtype]) if flag else wanted
                assert arrays.numpy_view(y.cpu()).tobytes() == wanted.tobytes(), (quantum, n, units)


def test_unaligned_gradients() -> None:
    for shift in (1, 2, 3):
        g = torch.randn(5000, device="cuda").bfloat16()
        total, peaks = (torch.zeros(n, dtype=torch.int64, device="cuda") for n in (5000 - shift, 1))
        kernels.accumulate(g[shift:], total, peaks, 0, -48, 14, True)
        right = reference.quanta(arrays.numpy_view(g[shift:].cpu()), -48, 14)
        assert (total.cpu().numpy() == right.units).all()


def parameters(device: str) -> nn.ParameterDict:
    return nn.ParameterDict({
        name: nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
        for name, shape, dtype in (
            ("matrix", (300, 70), torch.bfloat16), ("vector", (71,), torch.float32), ("narrow", (5, 3), torch.float16),
            ("wide", (40, 3), torch.float64), ("number", (), torch.float32),
        )
    })  # fmt: skip


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 26])
def test_gradients_have_the_bits_of_the_cpu(bucket_bytes: int) -> None:
    found = []
    for device in ("cpu", "cuda"):
        model = parameters(device)
        total = GradientSum(model, bucket_bytes=bucket_bytes)
        for unit in range(5):
            random = torch.Generator().manual_seed(unit)
            grads = [torch.randn(p.shape, generator=random, dtype=torch.float64).to(p.dtype) for p in model.values()]
            torch.autograd.backward([p * 1 for p in model.values()], [g.to(device) for g in grads])
        report = total.finish()
        assert (report.units, report.fits) == (5, True)
        found.append([arrays.numpy_view(p.grad.cpu()).tobytes() for p in model.values()])
    assert found[0] == found[1]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 8)).cuda().bfloat16()


def backward(model: nn.Module, seed: int) -> None:
    x = torch.full((32, 64), 0.01 * (seed + 1), device="cuda", dtype=torch.bfloat16)
    model(x).float().square().mean().backward()


def test_nothing_waits_for_the_device() -> None:
    model = mlp()
    total = GradientSum(model, units=3)
    for step in range(3):
        if step == 2:  # kernels are compiled, memory is there
            torch.cuda.set_sync_debug_mode("error")
        try:
            for unit in range(3):
                backward(model, unit)
            total.finish()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        model.zero_grad()


def test_what_does_not_fit_is_nan_and_said_later() -> None:
    model = mlp()
    total = GradientSum(model, range={"3.bias": -30})
    backward(model, 0)
    report = total.finish()
    torch.cuda.synchronize()
    assert all(p.grad.isnan().all() for p in model.parameters())
    assert report.exceeded == ("3.bias",)
    assert not report.fits
    model.zero_grad()
    backward(model, 0)
    with pytest.warns(RuntimeWarning, match=r"in an earlier step every gradient is NaN: .* '3\.bias'"):
        total.finish()


def test_steps_that_cannot_be_finished() -> None:
    model = mlp()
    total = GradientSum(model)
    with pytest.raises(StepError, match="no backward pass"):
        total.finish()
    backward(model, 0)
    total.finish()
    backward(model, 0)
    with pytest.raises(StepError, match="zero_grad"):
        total.finish()
    backward(model, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert total.finish().fits


def test_units_on_a_stream_of_their_own() -> None:
    found = []
    for stream in (None, torch.cuda.Stream()):
        model = mlp()
        total = GradientSum(model, units=2)
        torch.cuda.synchronize()
        for unit in range(2):
            with torch.cuda.stream(stream if unit else None):
                backward(model, unit)
            torch.cuda.synchronize()
        total.finish()
        found.append([arrays.numpy_view(p.grad.cpu()).tobytes() for p in model.parameters()])
    assert found[0] == found[1]


# --- one process ------------------------------------------------------------------------------------------------------
CASES = [("uneven", False), ("empty", True)]


@pytest.mark.parametrize("special", [False, True], ids=["finite", "special"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_rows_have_the_bits_of_the_cpu(dtype: str, special: bool) -> None:
    given = {"dtypes": [dtype], "sizes": [1, 5, 300, 4097, 20_000], "kind": "even", "special": special}
    assert vocab.losses_differ(None, **given, device="cuda") == []
    assert vocab.softmax_differs(None, **given, device="cuda") == []


def test_more_classes_than_a_short_sum_holds() -> None:
    assert vocab.many_classes_differ(None, "bfloat16", "cuda") == []


@pytest.mark.parametrize("special", [False, True], ids=["finite", "special"])
def test_linear_layers_have_the_bits_of_the_cpu(special: bool) -> None:
    assert linears.differ(None, ["float16", "bfloat16", "float32"], "even", special, "cuda") == []
    assert not linears.mlp_differs(None, "cuda")


# Sizes for Triton's kernels and, on Hopper, for those in Gluon; sequences have the bits of the same device.
SHAPES = [contexts.SHAPE, *[contexts.Shape(head_dim=d, v_dim=d) for d in (64, 128)]]
PRECISIONS = [("float16", None), ("bfloat16", None), ("float32", None), ("bfloat16", "int16")]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_without_a_group(shape: Any) -> None:
    assert contexts.differ(None, "even", kinds=PRECISIONS, shape=shape, device="cuda") == []


# --- NCCL ------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def ranks(tmp_path_factory: Any) -> Any:
    made = Ranks(min(torch.cuda.device_count(), 2), tmp_path_factory.mktemp("nccl"), "nccl")
    yield made
    made.close()


KINDS = ["plain", "ddp", "ddp_no_sync", "fsdp"]


@pytest.mark.parametrize("kind", KINDS)
def test_one_digest_on_one_rank(ranks: Ranks, kind: str) -> None:
    right = ranks.run("training", "train", 1, kind="plain", by_step=True)
    for ahead in (False, True):
        assert ranks.run("training", "train", 1, kind=kind, ahead=ahead, by_step=True, bucket_bytes=256) == right


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", KINDS)
def test_one_digest_on_one_and_two_ranks(ranks: Ranks, kind: str) -> None:
    [right] = ranks.run("training", "train", 1, kind="plain", by_step=True, steps=20)
    for _ in range(3):
        found = ranks.run("training", "train", 2, kind=kind, ahead=True, by_step=True, steps=20, bucket_bytes=256)
        assert set(found) == {right}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_uneven_units_and_missing_gradients_on_two_ranks(ranks: Ranks) -> None:
    right = ranks.run("misuse", "sums_on_gpu", 2)
    assert right == [[True, True, True, True]] * 2


# --- what is spread over ranks ----------------------------------------------------------------------------------------
NUMBERS = [1, pytest.param(2, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"))]


@pytest.mark.parametrize("n", NUMBERS)
@pytest.mark.parametrize(("kind", "special"), CASES, ids=str)
def test_bits_of_whole_rows(ranks: Ranks, n: int, kind: str, special: bool) -> None:
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        given = {"dtypes": [dtype], "sizes": [1, 5, 300, 20_000], "kind": kind, "special": special, "device": "cuda"}
        for function in ("losses_differ", "softmax_differs"):
            assert ranks.run("vocab", function, n, timeout=600, **given) == [[]] * n, (dtype, function)
    assert ranks.run("vocab", "many_classes_differ", n, dtype="bfloat16", device="cuda", timeout=600) == [[]] * n


@pytest.mark.parametrize("n", NUMBERS)
@pytest.mark.parametrize(("kind", "special"), CASES, ids=str)
def test_bits_of_the_whole_layer(ranks: Ranks, n: int, kind: str, special: bool) -> None:
    given = {"dtypes": ["float16", "bfloat16", "float32"], "kind": kind, "special": special, "device": "cuda"}
    assert ranks.run("linears", "differ", n, timeout=600, **given) == [[]] * n
    assert ranks.run("linears", "mlp_differs", n, device="cuda", timeout=600) == [False] * n


@pytest.mark.parametrize("n", NUMBERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_of_the_whole_sequence(ranks: Ranks, n: int, shape: Any) -> None:
    for kind in ("even", "uneven", "empty"):
        given = {"kind": kind, "kinds": PRECISIONS, "shape": shape, "device": "cuda"}
        assert ranks.run("contexts", "differ", n, timeout=600, **given) == [[]] * n, kind
    assert ranks.run("contexts", "some_gradients_differ", n, device="cuda", timeout=600) == [[]] * n


@pytest.mark.parametrize("n", NUMBERS)
def test_layouts_autocast_and_nothing_to_do(ranks: Ranks, n: int) -> None:
    assert ranks.run("vocab", "layouts_differ", n, device="cuda", timeout=600) == [False] * n
    assert ranks.run("vocab", "empty", n, device="cuda", timeout=600) == [[0.0, (0, 3), (2, 0)]] * n
    assert ranks.run("vocab", "autocast", n, device="cuda", timeout=600) == [True] * n
    assert ranks.run("linears", "empty", n, device="cuda", timeout=600) == [[(0, 3), 0.0, [[0.0] * 3] * 2]] * n
    assert ranks.run("linears", "autocast", n, device="cuda", timeout=600) == [True] * n
    sequences = [(1, 2, 0, 16), (1, 2, 0, 16), [0.0, 0.0], (1, 0, 3, 16)]
    assert ranks.run("contexts", "empty", n, device="cuda", timeout=600) == [sequences] * n
    assert ranks.run("contexts", "autocast", n, device="cuda", timeout=600) == [True] * n


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("vocab", test_vocab.SAID),
        ("linears", test_parallel_linear.SAID),
        ("contexts", test_context_attention.SAID),
    ],
)
def test_errors_on_both_ranks(ranks: Ranks, module: str, said: Any) -> None:
    found = ranks.run(module, "mistakes", 2, device="cuda", timeout=600)
    for what, (kind, first, second) in said.items():
        for rank, fragment in enumerate((first, first if second is None else second)):
            raised, message = found[rank][what]
            assert fragment in message, (what, message)
            assert raised == kind or (second is not None and rank), (what, raised)
