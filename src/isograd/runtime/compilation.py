"""What the library says of compilation, to the logger `isograd`.

Kernels are compiled when they are first used on a machine and kept on disk: nothing is said where they are found there.
"""

import logging
import time

_log = logging.getLogger("isograd")
_LONG = 2.0  # seconds after which a user wonders

_begun = False
_warned = False
_seconds = 0.0
_since: float | None = None


def begin(kind: str, folder: str | None) -> None:
    """A compilation begins; `folder` is where the result is kept, if anywhere."""
    global _begun, _since
    if not _begun:
        _begun = True
        _log.info("compiling %s kernels for this machine; they are %s", kind, _kept(folder))
    _since = time.monotonic()


def end(kind: str, folder: str | None) -> None:
    """The compilation that began last is done."""
    global _seconds, _since
    tell(kind, folder)
    if _since is not None:
        _seconds += time.monotonic() - _since
    _since = None


def add(seconds: float, kind: str, folder: str | None) -> None:
    """A compilation of so many seconds is done."""
    global _seconds, _since
    begin(kind, folder)
    _seconds += seconds
    _since = None
    tell(kind, folder)


def seconds() -> float:
    """The seconds that this process has compiled for."""
    return _seconds


def tell(kind: str, folder: str | None) -> None:
    """Warn once if this process has compiled for long."""
    global _warned
    spent = _seconds + (0.0 if _since is None else time.monotonic() - _since)
    if spent > _LONG and not _warned:
        _warned = True
        _log.warning(
            "compiling %s kernels for this machine, %.0f seconds so far; they are %s", kind, spent, _kept(folder)
        )


def _kept(folder: str | None) -> str:
    if folder is None:
        return "not kept: no folder of the cache can be written"
    return f"kept in {folder}, and later processes load them from there"
