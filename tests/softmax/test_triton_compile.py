"""The Triton kernels compile for GPUs that are not there, and keep what they hold in registers."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")

from choices import thinned  # noqa: E402
from triton_compile import compile_for  # noqa: E402
from triton_targets import resources  # noqa: E402

from isograd.rows.triton_configuration import configuration  # noqa: E402

OPERATIONS = ("softmax", "log_softmax", "softmax_backward", "log_softmax_backward")
# dtype, shape, axis: rows of a cluster, and strips of a block and of a cluster
PROBLEMS = {
    "long rows": ("float32", (8, 65536), 1),
    "strips": ("bfloat16", (4, 128, 512), 1),
    "long strips": ("float32", (4, 2048, 512), 1),
}


def problem(name: str, operation: str) -> tuple[list[Any], int]:
    dtype, shape, axis = PROBLEMS[name]
    like = torch.empty(shape, dtype=getattr(torch, dtype))
    return [like] * (3 if operation.endswith("backward") else 2), axis


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "operation"), thinned(2, PROBLEMS, OPERATIONS))
def test_hopper(name: str, operation: str) -> None:
    needs = resources(compile_for("sm_90", operation, *problem(name, operation)))
    assert needs["stack"] <= 64
    assert needs["registers"] <= 168
    assert needs["shared"] <= (200 if name == "long rows" else 100) * 1024


@pytest.mark.parametrize(("operation", "n"), [("softmax", 40008), ("log_softmax_backward", 20008)])
def test_rows_of_any_length_compile(operation: str, n: int) -> None:
    """Of multiples of 8 elements, too, whose addresses the compiler does not know to be multiples of 16 bytes."""
    like = torch.empty((8, n), dtype=torch.bfloat16)
    compile_for("sm_90", operation, [like] * (3 if operation.endswith("backward") else 2), 1)


@pytest.mark.thorough
@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("operation", ["softmax", "log_softmax_backward"])
def test_other_architectures(target: str, name: str, operation: str) -> None:
    needs = resources(compile_for(target, operation, *problem(name, operation)))
    assert needs["stack"] <= (128 if name == "long rows" else 64)
    assert needs["registers"] <= 255
    # A processor of these architectures that runs the kernels for long rows has 227 KiB.
    assert needs["shared"] <= (200 if name == "long rows" else 64) * 1024


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("exponent", range(12, 18))
def test_rows_up_to_131072_are_read_once_on_hopper(operation: str, itemsize: int, exponent: int) -> None:
    for n in (2**exponent, 2**exponent - 16):
        chosen = configuration(n, itemsize, operation, 90)
        assert chosen.variant in ("tile", "cluster", "staged", "piped")
        assert chosen.block * chosen.ctas >= n
        assert chosen.ctas <= 8
        assert chosen.warps <= 16


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("exponent", range(13))
def test_strips_hold_rows_up_to_4096_on_hopper(operation: str, itemsize: int, exponent: int) -> None:
    for n in (2**exponent, 2**exponent - 2**exponent // 4):
        chosen = configuration(n, itemsize, operation, 90, False)
        assert chosen.variant == "strip"
        rows_of_a_thread, lanes = chosen.vector, chosen.rows // chosen.vector
        assert rows_of_a_thread * itemsize == 4
        assert chosen.ctas * chosen.warps * (32 // lanes) * chosen.group >= n
        assert chosen.group % chosen.chunks == 0
        assert chosen.ctas <= 8
        assert chosen.warps <= 16


def test_configuration_depends_on_nothing_but_its_arguments() -> None:
    assert configuration(5000, 2, "softmax", 90) == configuration(5000, 2, "softmax", 90)
    assert configuration(1 << 20, 4, "softmax", 90).variant == "loop"
    assert configuration(8192, 4, "softmax_backward", 80).variant == "tile"
