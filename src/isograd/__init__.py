"""Training kernels whose results have the same bits on every run, batch split, thread count and machine."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from isograd.exported import *  # noqa: F403
    from isograd.public import *  # noqa: F403
    from isograd.public import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        if name[:2] == "__" and name != "__all__":
            raise AttributeError(f"module 'isograd' has no attribute {name!r}")
        public = importlib.import_module("isograd.public")
        globals().update({key: getattr(public, key) for key in (*public.__all__, "__all__")})
        if name not in globals():
            raise AttributeError(f"module 'isograd' has no attribute {name!r}")
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
