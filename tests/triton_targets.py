"""Compile Triton kernels for GPUs that are not there, and read back what they need."""

import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from isograd.devices.triton_launcher import Launcher

_POINTER = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int64: "*i64",
    torch.uint32: "*u32",
}
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


def architecture(target: str) -> int:
    """The compute capability times ten as launchers see it, 0 where the target is not NVIDIA's."""
    where = TARGETS[target]
    return where.arch if where.backend == "cuda" else 0


def _describe(
    value: Any, path: tuple[int, ...], constants: dict[Any, Any], attributes: dict[Any, Any], free: bool
) -> Any:
    """The signature of an argument as the launcher specialises it: 1 is a constant, 16 divides what it divides.

    free: nothing is said of its value.
    """
    if isinstance(value, tuple):
        return tuple(_describe(v, (*path, i), constants, attributes, free) for i, v in enumerate(value))
    if isinstance(value, float):
        return "fp32"
    if value == 1 and not free:
        constants[path] = 1
        return "constexpr"
    if value % 16 == 0 and not free:
        attributes[path] = [["tt.divisibility", 16]]
    return "i32" if abs(value) < 2**31 else "i64"


def compiled(
    target: str,
    kernel: Any,
    tensors: Sequence[Any],
    tail: Sequence[Any],
    options: dict[str, Any],
    numbers: Sequence[int] = (),
) -> Any:
    """A kernel compiled for tensors, which lend their dtypes, numbers that vary by call, and its other arguments.

    A tensor may be described by a Gluon tensor descriptor.
    """
    signature: dict[str, Any] = {}
    constants: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}
    values = (*tensors, *numbers, *tail)
    assert len(values) == len(kernel.arg_names)
    for i, (name, value) in enumerate(zip(kernel.arg_names, values, strict=True)):
        if i < len(tensors) and isinstance(value, TensorDescriptor):
            element = _POINTER[value.base.dtype][1:]
            signature[name] = f"tensordesc<{element}{list(value.block_shape)},{value.layout!r}>"
        elif i < len(tensors):
            signature[name] = _POINTER[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif i < len(tensors) + len(numbers):
            assert kernel.params[i].do_not_specialize, name
            signature[name] = "i32"
        elif kernel.params[i].is_constexpr:
            signature[name] = "constexpr"
            constants[(i,)] = value
        else:
            free = bool(kernel.params[i].do_not_specialize)
            signature[name] = _describe(value, (i,), constants, attributes, free)
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
    return triton.compile(source, target=TARGETS[target], options=options)


def resources(kernel: Any) -> dict[str, int]:
    """Registers a thread, bytes of its stack (where spills go) and shared memory of a compiled kernel."""
    shared = kernel.metadata.shared
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        registers, stack = (re.search(rf"\.{key}:\s*(\d+)", text) for key in ("vgpr_count", "vgpr_spill_count"))
    else:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, stack = (re.search(rf"{key}:(\d+)", text) for key in ("REG", "STACK"))
    assert registers is not None, text
    assert stack is not None, text
    return {"registers": int(registers[1]), "stack": int(stack[1]), "shared": shared}


def sass(kernel: Any) -> str:
    """The instructions of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def unordered(ptx: str) -> int:
    """Arrivals at an mbarrier with shared memory used since the last barrier of the arriving warps.

    One thread arrives for all of its partition; the others might still be at work.
    """
    count, used = 0, True
    for line in ptx.splitlines():
        if re.search(r"\bbar(rier)?(\.warp)?\.sync\b", line):
            used = False
        elif re.search(r"\b(ld|st)\.shared\b|\b(ld|st)matrix\b", line):
            used = True
        elif "mbarrier.arrive" in line and "expect_tx" not in line:
            count += used
    return count


def kernels_of(target: str, call: Callable[[], Any], *modules: Any, apart: str = "") -> dict[str, Any]:
    """What `call` launches through modules, compiled for a target, by the kernels' names; nothing runs.

    apart: an argument whose values follow the names of the kernels that have it.
    """
    found: dict[str, Any] = {}

    def record(self: Launcher, *tensors: Any, numbers: Any = ()) -> None:
        tail, options = self._specification.tail, self._specification.options
        shown = self.described(tensors)
        name = self._kernel.__name__
        values = dict(zip(self._kernel.arg_names[len(tensors) + len(numbers) :], tail, strict=True))
        if apart in values:
            name = f"{name} {values[apart]}"
        found[name] = compiled(target, self._kernel, shown, tail, options, numbers)

    patches: list[Any] = [mock.patch.object(Launcher, "__call__", record)]
    for module in modules:
        for name, value in (("architecture", architecture(target)), ("processors", 132)):
            if hasattr(module, name):
                patches.append(mock.patch.object(module, name, return_value=value))
    for patch in patches:
        patch.start()
    try:
        call()
    finally:
        for patch in patches:
            patch.stop()
    return found
