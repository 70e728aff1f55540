"""Attention over a cache as an operator of torch: bits of `igt.attention`, checks of the operator, no gradient."""

import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch

import isograd as ig
import isograd.torch as igt
from isograd.torch.ops_attention_with_cache import ATTENTION_WITH_CACHE


def operands(dtype):
    """Three rows of q of two sequences, a cache of 40 keys, its pages of 8, lengths; and the sequences as a whole."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 40, 32, generator=generator).to(dtype) for heads in (4, 2, 2))
    lengths = torch.tensor([33, 12], dtype=torch.int32)
    table = torch.randperm(10, generator=generator).reshape(2, 5).int()
    pages = []
    for x in (k, v):
        of_pages = torch.empty(10, 2, 8, 32, dtype=dtype)
        of_pages[table.flatten().long()] = x.unflatten(2, (5, 8)).transpose(1, 2).flatten(0, 1)
        pages.append(of_pages)
    newest = torch.stack([q[0, :, 30:33], q[1, :, 9:12]])
    return newest, (k, v), pages, lengths, table, (q, k, v)


@pytest.mark.parametrize("precision", [None, "int16"])
@pytest.mark.parametrize("layout", ["BHLD", "BLHD"])
def test_rows_are_those_of_attention(precision, layout):
    newest, cache, pages, lengths, table, whole = operands(torch.bfloat16)
    options = {"window": (20, None), "sinks": torch.tensor([0.5, -1, 2, 0]), "precision": precision}
    expected, sums = igt.attention(*whole, causal=True, return_lse=True, **options)
    order = (0, 1, 2, 3) if layout == "BHLD" else (0, 2, 1, 3)
    for (k, v), more in ((cache, {}), (pages, {"block_table": table})):
        q, k, v = (x.permute(order).contiguous() for x in (newest, k, v))
        o, lse = igt.attention_with_cache(q, k, v, lengths, layout=layout, return_lse=True, **more, **options)
        o = o.permute(order)
        assert torch.equal(o, torch.stack([expected[0, :, 30:33], expected[1, :, 9:12]]))
        assert torch.equal(lse, torch.stack([sums[0, :, 30:33], sums[1, :, 9:12]]))


def test_opcheck_and_compilation():
    newest, (k, v), pages, lengths, table, _ = operands(torch.float32)
    torch.library.opcheck(ATTENTION_WITH_CACHE.overload, (newest, k, v, lengths))
    torch.library.opcheck(ATTENTION_WITH_CACHE.overload, (newest, *pages, lengths, table, torch.zeros(4), 7, 0.3, 2.0))

    def step(q, k, v, lengths):
        return igt.attention_with_cache(q, k, v, lengths, return_lse=True, window=(9, None))

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for x, y in zip(compiled(newest, k, v, lengths), step(newest, k, v, lengths), strict=True):
        assert torch.equal(x, y)


def test_autocast_is_that_of_attention():
    newest, (k, v), _, lengths, _, whole = operands(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = igt.attention(*whole, causal=True, precision="int16")
        o = igt.attention_with_cache(newest, k, v, lengths, precision="int16")
    assert o.dtype is torch.bfloat16
    assert torch.equal(o, torch.stack([expected[0, :, 30:33], expected[1, :, 9:12]]))


def test_what_requires_a_gradient_is_refused():
    newest, (k, v), _, lengths, _, _ = operands(torch.float32)
    expected = igt.attention_with_cache(newest, k, v, lengths)
    for place in range(3):
        given = [x.clone().requires_grad_() if i == place else x for i, x in enumerate((newest, k, v))]
        for function in (igt.attention_with_cache, ig.attention_with_cache):
            with pytest.raises(ig.UnsupportedError, match="requires a gradient, which is not recorded by a forward"):
                function(*given, lengths)
        with torch.no_grad():
            assert torch.equal(igt.attention_with_cache(*given, lengths), expected)
    with torch.inference_mode():
        assert torch.equal(igt.attention_with_cache(newest, k, v, lengths), expected)
