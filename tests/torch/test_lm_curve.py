"""The benchmark of loss curves: what it computes, and what it says of curves that are known."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch

FILE = Path(__file__).parents[2] / "benchmarks" / "lm_curve.py"


@pytest.fixture(scope="module")
def curve():
    spec = importlib.util.spec_from_file_location("lm_curve", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made(kind, seed, losses):
    return {"kind": kind, "seed": seed, "losses": losses}


def test_a_mean_in_the_spread_is_within_and_another_is_not(curve):
    assert curve.smoothed([1.0, 2.0, 6.0], 2).tolist() == [1.5, 4.0]
    torchs = [made("torch", seed, [3.0 + seed, 2.0 + seed, 1.0 + seed]) for seed in range(3)]
    low, high = made("int16", 0, [2.5, 2.0, 1.5]), made("int16", 1, [4.0, 3.0, 3.5])
    verdict = curve.judged([*torchs, low, high], 1)
    assert verdict["within"]
    assert verdict["furthest_outside"] == 0
    np.testing.assert_allclose(verdict["inside_int16"], [2 / 3, 2 / 3])
    assert verdict["inside_torch_of_others"] == [0, 1, 0]
    assert verdict["change_of_a_seed"] == {"mean": 1.0, "all": [0.5, 1.5]}
    assert verdict["range_of_seeds"] == 2
    assert "2 int16 runs lies within the spread of 3 bfloat16 runs" in curve.told(verdict)
    verdict = curve.judged([*torchs, low], 1)
    assert not verdict["within"]
    assert verdict["furthest_outside"] == 0.5
    assert "up to 0.5000 nats outside" in curve.told(verdict)


def test_a_few_steps_of_the_small_model(curve, monkeypatch, tmp_path):
    report, picture = tmp_path / "curve.json", tmp_path / "curve.png"
    command = ["--device", "cpu", "--quick", "--steps", "3", "--seeds", "2"]
    monkeypatch.setattr(sys, "argv", ["lm_curve.py", *command, "--json", str(report), "--plot", str(picture)])
    curve.main()
    found = json.loads(report.read_text())
    losses = {(run["kind"], run["seed"]): run["losses"] for run in found["runs"]}
    assert set(losses) == {(kind, seed) for kind in ("torch", "int16") for seed in (0, 1)}
    for seed in (0, 1):  # the same weights and batches; products that differ by their roundings
        np.testing.assert_allclose(losses["int16", seed], losses["torch", seed], atol=0.02)
        assert losses["int16", seed] != losses["torch", seed]
    assert losses["torch", 0][0] != losses["torch", 1][0]
    assert all(run["left"] == {} for run in found["runs"])
    assert found["verdict"]["inside_int16"]
    assert picture.stat().st_size > 10_000


def test_no_run_begins_that_would_end_too_late(curve, monkeypatch, capsys):
    def train(kind, seed, steps, sizes, text):
        return made(kind, seed, [1.0 + seed] * steps) | {"seconds": 1e6, "first_two": 1.0, "left": {}}

    monkeypatch.setattr(curve, "train", train)
    monkeypatch.setattr(sys, "argv", ["lm_curve.py", "--device", "cpu", "--quick", "--steps", "3", "--seconds", "1e5"])
    curve.main()
    out = capsys.readouterr().out
    assert "int16, from seed 1 on: left out" in out
    assert "1 int16 runs lies within the spread of 5 bfloat16 runs" in out


def test_it_learns(curve):
    text = torch.frombuffer(bytearray(b"to be or not to be, " * 500), dtype=torch.uint8)
    losses = curve.train("torch", 0, 60, curve.SMALL, text)["losses"]
    assert losses[-1] < losses[0] - 2
