"""GradientSum on several processes: one digest for any number of ranks, and errors on all ranks instead of a wait."""

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
if not torch.distributed.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent))
from pool import Ranks  # noqa: E402


@pytest.fixture(scope="module")
def two(tmp_path_factory: Any) -> Any:
    ranks = Ranks(2, tmp_path_factory.mktemp("two"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four(tmp_path_factory: Any) -> Any:
    ranks = Ranks(4, tmp_path_factory.mktemp("four"))
    yield ranks
    ranks.close()


KINDS = ["plain", "ddp", "ddp_no_sync", "fsdp"]


# --- one digest ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def digest(two: Any) -> Any:
    """The digest of one process."""
    [found] = two.run("training", "train", 1, kind="plain")
    return found


@pytest.mark.parametrize(
    "ahead", [pytest.param(False, marks=pytest.mark.thorough), True], ids=["at the end", "ahead"]
)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_one_digest(two: Any, digest: str, kind: str, ahead: bool) -> None:
    for n in (1, 2):
        assert set(two.run("training", "train", n, kind=kind, ahead=ahead, bucket_bytes=256)) == {digest}, n


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [*KINDS, "ddp_find_unused"])
def test_one_digest_of_twenty_steps_on_one_two_and_four_ranks(four: Any, kind: str) -> None:
    [right] = four.run("training", "train", 1, kind="plain", steps=20)
    for n in (1, 2, 4):
        assert set(four.run("training", "train", n, kind=kind, steps=20, ahead=n == 4)) == {right}, n


def test_buckets_are_sent_in_the_last_pass(two: Any) -> None:
    for found in two.run("misuse", "sent_ahead", 2):
        assert found == [False, False, False, False, True, False, True]


@pytest.mark.thorough
def test_mixed_precision_of_fsdp(four: Any) -> None:
    found = [d for n in (1, 2, 4) for d in four.run("training", "train", n, kind="fsdp_mixed")]
    assert len(set(found)) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["plain", "fsdp"])
def test_checkpoints_change_no_bit(two: Any, digest: str, kind: str, reentrant: bool) -> None:
    assert set(two.run("training", "train", 2, kind=kind, checkpoints=reentrant, ahead=True)) == {digest}


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["llama", "olmoe"])
def test_one_digest_of_a_model_of_transformers(four: Any, family: str) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    given = {"family": family, "steps": 20}
    [right] = four.run("training", "train", 1, kind="plain", **given)
    for kind, n in (("plain", 2), ("plain", 4), ("ddp", 2), ("ddp", 4), ("fsdp", 1), ("fsdp", 2), ("fsdp", 4)):
        assert set(four.run("training", "train", n, kind=kind, ahead=True, **given)) == {right}, (kind, n)
    assert len({four.run("training", "train_with_torch", n, **given)[0] for n in (1, 2, 4)}) == 3


@pytest.mark.thorough
def test_replicas_of_shards(four: Any) -> None:
    assert set(four.run("training", "train_replicas", 4)) == set(four.run("training", "train", 1, kind="plain"))


@pytest.mark.thorough
def test_torchs_gradients_depend_on_the_ranks(four: Any) -> None:
    found = [four.run("training", "train_with_torch", n)[0] for n in (1, 2, 4)]
    assert len(set(found)) == 3


@pytest.mark.thorough
def test_resumed_with_another_number_of_ranks(four: Any) -> None:
    right, _ = four.run("training", "resume", 1, steps=(0, 4))[0]
    _, state = four.run("training", "resume", 2, steps=(0, 2))[0]
    assert {found for found, _ in four.run("training", "resume", 4, state=state, steps=(2, 4))} == {right}


# --- what may go wrong -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("shape", "parameters of rank 1 differ"), ("frozen", "parameters of rank 1 differ"),
        ("quantum", "settings of rank 1 differ"), ("bucket", "settings of rank 1 differ"),
    ],
)  # fmt: skip
def test_ranks_that_differ_are_told_on_all(two: Any, what: str, said: str) -> None:
    for (kind, message), works in two.run("misuse", "mismatched", 2, what=what):
        assert kind == "InvalidProblemError"
        assert said in message
        assert works


def test_an_argument_that_one_rank_refuses(two: Any) -> None:
    (first, _), (second, works) = two.run("misuse", "mismatched", 2, what="invalid")
    assert first == ("InvalidProblemError", "GradientSum: refused on rank 1, whose error says why")
    assert "'0.weight' is 2^999; accepted exponents: -100 to 60" in second[1]
    assert works


