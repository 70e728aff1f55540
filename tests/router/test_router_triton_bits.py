"""The router's Triton kernels in Triton's interpreter: the bits of the reference on a machine without a GPU."""

from pathlib import Path

import pytest
from choices import alongside, quick_first
from router_problems import SUITES as OPERATIONS

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")
SCRIPT = Path(__file__).parent / "interpreted_router.py"
SUITES = (*OPERATIONS, "separated", "members", "top_k_sorted", "blocks", "faults")
QUICK = ("moe_router", "moe_router_backward", "top_k", "faults")


@pytest.mark.parametrize("exhaustive", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["few", "all"])
@pytest.mark.parametrize("suite", quick_first(SUITES, QUICK))
def test_interpreter_returns_the_bits_of_the_reference(interpret, suite: str, exhaustive: bool) -> None:
    found, which = interpret(SCRIPT, *alongside(suite, SUITES, QUICK), exhaustive=exhaustive)
    assert suite in found, which
    cases, wrong = found[suite]
    assert cases >= (9 if exhaustive or suite == "faults" else 7)
    assert wrong == 0, which
