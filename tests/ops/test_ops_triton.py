"""Norms' gradients in Triton's interpreter, where programs take many rows or dx overwrites, and packed gates."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")

SCRIPT = Path(__file__).parent / "interpreted_ops.py"
SUITES = [f"{name}_{kind}" for name in ("stay", "places", "words") for kind in ("rmsnorm", "layernorm")]
SUITES += ["packed_swiglu", "packed_geglu"]


@pytest.mark.parametrize("name", SUITES)
def test_bits_of_the_reference(interpret: Any, name: str) -> None:
    found, which = interpret(SCRIPT, *SUITES, exhaustive=False)
    cases, wrong = found[name]
    assert cases >= 5
    assert wrong == 0, which
