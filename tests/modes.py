"""Rounding modes and flush-to-zero that a caller may have set."""

import contextlib
import platform

from isograd.runtime import fenv

X86 = platform.machine().lower() in ("x86_64", "amd64")

if X86:  # MXCSR: all exceptions masked, rounding in bits 13 and 14, flush-to-zero 15, denormals-are-zero 6
    MODES = {"up": 0x5F80, "down": 0x3F80, "toward zero": 0x7F80, "flush": 0x9FC0}
    SETTINGS = 0xFFC0  # the low bits note exceptions that occurred
else:  # FPCR: rounding in bits 22 and 23, flush-to-zero 24
    MODES = {"up": 1 << 22, "down": 2 << 22, "toward zero": 3 << 22, "flush": 1 << 24}
    SETTINGS = 0x07C00000


def settings():
    """The mode that is in force, as the value in MODES."""
    control = fenv.enter()
    fenv.leave(control)
    return control & SETTINGS


@contextlib.contextmanager
def environment(mode):
    """Run a block under a mode."""
    previous = fenv.enter()
    fenv.leave(MODES[mode])
    try:
        yield
    finally:
        fenv.leave(previous)
