"""Every operator under vmap on a GPU: members have the bits that they have alone."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "torch"))
from test_torch_vmap_calls import ONE_BY_ONE, cases, mapped

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(("name", "places"), list(cases()))
def test_members_have_their_own_bits(name, places):
    found, many, expected = mapped(name, 5, places, "cuda")
    assert all(map(torch.equal, found, expected))
    if not ONE_BY_ONE.get(name, set()) & set(places):
        assert many == mapped(name, 3, places, "cuda")[1]