@pytest.mark.parametrize("ahead", [False, True])
def test_a_parameter_without_a_gradient_on_one_rank(two: Any, ahead: bool) -> None:
    assert all(two.run("misuse", "missing_on_one_rank", 2, ahead=ahead))


@pytest.mark.parametrize("ahead", [False, True])
def test_other_numbers_of_units(two: Any, ahead: bool) -> None:
    for found in two.run("misuse", "uneven", 2, ahead=ahead):
        assert found == [4, True, True, 1, True]


@pytest.mark.parametrize(
    ("ranks", "dtypes", "sent"),
    [
        (2, ["float32", "bfloat16"], {"float32": True, "bfloat16": True}),
        (2, ["float64", "float16"], {"float64": False, "float16": True}),
        (4, ["float32", "bfloat16"], {"float32": False, "bfloat16": True}),
    ],
)  # fmt: skip
def test_one_unit_on_every_rank(four: Any, ranks: int, dtypes: list[str], sent: dict[str, bool]) -> None:
    for found in four.run("misuse", "one_unit", ranks, dtypes=dtypes):
        assert found == [sent, True, True, True, True]


def test_a_second_gradient_in_the_only_unit(two: Any) -> None:
    for announced, finished, works in two.run("misuse", "second_gradient", 2):
        assert announced[0] == "InvalidProblemError"
        assert "units is 2, and every rank has announced one unit" in announced[1]
        assert finished[0] == "StepError"
        assert "a second gradient of" in finished[1]
        assert works


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 2.0**13, -(2.0**15)])
def test_what_does_not_fit_is_nan_on_all_ranks(two: Any, value: float) -> None:
    for nan, fits, exceeded, told, works in two.run("misuse", "too_large", 2, value=value):
        assert nan
        assert not fits
        assert exceeded == ("2.bias",)
        [message] = told
        assert "in 2 units, gradients of '2.bias' were not finite or too large for their range" in message
        assert works


def test_what_just_fits(two: Any) -> None:
    for nan, fits, exceeded, told, _ in two.run("misuse", "too_large", 2, value=8191.0):
        assert (nan, fits, exceeded, told) == (False, True, (), [])


def test_finish_twice_and_before_any_unit(two: Any) -> None:
    for first, second, works in two.run("misuse", "twice", 2):
        assert first == second
        assert first == ("StepError", "GradientSum.finish: no rank had a backward pass since the last step")
        assert works


@pytest.mark.parametrize(("ahead", "retry"), [(False, False), (True, False), (False, True)])
def test_an_exception_in_a_backward_pass_of_one_rank(two: Any, ahead: bool, retry: bool) -> None:
    found = two.run("misuse", "broken_backward", 2, everywhere=False, ahead=ahead, retry=retry)
    (_, second, works), (mine, last, mine_works) = found
    assert mine[1] == "planted"
    assert second == ("StepError", "GradientSum.finish: 1 of the ranks could not finish the step, and say why")
    assert "an exception ended a backward pass" in last[1]
    assert works
    assert mine_works


def test_reset_after_an_exception_on_all_ranks(two: Any) -> None:
    for first, _, works in two.run("misuse", "broken_backward", 2, everywhere=True, ahead=False):
        assert first[1] == "planted"
        assert works


def test_more_units_than_announced(two: Any) -> None:
    (first, works), (second, also) = two.run("misuse", "more_than_announced", 2)
    assert first == ("StepError", "GradientSum.finish: 1 of the ranks could not finish the step, and say why")
    assert "this rank announced 1 units and was in unit 2" in second[1]
    assert works
    assert also


def test_gradients_that_were_not_cleared(two: Any) -> None:
    (first, works), (second, also) = two.run("misuse", "left_over", 2)
    assert first[0] == second[0] == "StepError"
    assert "call zero_grad(set_to_none=True)" in second[1]
    assert works
    assert also


def test_settings_of_fsdp(two: Any) -> None:
    for nan, units, exceeded, shadowed in two.run("misuse", "fsdp_settings", 2):
        assert nan
        assert units == 2
        assert exceeded == ("blocks.1.up.weight", "blocks.1.up.bias")
        assert not shadowed


def test_a_sum_comes_off_fsdp(two: Any) -> None:
    assert two.run("misuse", "removed_from_fsdp", 2) == [True, True]


def test_states(two: Any) -> None:
    for rank, (different, unknown, saving, loading, same) in enumerate(two.run("misuse", "loaded", 2)):
        assert "settings of rank 1 differ" in different[1]
        said = "differ in the parameters 9.bias" if rank else "refused on rank 1"
        assert said in unknown[1]
        assert saving[0] == loading[0] == "StepError"
        assert "1 units of a step are added up" in saving[1]
        assert same
