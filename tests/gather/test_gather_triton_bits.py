"""The Triton kernels in Triton's interpreter: the bits of the reference on a machine without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import isograd

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")
SCRIPT = Path(__file__).parent / "interpreted_kernels.py"
CASES = {
    "take": 40,
    "scatter": 200,
    "unique": 160,
    "atomics": 180,
    "select": 16,
    "sum": 156,
    "two": 2,
    "hot": 36,
    "faults": 12,
    "reduce": 264,
}


@pytest.mark.parametrize("suite", CASES)
def test_interpreter_returns_the_bits_of_the_reference(suite: str) -> None:
    paths = [str(Path(isograd.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), suite]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    cases, wrong = map(int, done.stdout.split())
    assert cases == CASES[suite]
    assert wrong == 0, done.stderr
