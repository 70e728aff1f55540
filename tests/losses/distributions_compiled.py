"""Compile the Triton kernels that a call would launch, for a GPU that is not there, and read back what they need."""

import re
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from isograd.losses import triton_distributions_launch
from isograd.reduction import cuda as reduction
from isograd.triton_launcher import Launcher

_POINTER = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint32: "*u32",
}
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


def _compile(target: GPUTarget, kernel: Any, tensors: Any, numbers: Any, specification: Any) -> Any:
    signature: dict[str, Any] = {}
    constants: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}
    values = (*tensors, *numbers, *specification.tail)
    assert len(values) == len(kernel.arg_names)
    for i, (name, value) in enumerate(zip(kernel.arg_names, values, strict=True)):
        if i < len(tensors):
            signature[name] = _POINTER[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif i < len(tensors) + len(numbers):
            assert kernel.params[i].do_not_specialize, name
            signature[name] = "i32"
        elif kernel.params[i].is_constexpr:
            signature[name] = "constexpr"
            constants[(i,)] = value
        else:
            signature[name] = _describe(value, (i,), constants, attributes)
    return triton.compile(ASTSource(kernel, signature, constants, attributes), target, specification.options)


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


def kernels_of(target: str, call: Callable[[], Any]) -> dict[str, dict[str, int]]:
    """What the kernels that `call` launches need on a target, by their names; nothing runs."""
    where = TARGETS[target]
    needs: dict[str, dict[str, int]] = {}

    def launch(self: Launcher, *tensors: Any, numbers: Any = ()) -> None:
        needs[self._kernel.__name__] = resources(_compile(where, self._kernel, tensors, numbers, self._specification))

    arch = where.arch if where.backend == "cuda" else 0
    with mock.patch.object(Launcher, "__call__", launch):
        for module in (triton_distributions_launch, reduction):
            for name, value in (("architecture", arch), ("processors", 132)):
                patch = mock.patch.object(module, name, return_value=value)
                patch.start()
        try:
            call()
        finally:
            mock.patch.stopall()
    return needs
