"""What an import loads, in a process of its own."""

import subprocess
import sys

import pytest

# module: what it leaves to the call that needs it
LEFT = {
    "isograd": ("torch", "triton", "mlx", "matplotlib"),
    "isograd.torch": ("torch._dynamo", "torch.distributed.tensor", "triton", "transformers"),
}


@pytest.mark.parametrize("module", LEFT)
def test_an_import_leaves_what_it_does_not_need(module):
    if module == "isograd.torch":
        pytest.importorskip("torch", reason="needs torch")
    code = f"import sys, {module}; print([m for m in {LEFT[module]} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
