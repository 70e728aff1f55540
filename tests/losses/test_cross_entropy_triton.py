"""The Triton kernels of cross entropy without a GPU: their bits in the interpreter, and what they compile to."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")

from choices import alongside, quick_first, thinned
from cross_entropy_compiled import KINDS, compile_for, kernel_for
from triton_targets import TARGETS, resources

import isograd as ig
from isograd.losses.linear_torch import pieces

SCRIPT = Path(__file__).parent / "cross_entropy_interpreted.py"
# suite: its cases, and those of an exhaustive run
CASES = {
    "hard": (11, 57),
    "smooth": (11, 57),
    "probabilities": (11, 57),
    "zeros": (12, 48),
    "faults": (6, 6),
    "parts": (24, 48),
    "linear": (16, 72),
    "order_free_linear": (38, 74),
    "reductions": (33, 33),
}
QUICK = ("hard", "zeros", "faults", "reductions")


@pytest.mark.parametrize("exhaustive", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["few", "all"])
@pytest.mark.parametrize("suite", quick_first(CASES, QUICK))
def test_interpreter_returns_the_bits_of_the_reference(interpret, suite, exhaustive):
    found, which = interpret(SCRIPT, *alongside(suite, CASES, QUICK), exhaustive=exhaustive)
    assert suite in found, which
    assert found[suite] == (CASES[suite][exhaustive], 0), which


@pytest.mark.parametrize(
    ("rows", "features", "classes", "chunk", "expected"),
    [
        # As many logits as hidden has elements, at most; dhidden of a chunk is 4 * 2^20 elements, or dweight is full.
        (8192, 4096, 128_256, 0, (1024, 4008)),
        (8192, 2048, 32_000, 0, (2048, 2000)),
        (8192, 1024, 32_000, 0, (1024, 1000)),
        (8192, 5120, 128_256, 0, (768, 4936)),
        (512, 4096, 128_256, 0, (512, 8016)),
        (8192, 64, 128_256, 0, (256, 512)),
        (200, 64, 500, 0, (200, 500)),
        (0, 64, 500, 0, (1, 500)),
        (8192, 4096, 128_256, 256, (256, 4008)),
        (5, 4, 40, 2, (2, 16)),
        (5, 4, 40, 100, (5, 40)),
        (0, 4, 40, 3, (1, 40)),
    ],
)
def test_what_linear_cross_entropy_holds(rows, features, classes, chunk, expected):
    fields = (rows, features, classes, "bfloat16")
    assert pieces(ig.LinearCrossEntropyGradientDescriptor(*fields, chunk=chunk)) == expected
    forward = pieces(ig.LinearCrossEntropyDescriptor(*fields, chunk=chunk))
    assert forward.classes == expected[1]
    assert forward.rows * classes <= max(rows * expected[1], 256 * classes, classes)


# dtype, shape, axis, options: rows that a program holds, rows in passes, lanes, dense targets
PROBLEMS = {
    "short rows": ("bfloat16", (64, 1024), 1, {}),
    "long rows": ("float32", (8, 300_000), 1, {}),
    "doubles": ("float64", (64, 256), 1, {}),
    "lanes": ("bfloat16", (4, 19, 512), 1, {}),
    "smoothed": ("bfloat16", (64, 4096), 1, {"label_smoothing": 0.1, "weighted": True, "z_loss": 0.1}),
    "probabilities": ("float32", (64, 1000), 1, {"target_dtype": "float32"}),
}


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "operation"), thinned(3, PROBLEMS, KINDS))
def test_hopper(name, operation):
    check_compiled(operation, name, "sm_90")


@pytest.mark.thorough
@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
@pytest.mark.parametrize(
    ("operation", "name"), [("cross_entropy_gradient", "smoothed"), ("cross_entropy_backward", "lanes")]
)
def test_other_architectures(operation, name, target):
    check_compiled(operation, name, target)


@pytest.mark.thorough
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "weighted": True}], ids=["plain", "smoothed"])
def test_some_classes_alone(options, target):
    check_resources(compile_for(target, "cross_entropy_backward", (8192, 4008), "bfloat16", part=True, **options))


@pytest.mark.thorough
@pytest.mark.parametrize("target", TARGETS)
def test_gradient_and_state_at_once(target):
    compiled = compile_for(target, "cross_entropy_gradient", (1024, 128_256), "bfloat16", state=True)
    staged = target in ("sm_90", "sm_100")
    assert compiled.metadata.name == ("gradient_staged" if staged else "forward")
    check_resources(compiled)
    if staged:
        assert resources(compiled)["stack"] == 0


def check_compiled(operation, name, target):
    dtype, shape, axis, options = PROBLEMS[name]
    check_resources(compile_for(target, operation, shape, dtype, axis, **options))


def check_resources(compiled):
    needs = resources(compiled)
    assert needs["stack"] <= 64
    assert needs["registers"] <= 255
    assert needs["shared"] <= 64 * 1024


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dtype", "n", "target"),
    [
        ("bfloat16", 128_256, "sm_90"),
        ("float16", 262_144, "sm_90"),
        ("bfloat16", 16_384, "sm_90"),
        ("float32", 65_536, "sm_90"),
        ("float32", 65_536, "sm_100"),
    ],
)
def test_long_rows_are_read_once(dtype, n, target):
    compiled = compile_for(target, "cross_entropy_gradient", (64, n), dtype)
    needs = resources(compiled)
    assert compiled.metadata.name == "gradient_staged"
    # A copy into shared memory that is not committed is not waited for: one before the loop, one inside.
    assert compiled.asm["ptx"].count("cp.async.commit_group") == 2
    # sm_100 puts a few words of 16 float32 warps on the stack.
    assert needs["stack"] <= (0 if target == "sm_90" and dtype != "float32" else 128)
    assert needs["registers"] <= 128
    assert needs["shared"] <= 100 * 1024


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        ((64, 300_000), "bfloat16", {}),
        ((64, 128_256), "float64", {}),
        ((64, 128_256), "bfloat16", {"label_smoothing": 0.1}),
        ((64, 4096), "bfloat16", {}),
        ((64, 128_255), "bfloat16", {}),
        ((64, 20_008), "bfloat16", {}),
        ((1, 70_001), "float16", {}),
        ((4, 40_000, 8), "float32", {}),
    ],
)
def test_other_rows_take_the_general_kernel(shape, dtype, options):
    assert kernel_for("sm_90", "cross_entropy_gradient", shape, dtype, **options)[0].__name__ == "forward"
