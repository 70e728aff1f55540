"""Attention over sequences that are spread over processes: bits of the whole sequence, errors on all ranks."""

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
if not torch.distributed.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent))
import contexts  # noqa: E402
from pool import Ranks  # noqa: E402

import isograd.torch.distributed as igd  # noqa: E402
from isograd.errors import UnsupportedError  # noqa: E402
from isograd.torch.distributed import context_pieces  # noqa: E402
from isograd.torch.distributed.context_pieces import Cut, Pieces  # noqa: E402


@pytest.fixture(scope="module")
def four(tmp_path_factory: Any) -> Any:
    ranks = Ranks(4, tmp_path_factory.mktemp("four"))
    yield ranks
    ranks.close()


# Before the others: kernels are compiled once, by a process that nobody waits for.
@pytest.mark.parametrize("kind", contexts.KINDS, ids=str)
def test_without_a_group(kind: Any) -> None:
    assert contexts.differ(None, "even", kinds=[kind]) == []
    assert contexts.some_gradients_differ(None) == []


EVERY = list(contexts.CASES)
CHOSEN = [
    (1, "even", ["causal"]),
    (2, "uneven", EVERY),
    (3, "even", ["sinks", "both sides", "left side"]),
    (4, "uneven", EVERY),
    (4, "ends", ["full", "short window", "long window", "right side"]),
]


@pytest.mark.parametrize(("n", "kind", "cases"), CHOSEN, ids=str)
def test_bits_of_the_whole_sequence(four: Any, n: int, kind: str, cases: list[str]) -> None:
    assert four.run("contexts", "differ", n, kind=kind, cases=cases) == [[]] * n


@pytest.mark.parametrize("n", [2, 3, 4])
def test_ranks_without_rows(four: Any, n: int) -> None:
    cases = ["causal", "sinks", "both sides"]
    assert four.run("contexts", "differ", n, kind="empty", cases=cases) == [[]] * n


def test_what_is_not_finite_goes_as_far_as_in_the_whole(four: Any) -> None:
    given = {"kind": "uneven", "special": True, "cases": ["full", "causal", "both sides", "short window"]}
    assert four.run("contexts", "differ", 4, **given) == [[]] * 4


@pytest.mark.thorough
@pytest.mark.parametrize("n", [2, 3, 4])
def test_bits_in_every_dtype(four: Any, n: int) -> None:
    kinds = [*contexts.KINDS, ("float16", None), ("float16", "int16"), ("float64", None)]
    for kind in ("even", "uneven", "ends"):
        assert four.run("contexts", "differ", n, kind=kind, kinds=kinds) == [[]] * n


def test_gradients_of_some(four: Any) -> None:
    assert four.run("contexts", "some_gradients_differ", 3) == [[]] * 3


def test_autocast(four: Any) -> None:
    assert four.run("contexts", "autocast", 2) == [True, True]


def test_nothing_to_do(four: Any) -> None:
    assert four.run("contexts", "empty", 2) == [[(1, 2, 0, 16), (1, 2, 0, 16), [0.0, 0.0], (1, 0, 3, 16)]] * 2


def seen(pieces: Pieces, cut: Cut) -> list[range]:
    """The rows of the other side that each row of a piece reaches within a cut, counted in the whole."""
    found = []
    for i in range(pieces.first - cut.first, pieces.first - cut.first + pieces.length):
        low = 0 if cut.before is None else max(i - cut.before, 0)
        high = cut.other_end - cut.other_first
        high = high if cut.after is None else min(i + cut.after + 1, high)
        found.append(range(cut.other_first + low, cut.other_first + max(high, low)))
    return found


