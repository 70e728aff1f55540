"""The Triton kernels in Triton's interpreter: the bits of the reference on a machine without a GPU."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")
SCRIPT = Path(__file__).parent / "interpreted_kernels.py"
# suite: its cases, and those of an exhaustive run
CASES = {
    "take": (0, 40),
    "scatter": (0, 200),
    "unique": (0, 160),
    "atomics": (0, 180),
    "select": (0, 16),
    "sum": (0, 156),
    "two": (0, 2),
    "hot": (0, 36),
    "faults": (0, 12),
    "reduce": (0, 264),
}


@pytest.mark.parametrize("exhaustive", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["few", "all"])
@pytest.mark.parametrize("suite", CASES)
def test_interpreter_returns_the_bits_of_the_reference(interpret, suite: str, exhaustive: bool) -> None:
    found, which = interpret(SCRIPT, *CASES, exhaustive=exhaustive)
    assert suite in found, which
    assert found[suite] == (CASES[suite][exhaustive], 0), which
