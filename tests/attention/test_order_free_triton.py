"""Order-free attention in Triton without a GPU: the reference's bits in its interpreter, and compilation for GPUs."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")

import triton_targets  # noqa: E402
from choices import alongside, exhaustive, quick_first  # noqa: E402
from triton_targets import resources, sass, unordered  # noqa: E402

from isograd.flash_attention import triton_problem as problem  # noqa: E402
from isograd.flash_attention.descriptors import AttentionBackwardDescriptor  # noqa: E402
from isograd.flash_attention.options import AttentionOptions  # noqa: E402
from isograd.flash_attention.order_free import triton_launch as launch  # noqa: E402
from isograd.reduction import cuda as reduction  # noqa: E402

SCRIPT = Path(__file__).parent / "interpreted_order_free.py"
SUITES = {"options": 11, "shapes": 27, "packed": 22, "strides": 2, "special": 29, "hopper": 24, "hopper_faults": 6}
KERNELS = {
    "cut_queries",
    "cut_keys",
    "order_free_forward",
    "cut_queries_twice",
    "cut_keys_twice",
    "order_free_backward_keys",
    "order_free_backward_queries",
}
CAUSAL = AttentionOptions(causal=True)
HOPPER = {"order_free_forward_hopper", *(f"order_free_backward_hopper {kind}" for kind in range(3))}  # dq, dk and dv
QUICK = ("options", "strides", "hopper", "hopper_faults")


@pytest.mark.parametrize("exhaustive", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["few", "all"])
@pytest.mark.parametrize("suite", quick_first(SUITES, QUICK))
def test_interpreter_returns_the_bits_of_the_reference(interpret: Any, suite: str, exhaustive: bool) -> None:
    found, which = interpret(SCRIPT, *alongside(suite, SUITES, QUICK), exhaustive=exhaustive)
    assert suite in found, which
    cases, wrong = found[suite]
    assert cases >= SUITES[suite]
    assert wrong == 0, which


# --- compilation -----------------------------------------------------------------------------------------------------
def calls(dtype: str, head_dim: int, options: AttentionOptions, **extra: Any) -> Callable[[], None]:
    """Forward and backward of a problem whose sizes are multiples of 16."""
    batch = 1 if "sequences" in extra else 2
    sizes = (batch, 4, 4, 2048, 4096, head_dim, extra.pop("v_dim", head_dim))
    descriptor = AttentionBackwardDescriptor(*sizes, dtype, options, **extra).validated()
    arguments = {}
    for operand in descriptor.operands():
        of = {"bool": torch.bool, "int32": torch.int32, "float32": torch.float32}
        arguments[operand.name] = torch.empty(operand.shape, dtype=of.get(operand.dtype, getattr(torch, dtype)))

    def run() -> None:
        launch.forward(descriptor, arguments)
        launch.backward(descriptor, arguments)

    return run


def kernels_of(target: str, call: Callable[[], Any]) -> dict[str, Any]:
    """What a call launches, compiled for a target, by the kernels' names; nothing runs."""
    return triton_targets.kernels_of(target, call, problem, reduction, apart="KIND")


def kernels(target: str, head_dim: int) -> set[str]:
    """The kernels of a problem that the kernels for Hopper take, apart from the head dimension."""
    hopper = target == "sm_90" and head_dim in (64, 128)
    return {name for name in KERNELS if name.startswith("cut")} | HOPPER if hopper else KERNELS


# Shared memory of a program, where the least of an architecture's GPUs counts (8.6 and 8.9 have less than 8.0).
_SHARED = {"sm_80": 99 << 10, "sm_90": 227 << 10, "gfx942": 64 << 10}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("target", "head_dim"),
    [("sm_80", 128), ("sm_90", 32), ("gfx942", 128), *(exhaustive(t, d) for t in _SHARED for d in (64, 256))],
)
def test_kernels_compile_and_fit_shared_memory(target: str, head_dim: int) -> None:
    found = kernels_of(target, calls("bfloat16", head_dim, CAUSAL))
    assert found.keys() == kernels(target, head_dim)
    for name, kernel in found.items():
        assert resources(kernel)["shared"] <= _SHARED[target], name
        if target == "sm_90" and name.startswith("order_free") and name not in HOPPER:
            text = kernel.asm["ptx"]
            assert "wgmma.mma_async.sync.aligned.m64n" in text, name
            assert "s32.s8.s8" in text, name
            # Weights go from the accumulators of one product to the operand of the next one in their registers.
            assert text.count("ld.shared") <= 128, name
            assert "cp.async.bulk.tensor" in text, name


EVERYTHING = AttentionOptions(causal=True, window=(100, None), softcap=30.0)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("head_dim", "options", "stack"),
    [(64, CAUSAL, 128), (128, CAUSAL, 600), exhaustive(64, EVERYTHING, 1000), exhaustive(128, EVERYTHING, 1400)],
)
def test_two_programs_fit_a_multiprocessor_of_hopper(head_dim: int, options: AttentionOptions, stack: int) -> None:
    """Products stay asynchronous: where ptxas takes them one by one, it puts a wait behind each."""
    extra = {"sequences": 3, "sinks_dtype": "float32"} if options is EVERYTHING else {}
    found = kernels_of("sm_90", calls("bfloat16", head_dim, options, **extra))
    assert found.keys() >= HOPPER
    for name in HOPPER:
        needs, text = resources(found[name]), sass(found[name])
        assert "s32.s8.s8" in found[name].asm["ptx"], name
        assert needs["registers"] <= 128, name
        assert 2 * (needs["shared"] + 1024) <= 228 << 10, name
        assert needs["stack"] <= stack, name
        count, waits = text.count(" IGMMA"), text.count(" WARPGROUP.DEPBAR")
        assert count >= 24, name
        assert waits <= count / 4, name
        ptx = found[name].asm["ptx"]
        assert unordered(ptx) == 0, name
        assert unordered(re.sub(r"\bbar\.(warp\.)?sync", "nothing", ptx)) > 0, name


@pytest.mark.thorough
@pytest.mark.parametrize("target", [exhaustive(t) for t in _SHARED])  # for many minutes each
def test_every_option_compiles(target: str) -> None:
    shape = (2, 4, 2048, 4096)
    options = AttentionOptions(causal=True, window=(100, None), softcap=30.0, dropout_p=0.1, alignment="upper_left")
    extra: dict[str, Any] = {"mask_shape": (2, 1, 1, 4096), "segments": True, "dlse": True}
    extra |= {"bias_shape": shape, "bias_dtype": "float32", "sinks_dtype": "float16", "dsinks": True}
    found = kernels_of(target, calls("float16", 64, options, v_dim=128, **extra))
    assert found.keys() >= {*KERNELS, "sink_terms"}
    found = kernels_of(target, calls("bfloat16", 128, CAUSAL, v_dim=64, sequences=3, sinks_dtype="float32"))
    assert found.keys() == {*kernels(target, 128), "check_starts"}


def test_tiles_divide_the_blocks() -> None:
    for head_dim in range(16, 257, 8):
        descriptor = AttentionBackwardDescriptor(1, 1, 1, 256, 256, head_dim, 16, "bfloat16").validated()
        given = problem.problem_of(descriptor, torch.empty(1, dtype=torch.bfloat16))
        for architecture in (0, 80, 90, 100):
            p = given._replace(architecture=architecture)
            for tile in (launch.forward_tile(p), *launch.backward_tiles(p)[:2]):
                assert problem.PAD % tile.rows == 0
