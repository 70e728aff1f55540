"""Compile a softmax kernel for a GPU that is not there, and read back what it needs."""

import re
import subprocess
import tempfile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from isograd.softmax import triton_kernels
from isograd.softmax.triton_launch import Configuration, specify

_POINTER = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64"}
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
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


def compile_for(
    target: str, op: str, tensors: list[torch.Tensor], axis: int, config: Configuration | None = None
) -> Any:
    """The compiled kernel that `op` would launch for these tensors, which only lend shape, strides and dtype."""
    where = TARGETS[target]
    arch = where.arch if where.backend == "cuda" else 0
    kernel, tail, _, options, _ = specify(triton_kernels.KERNELS, op, tensors, axis, config, arch)
    names = kernel.arg_names
    signature: dict[str, Any] = {}
    constants: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}
    for i, name in enumerate(names):
        if i < len(tensors):
            signature[name] = _POINTER[tensors[i].dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif kernel.params[i].is_constexpr:
            signature[name] = "constexpr"
            constants[(i,)] = tail[i - len(tensors)]
        else:
            signature[name] = _describe(tail[i - len(tensors)], (i,), constants, attributes)
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
    return triton.compile(source, target=where, options=options)


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
