"""The Triton kernels of cross entropy without a GPU: their bits in the interpreter, and what they compile to."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import isograd

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")

from cross_entropy_compiled import KINDS, compile_for, resources

SCRIPT = Path(__file__).parent / "cross_entropy_interpreted.py"
CASES = {"hard": 57, "smooth": 57, "probabilities": 57, "faults": 6, "linear": 18, "reductions": 31}


@pytest.mark.parametrize("suite", CASES)
def test_interpreter_returns_the_bits_of_the_reference(suite):
    paths = [str(Path(isograd.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), suite]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    cases, wrong = map(int, done.stdout.split())
    assert cases == CASES[suite]
    assert wrong == 0, done.stderr


# dtype, shape, axis, options: rows that a program holds, rows in passes, lanes, dense targets
PROBLEMS = {
    "short rows": ("bfloat16", (64, 1024), 1, {}),
    "long rows": ("float32", (8, 300_000), 1, {}),
    "doubles": ("float64", (64, 256), 1, {}),
    "lanes": ("bfloat16", (4, 19, 512), 1, {}),
    "smoothed": ("bfloat16", (64, 4096), 1, {"label_smoothing": 0.1, "weighted": True, "z_loss": 0.1}),
    "probabilities": ("float32", (64, 1000), 1, {"target_dtype": "float32"}),
}


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_compiled(name, target):
    for operation in KINDS if target == "sm_90" else ["cross_entropy_gradient"]:
        check_compiled(operation, name, target)


def check_compiled(operation, name, target):
    dtype, shape, axis, options = PROBLEMS[name]
    needs = resources(compile_for(target, operation, shape, dtype, axis, **options))
    assert needs["stack"] <= 64
    assert needs["registers"] <= 255
    assert needs["shared"] <= 64 * 1024


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
@pytest.mark.parametrize(
    ("dtype", "n"), [("bfloat16", 128_256), ("float16", 262_144), ("bfloat16", 16_384), ("float32", 65_536)]
)
def test_long_rows_are_read_once(dtype, n, target):
    compiled = compile_for(target, "cross_entropy_gradient", (64, n), dtype)
    needs = resources(compiled)
    assert compiled.metadata.name == "gradient_staged"
    # sm_100 puts a few words of 16 float32 warps on the stack.
    assert needs["stack"] <= (0 if target == "sm_90" and dtype != "float32" else 128)
    assert needs["registers"] <= 128
    assert needs["shared"] <= 100 * 1024


@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        ((64, 300_000), "bfloat16", {}),
        ((64, 128_256), "float64", {}),
        ((64, 128_256), "bfloat16", {"label_smoothing": 0.1}),
        ((64, 4096), "bfloat16", {}),
        ((64, 128_255), "bfloat16", {}),
        ((4, 40_000, 8), "float32", {}),
    ],
)
def test_other_rows_take_the_general_kernel(shape, dtype, options):
    assert compile_for("sm_90", "cross_entropy_gradient", shape, dtype, **options).metadata.name == "forward"
