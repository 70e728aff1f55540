"""The example that trains a language model: a few steps of it."""

import importlib.util
import re
from pathlib import Path

import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch
from typer.testing import CliRunner

import isograd as ig

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_lm.py"


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


def test_a_run_can_be_repeated(example, monkeypatch):
    # A short sample: what is drawn is the same whatever its length.
    whole = example.sample
    monkeypatch.setattr(example, "sample", lambda model, text, start, length, seed: whole(model, text, start, 20, seed))
    first = run(example, "--steps", "2")
    assert run(example, "--steps", "2") == first
    assert run(example, "--steps", "2", "--seed", "1") != first


def test_it_learns(example):
    console = example.Console(quiet=True)
    (_, text, untrained), (model, _, trained) = (example.train(steps, "cpu", 0, console) for steps in (1, 30))
    assert trained < untrained - 0.8
    assert example.sample(model, text, "The ", 5, 0) == example.sample(model, text, "The ", 5, 0)
    assert len(text.alphabet) == model.head.out_features
