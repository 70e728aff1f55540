"""The Triton kernels of `isograd.ops`: the reference's bits in Triton's interpreter, and code for GPUs not there."""

import contextlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")

import triton_targets  # noqa: E402
import triton_variants  # noqa: E402
from choices import alongside, quick_first  # noqa: E402
from operations import NAMES, descriptor, launch_of, options, refused, settings_of  # noqa: E402
from triton_targets import TARGETS, resources  # noqa: E402

from isograd.ops import OPERATIONS  # noqa: E402
from isograd.reduction import triton_kernels as reduction_kernels  # noqa: E402
from isograd.rows import triton_launch as rows  # noqa: E402
from isograd.rows import triton_norms, triton_sums  # noqa: E402

SCRIPT = Path(__file__).parent / "interpreted_operations.py"
QUICK = [name for name in NAMES if OPERATIONS[name].vjp]


@pytest.mark.parametrize("exhaustive", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["few", "all"])
@pytest.mark.parametrize("name", quick_first(NAMES, QUICK))
def test_interpreter_returns_the_bits_of_the_reference(interpret: Any, name: str, exhaustive: bool) -> None:
    found, which = interpret(SCRIPT, *alongside(name, NAMES, QUICK), exhaustive=exhaustive)
    assert name in found, which
    cases, wrong = found[name]
    assert cases >= (32 if exhaustive else 8)
    assert wrong == 0, which


# dtype, rows, columns: rows that a tile holds, rows of doubles, rows in passes, and what no pair of elements fills
PROBLEMS = {
    "rows": ("bfloat16", 64, 1024),
    "doubles": ("float64", 64, 250),
    "long rows": ("float32", 8, 100_000),
    "one column": ("bfloat16", 64, 1),
    "one element": ("float16", 1, 1),
}


def call(name: str, problem: str, rows: int | None = None) -> Any:
    """A function that launches an operation on tensors that nobody reads."""
    op, (dtype, count, n) = OPERATIONS[name], PROBLEMS[problem]
    n = max(n, op.least_size)
    made = descriptor(op, (rows or count, n), dtype, settings_of(op, 1), options(op, 0))
    if refused(made) is not None:
        return None
    arrays = {o.name: torch.zeros(o.shape, dtype=getattr(torch, o.dtype)) for o in made.operands()}
    return lambda: launch_of(name)(made, **arrays)


def module_of(name: str) -> Any:
    """Where an operation's kernels are launched."""
    return sys.modules[launch_of(name).__module__]


def modules_of(name: str) -> list[Any]:
    """The same, and the modules that it launches them through."""
    module = module_of(name)
    return [module, *[m for m in vars(module).values() if isinstance(m, ModuleType) and m.__name__ != "torch"]]


@pytest.mark.thorough
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("name", NAMES)
def test_hopper(name: str, problem: str) -> None:
    check_compiled(name, problem, "sm_90")


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_amd(name: str) -> None:
    check_compiled(name, "rows", "gfx942")


def kernels_of(name: str, problem: str, target: str) -> dict[str, Any]:
    """What an operation launches, compiled; but for softmax, which is compiled as an operation itself."""
    launch, module = call(name, problem), module_of(name)
    if launch is None:
        pytest.skip("its rows are shorter")
    others = [f for f in ("softmax", "softmax_backward") if hasattr(module, f) and not name.startswith("softmax")]
    with contextlib.ExitStack() as stack:
        for function in others:
            stack.enter_context(mock.patch.object(module, function))
        found = triton_targets.kernels_of(target, launch, rows, triton_norms, triton_sums, *modules_of(name))
    if not found and others:
        pytest.skip("it has no kernel of its own")
    return found


def check_compiled(name: str, problem: str, target: str) -> None:
    found = kernels_of(name, problem, target)
    assert found
    for kernel_name, compiled in found.items():
        need = resources(compiled)
        # A few words of the stack are what the compiler's scheduling costs.
        assert need["stack"] <= 64, kernel_name
        assert need["registers"] <= (512 if target == "gfx942" else 255), kernel_name
        # Long rows may take most of the 227 KiB of a processor.
        assert need["shared"] <= (200 if problem == "long rows" else 64) * 1024, kernel_name


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("target", sorted(TARGETS.keys() - {"sm_90", "gfx942"}))
def test_compiles_elsewhere(name: str, target: str) -> None:
    assert kernels_of(name, "rows", target)


@pytest.mark.parametrize("name", NAMES)
def test_numbers_of_rows_compile_few_kernels(name: str) -> None:
    with triton_variants.watched() as variants:
        for n in (1, 2, 3, 7, 16, 17, 32, 33, 100, 256, 1000, 1024, 3000, 4096):
            call(name, "rows", n)()
    # Two a kernel: one row, and more. Sums over all rows have tiles for them.
    own = {k: v for k, v in variants.items() if not hasattr(reduction_kernels, k)}
    assert own
    assert max(map(len, own.values())) <= 2, {k: triton_variants.differing(v) for k, v in own.items()}
