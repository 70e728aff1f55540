"""How `isograd verify` hands NumPy inputs to the kernels of a device and reads the results back.

A backend on another device adds a `Device` to `DEVICES`; the arrays it makes are whatever its plans take.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.numerics.reference import BFLOAT16

Array = NDArray[Any]


@dataclass(frozen=True)
class Device:
    """Arrays on a device.

    available: whether this machine has it. send: a NumPy array to the device, shape and strides kept. empty: an
    uninitialised array there with the shape and strides of a NumPy array. receive: an array of the device as NumPy's.
    """

    available: Callable[[], bool]
    send: Callable[[Array], Any]
    empty: Callable[[Array], Any]
    receive: Callable[[Any], Array]


def _strides(array: Array) -> tuple[int, ...]:
    return tuple(stride // array.itemsize for stride in array.strides)


def _cuda_available() -> bool:
    from isograd.devices.cuda import unavailable

    return unavailable() is None


def _mps_available() -> bool:
    from isograd.devices.metal import unavailable

    return unavailable() is None


def _send(device: str, array: Array) -> Any:
    import torch

    # Expanded axes stay expanded; torch has no negative strides, so such an array is copied.
    stored = np.asarray(array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)])
    host = stored.copy(order="C")  # `ascontiguousarray` would give an array without dimensions one
    if min(_strides(stored), default=0) < 0:
        stored = host
    if host.dtype == BFLOAT16:
        tensor = torch.from_numpy(host.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(host)
    sent = torch.empty_strided(stored.shape, _strides(stored), dtype=tensor.dtype, device=device)
    return sent.copy_(tensor).expand(array.shape)


def _empty(device: str, array: Array) -> Any:
    import torch

    like = np.empty_like(array)
    dtype = getattr(torch, like.dtype.name)
    return torch.empty_strided(like.shape, _strides(like), dtype=dtype, device=device)


def _receive(tensor: Any) -> Array:
    import torch

    host = tensor.cpu()
    if host.dtype == torch.bfloat16:
        return np.asarray(host.view(torch.int16).numpy().view(BFLOAT16))
    return np.asarray(host.numpy())


def _gpu(device: str, available: Callable[[], bool]) -> Device:
    return Device(available, functools.partial(_send, device), functools.partial(_empty, device), _receive)


DEVICES: dict[str, Device] = {
    "cpu": Device(available=lambda: True, send=lambda a: a, empty=np.empty_like, receive=lambda a: a),
    "cuda": _gpu("cuda", _cuda_available),
    "mps": _gpu("mps", _mps_available),
}
