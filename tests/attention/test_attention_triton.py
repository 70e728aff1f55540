"""Attention in Triton without a GPU: values in its interpreter, and compilation for GPUs that are not there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")

import triton_targets  # noqa: E402
from choices import alongside, exhaustive, quick_first, thinned  # noqa: E402
from triton_targets import TARGETS, resources  # noqa: E402

from isograd.flash_attention import triton_launch as launch  # noqa: E402
from isograd.flash_attention import triton_problem as problem  # noqa: E402
from isograd.flash_attention import triton_rows_launch as rows_launch  # noqa: E402
from isograd.flash_attention import triton_tiles as tiles  # noqa: E402
from isograd.flash_attention.descriptors import AttentionBackwardDescriptor, AttentionDeltaDescriptor  # noqa: E402
from isograd.flash_attention.options import AttentionOptions  # noqa: E402
from isograd.reduction import cuda as reduction  # noqa: E402

SCRIPT = Path(__file__).parent / "interpreted_attention.py"
SUITES = {"options": 11, "shapes": 23, "fixed": 24, "packed": 32, "dropout": 4, "faults": 10, "delta": 9}
KERNELS = {"attention_forward", "attention_rows", "attention_backward_keys", "attention_backward_queries"}
QUICK = ("options", "dropout", "faults")


@pytest.mark.parametrize("exhaustive", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["few", "all"])
@pytest.mark.parametrize("suite", quick_first(SUITES, QUICK))
def test_interpreter_stays_within_the_bounds(interpret: Any, suite: str, exhaustive: bool) -> None:
    found, which = interpret(SCRIPT, *alongside(suite, SUITES, QUICK), exhaustive=exhaustive)
    assert suite in found, which
    cases, wrong = found[suite]
    assert cases >= SUITES[suite]
    assert wrong == 0, which


# --- compilation ------------------------------------------------------------------------------------------------------
def calls(
    dtype: str, head_dim: int, v_dim: int | None = None, options: AttentionOptions | None = None, **extra: Any
) -> Callable[[], None]:
    """Forward and backward of a problem whose sizes are multiples of 16."""
    batch, heads, lq, lk, v_dim = (1 if "sequences" in extra else 2), 4, 2048, 4096, v_dim or head_dim
    size: Any = getattr(torch, dtype)
    descriptor = AttentionBackwardDescriptor(
        batch, heads, heads, lq, lk, head_dim, v_dim, dtype, options or AttentionOptions(), **extra
    ).validated()
    arguments = {}
    for operand in descriptor.operands():
        of = {"bool": torch.bool, "int32": torch.int32, "float32": torch.float32}.get(operand.dtype, size)
        arguments[operand.name] = torch.empty(operand.shape, dtype=of)

    def run() -> None:
        launch.forward(descriptor, arguments)
        launch.backward(descriptor, arguments)

    return run


def kernels_of(target: str, call: Callable[[], Any]) -> dict[str, Any]:
    """What a call launches, compiled for a target, by the kernels' names; nothing runs."""
    return triton_targets.kernels_of(target, call, problem, reduction)


