"""The Triton kernels: the reference's bits in Triton's interpreter, and code for GPUs that are not there."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import isograd as ig

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")

import triton_targets  # noqa: E402
from choices import alongside, quick_first, thinned  # noqa: E402
from triton_targets import TARGETS, resources  # noqa: E402

from isograd.numerics.storage import compute_dtype  # noqa: E402
from isograd.ops.distillation_loss import triton as launch  # noqa: E402
from isograd.ops.kl_div import triton as kl_div  # noqa: E402
from isograd.reduction import cuda as reduction  # noqa: E402

SCRIPT = Path(__file__).parent / "distributions_interpreted.py"
# suite: its cases, and those of an exhaustive run
CASES = {
    "distillation": (7, 25),
    "distillation_backward": (7, 25),
    "top": (7, 25),
    "top_backward": (7, 25),
    "faults": (16, 16),
}
QUICK = ("distillation", "faults")


@pytest.mark.parametrize("exhaustive", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["few", "all"])
@pytest.mark.parametrize("suite", quick_first(CASES, QUICK))
def test_interpreter_returns_the_bits_of_the_reference(interpret: Any, suite: str, exhaustive: bool) -> None:
    found, which = interpret(SCRIPT, *alongside(suite, CASES, QUICK), exhaustive=exhaustive)
    assert suite in found, which
    assert found[suite] == (CASES[suite][exhaustive], 0), which


# dtype, rows, columns: rows that a tile holds, rows of doubles, rows in passes
PROBLEMS = {"rows": ("bfloat16", 64, 1024), "doubles": ("float64", 64, 250), "long rows": ("float32", 8, 100_000)}
OPERATIONS = (
    "distillation_loss",
    "distillation_loss_backward",
    "top_loss",
    "top_loss_backward",
)


def call(operation: str, name: str, count: int, n: int) -> Any:
    """A function that launches an operation on rows of a dtype."""
    shape, dtype, work = (count, n), getattr(torch, name), getattr(torch, compute_dtype(name))
    x = torch.zeros(shape, dtype=dtype)
    top, backward = operation.startswith("top"), operation.endswith("backward")
    kind = ig.DistillationLossBackwardDescriptor if backward else ig.DistillationLossDescriptor
    descriptor = kind(shape, name, classes=8 if top else None, reduction="none").validated()
    losses = torch.zeros(count, dtype=work)
    arguments = {"student": x, "teacher": x[:, :8] if top else x}
    arguments |= {"indices": torch.zeros((count, 8), dtype=torch.int64)} if top else {}
    arguments |= {"dloss": losses, "dstudent": x} if backward else {"loss": losses}
    function = launch.distillation_loss_backward if backward else launch.distillation_loss
    return lambda: function(descriptor, **arguments)


@pytest.mark.thorough
@pytest.mark.parametrize(("operation", "problem"), thinned(3, OPERATIONS, PROBLEMS))
def test_hopper(operation: str, problem: str) -> None:
    check_compiled(operation, problem, "sm_90")


@pytest.mark.thorough
@pytest.mark.parametrize("operation", OPERATIONS)
def test_amd(operation: str) -> None:
    check_compiled(operation, "rows", "gfx942")


def check_compiled(operation: str, problem: str, target: str) -> None:
    found = triton_targets.kernels_of(target, call(operation, *PROBLEMS[problem]), launch, reduction)
    assert found
    for name, kernel in found.items():
        need = resources(kernel)
        # A few words of the stack are what the compiler's scheduling costs.
        assert need["stack"] <= 64, name
        assert need["registers"] <= 255, name
        assert need["shared"] <= 64 * 1024, name


@pytest.mark.thorough
@pytest.mark.parametrize(("operation", "dtype", "n"), [
    ("distillation_loss", "bfloat16", 32_000), ("distillation_loss_backward", "float32", 32_768),
    ("distillation_loss", "float32", 65_536), ("distillation_loss_backward", "bfloat16", 4096),
])  # fmt: skip
def test_long_rows_are_read_once(operation: str, dtype: str, n: int) -> None:
    ((name, kernel),) = triton_targets.kernels_of("sm_90", call(operation, dtype, 64, n), launch, reduction).items()
    assert name == ("gradient_staged" if operation.endswith("backward") else "distillation_staged")
    # Copies of the first row and, in the loop, of the next one.
    assert kernel.asm["ptx"].count("cp.async.commit_group") == 2
    need = resources(kernel)
    assert need["stack"] <= 384
    assert need["registers"] <= 128
    assert need["shared"] <= 72 * 1024


@pytest.mark.thorough
def test_temperatures_from_1_on_cost_no_test_for_overflow() -> None:
    def instructions(temperature: float) -> int:
        descriptor = ig.DistillationLossDescriptor(
            tuple(x.shape), "float32", temperature=temperature, reduction="none"
        ).validated()
        found = triton_targets.kernels_of(
            "sm_90", lambda: launch.distillation_loss(descriptor, x, x, x[:, 0].contiguous()), launch
        )
        return triton_targets.sass(found["distillation_rows"]).count(";")

    x = torch.zeros((8, 100_000))
    assert instructions(1.0) < 0.95 * instructions(0.5)


@pytest.mark.thorough
def test_any_number_of_terms_of_kl_div_is_read_in_wide_loads() -> None:
    x = torch.zeros((999, 1001))
    descriptor = ig.KlDivDescriptor(tuple(x.shape), "float32", "sum").validated()
    found = triton_targets.kernels_of("sm_90", lambda: kl_div.kl_div(descriptor, x, x, torch.zeros(())), kl_div)
    for name in ("kl_keys", "kl_parts"):
        assert triton_targets.sass(found[name]).count("LDG.E.128") == 4, name  # 1024 of x and t by 128 threads


@pytest.mark.parametrize(
    ("dtype", "n"), [("float32", 4095), ("float32", 128_256), ("float64", 8192), ("bfloat16", 40_008)]
)
def test_other_rows_are_read_in_passes(dtype: str, n: int) -> None:
    x = torch.zeros((2, n), dtype=getattr(torch, dtype))
    numbers = (0, 0, 0, 0)
    with mock.patch.object(launch, "architecture", return_value=90):
        assert not launch._run_staged((x, x, x[:, 0]), (x.stride(), x.stride(), (1, 0)), None, numbers, False)


@pytest.mark.thorough
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("target", sorted(TARGETS.keys() - {"sm_90", "gfx942"}))
def test_compiles_elsewhere(operation: str, target: str) -> None:
    assert triton_targets.kernels_of(target, call(operation, *PROBLEMS["rows"]), launch, reduction)
