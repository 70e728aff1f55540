"""Programs of their own, since they may die: what they begin with, and how they run."""

import textwrap

import pytest

durations = pytest.mark.parametrize("seconds", [3, pytest.param(120, marks=pytest.mark.exhaustive)])

PRELUDE = """
import faulthandler, os, random, signal, sys, threading, time
import numpy as np
import isograd as ig
from isograd.runtime import fenv, parallel

faulthandler.dump_traceback_later(100, exit=True, repeat=False)
rng = np.random.default_rng(0)
ig.set_num_threads(4)
"""


def program(run_python, code, seconds, timeout=400, **environment):
    code = PRELUDE + textwrap.dedent(code).replace("SECONDS", str(seconds))
    return run_python(code, timeout=timeout, **environment)
