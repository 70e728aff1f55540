"""Kernels on NVIDIA and AMD GPUs, compiled by Triton."""

from collections.abc import Callable, Mapping
from typing import Any

from isograd import cuda
from isograd.core.kernel import Backend


class Triton(Backend):
    """The current stream of the arguments' device, or one that is given; operands are torch tensors."""

    name = "triton"
    device = "cuda"

    def unavailable(self) -> str | None:
        """What is missing here."""
        return cuda.unavailable()

    def architecture(self) -> str:
        """The architectures of the GPUs here."""
        return cuda.architecture()

    def launch(self, function: Callable[..., None], descriptor: Any, arguments: Mapping[str, Any], stream: Any) -> None:
        """Launch without waiting."""
        if stream is None:
            function(descriptor, **arguments)
            return
        with cuda.on_stream(descriptor.operation, stream, arguments):
            function(descriptor, **arguments)


BACKEND = Triton()
