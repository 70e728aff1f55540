"""The Hopper kernel of products without a GPU: its bits and protocol on NumPy, and the code it is compiled to."""

import re
import subprocess
import tempfile
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")

import gluon_emulation as emulation  # noqa: E402
import triton  # noqa: E402
from triton_targets import kernels_of, resources  # noqa: E402

from isograd.devices.tma_launcher import BlockLauncher  # noqa: E402
from isograd.numerics.numba_int16 import product as on_cpu  # noqa: E402
from isograd.products import cuda, tiles  # noqa: E402

SMALL = tiles.HOPPER._replace(columns=16, stages=3, group=2)
TALL = tiles.HOPPER_TALL._replace(columns=16, stages=2, group=2)


def cut(x: Any) -> cuda.Lines:
    """Lines of digits of integers, whose exponent is 15."""
    n, k = x.shape
    width = -(-k // 128) * 128
    digits = np.zeros((n, 2, width), np.int8)
    low = ((x + 128) & 255) - 128
    digits[:, 0, :k], digits[:, 1, :k] = (x - low) >> 8, low
    return cuda.Lines(torch.from_numpy(digits), torch.full((n,), 4 * 15, dtype=torch.int32))


@pytest.mark.parametrize("tile", [SMALL, TALL])
@pytest.mark.parametrize(
    ("shape", "programs"), [((200, 300, 50), 3), ((1, 1, 1), 1), ((129, 129, 17), 132), ((64, 600, 16), 1)]
)
def test_bits_and_protocol(
    shape: tuple[int, int, int], programs: int, tile: tiles.Tiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, k, n = shape
    rng = np.random.default_rng(k)
    a, b = (rng.integers(-32639, 32640, s) for s in ((m, k), (n, k)))
    a[0], b[0] = 32639, 32639  # so that the exponents are 15 in every line
    a[:, 0], b[:, 0] = 32639, -32639
    wide, expected = [x.astype(np.float32) for x in (a, b)], np.empty((m, n), np.float32)
    on_cpu(wide[0], wide[1].T, expected)
    monkeypatch.setattr(BlockLauncher, "__call__", lambda self, *tensors: emulation.call(self, *tensors, seed=m))
    monkeypatch.setattr(cuda, "processors", lambda t: programs)
    c = torch.full((m, n), 7.0)
    empty = [torch.empty(s) for s in ((m, k), (k, n))]
    cuda.multiplied(cut(a), cut(b), cuda._shape(*empty, c), c, tile)
    assert np.array_equal(c.numpy().view(np.int32), expected.view(np.int32))


def test_stacks_of_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(-32639, 32640, (3, 70, 130)), rng.integers(-32639, 32640, (20, 130))
    a[..., 0], b[..., 0] = 32639, 32639
    monkeypatch.setattr(BlockLauncher, "__call__", lambda self, *tensors: emulation.call(self, *tensors))
    monkeypatch.setattr(cuda, "processors", lambda t: 2)
    c, expected = torch.empty(3, 70, 20), np.empty((3, 70, 20), np.float32)
    for i in range(3):
        on_cpu(a[i].astype(np.float32), b.astype(np.float32).T, expected[i])
    s = cuda._Shape(70, 20, 130, (3,), (70 * 130,), (0,), (70,), (0,))
    cuda.multiplied(cut(a.reshape(210, 130)), cut(b), s, c, SMALL)
    assert np.array_equal(c.numpy().view(np.int32), expected.view(np.int32))


@pytest.mark.thorough
@pytest.mark.parametrize("tile", [tiles.HOPPER, tiles.HOPPER_TALL])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_for_hopper(dtype: Any, tile: tiles.Tiles) -> None:
    """Products stay asynchronous: where ptxas takes them one by one, it puts a wait behind each."""
    a, b, c = (torch.empty(s, dtype=dtype) for s in ((4096, 256), (256, 4096), (4096, 4096)))
    s = cuda._shape(a, b, c)
    lines = [cuda.Lines(torch.empty(4096, 2, 256, dtype=torch.int8), torch.empty(4096, dtype=torch.int32))] * 2
    found = kernels_of("sm_90", lambda: cuda.multiplied(*lines, s, c, tile), cuda)
    assert sorted(found) == ["product_hopper"]
    kernel = found["product_hopper"]
    assert resources(kernel)["shared"] <= 227 * 1024
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # Consumers, three sums, four steps of 32 elements, two instructions of 128 columns; two waits a sum.
    assert len(re.findall(r" IGMMA", text)) == tile.consumers * 3 * 4 * 2
    assert len(re.findall(r"WARPGROUP\.DEPBAR", text)) == tile.consumers * 3 * 2
    # Nothing spills where products are added.
    for loop in re.findall(r"IGMMA.*?WARPGROUP\.DEPBAR", text, re.DOTALL):
        assert "STL" not in loop
        assert "LDL" not in loop
