"""The example that trains a language model: a few steps of it."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch
from typer.testing import CliRunner

import isograd as ig
import isograd.torch as igt
from isograd.cli import check

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_lm.py"
# Of every machine with order-free products, after so many steps.
PUBLISHED, MIXED = (
    {int(steps): weights for steps, weights in check.published()["language_model"]["weights"][dtype].items()}
    for dtype in ("float32", "bfloat16")
)
ORDER_FREE = ["--products", "int16", "--text", str(EXAMPLE.parents[1] / "LICENSE"), "--steps"]


@pytest.fixture
def example(restore_threads):
    """The example as a module, on one thread; what it asks of torch for the whole process is undone."""
    before, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    torch.set_num_threads(1)
    ig.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("train_lm", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    torch.use_deterministic_algorithms(before)
    torch.set_num_threads(threads)


@pytest.fixture
def short(example, monkeypatch):
    """Samples of a few characters: what is drawn is the same whatever the length."""
    whole = example.sample
    monkeypatch.setattr(example, "sample", lambda model, text, start, length, seed: whole(model, text, start, 20, seed))


def run(example, *arguments):
    """The digest that the example prints."""
    app = example.typer.Typer()
    app.command()(example.main)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "The " in result.output
    loss = float(re.search(r"loss (\d+\.\d+)\n", result.output).group(1))
    assert 1 < loss < 6
    return re.search(r"digest of the weights: ([0-9a-f]{64})", result.output).group(1)


def ranks(count, *arguments, environment=None):
    """The digest that so many processes print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ISOGRAD_NUM_THREADS": "1"} | (environment or {})
    found = subprocess.run(
        [*command, str(EXAMPLE), *arguments], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert found.returncode == 0, found.stderr
    return re.search(r"digest of the weights: ([0-9a-f]{64})", found.stdout).group(1)


@pytest.mark.usefixtures("short")
def test_a_run_can_be_repeated(example):
    first = run(example, "--steps", "2")
    assert run(example, "--steps", "2") == first
    assert run(example, "--steps", "2", "--seed", "1") != first


def test_it_learns(example):
    console, losses = example.Console(quiet=True), []
    for steps in (1, 30):
        trained = example.Run(30, "cpu", 0, "none", 2, "torch", example.read(None))
        example.train(trained, steps, console)
        losses.append(trained.losses[-1])
    assert losses[1] < losses[0] - 0.8
    model, text = trained.model, trained.text
    assert example.sample(model, text, "The ", 5, 0) == example.sample(model, text, "The ", 5, 0)
    assert len(text.alphabet) == model.head.out_features


@pytest.mark.usefixtures("short")
def test_order_free_products_give_the_published_digest(example):
    assert run(example, *ORDER_FREE, "4") == PUBLISHED[4]


@pytest.mark.usefixtures("short")
def test_mixed_precision_gives_its_own(example):
    assert run(example, *ORDER_FREE, "4", "--dtype", "bfloat16") == MIXED[4]


def test_what_is_written_about_it_quotes_the_published_digests():
    root = EXAMPLE.parents[1]
    assert set(PUBLISHED) == set(MIXED) == {4, 20}
    assert f"`{PUBLISHED[4][:8]}…{PUBLISHED[4][-8:]}`" in (root / "README.md").read_text("utf-8")
    page = (root / "docs" / "reproducible_training.md").read_text("utf-8")
    assert PUBLISHED[20] in page
    assert MIXED[20] in page


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_in_a_step_by_order_free_products_depends_on_an_order_or_the_machine(example, dtype):
    trained = example.Run(4, "cpu", 0, "none", 2, "int16", example.read(EXAMPLE.parents[1] / "LICENSE"), dtype)
    with igt.audit(trained.model) as audit:
        trained.advance()
    assert not trained.switch.report().not_replaced
    left = {entry.operator for entry in audit.findings}
    assert left == {"aten::randint", "aten::mean"}  # what is drawn for every unit, and the loss that is shown
    attention = {entry.operator for entry in audit.entries if "attention" in entry.operator}
    assert attention == ({"isograd::attention", "isograd::attention_backward"} if dtype == "bfloat16" else set())


@pytest.mark.thorough
def test_the_published_digest_on_any_processor_threads_and_ranks(example):
    assert run(example, *ORDER_FREE, "20") == PUBLISHED[20]
    generic = {"NUMBA_CPU_NAME": "generic", "ATEN_CPU_CAPABILITY": "default"}
    assert ranks(1, *ORDER_FREE, "4", environment=generic) == PUBLISHED[4]
    assert ranks(2, *ORDER_FREE, "4", "--parallel", "fsdp2", environment={"ISOGRAD_NUM_THREADS": "2"}) == PUBLISHED[4]
    mixed = [*ORDER_FREE, "4", "--dtype", "bfloat16"]
    assert ranks(1, *mixed, environment=generic) == MIXED[4]
    assert ranks(2, *mixed, "--parallel", "fsdp2") == ranks(4, *mixed, "--parallel", "ddp") == MIXED[4]


@pytest.mark.thorough
def test_ranks_sharding_and_a_resume_leave_the_digest(example, tmp_path):
    alone = run(example, "--steps", "4")
    state, picture = tmp_path / "run.pt", tmp_path / "loss.png"
    assert ranks(2, "--steps", "4", "--parallel", "ddp") == alone
    assert ranks(2, "--steps", "4", "--parallel", "fsdp2", "--stop", "2", "--checkpoint", str(state)) != alone
    assert ranks(4, "--steps", "4", "--parallel", "fsdp2", "--resume", str(state), "--plot", str(picture)) == alone
    assert picture.stat().st_size > 1000
    assert run(example, "--steps", "4", "--resume", str(state)) == alone
