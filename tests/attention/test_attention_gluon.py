"""The Hopper kernels of attention: their arithmetic and protocol in an emulation, compilation, and what they take."""

import math
import re
import subprocess
import tempfile
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
triton = pytest.importorskip("triton", reason="needs triton")

import gluon_emulation as emulation  # noqa: E402
from choices import exhaustive  # noqa: E402
from triton_targets import kernels_of, resources  # noqa: E402

from isograd.core import registry  # noqa: E402
from isograd.flash_attention import bounds, reference  # noqa: E402
from isograd.flash_attention import gluon_launch as launch  # noqa: E402
from isograd.flash_attention.descriptors import AttentionBackwardDescriptor  # noqa: E402
from isograd.flash_attention.options import AttentionOptions  # noqa: E402

CAUSAL, FULL = AttentionOptions(causal=True), AttentionOptions()
UPPER_LEFT = AttentionOptions(causal=True, alignment="upper_left", scale=0.2)
# batch, heads, heads of keys, lengths, head dimension, dtype: ends within tiles, rows that see nothing, shared keys
PROBLEMS: dict[str, tuple[tuple[int, ...], str, AttentionOptions]] = {
    "one tile": ((1, 1, 1, 64, 128, 128), "bfloat16", FULL),
    "one row": ((2, 1, 1, 1, 130, 64), "float16", CAUSAL),
    "lower right": ((1, 2, 1, 200, 300, 64), "bfloat16", CAUSAL),
    "upper left": ((1, 2, 2, 250, 140, 128), "bfloat16", UPPER_LEFT),
    "rows without keys": ((1, 4, 2, 257, 130, 64), "float16", CAUSAL),
    "full": ((1, 2, 1, 70, 260, 128), "float16", FULL),
    "shared keys": ((1, 4, 2, 130, 180, 128), "bfloat16", CAUSAL),
}


def described(shape: tuple[int, ...], dtype: str, options: AttentionOptions) -> Any:
    *sizes, head_dim = shape
    return AttentionBackwardDescriptor(*sizes, head_dim, head_dim, dtype, options).validated()


def operands(d: Any, seed: int = 0) -> dict[str, Any]:
    """Random inputs, some with the axes of heads and rows in the other order; outputs full of NaN."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, d.dtype)

    def rows(shape: tuple[int, ...], swapped: bool, values: bool = True) -> Any:
        order = (0, 2, 1, 3) if swapped else (0, 1, 2, 3)
        t = torch.full([shape[i] for i in order], math.nan)
        if values:
            t.normal_(generator=generator)
        return t.to(dtype).permute(order)

    return {
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


def wide(t: Any) -> Any:
    return t.double().numpy()


class RowsInNumPy:
    """What the kernels in Triton compute before and after, in NumPy: they do not run here."""

    @staticmethod
    def fill_bounds(p: Any, k: Any, v: Any, x: Any) -> Any:
        columns, norms = np.abs(wide(k)).max(2), np.linalg.norm(wide(v), axis=-1).max(-1)
        return torch.from_numpy(np.concatenate([columns, norms[..., None]], -1).astype(np.float32)).view(torch.int32)

    @staticmethod
    def fill_rows(p: Any, o: Any, do: Any, lse: Any, dlse: Any, x: Any, bounds: Any) -> Any:
        norms = np.repeat(wide(bounds.view(torch.float32))[..., -1:], p.groups, 1)
        bound = 2.002 * np.linalg.norm(wide(do), axis=-1) * norms
        values = np.full((3, p.batch, p.heads, p.pitch), 0.0, np.float32)
        values[0] = np.inf
        values[0, :, :, : p.lq] = np.where(wide(lse) == -np.inf, np.inf, wide(lse) / math.log(2))
        values[1, :, :, : p.lq] = (wide(o) * wide(do)).sum(-1)
        values[2, :, :, : p.lq] = 2.0 ** (30 - np.ceil(np.log2(bound)))
        return torch.from_numpy(values)

    @staticmethod
    def fixed_to_float(p: Any, integers: Any, rows: Any, bounds: Any, dq: Any, x: Any) -> None:
        column = 2.0 ** np.ceil(np.log2(wide(bounds.view(torch.float32))[..., :-1]))
        unit = np.repeat(column, p.groups, 1)[:, :, None, :] / wide(rows)[2, :, :, : p.lq, None]
        dq.copy_(torch.from_numpy(wide(integers) * unit * p.scale))


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The launchers run in the emulation, in an order of chance that a seed fixes."""
    seeds = [0]
    run = lambda self, *tensors: emulation.call(self, *tensors, seed=seeds[0])  # noqa: E731
    monkeypatch.setattr(launch.BlockLauncher, "__call__", run)
    monkeypatch.setattr(launch, "rows_launch", RowsInNumPy)
    monkeypatch.setattr(launch.faults, "after_launch", lambda device: None)
    return seeds


def plain(d: Any, a: dict[str, Any]) -> dict[str, Any]:
    """The same in PyTorch and the dtype of q, rounded after every step."""
    q, k, v, do = (a[name] for name in ("q", "k", "v", "do"))
    k, v = (t.repeat_interleave(d.groups, 1) for t in (k, v))
    seen = torch.from_numpy(reference.visible(d.options, d.q_length, d.k_length))
    s = (q @ k.mT * d.options.scale).masked_fill(~seen, -math.inf)
    p = torch.softmax(s.float(), -1).nan_to_num(0.0).to(q.dtype)
    ds = p * (do @ v.mT - (a["o"] * do).sum(-1, keepdim=True)) * d.options.scale
    shape = (d.batch, d.kv_heads, d.groups, d.k_length, d.head_dim)
    return {"o": p @ v, "dq": ds @ k, "dk": (ds.mT @ q).view(shape).sum(2), "dv": (p.mT @ do).view(shape).sum(2)}


