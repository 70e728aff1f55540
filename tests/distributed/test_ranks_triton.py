"""What is spread over ranks by the kernels for GPUs: bits in Triton's interpreter, code for GPUs that are not there."""

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")
if not torch.distributed.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent))
import triton_targets  # noqa: E402
import triton_variants  # noqa: E402
from triton_targets import TARGETS, resources  # noqa: E402

from isograd.losses import triton_cross_entropy_launch  # noqa: E402
from isograd.losses.cross_entropy_plans import CrossEntropyDescriptor, scalars  # noqa: E402
from isograd.products import cuda  # noqa: E402
from isograd.torch.distributed import products_gpu, vocab_gpu  # noqa: E402

SCRIPT = Path(__file__).parent / "interpreted_ranks.py"
SUITES = {"losses": 3, "softmax": 3, "layouts": 2, "linears": 5}
LONG = {"long_rows": 5, "attention": 2}


@pytest.mark.parametrize("suite", SUITES)
def test_interpreter_returns_the_bits_of_the_whole(interpret: Any, suite: str) -> None:
    found, which = interpret(SCRIPT, *SUITES, exhaustive=False)
    assert found.get(suite) == (SUITES[suite], 0), which


@pytest.mark.thorough
def test_long_rows_and_attention_in_the_interpreter(interpret: Any) -> None:
    found, which = interpret(SCRIPT, *LONG, exhaustive=False)
    assert {name: cases for name, (cases, wrong) in found.items() if not wrong} == LONG, which


@pytest.mark.exhaustive
@pytest.mark.parametrize("suite", SUITES)
def test_interpreter_with_any_number_of_ranks(interpret: Any, suite: str) -> None:
    found, which = interpret(SCRIPT, *SUITES, exhaustive=True)
    assert found[suite][0] >= SUITES[suite], which
    assert found[suite][1] == 0, which


# --- compilation ------------------------------------------------------------------------------------------------------
def rows(dtype: Any, tokens: int, classes: int) -> None:
    """Every kernel of rows, of four ranks' classes."""
    x, targets = torch.empty(tokens, classes // 4, dtype=dtype), torch.empty(tokens, dtype=torch.int64)
    whole = CrossEntropyDescriptor(
        (tokens, classes), str(dtype).removeprefix("torch."), label_smoothing=0.1, z_loss=0.1
    )
    keys = vocab_gpu.maxima(x)
    words = vocab_gpu.exponentials(x, keys, classes)
    about = vocab_gpu.statistics(x, keys, words, classes)
    for mode in range(3):
        keys = vocab_gpu.magnitudes(mode, x, x, about)
        sums = vocab_gpu.totals(x, keys, vocab_gpu.terms(mode, x, x, about, keys))
    numbers = scalars(whole, None)
    losses, state = vocab_gpu.losses(x[:, 0].contiguous(), targets, about, sums, whole, numbers)
    vocab_gpu.logit_gradients(x, targets, losses, state, whole, numbers)
    for logarithm in (False, True):
        y = vocab_gpu.outputs(x, about, logarithm)
        vocab_gpu.gradients(x, y, sums, logarithm)


WALKS = {"maxima", "exponentials", "magnitudes", "terms", "outputs", "gradients"}
FOLLOWING = {"statistics", "totals", "losses"}


@pytest.mark.thorough
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_kernels_of_rows_compile(target: str, dtype: Any) -> None:
    found = triton_targets.kernels_of(target, lambda: rows(dtype, 512, 32_000), triton_cross_entropy_launch)
    assert set(found) == {*WALKS, *FOLLOWING, "backward"}
    for name, kernel in found.items():
        used = resources(kernel)
        assert used["stack"] <= 64, (name, used)
        assert used["registers"] <= 255


@pytest.mark.thorough
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_kernels_of_spread_products_compile(target: str) -> None:
    a, b = torch.empty(512, 1024, dtype=torch.bfloat16), torch.empty(1024, 768, dtype=torch.bfloat16)

    def run() -> None:
        own = products_gpu.Pieces(a, b, products_gpu.balance_from(products_gpu.keys(b)))
        own.rounded(own.sums(own.keys()))

    found = triton_targets.kernels_of(target, run, cuda)
    assert set(found) == {"line_words", "weight_balance", "slice_chunks", "add_parts", "round_sums"}
    # Sums leave a thread one by one, at addresses of 64 bits: registers spill at the end of a tile.
    assert resources(found["add_parts"])["stack"] <= 512


def test_numbers_of_tokens_compile_few_kernels() -> None:
    with triton_variants.watched() as variants:
        for tokens in (1, 2, 7, 16, 17, 100, 128, 777, 1024):
            rows(torch.bfloat16, tokens, 32_000)
    mine = {name: len(found) for name, found in variants.items() if name.split(".")[-1] in WALKS | FOLLOWING}
    assert mine, variants.keys()
    assert max(mine.values()) <= 3, mine
