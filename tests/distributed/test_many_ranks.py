"""Eight and sixteen processes, and 64 ranks that are threads: the bits of one, in training and for what is spread."""

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
if not torch.distributed.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent))
import contexts  # noqa: E402
import linears  # noqa: E402
import thread_ranks  # noqa: E402
import training  # noqa: E402
import vocab  # noqa: E402
from pool import Ranks  # noqa: E402

pytestmark = pytest.mark.exhaustive
COUNTS = [8, 16]
TIMEOUT = 600.0  # so many processes on few cores
DTYPES = ["bfloat16", "float32"]


@pytest.fixture(scope="module")
def many(tmp_path_factory: Any) -> Any:
    ranks = Ranks(max(COUNTS), tmp_path_factory.mktemp("many"))
    yield ranks
    ranks.close()


@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp"])
def test_one_digest(many: Any, kind: str) -> None:
    [right] = many.run("training", "train", 1, TIMEOUT, kind="plain")
    assert set(many.run("training", "train", 8, TIMEOUT, kind=kind, ahead=True)) == {right}


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("function", ["losses_differ", "softmax_differs"])
def test_spread_classes(many: Any, function: str, n: int) -> None:
    for special in (False, True):
        given = {"dtypes": DTYPES, "sizes": [5, 300], "special": special}
        assert getattr(vocab, function)(None, kind="even", **given) == []
        assert many.run("vocab", function, n, TIMEOUT, kind="uneven", **given) == [[]] * n


@pytest.mark.parametrize("n", COUNTS)
def test_spread_layers(many: Any, n: int) -> None:
    for special in (False, True):
        given = {"dtypes": DTYPES, "special": special}
        assert linears.differ(None, kind="even", **given) == []
        assert many.run("linears", "differ", n, TIMEOUT, kind="uneven", **given) == [[]] * n


@pytest.mark.parametrize("n", COUNTS)
def test_spread_sequences(many: Any, n: int) -> None:
    given = {"cases": ["sinks", "short window"], "kinds": [("bfloat16", None), ("bfloat16", "int16")]}
    assert many.run("contexts", "differ", n, TIMEOUT, kind="even", **given) == [[]] * n


# --- threads ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes a group of so many threads."""
    thread_ranks.install(monkeypatch.setattr)
    monkeypatch.setattr(training, "UNITS", 64)
    return thread_ranks.Group


def test_one_digest_of_64_threads(threads: Any) -> None:
    [right] = threads(1).run(training.train, kind="plain")
    assert right
    for ahead in (False, True):
        assert set(threads(64).run(training.train, kind="plain", ahead=ahead)) == {right}


@pytest.mark.parametrize("kind", ["even", "uneven", "gaps"])
def test_64_threads(threads: Any, kind: str) -> None:
    for special in (False, True):
        given = {"dtypes": ["bfloat16"], "kind": kind, "special": special}
        assert threads(64).run(linears.differ, **given) == [[]] * 64
        for function in (vocab.losses_differ, vocab.softmax_differs):
            assert threads(64).run(function, sizes=[5, 300], **given) == [[]] * 64


@pytest.mark.parametrize("precision", [None, "int16"])
def test_a_sequence_over_64_threads(threads: Any, precision: str | None) -> None:
    given = {"cases": ["sinks", "short window"], "kinds": [("bfloat16", precision)]}
    assert threads(64).run(contexts.differ, kind="even", **given) == [[]] * 64
