"""What kernels keep of a long row is freed when they return: no sooner, and then all of it."""

import sys
from pathlib import Path

import pytest

# glibc takes arrays of this size straight from the system and gives them back when they are freed: a later access ends
# the process.
SCRIPT = """
    import sys

    sys.path.insert(0, {folder!r})
    import numpy as np
    from numba.core.runtime import rtsys
    from operations import NAMES, expected, fits, inputs, ran, raw, settings_of

    from isograd.core import call
    from isograd.ops import OPERATIONS

    for name in NAMES:
        op = OPERATIONS[name]
        for choice in range(4 if "hard" in op.attributes else 1):
            settings, given, shape = settings_of(op, -1, choice), list(op.optional), (2, 20_000)
            if fits(op, shape, -1):
                print(name, flush=True)
                made = inputs(op, np.random.default_rng(0), "normal", shape, "float32", settings, given)
                found = ran(call.function(op), op, made, settings, given)
                assert list(map(raw, found)) == list(map(raw, expected(op, made, settings, given)))
    stats = rtsys.get_allocation_stats()
    print(stats.alloc > 0, stats.alloc == stats.free, stats.mi_alloc == stats.mi_free)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="sets glibc's threshold")
def test_scratch_memory_lives_until_its_kernel_returns(run_python):
    found = run_python(
        SCRIPT.format(folder=str(Path(__file__).parent)),
        timeout=600,
        MALLOC_MMAP_THRESHOLD_="4096",
        MALLOC_TOP_PAD_="0",
        NUMBA_NRT_STATS="1",
    ).splitlines()
    assert "gumbel_softmax" in found
    assert found[-1] == "True True True"
