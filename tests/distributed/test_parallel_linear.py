"""Linear layers whose weight is spread over processes: bits of the whole layer, errors on all ranks."""

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
if not torch.distributed.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent))
import linears  # noqa: E402
from pool import Ranks  # noqa: E402

import isograd.torch.distributed as igd  # noqa: E402
from isograd.errors import UnsupportedError  # noqa: E402


@pytest.fixture(scope="module")
def four(tmp_path_factory: Any) -> Any:
    ranks = Ranks(4, tmp_path_factory.mktemp("four"))
    yield ranks
    ranks.close()


# Before the others: kernels are compiled once, by a process that nobody waits for.
@pytest.mark.parametrize("special", [False, True], ids=["finite", "special"])
def test_without_a_group(special: bool) -> None:
    assert linears.differ(None, ["bfloat16", "float32"], "even", special) == []
    assert not linears.mlp_differs(None)


@pytest.mark.parametrize("special", [False, True], ids=["finite", "special"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_bits_of_the_whole_layer(four: Any, n: int, special: bool) -> None:
    for kind in ("even", "uneven", "empty"):
        given = {"dtypes": ["bfloat16", "float32"], "kind": kind, "special": special}
        assert four.run("linears", "differ", n, **given) == [[]] * n, kind


@pytest.mark.thorough
def test_bits_in_float16(four: Any) -> None:
    for special in (False, True):
        given = {"dtypes": ["float16"], "kind": "uneven", "special": special}
        assert four.run("linears", "differ", 3, **given) == [[]] * 3


def test_a_gated_mlp(four: Any) -> None:
    for n in (2, 3):
        assert four.run("linears", "mlp_differs", n) == [False] * n


def test_nothing_to_do(four: Any) -> None:
    assert four.run("linears", "empty", 2) == [[(0, 3), 0.0, [[0.0] * 3] * 2]] * 2


def test_autocast(four: Any) -> None:
    assert four.run("linears", "autocast", 2) == [True, True]


DIFFER, REFUSED = "of rank 1 differ from the first rank's; expected the same", "refused on rank 1, whose error says why"
SHAPES = f"shapes, dtypes or a bias {DIFFER}"
SAID = {
    "tokens": ("InvalidProblemError", SHAPES, None),
    "dtypes": ("InvalidProblemError", SHAPES, None),
    "features": ("InvalidProblemError", SHAPES, None),
    "outputs": ("InvalidProblemError", SHAPES, None),
    "bias": ("InvalidProblemError", SHAPES, None),
    "gradient": ("InvalidProblemError", f"requires_grad of input and weight {DIFFER}", None),
    "shape": ("InvalidProblemError", REFUSED, "input has shape (4, 2) and weight (5, 3)"),
    "mixed": ("InvalidProblemError", REFUSED, "weight has dtype torch.float16 and input torch.float32"),
    "length": ("InvalidProblemError", REFUSED, "bias has shape (3,); expected (5,)"),
    "tensor": ("InvalidProblemError", REFUSED, "weight is NoneType"),
    "float64": ("UnsupportedError", "input has dtype float64", None),
    "group": ("InvalidProblemError", "group is 'world'; expected a process group", None),
}


def test_errors_on_all_ranks(four: Any) -> None:
    found = four.run("linears", "mistakes", 2)
    for what, (kind, first, second) in SAID.items():
        for rank, said in enumerate((first, first if second is None else second)):
            raised, message = found[rank][what]
            assert "_parallel_linear: " in message, (what, message)
            assert said in message, (what, message)
            assert raised == kind or (second is not None and rank), (what, raised)
    assert set(found[0]) == set(SAID)


def test_transforms_of_torch_func_are_refused() -> None:
    x, weight = torch.ones(2, 3), torch.ones(4, 3)
    for call in (igd.column_parallel_linear, igd.row_parallel_linear):

        def total(x: Any, call: Any = call) -> Any:
            return call(x, weight).sum()

        for transformed in (torch.vmap(total), torch.func.grad(total)):
            with pytest.raises(UnsupportedError, match=f"{call.__name__}: input is transformed by torch.func"):
                transformed(x)
