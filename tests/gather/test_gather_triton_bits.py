"""The Triton kernels in Triton's interpreter: the bits of the reference on a machine without a GPU."""

from pathlib import Path

import pytest
from choices import alongside, quick_first

pytest.importorskip("torch", reason="needs torch")
triton = pytest.importorskip("triton", reason="needs triton")
TAKES_MASKS = tuple(int(v) for v in triton.__version__.split(".")[:2]) < (3, 9)
SCRIPT = Path(__file__).parent / "interpreted_kernels.py"
# suite: its cases, and those of an exhaustive run
CASES = {
    "take": (10, 40),
    "scatter": (30, 200),
    "unique": (24, 160),
    "atomics": (60, 180),
    "select": (16, 16),
    "sum": (36, 156),
    "two": (2, 2),
    "hot": (24, 36),
    "faults": (12, 12),
    "reduce": (52, 264),
}

SUITES = (*CASES, *(() if TAKES_MASKS else ("refused",)))
QUICK = ("take", "scatter", "select", "two", "faults", "refused")


@pytest.mark.parametrize("exhaustive", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["few", "all"])
@pytest.mark.parametrize("suite", quick_first(CASES, QUICK))
def test_interpreter_returns_the_bits_of_the_reference(interpret, suite: str, exhaustive: bool) -> None:
    found, which = interpret(SCRIPT, *alongside(suite, SUITES, QUICK), exhaustive=exhaustive)
    assert suite in found, which
    assert found[suite] == (CASES[suite][exhaustive], 0), which


@pytest.mark.skipif(TAKES_MASKS, reason="this interpreter takes every mask")
def test_a_refused_mask_is_noticed(interpret) -> None:
    """The interpreter makes an integer of a mask and refuses it, which the patch repairs."""
    found, which = interpret(SCRIPT, *alongside("take", SUITES, QUICK), exhaustive=False)
    assert found["refused"][1] > 0
    assert "unsupported dtype" in which
