"""The Hopper kernels of attention: their arithmetic and protocol in an emulation, compilation, and what they take."""

import math
import re
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")

import cached_sequences  # noqa: E402
import gluon_emulation as emulation  # noqa: E402
from choices import exhaustive, thorough  # noqa: E402
from triton_targets import kernels_of, resources, sass, unordered  # noqa: E402

from isograd.core import registry  # noqa: E402
from isograd.flash_attention import bounds, reference  # noqa: E402
from isograd.flash_attention import gluon_launch as launch  # noqa: E402
from isograd.flash_attention.descriptors import (  # noqa: E402
    AttentionBackwardDescriptor,
    AttentionDescriptor,
    AttentionWithCacheDescriptor,
)
from isograd.flash_attention.options import AttentionOptions  # noqa: E402
from isograd.flash_attention.triton_problem import PAD  # noqa: E402

CAUSAL, FULL = AttentionOptions(causal=True), AttentionOptions()
UPPER_LEFT = AttentionOptions(causal=True, alignment="upper_left", scale=0.2)
EVERYTHING = AttentionOptions(causal=True, window=(90, None), softcap=2.0)
# Ends of packed sequences: some without rows, without keys, without either, longer than a tile; rows are left over.
ENDS = ((0, 70, 70, 75, 75, 220), (0, 40, 60, 60, 60, 330))


class Case(NamedTuple):
    """Batch, heads, heads of keys, lengths, head dimension; dtype; options; ends of sequences; sinks."""

    shape: tuple[int, ...]
    dtype: str
    options: AttentionOptions
    ends: Any = None
    sinks: str | None = None


# ends within tiles, rows that see nothing, shared keys
PROBLEMS: dict[str, Case] = {
    "one tile": Case((1, 1, 1, 64, 128, 128), "bfloat16", FULL),
    "one row": Case((2, 1, 1, 1, 130, 64), "float16", CAUSAL),
    "lower right": Case((1, 2, 1, 200, 300, 64), "bfloat16", CAUSAL),
    "upper left": Case((1, 2, 2, 250, 140, 128), "bfloat16", UPPER_LEFT),
    "rows without keys": Case((1, 4, 2, 257, 130, 64), "float16", CAUSAL),
    "full": Case((1, 2, 1, 70, 260, 128), "float16", FULL),
    "shared keys": Case((1, 4, 2, 130, 180, 128), "bfloat16", CAUSAL),
    "packed": Case((1, 2, 1, 223, 335, 64), "bfloat16", FULL, ENDS),
    "packed, causal": Case((1, 2, 2, 223, 335, 128), "float16", CAUSAL, ENDS),
    "packed, upper left": Case((1, 1, 1, 223, 335, 64), "float16", UPPER_LEFT, ENDS),
    "left window": Case((1, 2, 1, 300, 420, 64), "bfloat16", AttentionOptions(causal=True, window=(100, None))),
    "narrow window": Case((1, 1, 1, 400, 400, 128), "float16", AttentionOptions(window=(3, 2))),
    "window behind the keys": Case(
        (1, 1, 1, 400, 150, 64), "bfloat16", AttentionOptions(window=(20, 9), alignment="upper_left")
    ),
    "right window": Case((1, 1, 1, 150, 330, 128), "bfloat16", AttentionOptions(window=(None, 70))),
    "softcap": Case((1, 2, 1, 130, 260, 128), "bfloat16", AttentionOptions(causal=True, softcap=1.5)),
    "sinks": Case((1, 2, 1, 200, 130, 64), "float16", CAUSAL, None, "float32"),
    "head dimension 80": Case((1, 2, 1, 130, 180, 80), "bfloat16", CAUSAL),
    "everything": Case((1, 4, 2, 223, 335, 96), "float16", EVERYTHING, ENDS, "float16"),
}
# The rest in thorough runs: each takes seconds.
THOROUGH = ("upper left", "packed, upper left", "narrow window", "right window", "softcap", "head dimension 80")
EACH = [thorough(name) if name in THOROUGH else name for name in PROBLEMS]


