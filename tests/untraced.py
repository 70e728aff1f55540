"""Compilers that a measurement of coverage does not follow: in their own lines it spends as long as they do.

Before Python 3.12 a trace function sees every line that Python executes, also of files that nobody measures.
"""

import functools
import sys


def leave_out_compilers():
    """Measure nothing where Numba and Triton compile, in this process and for good."""
    import numba.core.compiler as numba_compiler  # here, since tests of what is imported measure nothing

    numba_compiler.compile_extra = _untraced(numba_compiler.compile_extra)
    if "triton" in sys.modules:
        import triton

        triton.compile = _untraced(triton.compile)


def _untraced(function):
    @functools.wraps(function)
    def run(*arguments, **named):
        tracer = sys.gettrace()
        if type(tracer).__module__.partition(".")[0] != "coverage":  # nothing, or a test that counts steps
            return function(*arguments, **named)
        sys.settrace(None)
        try:
            return function(*arguments, **named)
        finally:
            sys.settrace(tracer)
            _call()

    return run


def _call():
    """A call, by which the tracer finds out that it is in force again: it counts calls and returns."""
