"""The router's Triton kernels in Triton's interpreter: the bits of the reference on a machine without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import isograd
from isograd.router.plans import OPERATIONS

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")
SCRIPT = Path(__file__).parent / "interpreted_router.py"


def interpret(suite: str) -> tuple[int, int, str]:
    """(cases, cases that differ, what was said about them)."""
    paths = [str(Path(isograd.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), suite]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    cases, wrong = done.stdout.split()
    return int(cases), int(wrong), done.stderr


@pytest.mark.parametrize("suite", [*OPERATIONS, "separated", "top_k_sorted", "blocks", "faults"])
def test_interpreter_returns_the_bits_of_the_reference(suite: str) -> None:
    cases, wrong, which = interpret(suite)
    assert cases >= 9
    assert wrong == 0, which
