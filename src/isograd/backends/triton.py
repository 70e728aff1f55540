"""Kernels on NVIDIA and AMD GPUs, compiled by Triton."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from isograd.core.kernel import Backend
from isograd.devices import cuda


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

    def on_stream(self, operation: str, stream: Any, arguments: Mapping[str, Any]) -> AbstractContextManager[Any]:
        """A block whose launches run on a stream that was given, or an error."""
        return cuda.on_stream(operation, stream, arguments)


BACKEND = Triton()
