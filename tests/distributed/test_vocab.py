"""Cross entropy and softmax over classes that are spread over processes: bits of whole rows, errors on all ranks."""

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
if not torch.distributed.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent))
import vocab  # noqa: E402
from pool import Ranks  # noqa: E402

SIZES = [1, 5, 300]
DTYPES = ["float16", "bfloat16", "float32", "float64"]


@pytest.fixture(scope="module")
def four(tmp_path_factory: Any) -> Any:
    ranks = Ranks(4, tmp_path_factory.mktemp("four"))
    yield ranks
    ranks.close()


# Before the others: kernels are compiled once, by a process that nobody waits for.
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("function", [vocab.losses_differ, vocab.softmax_differs])
def test_without_a_group(function: Any, dtype: str) -> None:
    for special in (False, True):
        assert function(None, [dtype], SIZES, "even", special) == []


@pytest.mark.parametrize(
    ("special", "kind"), [(False, "uneven"), (True, "empty")], ids=["finite, uneven", "special, empty"]
)
@pytest.mark.parametrize("function", ["losses_differ", "softmax_differs"])
def test_bits_of_whole_rows(four: Any, function: str, special: bool, kind: str) -> None:
    for n in (1, 2, 3, 4):
        given = {"dtypes": ["bfloat16", "float32"], "sizes": SIZES, "kind": kind, "special": special}
        assert four.run("vocab", function, n, **given) == [[]] * n, n


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("special", [False, True], ids=["finite", "special"])
@pytest.mark.parametrize("function", ["losses_differ", "softmax_differs"])
def test_bits_of_long_rows(four: Any, function: str, special: bool, dtype: str) -> None:
    given = {"dtypes": [dtype], "sizes": SIZES, "special": special}
    assert getattr(vocab, function)(None, kind="even", **given) == []
    for n in (1, 2, 3, 4):
        for kind in ("even", "uneven", "empty"):
            given = {"dtypes": [dtype], "sizes": [*SIZES, 4097, 20_000], "kind": kind, "special": special}
            assert four.run("vocab", function, n, **given) == [[]] * n, n


@pytest.mark.thorough
def test_the_quantum_of_16_bits_is_that_of_whole_rows(four: Any) -> None:
    for n in (1, 3):
        assert four.run("vocab", "many_classes_differ", n, dtype="bfloat16") == [[]] * n


def test_layouts(four: Any) -> None:
    assert four.run("vocab", "layouts_differ", 3) == [False] * 3


def test_autocast(four: Any) -> None:
    assert four.run("vocab", "autocast", 2) == [True, True]


def test_nothing_to_do(four: Any) -> None:
    assert four.run("vocab", "empty", 2) == [[0.0, (0, 3), (2, 0)]] * 2


DIFFER, REFUSED = "of rank 1 differ from the first rank's; expected the same", "refused on rank 1, whose error says why"
SAID = {
    "tokens": ("InvalidProblemError", f"tokens or dtypes {DIFFER}", None),
    "dtypes": ("InvalidProblemError", f"tokens or dtypes {DIFFER}", None),
    "targets": ("InvalidProblemError", f"targets {DIFFER}", None),
    "options": ("InvalidProblemError", f"options {DIFFER}", None),
    "shape": ("InvalidProblemError", REFUSED, "logits have shape (4, 3) and targets (3,)"),
    "tensor": ("InvalidProblemError", REFUSED, "logits is NoneType"),
    "storage": ("InvalidProblemError", REFUSED, "logits has dtype"),
    "range": ("IndexOutOfRangeError", "targets[3] is 6; accepted: 0 to 5", None),
    "smoothing": ("InvalidProblemError", "label_smoothing is 2.0; accepted: 0 to 1", None),
    "reduction": ("InvalidProblemError", "reduction is 'avg'", None),
    "classes": ("InvalidProblemError", "no class", None),
    "rows": ("InvalidProblemError", f"or requires_grad {DIFFER}", None),
    "softmax storage": ("InvalidProblemError", REFUSED, "x has dtype"),
    "device": ("InvalidProblemError", REFUSED, "no kernel for device 'meta'"),
    "gradient": ("InvalidProblemError", f"or requires_grad {DIFFER}", None),
    "group": ("InvalidProblemError", "group is 'world'; expected a process group", None),
}


def test_errors_on_all_ranks(four: Any) -> None:
    found = four.run("vocab", "mistakes", 2)
    for what, (kind, first, second) in SAID.items():
        for rank, said in enumerate((first, first if second is None else second)):
            raised, message = found[rank][what]
            assert message.startswith("vocab_parallel_"), (what, message)
            assert said in message, (what, message)
            assert raised == kind or (second is not None and rank), (what, raised)
    assert set(found[0]) == set(SAID)