def described(
    shape: tuple[int, ...], dtype: str, options: AttentionOptions, ends: Any = None, sinks: str | None = None
) -> Any:
    *sizes, head_dim = shape
    sequences = None if ends is None else len(ends[0]) - 1
    return AttentionBackwardDescriptor(
        *sizes, head_dim, head_dim, dtype, options, sequences=sequences, sinks_dtype=sinks
    ).validated()


def operands(d: Any, ends: Any = None, seed: int = 0) -> dict[str, Any]:
    """Random inputs, some with the axes of heads and rows in the other order; outputs full of NaN."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, d.dtype)

    def rows(shape: tuple[int, ...], swapped: bool, values: bool = True) -> Any:
        order = (0, 2, 1, 3) if swapped else (0, 1, 2, 3)
        t = torch.full([shape[i] for i in order], math.nan)
        if values:
            t.normal_(generator=generator)
        return t.to(dtype).permute(order)

    found = {
        "q": rows(d.q_shape, True),
        "k": rows(d.k_shape, False),
        "v": rows(d.v_shape, True),
        "do": rows(d.o_shape, False),
        "o": rows(d.o_shape, True, False),
        "dq": rows(d.q_shape, False, False),
        "dk": rows(d.k_shape, True, False),
        "dv": rows(d.v_shape, False, False),
        "lse": torch.full(d.lse_shape, math.nan),
    }
    if ends is not None:
        found |= {f"cu_seqlens_{side}": torch.tensor(e, dtype=torch.int32) for side, e in zip("qk", ends, strict=True)}
    if d.sinks_dtype is not None:
        found["sinks"] = torch.linspace(-1, 2, d.heads).to(getattr(torch, d.sinks_dtype))
    return found


def to_torch(x: Any) -> Any:
    return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16) if x.itemsize == 2 else torch.from_numpy(x)


def to_numpy(t: Any) -> Any:
    t = t.contiguous()
    return t.view(torch.int16).numpy() if t.dtype == torch.bfloat16 else t.numpy()


def wide(t: Any) -> Any:
    return t.double().numpy()


def parts(p: Any, q_starts: Any, k_starts: Any) -> list[tuple[int, int, slice, slice, int]]:
    """Sequences: their number, batch element, rows of q and of k, and where these of q are in scratch memory."""
    if p.sequences is None:
        return [(z, z, slice(0, p.lq), slice(0, p.lk), 0) for z in range(p.batch)]
    places = reference.sequences((q_starts.numpy(), k_starts.numpy()))
    return [(n, 0, i, j, (int(i.start) // PAD + n) * PAD) for n, i, j in places]


class RowsInNumPy:
    """What the kernels in Triton compute before and after, in NumPy: they do not run here."""

    @staticmethod
    def fill_bounds(p: Any, k: Any, v: Any, x: Any) -> Any:
        count = p.batch if p.sequences is None else p.sequences + 1
        found = np.zeros((count, k.shape[1], p.widths[2] + 1), np.float32)
        for n, z, _, j, _ in parts(p, x.q_starts, x.k_starts):
            found[n, :, : p.head_dim] = np.abs(wide(k)[z, :, j]).max(1, initial=0)
            found[n, :, -1] = np.linalg.norm(wide(v)[z, :, j], axis=-1).max(-1, initial=0)
        return torch.from_numpy(found).view(torch.int32)

    @staticmethod
    def fill_rows(p: Any, o: Any, do: Any, lse: Any, dlse: Any, x: Any, fixed: Any) -> Any:
        bounds, integers = fixed
        integers.zero_()
        norms = np.repeat(wide(bounds.view(torch.float32))[..., -1:], p.groups, 1)
        values = np.full((3, p.batch, p.heads, p.pitch), 0.0, np.float32)
        values[0] = np.inf
        for n, z, i, _, slot in parts(p, x.q_starts, x.k_starts):
            here = slice(slot, slot + i.stop - i.start)
            bound = 2.002 * np.linalg.norm(wide(do)[z, :, i], axis=-1) * norms[n]
            values[0, z, :, here] = np.where(wide(lse)[z, :, i] == -np.inf, np.inf, wide(lse)[z, :, i] / math.log(2))
            values[1, z, :, here] = (wide(o)[z, :, i] * wide(do)[z, :, i]).sum(-1)
            values[2, z, :, here] = 2.0 ** (30 - np.ceil(np.log2(np.maximum(bound, 2.0**-90))))
        return torch.from_numpy(values)

    @staticmethod
    def fixed_to_float(p: Any, integers: Any, rows: Any, bounds: Any, dq: Any, x: Any) -> None:
        column = 2.0 ** np.ceil(np.log2(np.maximum(wide(bounds.view(torch.float32))[..., : p.head_dim], 2.0**-120)))
        column = np.repeat(column, p.groups, 1)
        left = integers.clone()
        dq.zero_()
        for n, z, i, _, slot in parts(p, x.q_starts, x.k_starts):
            unit = column[n][:, None, :] / wide(rows)[2, z, :, slot : slot + i.stop - i.start, None]
            dq[z, :, i] = torch.from_numpy(wide(integers)[z, :, i] * unit * p.scale).to(dq.dtype)
            left[z, :, i] = 0
        assert not left.any()


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The launchers run in the emulation, in an order of chance that a seed fixes."""
    seeds = [0]
    run = lambda self, *tensors: emulation.call(self, *tensors, seed=seeds[0])  # noqa: E731
    monkeypatch.setattr(launch.BlockLauncher, "__call__", run)
    monkeypatch.setattr(launch, "rows_launch", RowsInNumPy)
    monkeypatch.setattr(launch.triton_launch, "note_starts", lambda p, operation, x: None)
    monkeypatch.setattr(launch.faults, "after_launch", lambda device: None)
    return seeds


