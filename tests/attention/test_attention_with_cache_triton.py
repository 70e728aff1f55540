"""Attention over a cache in Triton without a GPU: its bits in the interpreter, and compilation for GPUs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")

import triton_targets  # noqa: E402
from choices import alongside, quick_first  # noqa: E402
from triton_targets import resources  # noqa: E402

from isograd.flash_attention import triton_launch  # noqa: E402
from isograd.flash_attention import triton_problem as problem  # noqa: E402
from isograd.flash_attention.descriptors import AttentionWithCacheDescriptor  # noqa: E402
from isograd.flash_attention.options import AttentionOptions  # noqa: E402
from isograd.flash_attention.order_free import triton_launch as order_free_launch  # noqa: E402
from isograd.reduction import cuda as reduction  # noqa: E402

SCRIPT = Path(__file__).parent / "interpreted_cache.py"
SUITES = {
    "triton_options": 16,
    "order_free_options": 16,
    "triton_growth": 38,
    "order_free_growth": 38,
    "triton_shapes": 8,
    "order_free_shapes": 8,
    "triton_faults": 4,
    "order_free_faults": 4,
}
QUICK = ("triton_options", "triton_faults", "order_free_faults")


@pytest.mark.parametrize("exhaustive", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["few", "all"])
@pytest.mark.parametrize("suite", quick_first(SUITES, QUICK))
def test_interpreter_returns_the_bits_of_the_forward_pass(interpret: Any, suite: str, exhaustive: bool) -> None:
    found, which = interpret(SCRIPT, *alongside(suite, SUITES, QUICK), exhaustive=exhaustive)
    assert suite in found, which
    cases, wrong = found[suite]
    assert cases >= SUITES[suite]
    assert wrong == 0, which


def calls(launch: Any, page_size: int | None, head_dim: int = 128) -> Callable[[], None]:
    """A step of decoding whose sizes are multiples of 16."""
    pages: Any = {} if page_size is None else {"page_size": page_size, "pages": 64}
    options = AttentionOptions(causal=True, window=(100, None))
    sizes = (2, 8, 2, 1, 4096, head_dim, head_dim, "bfloat16")
    descriptor = AttentionWithCacheDescriptor(*sizes, options, sinks_dtype="float32", **pages).validated()
    arguments = {}
    for operand in descriptor.operands():
        dtype = getattr(torch, operand.dtype)
        arguments[operand.name] = torch.empty(operand.shape, dtype=dtype)
    return lambda: launch.forward(descriptor, arguments)


@pytest.mark.thorough
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("target", triton_targets.TARGETS)
def test_everything_compiles(target: str, page_size: int | None) -> None:
    found = triton_targets.kernels_of(target, calls(triton_launch, page_size), problem, reduction)
    assert found.keys() == {"check_cache", "attention_forward"}
    assert resources(found["check_cache"])["stack"] == 0
    found = triton_targets.kernels_of(target, calls(order_free_launch, page_size), problem, reduction)
    forward = "order_free_forward_hopper" if target == "sm_90" else "order_free_forward"
    assert found.keys() == {"check_cache", "cut_queries", "cut_cached_keys", forward}
