"""The kernels of rows whose classes are spread over ranks, by the device of their tensors: what lies between two
collectives. `vocab_cpu.py` and `vocab_gpu.py` have the same functions; ranks exchange integers that both read alike.
"""

from types import ModuleType

import torch
from torch import Tensor

from isograd.devices.cuda import unavailable
from isograd.errors import UnsupportedError
from isograd.torch.distributed import vocab_cpu


def require_kernels(name: str, device: torch.device) -> None:
    """Raise unless the device has these kernels."""
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"{name}: no kernel for device {device.type!r}; available: cpu, cuda")
    if device.type == "cuda" and (missing := unavailable()) is not None:
        raise UnsupportedError(f"{name}: no kernel for device 'cuda': {missing}")


def of(x: Tensor) -> ModuleType:
    """The kernels for a tensor's device."""
    if x.is_cpu:
        return vocab_cpu
    from isograd.torch.distributed import vocab_gpu

    return vocab_gpu
