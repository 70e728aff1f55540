"""Peak memory of attention on the CPU, in processes of their own: 16-bit operands are converted a tile at a time."""

import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of resident memory from /proc")

# What is resident at most during a call beyond what was before, in sizes of q.
MEASURE = """
    def peak(call):
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        def sizes():
            with open("/proc/self/status") as file:
                lines = dict(line.split(":", 1) for line in file)
            return [int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM")]
        before, _ = sizes()
        result = call()
        return result, (sizes()[1] - before) / UNIT
"""
OURS = """
    import numpy as np, ml_dtypes
    import isograd as ig
    ig.set_num_threads(2)
    UNIT = 8 * {length} * 64 * 2
    def run(length):
        rng = np.random.default_rng(0)
        q, k, v, do = (rng.standard_normal((1, 8, length, 64), np.float32).astype("{dtype}") for _ in range(4))
        (o, lse), forward = peak(lambda: ig.attention(q, k, v, return_lse=True))
        return forward, peak(lambda: ig.attention_backward(do, q, k, v, o, lse))[1]
    run(128), run(1024)
    print(*run({length}))
"""
THEIRS = """
    import torch
    torch.set_num_threads(2)
    UNIT = 8 * {length} * 64 * 2
    def run(length):
        q, k, v, do = (torch.randn(1, 8, length, 64, dtype=torch.{dtype}).requires_grad_() for _ in range(4))
        o, forward = peak(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v))
        return forward, peak(lambda: torch.autograd.grad(o, (q, k, v), do.detach()))[1]
    run(128)
    print(*run({length}))
"""
# Memory goes back at once, so that a peak is one of this call.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}


def peaks(run_python, code, **given):
    printed = run_python(MEASURE + code.format(**given), timeout=600, **MALLOC)
    return [float(word) for word in printed.split()[-2:]]


def test_beyond_the_results_there_are_tiles_alone(run_python):
    forward, backward = peaks(run_python, OURS, length=2048, dtype="bfloat16")
    assert forward < 1.8  # o is 1, and each thread has half a megabyte: a quarter
    assert backward < 5.2  # dq, dk and dv are 3, and a head's dq in float32 a quarter for each thread


@pytest.mark.thorough
@pytest.mark.parametrize("length", [2048, 4096])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_at_most_half_more_than_torch(run_python, dtype, length):
    pytest.importorskip("torch")
    ours, theirs = (peaks(run_python, code, length=length, dtype=dtype) for code in (OURS, THEIRS))
    assert [a < 1.5 * b for a, b in zip(ours, theirs, strict=True)] == [True, True], (ours, theirs)
