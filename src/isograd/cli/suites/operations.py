"""The suites of the operations of `isograd.ops`, which follow from their declarations and their cases."""

import importlib

from isograd.core.cases import Suite, suite
from isograd.ops import FOLDERS, OPERATIONS

SUITES: dict[str, Suite] = {}
for _folder in FOLDERS:
    _cases = importlib.import_module(f"isograd.ops.{_folder}.cases")
    for _name, _op in OPERATIONS.items():
        if hasattr(_cases, _name):
            _keys = [key for key in ("batch", "order", "padding") if hasattr(_cases, f"{_name}_{key}")]
            _own = {key: getattr(_cases, f"{_name}_{key}") for key in _keys}
            SUITES[_name] = suite(_op, getattr(_cases, _name), _own)
