"""The softmax family on NVIDIA and AMD GPUs, compiled by Triton; torch and triton are imported when first needed."""

import functools
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from isograd.errors import DeviceMismatchError, InvalidProblemError
from isograd.plan import DTYPES, Descriptor, Kernel, KernelSku
from isograd.registry import register_kernel
from isograd.softmax.plans import KINDS, family_sku

_LEAST_CAPABILITY = (8, 0)


def _capabilities() -> list[tuple[int, int]]:
    import torch

    return [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]


def unavailable() -> str | None:
    """Why Triton kernels cannot run here, or None if they can."""
    try:
        import torch.cuda
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if torch.version.hip is None and max(_capabilities()) < _LEAST_CAPABILITY:
        found = ", ".join(f"{major}.{minor}" for major, minor in _capabilities())
        return f"compute capability {found} is below {'.'.join(map(str, _LEAST_CAPABILITY))}"
    return None


def architecture() -> str:
    """The architectures of the devices here: "sm_90", or "sm_80/sm_90" where they differ."""
    import torch

    if torch.version.hip is not None:
        names = {torch.cuda.get_device_properties(i).gcnArchName for i in range(torch.cuda.device_count())}
    else:
        names = {f"sm_{major}{minor}" for major, minor in _capabilities()}
    return "/".join(sorted(names))


@functools.cache
def _function(operation: str) -> Callable[..., None]:
    from isograd.softmax import triton_kernels

    function: Callable[..., None] = getattr(triton_kernels, operation)
    return function


class TritonSoftmax(Kernel):
    """The family on a GPU: operands are torch tensors of one device, which need not be the current one."""

    name = "triton"
    backend = "triton"

    def reject(self, descriptor: Descriptor) -> str | None:
        """Say what is missing on this machine."""
        return unavailable()

    def sku(self, descriptor: Descriptor) -> KernelSku:
        """The kernel's identity."""
        return family_sku(descriptor, self.backend, architecture())

    def launch(self, descriptor: Descriptor, arguments: Mapping[str, Any], workspace: Any, stream: Any) -> None:
        """Launch on `stream`, by default the current stream of the tensors' device; needs no workspace."""
        operands = [arguments[name] for name in descriptor.inputs]
        operands.append(arguments[descriptor.output])
        function = _function(descriptor.operation)
        if stream is None:
            function(*operands, descriptor.axis)
            return
        import torch

        if not isinstance(stream, torch.cuda.Stream):
            raise InvalidProblemError(
                f"{descriptor.operation}: stream is a {type(stream).__name__}; expected a torch.cuda.Stream"
            )
        if stream.device != operands[-1].device:
            raise DeviceMismatchError(
                f"{descriptor.operation}: stream belongs to {stream.device}; the arguments are on {operands[-1].device}"
            )
        with torch.cuda.stream(stream):
            function(*operands, descriptor.axis)


for _operation in (*KINDS, *(f"{kind}_backward" for kind in KINDS)):
    for _dtype in DTYPES:
        register_kernel(_operation, "cuda", _dtype, TritonSoftmax())