@pytest.mark.parametrize("name", PROBLEMS)
def test_emulated_kernels(name: str, seeds: list[int]) -> None:
    """Within the stated bound, and the largest error at most twice that of a plain computation in the same dtype."""
    d = described(*PROBLEMS[name])
    a = operands(d)
    launch.forward(d, a)
    inputs = [wide(a[n]) for n in ("q", "k", "v")]
    o, lse = reference.oracle_attention(*inputs, d.options)
    np.testing.assert_allclose(a["lse"], lse, rtol=1e-5, atol=1e-5)
    launch.backward(d, a)
    gradients = reference.oracle_attention_backward(wide(a["do"]), *inputs, d.options)
    exact = {"o": o, **{n: getattr(gradients, n) for n in ("dq", "dk", "dv")}}
    arrays = {n: emulation.array(a[n]) for n in ("do", "q", "k", "v", "o", "lse")}
    given = reference.oracle_attention_backward(
        *(arrays[n] for n in ("do", "q", "k", "v")), d.options, o=arrays["o"], lse=arrays["lse"]
    )
    limits = bounds.error_bound("attention_backward", True, launch.TILE_KEYS)(**arrays, options=d.options)
    for n, limit in zip(("dq", "dk", "dv"), limits, strict=True):
        assert np.all(np.abs(wide(a[n]) - getattr(given, n)) <= limit), n
    for n, found in plain(d, a).items():
        error, least = (np.abs(wide(t) - exact[n]).max() for t in (a[n], found))
        assert error <= 2 * least + 1e-5 * np.abs(exact[n]).max(), n


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


# --- compilation -----------------------------------------------------------------------------------------------------
def sass(kernel: Any) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def unordered(ptx: str) -> int:
    """Arrivals at an mbarrier with shared memory used since the last barrier of the arriving warps.

    One thread arrives for all of its partition; the others might still be at work.
    """
    count, used = 0, True
    for line in ptx.splitlines():
        if re.search(r"\bbar(rier)?(\.warp)?\.sync\b", line):
            used = False
        elif re.search(r"\b(ld|st)\.shared\b|\b(ld|st)matrix\b", line):
            used = True
        elif "mbarrier.arrive" in line and "expect_tx" not in line:
            count += used
    return count


@pytest.mark.thorough
@pytest.mark.parametrize(("head_dim", "dtype", "options"), [(128, "bfloat16", CAUSAL), exhaustive(64, "float16", FULL)])
def test_compiled_for_hopper(
    head_dim: int, dtype: str, options: AttentionOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products stay asynchronous: where ptxas takes them one by one, it puts a wait behind each."""
    monkeypatch.setattr(launch, "rows_launch", RowsInNumPy)
    monkeypatch.setattr(launch.faults, "after_launch", lambda device: None)
    d = described((1, 4, 2, 300, 500, head_dim), dtype, options)
    a = operands(d)
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
        products, waits = text.count(" HGMMA"), text.count(" WARPGROUP.DEPBAR")
        assert products > 50
        assert waits < products / 4
        assert (" UTMAREDG" in text) == ("backward" in name)
        assert "RED.E.ADD.F32" not in text
        ptx = kernel.asm["ptx"]
        assert unordered(ptx) == 0
        assert unordered(re.sub(r"\bbar\.(warp\.)?sync", "nothing", ptx)) > 0


# --- what they take --------------------------------------------------------------------------------------------------
REFUSED = {
    "head dimension": ({"head_dim": 72, "v_dim": 72}, "72"),
    "other of v": ({"v_dim": 64}, "128 and 64"),
    "window": ({"options": AttentionOptions(window=(3, None))}, "a window"),
    "softcap and dropout": ({"options": AttentionOptions(softcap=2.0, dropout_p=0.1)}, "a softcap, dropout"),
    "bias": ({"bias_shape": (1, 1, 1, 200)}, "a bias"),
    "mask": ({"mask_shape": (1, 1, 1, 200)}, "a mask"),
    "segments": ({"segments": True}, "segment ids"),
    "packed": ({"sequences": 2}, "packed sequences"),
    "sinks": ({"sinks_dtype": "float32"}, "sinks"),
    "scale": ({"options": AttentionOptions(scale=-0.1)}, "scale"),
    "no keys": ({"k_length": 0}, "empty"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name: str) -> None:
    fields, reason = REFUSED[name]
    d = replace(described((1, 2, 1, 100, 200, 128), "bfloat16", CAUSAL), **fields).validated()
    assert reason in (launch.supports(d) or "")


def test_had_by_preference_for_16_bits() -> None:
    """Nothing else chooses them: packed sequences, which they do not take, would get other bits."""
    for operation in ("attention", "attention_backward"):
        for dtype, names in (("bfloat16", ["triton", "hopper"]), ("float32", ["triton"])):
            entries = [e for e in registry.kernels() if e[:3] == (operation, "cuda", dtype)]
            assert [e.kernel.name for e in entries] == names


def test_misaligned_operands_are_copied(seeds: list[int]) -> None:
    d = described((1, 1, 1, 65, 70, 64), "bfloat16", FULL)
    a = operands(d)
    launch.forward(d, a)
    odd = {n: torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape).copy_(t) for n, t in operands(d).items()}
    odd["k"] = odd["k"].expand(d.k_shape)
    launch.forward(d, odd)
    assert torch.equal(odd["o"], a["o"])
    assert torch.equal(odd["lse"], a["lse"])
