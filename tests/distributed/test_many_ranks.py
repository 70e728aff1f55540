"""Eight and sixteen processes: the bits of one, for training, spread classes and spread layers."""

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
if not torch.distributed.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent))
import linears  # noqa: E402
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