def inputs_of(a: dict[str, Any]) -> reference.Inputs:
    """What there is besides q, k and v, in NumPy."""
    return reference.inputs_of({n: t.float().numpy() if n == "sinks" else t.numpy() for n, t in a.items() if n in REST})


REST = ("cu_seqlens_q", "cu_seqlens_k", "sinks")


def plain(d: Any, a: dict[str, Any]) -> dict[str, Any]:
    """The same in PyTorch and the dtype of q, rounded after every step."""
    found = {n: torch.zeros_like(a[n]) for n in ("o", "dq", "dk", "dv")}
    p = launch.problem_of(d, a["q"])
    for _, z, i, j, _ in parts(p, a.get("cu_seqlens_q"), a.get("cu_seqlens_k")):
        q, do, o = (a[name][z : z + 1, :, i] for name in ("q", "do", "o"))
        k, v = (a[name][z : z + 1, :, j].repeat_interleave(d.groups, 1) for name in "kv")
        seen = torch.from_numpy(reference.visible(d.options, q.shape[2], k.shape[2]))
        s, slope = q @ k.mT * d.options.scale, 1.0
        if d.options.softcap:
            t = torch.tanh(s / d.options.softcap)
            s, slope = d.options.softcap * t, 1 - t * t
        s = s.masked_fill(~seen, -math.inf)
        if d.sinks_dtype is not None:
            s = torch.cat([s, a["sinks"].to(s.dtype)[:, None, None].expand(1, d.heads, q.shape[2], 1)], -1)
        w = torch.softmax(s.float(), -1).nan_to_num(0.0)[..., : k.shape[2]].to(q.dtype)
        ds = w * (do @ v.mT - (o * do).sum(-1, keepdim=True)) * slope * d.options.scale
        shape = (1, d.kv_heads, d.groups, k.shape[2], d.head_dim)
        found["o"][z : z + 1, :, i] = w @ v
        found["dq"][z : z + 1, :, i] = ds @ k
        found["dk"][z : z + 1, :, j] = (ds.mT @ q).view(shape).sum(2)
        found["dv"][z : z + 1, :, j] = (w.mT @ do).view(shape).sum(2)
    return found


