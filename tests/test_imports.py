"""What an import loads, in a process of its own."""

import subprocess
import sys

import pytest

# module: what it leaves to the call that needs it
LEFT = {
    "isograd": ("numba", "torch", "triton", "mlx", "matplotlib"),
    "isograd.torch": (
        "torch._dynamo",
        "torch.distributed.tensor",
        "triton",
        "transformers",
        "isograd.torch.distributed",
    ),
}


@pytest.mark.parametrize("module", LEFT)
def test_an_import_leaves_what_it_does_not_need(module):
    if module == "isograd.torch":
        pytest.importorskip("torch", reason="needs torch")
    code = f"import sys, {module}; print([m for m in {LEFT[module]} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_sums_over_ranks_are_imported_when_they_are_asked_for():
    pytest.importorskip("torch", reason="needs torch")
    code = (
        "import sys, isograd.torch as igt; total = igt.distributed.GradientSum; import isograd.torch.distributed as d; "
        "print(total is d.GradientSum, [m for m in ('torch.distributed.fsdp', 'triton') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "True []\n"
