"""How `isograd verify` hands NumPy inputs to the kernels of a device and reads the results back.

A backend on another device adds a `Device` to `DEVICES`; the arrays it makes are whatever its plans take.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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


DEVICES: dict[str, Device] = {
    "cpu": Device(available=lambda: True, send=lambda a: a, empty=np.empty_like, receive=lambda a: a),
}