@pytest.mark.parametrize("name", EACH)
def test_emulated_kernels(name: str, seeds: list[int]) -> None:
    """Within the stated bound, and FlashAttention's rule: at most twice a plain computation's error, or three times."""
    d = described(*PROBLEMS[name])
    a = operands(d, PROBLEMS[name].ends)
    launch.forward(d, a)
    inputs, rest = [wide(a[n]) for n in ("q", "k", "v")], inputs_of(a)
    o, lse = reference.oracle_attention(*inputs, d.options, rest)
    np.testing.assert_allclose(a["lse"], lse, rtol=1e-5, atol=1e-5)
    launch.backward(d, a)
    gradients = reference.oracle_attention_backward(wide(a["do"]), *inputs, d.options, rest)
    exact = {"o": o, **{n: getattr(gradients, n) for n in ("dq", "dk", "dv")}}
    arrays = {n: emulation.array(a[n]) for n in ("do", "q", "k", "v", "o", "lse")}
    given = reference.oracle_attention_backward(
        *(arrays[n] for n in ("do", "q", "k", "v")), d.options, rest, o=arrays["o"], lse=arrays["lse"]
    )
    rest_arrays = {n: emulation.array(a[n]) for n in REST if n in a}
    named = {**{n: arrays[n] for n in "qkv"}, **rest_arrays, "options": d.options}
    (of_o, of_lse) = bounds.error_bound("attention", True)(**named)
    assert np.all(np.abs(wide(a["o"]) - o) <= of_o)
    seen = lse > -np.inf
    assert np.all(np.isneginf(wide(a["lse"])[~seen]))
    assert np.all(np.abs(wide(a["lse"])[seen] - lse[seen]) <= of_lse[seen])
    limits = bounds.error_bound("attention_backward", True, launch.TILE_KEYS)(
        **arrays, **rest_arrays, options=d.options
    )
    for n, limit in zip(("dq", "dk", "dv"), limits, strict=False):
        assert np.all(np.abs(wide(a[n]) - getattr(given, n)) <= limit), n
    factor = 3 if d.options.softcap else 2
    for n, found in plain(d, a).items():
        error, least = (np.abs(wide(t) - exact[n]).max() for t in (a[n], found))
        assert error <= factor * least + 1e-5 * np.abs(exact[n]).max(), n


@pytest.mark.parametrize("name", ["everything", thorough("packed")])
def test_sequences_have_the_bits_that_they_have_alone(name: str, seeds: list[int]) -> None:
    """Packed among others that are full of NaN, which no row of theirs may read or write."""
    case = PROBLEMS[name]
    d = described(*case)
    for number, _, i, j, _ in parts(launch.problem_of(d, torch.empty(0, dtype=torch.bfloat16)), *starts(case)):
        if i.stop == i.start or j.stop == j.start:
            continue
        sizes = (*case.shape[:3], int(i.stop - i.start), int(j.stop - j.start), case.shape[-1])
        one = described(sizes, case.dtype, case.options, None, case.sinks)
        alone, packed = operands(one), operands(d, case.ends)
        for n in ("q", "k", "v", "do"):
            here = j if n in "kv" else i
            packed[n].fill_(math.nan)
            packed[n][:, :, here] = alone[n]
        for descriptor, a in ((one, alone), (d, packed)):
            launch.forward(descriptor, a)
        for n in ("o", "lse"):  # the others have no gradient that could be checked
            assert torch.equal(alone[n], packed[n][:, :, i]), (n, number)
        for descriptor, a in ((one, alone), (d, packed)):
            launch.backward(descriptor, a)
        for n in ("dq", "dk", "dv"):
            assert torch.equal(alone[n], packed[n][:, :, j if n != "dq" else i]), (n, number)


def starts(case: Case) -> list[Any]:
    return [torch.tensor(e) for e in case.ends]


def test_bits_depend_neither_on_the_batch_nor_on_the_order_of_events(seeds: list[int]) -> None:
    d = described((2, 1, 1, 130, 200, 64), "bfloat16", CAUSAL)
    a = operands(d)
    launch.forward(d, a)
    launch.backward(d, a)
    seeds[0] = 1
    again = operands(d)
    launch.forward(d, again)
    launch.backward(d, again)
    alone = {n: t[1:].clone() for n, t in operands(d).items()}
    launch.forward(replace(d, batch=1), alone)
    launch.backward(replace(d, batch=1), alone)
    for n, t in a.items():
        assert torch.equal(t, again[n]), n
        assert torch.equal(t[1:], alone[n]), n