def test_rows_see_what_they_see_in_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_pieces, "STEP", step := 4)
    sides = (None, 0, 1, 3, 4, 5, 9, 21)
    for total, before, after, whole in itertools.product((1, 8, 21), sides, sides, (False, True)):
        for first, end in itertools.combinations(range(total + 1), 2):
            pieces = Pieces(None, (first, end - first, total - end), 1)
            cut = pieces.cut(before, after, whole)
            assert seen(pieces, cut) == [
                range(
                    0 if before is None else max(i - before, 0), total if after is None else min(i + after + 1, total)
                )
                for i in range(first, end)
            ]
            assert cut.before is None or cut.before >= 0
            assert cut.after is None or cut.after >= 0
            assert cut.first <= first < end <= cut.end <= total
            assert cut.first % step == cut.other_first % step == 0
            assert all(x in (-x // step * -step, total) for x in (cut.end, cut.other_end))
            assert not whole or (cut.other_first, cut.other_end) == (0, total)


def test_tiles_divide_what_is_cut_out() -> None:
    pytest.importorskip("triton", reason="needs triton")
    from isograd.flash_attention import gluon_launch, numba_scores, triton_tiles
    from isograd.flash_attention.order_free import reference

    sizes = {numba_scores.BLOCK_Q, numba_scores.BLOCK_K, reference.BLOCK, gluon_launch.TILE_KEYS}
    for head_dim in range(16, 257, 8):
        forward = gluon_launch.forward_tiles(head_dim)
        sizes |= {64 * forward.consumers, forward.keys, gluon_launch.backward_tiles(head_dim).queries}
        for size, architecture in itertools.product((2, 4), (80, 90, 100)):
            of = head_dim, head_dim, size, architecture
            for tile in (triton_tiles.forward(*of), *triton_tiles.backward(*of)):
                sizes |= {tile.queries, tile.keys}
    assert len(sizes) > 4
    assert not [size for size in sizes if context_pieces.STEP % size]


DIFFER, REFUSED = "of rank 1 differ from the first rank's; expected the same", "refused on rank 1, whose error says why"
SHAPES, OPTIONS = f"shapes but for the length, dtypes or sinks {DIFFER}", f"options {DIFFER}"
INVALID = "InvalidProblemError"
SAID = {
    "heads": (INVALID, SHAPES, None),
    "batch": (INVALID, SHAPES, None),
    "dtypes": (INVALID, SHAPES, None),
    "sinks": (INVALID, SHAPES, None),
    "causal": (INVALID, OPTIONS, None),
    "window": (INVALID, OPTIONS, None),
    "scale": (INVALID, OPTIONS, None),
    "precision": (INVALID, OPTIONS, None),
    "gradient": (INVALID, f"requires_grad {DIFFER}", None),
    "length": (INVALID, REFUSED, "q has 4 rows and k and v have 5; expected the same piece of one sequence"),
    "rank": (INVALID, REFUSED, "q has shape (2, 5, 16); expected four axes, BHLD"),
    "values": (INVALID, REFUSED, "v has shape (1, 2, 4, 16); expected (1, 2, 5, 16)"),
    "groups": (INVALID, REFUSED, "q has 3 heads and k and v have 2"),
    "mixed": (INVALID, REFUSED, "v has dtype torch.float16 and q torch.float32"),
    "tensor": (INVALID, REFUSED, "k is NoneType"),
    "many": (INVALID, REFUSED, "sinks has shape (3,); expected (4,)"),
    "negative": (INVALID, REFUSED, "window is (-1, 0)"),
    "axes": (INVALID, REFUSED, "layout is 'LBHD'; accepted: BHLD, BLHD"),
    "dropout": ("UnsupportedError", "dropout_p is 0.1; accepted: 0.0", None),
    "int16": ("UnsupportedError", "precision is 'int16' for float32; accepted with it: float16, bfloat16", None),
    "fp8": (INVALID, "precision is 'fp8'; accepted: int16, None", None),
    "wide": ("UnsupportedError", "the head dimension of q is 272; accepted: 1 to 256", None),
    "group": (INVALID, "group is 'world'; expected a process group", None),
}


def test_errors_on_all_ranks(four: Any) -> None:
    found = four.run("contexts", "mistakes", 2)
    for what, (kind, first, second) in SAID.items():
        for rank, said in enumerate((first, first if second is None else second)):
            raised, message = found[rank][what]
            assert message.startswith("context_parallel_attention: "), (what, message)
            assert said in message, (what, message)
            assert raised == kind or (second is not None and rank), (what, raised)
    assert set(found[0]) == set(SAID)


def test_transforms_of_torch_func_are_refused() -> None:
    x = torch.ones(1, 1, 3, 16)

    def total(q: Any) -> Any:
        return igd.context_parallel_attention(q, x, x).sum()

    with pytest.raises(UnsupportedError, match=r"q is transformed by torch\.func"):
        torch.func.grad(total)(x)
