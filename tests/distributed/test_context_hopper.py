"""Attention over spread sequences by the Hopper kernels, in their emulation: bits of the whole sequence."""

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")
if not torch.distributed.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

for _folder in ("distributed", "attention"):
    sys.path.insert(0, str(Path(__file__).parents[1] / _folder))
import contexts  # noqa: E402
import thread_ranks  # noqa: E402
from choices import thorough  # noqa: E402
from test_attention_gluon import launch, seeds  # noqa: E402, F401

from isograd.torch.distributed import context_attention, context_pieces  # noqa: E402


@pytest.fixture
def group(seeds: list[int], monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: F811
    """Two ranks whose attention is that of the emulation."""
    thread_ranks.install(monkeypatch.setattr)
    contexts.use(launch, monkeypatch.setattr)
    monkeypatch.setattr(context_attention, "_reads_all_keys", lambda q, preference: preference is None)
    return thread_ranks.Group(2)


LOUD = 1e5  # which leaves few bits to dq


@pytest.mark.parametrize("case", ["causal", "narrow window", thorough("full"), thorough("right side")])
def test_bits_of_the_whole_sequence(case: str, group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_pieces, "STEP", 128)  # a multiple of these tiles, for a shorter sequence
    shape = contexts.Shape(1, 2, 1, 660, 128, 128)
    given = {"kind": "even", "cases": [case], "kinds": [("bfloat16", None)], "shape": shape}
    assert group.run(contexts.differ, **given, loud=LOUD if "narrow" in case else 1) == [[], []]


def test_tiles_of_192_queries(group: Any) -> None:
    shape = contexts.Shape(1, 1, 1, 830, 64, 64)
    given = {"kind": "even", "cases": ["narrow window"], "kinds": [("bfloat16", None)], "shape": shape}
    assert group.run(contexts.differ, **given, loud=LOUD) == [[], []]


def test_without_hidden_keys_dq_is_another(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fixed point is that of all keys of the sequence."""
    monkeypatch.setattr(context_attention, "_reads_all_keys", lambda q, preference: False)
    monkeypatch.setattr(context_pieces, "STEP", 128)
    shape = contexts.Shape(1, 2, 1, 660, 128, 128)
    given = {"kind": "even", "cases": ["narrow window"], "kinds": [("bfloat16", None)], "shape": shape}
    found = group.run(contexts.differ, **given, loud=LOUD)
    assert found == [[], ["bfloat16 None narrow window dq"]]
