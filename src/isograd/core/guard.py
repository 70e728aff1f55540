"""A guard over results that a recording has promised but not computed."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, empty_like, ones_like, strided, zeros_like
from torch.overrides import TorchFunctionMode

from isograd.core import arrays
from isograd.errors import RecordingError
from isograd.runtime import modes

# What does not look at a tensor's contents.
_PROPERTIES = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "is_cpu", "is_cuda",
               "itemsize", "nbytes", "is_nested", "is_sparse", "is_quantized", "is_meta")  # fmt: skip
_METHODS = ("__hash__", "__len__", "data_ptr", "dim", "element_size", "get_device", "is_complex", "is_contiguous",
            "is_floating_point", "is_inference", "is_neg", "nelement", "new_empty", "new_ones", "new_zeros", "numel",
            "size", "storage_offset", "stride", "untyped_storage")  # fmt: skip
_METADATA = {
    empty_like,
    ones_like,
    zeros_like,
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
    *(getattr(Tensor, name) for name in _METHODS),
}


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())


def _shares_memory(tensor: Tensor, result: Tensor) -> bool:
    if tensor.device != result.device or tensor.layout is not strided or tensor.is_nested:
        return False
    try:
        return arrays.overlaps(tensor, result)
    except RuntimeError:  # a wrapper without memory of its own
        return False


class PendingGuard(TorchFunctionMode):
    """Raises RecordingError where a torch function of this thread touches the memory of a pending result."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[tuple[str, Tensor]] = []
        self.suspended = False

    def leave(self) -> None:
        """Guard no more, also where this comes from another thread than the one on whose stack of modes it lies."""
        self.suspended = True
        modes.remove(self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.pending and not self.suspended and func not in _METADATA:
            for tensor in _tensors((*args, *kwargs.values())):
                for operation, result in self.pending:
                    if _shares_memory(tensor, result):
                        raise RecordingError(
                            f"{getattr(func, '__name__', func)}: uses the result of {operation}, which was recorded "
                            "but has not been computed; leave the encoder's block first"
                        )
        return func(*args, **kwargs)
