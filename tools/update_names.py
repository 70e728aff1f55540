"""Write the modules that give the names of operations to `isograd`, `isograd.tape` and `isograd.torch` anew.

    python tools/update_names.py

A type checker and an editor read names from sources, so these stand in `exported.py` of each, found in `isograd.ops`:
the functions of `api.py` and `torch.py`, the descriptors and plans of `operation.py`.
"""

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import isograd.torch  # noqa: F401 - the operations' files for torch are a part of it
from isograd.ops import FOLDERS, OPERATIONS, files

PACKAGE = Path(__file__).parent.parent / "src" / "isograd"


def _functions(module: ModuleType) -> list[str]:
    own = inspect.getmembers(module, inspect.isfunction)
    return [name for name, value in own if value.__module__ == module.__name__ and name[0] != "_"]


def _types(module: ModuleType) -> list[str]:
    return [name for name, value in inspect.getmembers(module, inspect.isclass) if value.__module__ == module.__name__]


def _differentiable(module: ModuleType) -> list[str]:
    return [
        name
        for name in _functions(module)
        if name in OPERATIONS and (OPERATIONS[name].vjp or OPERATIONS[name].pullback)
    ]


# For each file: the module of an operation that its names come from, and which of its names.
SOURCES: dict[str, list[tuple[str, Callable[[Any], list[str]]]]] = {
    "exported.py": [("api", _functions), ("operation", _types)],
    "tape/exported.py": [("api", _differentiable)],
    "torch/exported.py": [("torch", _functions)],
}


def text(target: str) -> str:
    """What a file has to hold."""
    lines = ['"""The names of operations; written by `python tools/update_names.py`."""\n\n']
    exported = []
    for folder in FOLDERS:
        for kind, of in SOURCES[target]:
            if kind in files(folder):
                place = f"isograd.ops.{folder}.{kind}"
                names = sorted(of(importlib.import_module(place)), key=lambda name: (name.islower(), name))
                exported += names
                lines.append(f"from {place} import (\n" + "".join(f"    {name},\n" for name in names) + ")\n")
    quoted = "".join(f'    "{name}",\n' for name in sorted(exported))
    return "".join([*lines, f"\n__all__ = [\n{quoted}]\n"])


if __name__ == "__main__":
    for target in SOURCES:
        (PACKAGE / target).write_text(text(target), "utf-8")
