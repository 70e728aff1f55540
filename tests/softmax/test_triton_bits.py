"""The Triton kernels in Triton's interpreter: the bits of the reference on a machine without a GPU."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch")
triton = pytest.importorskip("triton", reason="needs triton")
SCRIPT = Path(__file__).parent / "triton_interpreted.py"
FUSES_FMA = tuple(int(v) for v in triton.__version__.split(".")[:2]) >= (3, 9)
OPERATIONS = ("softmax", "log_softmax", "softmax_backward", "log_softmax_backward")
SUITES = (*OPERATIONS, "unfused", "truncated")


@pytest.mark.parametrize("exhaustive", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["few", "all"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_interpreter_returns_the_bits_of_the_reference(interpret, operation: str, exhaustive: bool) -> None:
    found, which = interpret(SCRIPT, *SUITES, exhaustive=exhaustive)
    assert operation in found, which
    assert found[operation] == (36 if exhaustive else 12, 0), which


@pytest.mark.skipif(FUSES_FMA, reason="this interpreter fuses by itself")
def test_unfused_fma_is_noticed(interpret) -> None:
    found, which = interpret(SCRIPT, *SUITES, exhaustive=False)
    assert "unfused" in found, which
    assert found["unfused"][1] > 0


def test_truncation_to_bfloat16_is_noticed(interpret) -> None:
    """The interpreter's own conversion truncates, which the patch repairs."""
    found, which = interpret(SCRIPT, *SUITES, exhaustive=False)
    assert "truncated" in found, which
    assert found["truncated"][1] > 0
