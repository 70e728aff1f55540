"""What Triton's interpreter computes otherwise than a GPU is noticed where it is not patched."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch")
triton = pytest.importorskip("triton", reason="needs triton")
SCRIPT = Path(__file__).parent / "triton_interpreted.py"
FUSES_FMA = tuple(int(v) for v in triton.__version__.split(".")[:2]) >= (3, 9)
SUITES = ("unfused", "truncated")


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
