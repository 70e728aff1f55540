"""Attention over a cache on a real GPU: rows have the bits of the forward pass of whole sequences, in every kernel."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "attention"))
from cached_sequences import Shape, Whole, cached, paged, same, whole  # noqa: E402

import isograd as ig  # noqa: E402
import isograd.torch as igt  # noqa: E402

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": (150, None)},
    "softcap": {"softcap": 2.0, "scale": 0.3},
    "everything": {"window": (70, None), "softcap": 20.0, "sinks": True},
}
KERNELS = [(None, "bfloat16"), ("triton", "bfloat16"), ("order_free", "bfloat16"), (None, "float32"), (None, "float16")]


def on_gpu(x: Any) -> Any:
    t = torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16) if x.dtype.name == "bfloat16" else None
    return (torch.from_numpy(x.copy()) if t is None else t).cuda()


def on_cpu(t: Any) -> Any:
    t = t.contiguous().cpu()
    return t.view(torch.int16).numpy() if t.dtype == torch.bfloat16 else t.numpy()


def forward(w: Whole, **options: Any) -> list[Any]:
    """(o, lse) of each sequence by itself."""
    found = []
    for parts in zip(w.q, w.k, w.v, strict=True):
        o, lse = ig.attention(*map(on_gpu, parts), causal=True, return_lse=True, **options)
        found.append((on_cpu(o), on_cpu(lse)))
    return found


def with_cache(arrays: dict[str, Any], **options: Any) -> Any:
    given = {name: on_gpu(x) for name, x in arrays.items() if name != "sinks"}
    found = [given.pop(name) for name in ("q", "k", "v", "cache_seqlens")]
    o, lse = ig.attention_with_cache(*found, return_lse=True, **given, **options)
    return on_cpu(o), on_cpu(lse)


@pytest.mark.parametrize("head_dim", [64, 128, 40, 256])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("preference", "dtype"), KERNELS)
def test_rows_have_the_bits_of_the_forward_pass(preference: str | None, dtype: str, option: str, head_dim: int) -> None:
    options = OPTIONS[option] | {"preference": preference}
    w = whole(Shape((1000, 321, 0, 70), 8, 2, head_dim, head_dim), dtype, bool(options.pop("sinks", False)))
    options |= {} if w.sinks is None else {"sinks": on_gpu(w.sinks)}
    expected = forward(w, **options)
    for rows, lengths in ((1, [1000, 257, 0, 1]), (3, [513, 129, 0, 2]), (70, [769, 256, 0, 64])):
        for arrays in (
            cached(w, lengths, rows, 1008),
            cached(w, lengths, rows, 1001),
            paged(w, lengths, rows, 16),
            paged(w, lengths, rows, 128),
            paged(w, lengths, rows, 7),
        ):
            assert same(expected, with_cache(arrays, **options), arrays), (rows, lengths, arrays["k"].shape)


@pytest.mark.parametrize(("preference", "dtype"), KERNELS[:4])
def test_a_sequence_that_grows_by_a_token_at_a_time(preference: str | None, dtype: str) -> None:
    w = whole(Shape((300,), 4, 1, 64, 64), dtype)
    expected = forward(w, preference=preference)
    for length in range(1, 301):
        arrays = cached(w, [length], 1, 320) if length % 2 else paged(w, [length], 1, 16, seed=length)
        assert same(expected, with_cache(arrays, preference=preference), arrays), length


@pytest.mark.parametrize(("preference", "dtype"), KERNELS[:4])
def test_what_is_out_of_range_is_nan_and_noted(preference: str | None, dtype: str) -> None:
    w = whole(Shape((200, 130, 90), 4, 2, 64, 64), dtype)
    lengths = [200, 130, 90]
    expected = forward(w, preference=preference)
    ig.check()
    for what, value in (("cache_seqlens", -1), ("cache_seqlens", 257), ("block_table", -1), ("block_table", 1 << 30)):
        arrays = paged(w, lengths, 2, 16) if what == "block_table" else cached(w, lengths, 2, 256)
        arrays[what][(1, 3) if what == "block_table" else (1,)] = value
        o, lse = with_cache(arrays, preference=preference)
        assert np.isnan(torch.from_numpy(o[1]).view(getattr(torch, dtype)).float()).all()
        assert np.isnan(lse[1]).all()
        assert same(expected, (o, lse), arrays, sequences=(0, 2))
        with pytest.raises(ig.IndexOutOfRangeError, match=f"attention_with_cache: {what} has {value}"):
            ig.check()


@pytest.mark.parametrize("precision", [None, "int16"])
@pytest.mark.parametrize("page_size", [None, 16])
def test_nothing_waits_and_replays_and_graphs_have_the_same_bits(precision: Any, page_size: int | None) -> None:
    w = whole(Shape((300, 130), 4, 2, 64, 64), "bfloat16")
    expected = [
        on_cpu(igt.attention(*map(on_gpu, x), causal=True, precision=precision)) for x in zip(*w[:3], strict=True)
    ]
    calls = []
    for lengths in ([300, 130], [120, 64], [299, 1]):
        arrays = cached(w, lengths, 1, 320) if page_size is None else paged(w, lengths, 1, page_size)
        given = {name: on_gpu(x) for name, x in arrays.items()}
        if page_size is not None:  # one shape for all
            table = torch.zeros(2, 20, dtype=torch.int32, device="cuda")
            table[:, : given["block_table"].shape[1]] = given["block_table"][:, :20]
            pages = [torch.nn.functional.pad(given[x], (0, 0, 0, 0, 0, 0, 0, 40 - len(given[x]))) for x in "kv"]
            given |= {"block_table": table, "k": pages[0], "v": pages[1]}
        calls.append((lengths, given))

    def call(given: dict[str, Any]) -> Any:
        more = {} if page_size is None else {"block_table": given["block_table"]}
        return igt.attention_with_cache(
            given["q"], given["k"], given["v"], given["cache_seqlens"], precision=precision, **more
        )

    def right(o: Any, lengths: list[int]) -> bool:
        return all(on_cpu(o)[n].tobytes() == expected[n][0, :, m - 1 : m].tobytes() for n, m in enumerate(lengths))

    for turn in range(4):  # the third is the first that is replayed
        for lengths, given in calls:
            if turn:
                torch.cuda.set_sync_debug_mode("error")
            try:
                o = call(given)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert right(o, lengths), (turn, lengths)
    held = {name: x.clone() for name, x in calls[0][1].items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = call(held)
    for lengths, given in calls:
        for name, x in given.items():
            held[name].copy_(x)
        graph.replay()
        assert right(o, lengths), lengths
