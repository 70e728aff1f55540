"""Compile the kernels of cross entropy for a GPU that is not there, and read back what they need."""

import re
import subprocess
import tempfile
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

import isograd as ig
from isograd.losses import triton_launch
from isograd.losses.gluon_cross_entropy import gradient_staged

_POINTER = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
}
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
KINDS = {
    "cross_entropy": ig.CrossEntropyDescriptor,
    "cross_entropy_backward": ig.CrossEntropyBackwardDescriptor,
    "cross_entropy_gradient": ig.CrossEntropyGradientDescriptor,
}


def _describe(value: Any, path: tuple[int, ...], constants: dict[Any, Any], attributes: dict[Any, Any]) -> Any:
    """The signature of an argument as the launcher specialises it: 1 is a constant, 16 divides what it divides."""
    if isinstance(value, tuple):
        return tuple(_describe(v, (*path, i), constants, attributes) for i, v in enumerate(value))
    if value == 1:
        constants[path] = 1
        return "constexpr"
    if value % 16 == 0:
        attributes[path] = [["tt.divisibility", 16]]
    return "i32" if abs(value) < 2**31 else "i64"


def kernel_for(target: str, operation: str, shape: tuple[int, ...], dtype: str, axis: int = 1, **options: Any) -> Any:
    """(kernel, tensors, what follows them, compiler's options) that an operation on tensors of a shape would launch."""
    where = TARGETS[target]
    descriptor = KINDS[operation](shape, dtype, axis=axis, **options).validated()
    given = {o.name: torch.empty(o.shape, dtype=getattr(torch, o.dtype)) for o in descriptor.operands()}
    found: list[Any] = []

    def launch(kernel: Any, tensors: Any, specify: Any, *key: Any) -> None:
        specification = specify(*key)
        found.append((kernel, tensors, specification.tail, specification.options))

    def launch_staged(problem: Any, tensors: Any) -> None:
        found.append((gradient_staged, tensors, problem.tail, problem.options))

    arch = where.arch if where.backend == "cuda" else 0
    with (
        mock.patch.object(triton_launch, "launch", launch),
        mock.patch.object(triton_launch, "_launch_staged", launch_staged),
        mock.patch.object(triton_launch, "numbers", return_value=given["losses" if "losses" in given else "dlosses"]),
        mock.patch.object(triton_launch, "architecture", return_value=arch),
    ):
        triton_launch.cross_entropy(descriptor, given)
    return found[-1]


def compile_for(target: str, operation: str, shape: tuple[int, ...], dtype: str, axis: int = 1, **options: Any) -> Any:
    """The compiled kernel that an operation on tensors of a shape would launch."""
    kernel, tensors, tail, compiler = kernel_for(target, operation, shape, dtype, axis, **options)
    signature: dict[str, Any] = {}
    constants: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}
    for i, name in enumerate(kernel.arg_names):
        if i < len(tensors):
            signature[name] = _POINTER[tensors[i].dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif kernel.params[i].is_constexpr:
            signature[name] = "constexpr"
            constants[(i,)] = tail[i - len(tensors)]
        else:
            signature[name] = _describe(tail[i - len(tensors)], (i,), constants, attributes)
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
    return triton.compile(source, target=TARGETS[target], options=compiler)


def resources(compiled: Any) -> dict[str, int]:
    """Registers a thread, bytes of its stack (where spills go) and shared memory of a compiled kernel."""
    shared = compiled.metadata.shared
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        registers, stack = (re.search(rf"\.{key}:\s*(\d+)", text) for key in ("vgpr_count", "vgpr_spill_count"))
    else:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, stack = (re.search(rf"{key}:(\d+)", text) for key in ("REG", "STACK"))
    assert registers is not None, text
    assert stack is not None, text
    return {"registers": int(registers[1]), "stack": int(stack[1]), "shared": shared}
