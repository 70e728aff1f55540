"""The operations: a folder each, found by its name.

`operation.py` declares; `reference.py`, `bounds.py` and `cases.py` say what is right; a file that is named like one of
`isograd.backends` has kernels; `api.py` and `torch.py` are what users call.
"""

import importlib
import pkgutil
from pathlib import Path

from isograd.core.operation import Operation
from isograd.core.registry import register_kernel

FOLDERS = tuple([found.name for found in pkgutil.iter_modules(__path__) if found.ispkg])


def files(folder: str) -> set[str]:
    """The names of the modules of an operation's folder."""
    return {found.name for found in pkgutil.iter_modules([str(Path(place, folder)) for place in __path__])}


def _load() -> dict[str, Operation]:
    """Every operation by name; their kernels are registered."""
    declared: dict[str, Operation] = {}
    backends = [found.name for found in pkgutil.iter_modules(importlib.import_module("isograd.backends").__path__)]
    for folder in FOLDERS:
        module = importlib.import_module(f"isograd.ops.{folder}.operation")
        found = {op.name: op for op in vars(module).values() if isinstance(op, Operation)}
        declared |= found
        for name in backends:
            backend = importlib.import_module(f"isograd.backends.{name}").BACKEND
            place = f"isograd.ops.{folder}.{name}" if name in files(folder) else None
            for op in found.values():
                for dtype, kernel in backend.kernels(op, place):
                    register_kernel(op.name, backend.device, dtype, kernel)
    return declared


OPERATIONS = _load()
