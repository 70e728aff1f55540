"""The product of 16-bit integers in Triton without a GPU: bits in its interpreter, code for GPUs that are not there."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")

import triton_targets  # noqa: E402
import triton_variants  # noqa: E402
from choices import alongside, quick_first  # noqa: E402
from triton_targets import TARGETS, resources  # noqa: E402

from isograd.products import cuda, grouped, tiles  # noqa: E402

SCRIPT = Path(__file__).parent / "interpreted_products.py"
SUITES = {
    "layouts": 14, "pieces": 6, "extremes": 3, "scales": 24, "special": 12, "balances": 26, "batches": 11, "rows": 4,
    "published": 42,
    "experts": 26, "offsets": 6,
}  # fmt: skip
QUICK = tuple(suite for suite in SUITES if suite != "published")  # all that `isograd verify` computes


@pytest.mark.parametrize("exhaustive", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["few", "all"])
@pytest.mark.parametrize("suite", quick_first(SUITES, QUICK))
def test_interpreter_returns_the_bits_of_the_definition(interpret: Any, suite: str, exhaustive: bool) -> None:
    found, which = interpret(SCRIPT, *alongside(suite, SUITES, QUICK), exhaustive=exhaustive)
    assert suite in found, which
    cases, wrong = found[suite]
    assert cases >= SUITES[suite]
    assert wrong == 0, which


# --- compilation ------------------------------------------------------------------------------------------------------
def training(dtype: Any, tokens: int, features: int = 4096, outputs: int = 4096) -> Callable[[], None]:
    """The products of a linear layer: forward, dX and dW, and the bias."""
    x, w, g = (torch.empty(s, dtype=dtype) for s in ((tokens, features), (outputs, features), (tokens, outputs)))

    def run() -> None:
        cuda.product(x, w.t(), g, cuda.balance_of(w.t()))
        cuda.product(g, w, x, cuda.balance_of(w))
        cuda.product(x.t(), g, w.t().contiguous(), cuda.balance_between(x.t(), g))
        cuda.add_to_rows(g, g[0], g)

    return run


KERNELS = {
    "line_words", "slice_lines", "slice_chunks", "weight_balance", "tokens_balance", "repair", "add_to_rows",
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("target", TARGETS)
def test_a_training_step_compiles_without_spills(target: str) -> None:
    found = triton_targets.kernels_of(target, training(torch.bfloat16, 4096), cuda)
    product = "product_hopper" if target == "sm_90" else "product"
    assert set(found) == {product, *KERNELS}
    for name, kernel in found.items():
        used = resources(kernel)
        # In the largest tile of the product what spills does so once, after the sums.
        assert used["stack"] <= (300 if name == product else 64 if name == "repair" else 0), (name, used)
        assert used["shared"] <= 227 * 1024
    text = found[product].asm.get("ptx") or found[product].asm["amdgcn"]
    # Before Triton 3.9 integers do not go to tcgen05.
    own = {"sm_90": "wgmma", "sm_100": "tcgen05|s32.s8.s8.s32", "gfx942": "v_mfma_i32"}
    assert re.search(own.get(target, "s32.s8.s8.s32"), text)


@pytest.mark.thorough
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_pieces_compile(target: str) -> None:
    a, b, c = (torch.empty(s, dtype=torch.float32) for s in ((64, 100_000), (100_000, 64), (64, 64)))
    found = triton_targets.kernels_of(target, lambda: cuda.product(a, b, c), cuda)
    assert {"add_parts", "round_sums"} <= set(found)
    # Sums leave a thread one by one, at addresses of 64 bits: registers spill at the end of a tile.
    assert resources(found["add_parts"])["stack"] <= 512


def experts(dtype: Any, tokens: int, features: int = 4096, outputs: int = 4096) -> None:
    """The products of eight experts: forward, dX and dW."""
    x, g = torch.empty(tokens, features, dtype=dtype), torch.empty(tokens, outputs, dtype=dtype)
    w, offsets = torch.empty(8, outputs, features, dtype=dtype), torch.empty(9, dtype=torch.int64)
    clean = grouped.checked_offsets("grouped_linear", offsets, tokens)
    grouped.product_of_rows(x, w.mT, clean, g)
    grouped.product_of_rows(g, w, clean, x)
    grouped.product_along_rows(x, g, clean, w.mT.contiguous())


GROUPED = {
    "check_offsets", "product_of_rows", "repair_rows", "expert_words", "expert_slices", "product_along_rows",
    "repair_along_rows",
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("tokens", [4096, 70_000])
@pytest.mark.parametrize("target", TARGETS)
def test_experts_compile_without_spills(target: str, tokens: int) -> None:
    found = triton_targets.kernels_of(target, lambda: experts(torch.bfloat16, tokens), cuda, grouped)
    assert set(found) >= GROUPED
    for name in GROUPED:
        used = resources(found[name])
        assert used["stack"] <= (300 if "product" in name else 64), (name, used)
        assert used["shared"] <= 227 * 1024


def test_numbers_of_rows_of_experts_compile_few_kernels() -> None:
    with triton_variants.watched() as variants:
        for tokens in SIZES:
            experts(torch.bfloat16, tokens, 256, 512)
    assert {k: len(v) for k, v in variants.items() if len(v) > 8} == {}, variants.keys()
    assert sum(map(len, variants.values())) <= 50, {k: triton_variants.differing(v) for k, v in variants.items()}


SIZES = (1, 2, 7, 16, 17, 64, 100, 128, 300, 777, 1000, 1024, 2048, 3000, 4096)


def test_numbers_of_tokens_compile_few_kernels() -> None:
    with triton_variants.watched() as variants:
        for tokens in SIZES:
            training(torch.bfloat16, tokens, 256, 512)()
    # Three products in as many tiles as there are, sliced along either axis.
    assert {k: len(v) for k, v in variants.items() if len(v) > 8} == {}, variants.keys()
    assert sum(map(len, variants.values())) <= 40, {k: triton_variants.differing(v) for k, v in variants.items()}


# --- tiles ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("arch", [0, 80, 90, 100, 120])
def test_tiles_fit_the_problem(arch: int) -> None:
    for m, n, blocks in ((1, 1, 1), (8192, 8192, 64), (1, 4096, 32), (64, 64, 512), (4096, 4096, 513), (128, 128, 1)):
        tile = tiles.chosen(m, n, blocks, 1, arch, 132)
        assert -(-blocks // tile.pieces) <= tiles.LONGEST
        assert tile.tma == (90 <= arch < 120)  # which has less shared memory again
    assert tiles.chosen(8192, 8192, 64, 1, arch, 132).pieces == 1
    assert tiles.chosen(64, 64, 512, 1, arch, 132).pieces > 1