@pytest.mark.parametrize("count", [1, 3, 100])
def test_bits_do_not_depend_on_the_number_of_processors(
    count: int, seeds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    d = described((1, 4, 2, 300, 333, 64), "float16", CAUSAL)
    a, other = operands(d), operands(d)
    launch.forward(d, a)
    monkeypatch.setattr(launch, "processors", lambda t: count)
    seeds[0] = count
    launch.forward(d, other)
    assert torch.equal(a["o"], other["o"])
    assert torch.equal(a["lse"], other["lse"])


def test_emulation_finds_a_missing_wait(monkeypatch: pytest.MonkeyPatch, seeds: list[int]) -> None:
    """The emulation would be worth nothing if it let such faults pass."""
    monkeypatch.setattr(emulation.mbarrier, "wait", lambda barrier, phase, pred=True: None)
    d = described(*PROBLEMS["lower right"])
    a = operands(d)
    lse = reference.oracle_attention(*(wide(a[n]) for n in "qkv"), d.options)[1]

    def checked() -> None:
        launch.forward(d, a)
        np.testing.assert_allclose(a["lse"], lse, 1e-5)

    with pytest.raises((AssertionError, TimeoutError)):
        checked()


@pytest.mark.parametrize("name", ["contiguous", "heads inside", "pages", thorough("other strides")])
def test_rows_over_a_cache_have_the_bits_of_whole_sequences(
    name: str, seeds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = lambda p, operation, a: (a["cache_seqlens"], a.get("block_table", a["q"]))  # noqa: E731
    monkeypatch.setattr(launch.triton_launch, "used_keys", used)
    options, lengths = AttentionOptions(causal=True, window=(150, None), softcap=2.0), [200, 129, 0, 3]
    w = cached_sequences.whole(cached_sequences.Shape((200, 150, 0, 70), 4, 2, 64, 64), "bfloat16", True)
    arrays = (cached_sequences.paged if name == "pages" else cached_sequences.cached)(
        w, lengths, 2, 16 if name == "pages" else 210
    )
    a = {key: to_torch(x) for key, x in arrays.items()}
    if name != "contiguous":
        a |= {key: a[key].transpose(1, 2).contiguous().transpose(1, 2) for key in "qkv"}
    if name == "other strides":
        a["k"] = a["k"].expand(2, -1, -1, -1, -1)[0].clone(memory_format=torch.contiguous_format)
    room = {"page_size": 16, "pages": len(a["k"])} if name == "pages" else {}
    capacity = a["block_table"].shape[1] * 16 if name == "pages" else 210
    sinks = "bfloat16"
    d = AttentionWithCacheDescriptor(4, 4, 2, 2, capacity, 64, 64, "bfloat16", options, sinks_dtype=sinks, **room)
    d = d.validated()
    assert launch.supports(d) is None
    a |= {"o": torch.full(d.o_shape, math.nan, dtype=torch.bfloat16), "lse": torch.full(d.lse_shape, math.nan)}
    launch.forward(d, a)
    expected = []
    for q, k, v in zip(w.q, w.k, w.v, strict=True):
        one = AttentionDescriptor(1, 4, 2, q.shape[2], q.shape[2], 64, 64, "bfloat16", options, sinks_dtype=sinks)
        of_one = {key: to_torch(x) for key, x in (("q", q), ("k", k), ("v", v), ("sinks", w.sinks))}
        of_one |= {"o": torch.empty_like(of_one["q"]), "lse": torch.empty(1, 4, q.shape[2])}
        if q.shape[2]:
            launch.forward(one.validated(), of_one)
        expected.append((to_numpy(of_one["o"]), to_numpy(of_one["lse"])))
    assert cached_sequences.same(expected, (to_numpy(a["o"]), to_numpy(a["lse"])), arrays)


# --- compilation -----------------------------------------------------------------------------------------------------
@pytest.mark.thorough
@pytest.mark.parametrize(
    "case",
    [
        Case((1, 4, 2, 300, 500, 128), "bfloat16", CAUSAL),
        Case((1, 4, 2, 300, 500, 128), "bfloat16", EVERYTHING, ENDS, "float32"),
        exhaustive(Case((1, 4, 2, 300, 500, 64), "float16", FULL)),
        exhaustive(Case((1, 4, 2, 300, 500, 64), "bfloat16", CAUSAL, ENDS)),
    ],
    ids=["causal", "everything", "full", "packed"],
)
def test_compiled_for_hopper(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products stay asynchronous: where ptxas takes them one by one, it puts a wait behind each."""
    monkeypatch.setattr(launch, "rows_launch", RowsInNumPy)
    monkeypatch.setattr(launch.triton_launch, "note_starts", lambda p, operation, x: None)
    monkeypatch.setattr(launch.faults, "after_launch", lambda device: None)
    d = described(*case)
    a = operands(d, case.ends)
    a["o"], a["lse"] = torch.ones_like(a["o"]), torch.ones_like(a["lse"])

    def call() -> None:
        launch.forward(d, a)
        launch.backward(d, a)

    found = kernels_of("sm_90", call, launch)
    assert sorted(found) == ["attention_backward_hopper", "attention_forward_hopper"]
    for name, kernel in found.items():
        needs, text = resources(kernel), sass(kernel)
        assert needs["shared"] <= 227 * 1024
        assert needs["stack"] <= 256
        count, waits = text.count(" HGMMA"), text.count(" WARPGROUP.DEPBAR")
        assert count > 50
        assert waits < count / 4
        assert (" UTMAREDG" in text) == ("backward" in name)
        assert "RED.E.ADD.F32" not in text
        ptx = kernel.asm["ptx"]
        assert unordered(ptx) == 0
        assert unordered(re.sub(r"\bbar\.(warp\.)?sync", "nothing", ptx)) > 0


# --- what they take --------------------------------------------------------------------------------------------------
REFUSED = {
    "head dimension": ({"head_dim": 72, "v_dim": 72}, "72"),
    "other of v": ({"v_dim": 64}, "128 and 64"),
    "dropout": ({"options": AttentionOptions(softcap=2.0, dropout_p=0.1)}, "there is dropout;"),
    "bias": ({"bias_shape": (1, 1, 1, 200)}, "a bias"),
    "mask": ({"mask_shape": (1, 1, 1, 200)}, "a mask"),
    "segments": ({"segments": True}, "segment ids"),
    "many rows": ({"sequences": 2, "k_length": 2**30 + 1}, "up to"),
    "scale": ({"options": AttentionOptions(scale=-0.1)}, "scale"),
    "no keys": ({"k_length": 0}, "empty"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name: str) -> None:
    changed, reason = REFUSED[name]
    d = replace(described((1, 2, 1, 100, 200, 128), "bfloat16", CAUSAL), **changed).validated()
    assert reason in (launch.supports(d) or "")


def test_tried_first_for_16_bits() -> None:
    for operation in ("attention", "attention_backward"):
        for dtype, names in (("bfloat16", ["hopper", "triton", "order_free"]), ("float32", ["triton"])):
            entries = [e for e in registry.kernels() if e[:3] == (operation, "cuda", dtype)]
            assert [e.kernel.name for e in entries] == names


@pytest.mark.parametrize("name", PROBLEMS)
def test_taken_in_both_directions(name: str) -> None:
    """Whatever only one of the directions has does not enter the choice."""
    backward = described(*PROBLEMS[name])
    forward = AttentionDescriptor(**{f.name: getattr(backward, f.name) for f in fields(AttentionDescriptor)})
    assert launch.supports(forward) is None
    for more in (backward, replace(backward, dlse=True), replace(backward, dsinks=backward.sinks_dtype is not None)):
        assert launch.supports(more) is None


def test_one_constant_says_what_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option, or a head dimension, that is struck out is refused, and the others are not."""
    every = described(*PROBLEMS["everything"])
    monkeypatch.setattr(launch, "OPTIONS", ("packed sequences", "sinks"))
    monkeypatch.setattr(launch, "HEAD_DIMS", (96,))
    assert launch.supports(every) == (
        "there is a window, a softcap; accepted: causal or full attention, packed sequences, sinks"
    )
    assert launch.supports(replace(every, options=CAUSAL).validated()) is None
    assert "80 and 80; accepted: 96" in (launch.supports(described(*PROBLEMS["head dimension 80"])) or "")


def test_misaligned_operands_are_copied(seeds: list[int]) -> None:
    d = described((1, 1, 1, 65, 70, 64), "bfloat16", FULL)
    a = operands(d)
    launch.forward(d, a)
    odd = {n: torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape).copy_(t) for n, t in operands(d).items()}
    odd["k"] = odd["k"].expand(d.k_shape)
    launch.forward(d, odd)
    assert torch.equal(odd["o"], a["o"])
    assert torch.equal(odd["lse"], a["lse"])
