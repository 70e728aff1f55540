"""GPUs in torch's terms: whether kernels can run here, and what every kernel compiled by Triton has in common.

torch and triton are imported when they are first needed.
"""

import importlib.util
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from isograd.core.descriptor import Kernel
from isograd.errors import DeviceMismatchError, InvalidProblemError

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


def on_stream(operation: str, stream: Any, arguments: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """A block whose launches run on a stream of the arguments' device; an error for anything else."""
    import torch

    if not isinstance(stream, torch.cuda.Stream):
        raise InvalidProblemError(f"{operation}: stream is a {type(stream).__name__}; expected a torch.cuda.Stream")
    device = next(iter(arguments.values())).device
    if stream.device != device:
        raise DeviceMismatchError(f"{operation}: stream belongs to {stream.device}; the arguments are on {device}")
    context: AbstractContextManager[Any] = torch.cuda.stream(stream)
    return context


class TritonKernel(Kernel):
    """A kernel on a GPU: operands are torch tensors of one device, which need not be the current one."""

    name = "triton"
    backend = "triton"

    def reject(self, descriptor: Any) -> str | None:
        """Say what is missing on this machine."""
        return unavailable()

    @abstractmethod
    def compute(self, descriptor: Any, arguments: Mapping[str, Any], workspace: Any) -> None:
        """Launch on the current stream of the arguments' device, without waiting."""

    def launch(self, descriptor: Any, arguments: Mapping[str, Any], workspace: Any, stream: Any) -> None:
        """Launch on `stream`, by default the current stream of the arguments' device."""
        if stream is None:
            self.compute(descriptor, arguments, workspace)
            return
        with on_stream(descriptor.operation, stream, arguments):
            self.compute(descriptor, arguments, workspace)
