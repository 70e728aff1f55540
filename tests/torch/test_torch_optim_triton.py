"""The Triton kernels of igt.optim and of norms: the reference's bits in Triton's interpreter, and code for GPUs."""

import re
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")

from test_torch_optim import CASES  # noqa: E402
from triton_targets import TARGETS, kernels_of, resources  # noqa: E402

from isograd.optimizers import triton_norm, triton_updates  # noqa: E402
from isograd.optimizers.chunks import chunks  # noqa: E402
from isograd.optimizers.numbers import ADAM, COUPLED, DECOUPLED, LION, SGD, Rates, Update  # noqa: E402

SCRIPT = Path(__file__).parent / "interpreted_optim.py"
SUITES = (*CASES, "norm", "inf")
UPDATES = {
    "AdamW": Update(ADAM, DECOUPLED),
    "SGD": Update(SGD, COUPLED, True, False, True),
    "Lion": Update(LION, DECOUPLED, maximize=True),
}
MANY = 1 << 26  # elements, for the longer chunks


@pytest.mark.thorough
@pytest.mark.parametrize("name", SUITES)
def test_interpreter_returns_the_bits_of_the_reference(interpret, name):
    found, which = interpret(SCRIPT, *SUITES, exhaustive=False)
    assert name in found, which
    cases, wrong = found[name]
    assert cases >= 16
    assert wrong == 0, which


def placed(length):
    return torch.zeros((1, 7), dtype=torch.int64), torch.from_numpy(chunks(np.array([MANY]), length))


def updated(name, dtypes, copied=False):
    length = triton_updates.chunk_length(MANY)
    table, where = placed(length)
    values = triton_updates.numbers_of(UPDATES[name], Rates(), 0.1, table, dtypes[0])
    triton_updates.launch_updates(UPDATES[name], table, where, values, length, dtypes, copied, True)


def normed(dtype):
    length = triton_norm.chunk_length(MANY)
    table, where = placed(length)
    keys, words = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64)
    out = torch.zeros(2, dtype=torch.float64 if dtype == "float64" else torch.float32)
    triton_norm.launch_keys(table, where, keys, dtype, True, True, length)
    triton_norm.launch_words(table, where, keys, words, dtype, True, length)
    triton_norm.launch_sums(keys, words, out[:1])
    triton_norm.launch_finish(out, out, 1.0, True)
    triton_norm.launch_scale(table, where, out, dtype, True, length)


CALLS = {
    "AdamW bfloat16": lambda: updated("AdamW", ("bfloat16",) * 3),
    "AdamW master": lambda: updated("AdamW", ("float32", "bfloat16", "bfloat16"), True),
    "SGD float64": lambda: updated("SGD", ("float64",) * 3),
    "Lion float16": lambda: updated("Lion", ("float16",) * 3),
    "norm bfloat16": lambda: normed("bfloat16"),
    "norm float64": lambda: normed("float64"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CALLS)
def test_compiled(name, target):
    """Nothing spills, nothing is contracted that is not written, and whole chunks are read in wide accesses."""
    for kernel, compiled in kernels_of(target, CALLS[name], triton_updates, triton_norm).items():
        assert resources(compiled)["stack"] == 0, kernel
        text = compiled.asm.get("ptx")
        if text is not None and kernel.endswith("_chunks"):
            assert "fma" not in text
            assert re.search(r"ld\.global\.v[24]", text), kernel
