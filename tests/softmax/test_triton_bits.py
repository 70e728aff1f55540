"""The Triton kernels in Triton's interpreter: the bits of the reference on a machine without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import isograd

pytest.importorskip("torch", reason="needs torch")
triton = pytest.importorskip("triton", reason="needs triton")
SCRIPT = Path(__file__).parent / "triton_interpreted.py"
FUSES_FMA = tuple(int(v) for v in triton.__version__.split(".")[:2]) >= (3, 9)


def interpret(*arguments: str) -> tuple[int, int, str]:
    """(cases, elements that differ, what was said about them)."""
    paths = [str(Path(isograd.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    cases, wrong = done.stdout.split()
    return int(cases), int(wrong), done.stderr


@pytest.mark.parametrize("operation", ["softmax", "log_softmax", "softmax_backward", "log_softmax_backward"])
def test_interpreter_returns_the_bits_of_the_reference(operation: str) -> None:
    cases, wrong, which = interpret(operation)
    assert cases == 36
    assert wrong == 0, which


@pytest.mark.skipif(FUSES_FMA, reason="this interpreter fuses by itself")
def test_unfused_fma_is_noticed() -> None:
    assert interpret("softmax", "--without", "fma")[1] > 0


def test_truncation_to_bfloat16_is_noticed() -> None:
    """The interpreter's own conversion truncates, which the patch repairs."""
    assert interpret("softmax_backward", "--without", "cast")[1] > 0
