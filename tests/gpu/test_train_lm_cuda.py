"""The language model of the example and of the demo, on GPUs: the digest of every machine."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch", reason="needs torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "torch"))
from test_train_lm import MIXED, ORDER_FREE, PUBLISHED, ranks  # noqa: E402

from isograd.cli.main import app  # noqa: E402


def test_order_free_products_give_the_published_digest() -> None:
    assert ranks(1, *ORDER_FREE, "4", "--device", "cuda") == PUBLISHED[4]
    assert ranks(1, *ORDER_FREE, "20", "--device", "cuda", "--dtype", "bfloat16") == MIXED[20]


def test_the_demo_gives_it(tmp_path: Path) -> None:
    command = ["demo", "--model", "lm", "--device", "cuda", "--json", "--output", str(tmp_path)]
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout)
    assert report["agrees"]
    assert report["sha256"] == PUBLISHED[report["steps"]]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_give_it_too() -> None:
    assert ranks(2, *ORDER_FREE, "4", "--device", "cuda", "--parallel", "ddp") == PUBLISHED[4]
    assert ranks(2, *ORDER_FREE, "20", "--device", "cuda", "--parallel", "fsdp2") == PUBLISHED[20]
    mixed = [*ORDER_FREE, "20", "--device", "cuda", "--dtype", "bfloat16"]
    assert ranks(2, *mixed, "--parallel", "fsdp2") == ranks(2, *mixed, "--parallel", "ddp") == MIXED[20]
