"""What an import loads, in a process of its own."""

import subprocess
import sys

import pytest

# What each statement leaves to the call that needs it, one after the other in a process.
NUMPY = {"import isograd": ("numba", "torch", "triton", "mlx", "matplotlib")}
TORCH = {
    "import isograd.torch as igt": (
        "torch._dynamo",
        "torch.distributed.tensor",
        "triton",
        "transformers",
        "isograd.torch.distributed",
    ),
    "igt.distributed.GradientSum": ("torch.distributed.fsdp", "triton"),
}


def found_after(statements, last="True"):
    """What is loaded after each statement of those that it leaves, and then what an expression is."""
    code = "import sys\n"
    for statement, left in statements.items():
        code += f"{statement}\nprint([m for m in {left} if m in sys.modules])\n"
    done = subprocess.run([sys.executable, "-c", f"{code}print({last})"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_an_import_leaves_what_it_does_not_need():
    assert found_after(NUMPY) == ["[]", "True"]


def test_an_import_for_torch_leaves_sums_over_ranks_until_they_are_asked_for():
    pytest.importorskip("torch", reason="needs torch")
    same = "igt.distributed.GradientSum is sys.modules['isograd.torch.distributed'].GradientSum"
    assert found_after(TORCH, same) == ["[]", "[]", "True"]
