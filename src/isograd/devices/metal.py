"""Apple GPUs in torch's terms: the sources of the Metal kernels, and what every kernel written in Metal has in common.

A family's `metal_kernels.metal` is compiled once a process by `torch.mps.compile_shader`. Its kernels take buffers and
lists of 64-bit integers. torch is imported when it is first needed.
"""

import functools
import importlib.resources
import os
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from isograd.core.descriptor import Kernel, PrecisionGuarantee
from isograd.errors import InvalidProblemError

DTYPES = ("float16", "bfloat16", "float32")  # Metal has no float64
MOST_GROUPS = 1 << 20  # of a launch; each serves several rows where there are more
_LEAST_THREADS, MOST_THREADS = 32, 256  # of a threadgroup
_ENTRY_POINTS = "// --- entry points ---"
_INCLUDE = re.compile(r'^#include "(isograd/[\w./]+)"\n', re.MULTILINE)


class Launch(NamedTuple):
    """One call of a kernel: its name, its buffers (tensors and lists of integers), and its threads.

    groups: threadgroups of `group_size` threads each.
    """

    name: str
    buffers: tuple[Any, ...]
    groups: int
    group_size: int


@functools.cache
def source(family: str) -> str:
    """The kernels of a family as one text in ASCII, which is all that Metal's compiler is handed."""
    return text_of(f"isograd/{family}/metal_kernels.metal")


@functools.cache
def functions(family: str) -> str:
    """The same without the entry points, for a launcher that writes its own."""
    return source(family).partition(_ENTRY_POINTS)[0]


def text_of(path: str) -> str:
    """A file of the package with the text of each header where it is included; a header may be included once."""
    text = importlib.resources.files("isograd").joinpath(*path.split("/")[1:]).read_text("ascii")
    return _INCLUDE.sub(lambda match: text_of(match[1]), text.replace("#pragma once\n", ""))


def threads_for(columns: int) -> int:
    """Threads of a threadgroup that serves a row: a power of two, some four columns each."""
    return min(max(1 << max((columns - 1) // 4, 0).bit_length(), _LEAST_THREADS), MOST_THREADS)


def unavailable() -> str | None:
    """Why Metal kernels cannot run here, or None if they can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.backends.mps.is_available():
        return "torch sees no Apple GPU"
    if os.environ.get("PYTORCH_MPS_FAST_MATH", "0") not in ("", "0"):
        return "PYTORCH_MPS_FAST_MATH is set, with which torch compiles Metal to other arithmetic"
    return None


def guarantee(promised: PrecisionGuarantee, integers: bool) -> PrecisionGuarantee:
    """What a kernel promises on an Apple GPU, from what the family promises elsewhere.

    Metal leaves the rounding mode of + - * and fma open (to nearest even, or toward zero), so equal bits on all
    hardware are promised only where `integers` says that a kernel's results come from integer arithmetic alone.
    """
    return replace(promised, bit_stable_across_hardware=integers)


@functools.cache
def _function(family: str, name: str) -> Any:
    """A kernel's function object; looking it up costs more than the launch."""
    return getattr(_library(family), name)


@functools.cache
def _library(family: str) -> Any:
    import torch

    return torch.mps.compile_shader(source(family))


class MetalKernel(Kernel):
    """A kernel on an Apple GPU: operands are torch tensors on "mps"."""

    name = "metal"
    backend = "metal"
    family: str

    def reject(self, descriptor: Any) -> str | None:
        """Say what is missing on this machine."""
        return unavailable()

    @abstractmethod
    def launches(self, descriptor: Any, arguments: Mapping[str, Any]) -> Iterator[Launch]:
        """The calls that compute a problem, in their order."""

    def launch(self, descriptor: Any, arguments: Mapping[str, Any], workspace: Any, stream: Any) -> None:
        """Launch on torch's stream of the device, without waiting."""
        if stream is not None:
            raise InvalidProblemError(f"{descriptor.operation}: stream is {stream!r}; on mps there is one: None")
        for call in self.launches(descriptor, arguments):
            function = _function(self.family, call.name)
            function(*call.buffers, threads=call.groups * call.group_size, group_size=call.group_size)
