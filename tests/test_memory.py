"""Large tensors on the CPU lie on huge pages where the system has them, as NumPy's arrays do."""

import re
from pathlib import Path

import numpy as np
import pytest

import isograd as ig

torch = pytest.importorskip("torch", reason="needs torch")
MAPS = Path("/proc/self/smaps")
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
pytestmark = pytest.mark.skipif(
    not (MAPS.exists() and HUGE.exists()) or "[never]" in HUGE.read_text(), reason="no huge pages here"
)


def advised(address: int) -> bool:
    """Whether the mapping of an address has the flag of huge pages."""
    inside = False
    for line in MAPS.read_text().splitlines():
        if found := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError(f"no mapping holds {address:#x}")


def test_large_results_lie_on_huge_pages():
    x = torch.randn(4096, 2048)
    index = torch.arange(2048).expand(4096, -1)
    results = {
        "softmax": ig.softmax(x),
        "softmax_backward": ig.softmax_backward(x, x),
        "take_along_axis": ig.take_along_axis(x, index),
        "scatter_sum": ig.scatter_sum(x, index, x),
    }
    assert np.array_equal(results["take_along_axis"].numpy(), x.numpy())
    for name, result in results.items():
        assert advised(result.data_ptr() + (result.nbytes >> 1)), name
