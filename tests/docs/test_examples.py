"""The example that distills: it learns, and its weights are the published ones."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

EXAMPLE = Path(__file__).parents[2] / "examples/distil.py"
PUBLISHED = "1409c3b361707967317491b549c96c0b9332f9ff9e80ebd2e859244e925c44ad"  # of every machine, after three steps


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("distil", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_weights_are_the_published_ones(example):
    weights, losses = example.distilled(3, 3, 0)
    assert example.digest(weights) == PUBLISHED
    assert len(losses) == 3
    assert example.digest(example.distilled(3, 3, 1)[0]) != PUBLISHED


def test_it_learns(example):
    _, losses = example.distilled(60, 3, 0)
    assert np.mean(losses[-10:]) < 0.75 * np.mean(losses[:10])


def test_few_bits_have_few_levels(example):
    w = example.uniform((2, 64, 5), np.random.default_rng(0))
    for column in np.moveaxis(example.rounded(w, 3), -2, -1).reshape(-1, 64):
        assert len(np.unique(np.abs(column))) <= 4
    assert np.abs(example.rounded(w, 8) - w).max() <= 0.5 / 127 * np.abs(w).max() * 1.001


def test_the_command_says_what_came_of_it(example):
    import typer

    app = typer.Typer()
    app.command()(example.main)
    result = CliRunner().invoke(app, ["--steps", "1", "--bits", "2"])
    assert result.exit_code == 0, result.output
    assert "digest of the weights: " in result.stdout
    assert CliRunner().invoke(app, ["--bits", "1"]).exit_code == 2