@pytest.mark.thorough
@pytest.mark.parametrize(("head_dim", "causal"), thinned(2, [64, 128], [False, True]))
def test_the_fast_paths_on_hopper(head_dim: int, causal: bool) -> None:
    found = kernels_of("sm_90", calls("bfloat16", head_dim, options=AttentionOptions(causal=causal)))
    assert found.keys() == KERNELS
    for name, kernel in found.items():
        needs = resources(kernel)
        # The tiles of keys at head dimension 128 fill the registers: dK and dV alone take half of them.
        assert needs["stack"] <= (64 if name == "attention_backward_keys" and head_dim == 128 else 0), name
        if name != "attention_rows":
            text = kernel.asm["ptx"]
            assert "wgmma.mma_async" in text, name
            assert "cp.async.bulk.tensor" in text, name
        if name.startswith("attention_backward_keys"):
            assert needs["shared"] <= 113 << 10  # two programs on a multiprocessor


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("target", "dtype", "every_option"),
    [
        *((t, "bfloat16", False) for t in TARGETS),
        ("sm_90", "bfloat16", True),
        *(exhaustive(t, "bfloat16", True) for t in TARGETS if t != "sm_90"),
        exhaustive("sm_90", "float16", True),
        exhaustive("sm_80", "float32", True),
    ],
)
def test_everything_compiles(target: str, dtype: str, every_option: bool) -> None:
    """Every kernel; masks and what else is computed with scores are compiled for some GPUs only, as they take long."""
    shape = (2, 4, 2048, 4096)
    masked: Any = {"mask_shape": (2, 1, 1, 4096), "segments": True, "dlse": True}
    every: Any = {"bias_shape": shape, "bias_dtype": "float32", "sinks_dtype": dtype, "dbias": True, "dsinks": True}
    packed: Any = {"sequences": 3, "sinks_dtype": "float32"}
    options = AttentionOptions(causal=True, window=(100, None), softcap=30.0, dropout_p=0.1, alignment="upper_left")
    if not every_option:
        masked, options = {}, AttentionOptions(causal=True)
    found = kernels_of(target, calls(dtype, 64, 128, options, **masked, **every))
    assert found.keys() >= {*KERNELS, "attention_backward_bias", "sink_terms"}
    found = kernels_of(target, calls(dtype, 128, 64, AttentionOptions(causal=True), **packed))
    assert found.keys() == {*KERNELS, "check_starts"}


# Shared memory of a program, where the least of an architecture's GPUs counts (8.6 and 8.9 have less than 8.0).
_SHARED = {"sm_80": 99 << 10, "sm_90": 227 << 10, "gfx942": 64 << 10}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("target", "head_dim", "dtype"),
    [
        ("sm_80", 256, "bfloat16"),
        exhaustive("sm_80", 40, "float32"),
        ("sm_80", 256, "float32"),
        exhaustive("sm_90", 16, "bfloat16"),
        ("sm_90", 256, "bfloat16"),
        exhaustive("sm_90", 96, "float32"),
        ("gfx942", 256, "bfloat16"),
        exhaustive("gfx942", 256, "float32"),
    ],
)
def test_head_dimensions_fit_shared_memory(target: str, head_dim: int, dtype: str) -> None:
    found = kernels_of(target, calls(dtype, head_dim, options=AttentionOptions(causal=True)))
    for name, kernel in found.items():
        assert resources(kernel)["shared"] <= _SHARED[target], name


@pytest.mark.thorough
@pytest.mark.parametrize("target", TARGETS)
def test_passes_over_rows_compile(target: str) -> None:
    o = torch.empty(2, 4, 2048, 128, dtype=torch.bfloat16)
    delta = AttentionDeltaDescriptor(2, 4, 2048, 128, "bfloat16").validated()
    (kernel,) = kernels_of(
        target, lambda: launch.delta(delta, {"o": o, "do": o, "delta": torch.empty(2, 4, 2048)})
    ).values()
    assert resources(kernel)["stack"] == 0
    descriptor = AttentionBackwardDescriptor(2, 4, 4, 2048, 2048, 128, 128, "bfloat16").validated()
    p, x = problem.problem_of(descriptor, o), problem.extras({"q": o})

    def fixed() -> None:
        bounds = rows_launch.fill_bounds(p, o, o, x)
        integers = torch.empty(o.shape, dtype=torch.int32)
        rows = rows_launch.fill_rows(p, o, o, torch.empty(2, 4, 2048), None, x, (bounds, integers))
        rows_launch.fixed_to_float(p, integers, rows, bounds, o, x)

    found = kernels_of(target, fixed)
    assert found.keys() == {"attention_bounds", "attention_rows", "fixed_to_float"}
    for name, kernel in found.items():
        assert resources(kernel)["stack"] == 0, name


def test_tiles_divide_the_rows_of_scratch_memory() -> None:
    for head_dim in range(16, 257, 8):
        for size in (2, 4):
            for architecture in (0, 80, 90, 100):
                over_keys, over_queries = tiles.backward(head_dim, 16, size, architecture)
                for tile in (over_keys, over_queries, tiles.bias(head_dim, 16, size)):
                    assert problem.PAD % tile.queries == 0
                    assert problem.PAD % tile.keys == 0
