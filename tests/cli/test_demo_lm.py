"""`isograd demo --model lm`: the published weights, a plot, and what is refused or missing."""

import hashlib
import json
import re
import sys
from pathlib import Path

import pytest

from isograd.cli import check, demo_lm

ROOT = Path(__file__).parents[2]
LM = ("demo", "--model", "lm")


@pytest.fixture
def torch(restore_threads):
    return pytest.importorskip("torch.library", reason="needs torch")


@pytest.mark.usefixtures("torch")
def test_the_published_weights_and_a_plot(cli, tmp_path):
    pytest.importorskip("matplotlib")
    result = cli(*LM, "--steps", 4, "--output", tmp_path / "new")
    assert result.exit_code == 0, result.stdout + result.stderr
    assert "They agree" in result.stdout
    assert result.stdout.count(check.published()["language_model"]["weights"]["float32"]["4"]) == 2
    losses = [float(x) for x in re.findall(r"│ +\d+ │ +(\d\.\d{4}) │", result.stdout)]
    assert len(losses) == 4
    assert losses[3] < losses[0] - 0.8
    assert (tmp_path / "new" / "isograd-demo-lm.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
@pytest.mark.usefixtures("torch")
def test_without_options_it_gives_published_weights_too(cli, tmp_path):
    found = json.loads(cli(*LM, "--json", "--output", tmp_path).stdout)
    assert found["agrees"]
    assert len(found["losses"]) == found["steps"] == demo_lm.STEPS
    assert found["losses"][-1] < found["losses"][0] - 1.5
    found, known = demo_lm.published_entry([4])["weights"], check.published()["language_model"]["weights"]
    assert found == {dtype: {"4": known[dtype]["4"]} for dtype in demo_lm.DTYPES}
    mixed = json.loads(cli(*LM, "--json", "--dtype", "bfloat16", "--output", tmp_path).stdout)
    assert mixed["agrees"]
    assert mixed["dtype"] == "bfloat16"


@pytest.mark.usefixtures("torch")
def test_weights_that_differ_end_with_status_1(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(demo_lm, "digest", lambda run: "0" * 64)
    result = cli(*LM, "--steps", 4, "--json", "--output", tmp_path)
    assert result.exit_code == 1
    assert json.loads(result.stdout)["agrees"] is False


@pytest.mark.parametrize("seed", [1 << 32, 1 << 64])
def test_a_seed_that_the_generator_cuts_is_refused(cli, seed):
    result = cli(*LM, "--seed", seed)
    assert result.exit_code == 2
    assert f"--seed is {seed}; --model lm takes one below 4294967296" in " ".join(result.stderr.split())


@pytest.mark.parametrize("other", [("--steps", 1), ("--steps", 1, "--seed", 5)])
@pytest.mark.usefixtures("torch")
def test_other_settings_have_no_published_digest(cli, tmp_path, other):
    result = cli(*LM, *other, "--output", tmp_path)
    assert result.exit_code == 0
    assert "no published digest for 1 steps" in result.stdout
    assert "4, 20 steps and seed 0" in " ".join(result.stdout.split())


@pytest.mark.usefixtures("torch")
def test_another_text_has_no_published_digest(monkeypatch):
    assert demo_lm._published(4, 0, "float32") == check.published()["language_model"]["weights"]["float32"]["4"]
    assert demo_lm._published(4, 1, "float32") is None
    monkeypatch.setattr(demo_lm, "license_text", lambda: "another text")
    assert demo_lm._published(4, 0, "float32") is None


def test_the_text_is_the_license_of_the_repository(monkeypatch, tmp_path):
    text = (ROOT / "LICENSE").read_text("utf-8")
    assert demo_lm.license_text() == text
    assert check.published()["language_model"]["text"] == hashlib.sha256(text.encode()).hexdigest()

    def missing(name):
        raise demo_lm.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(demo_lm.importlib.metadata, "distribution", missing)
    assert demo_lm.license_text() == text
    monkeypatch.setattr(demo_lm, "__file__", str(tmp_path / "a" / "b" / "c" / "d.py"))
    with pytest.raises(demo_lm.InvalidProblemError, match="was not installed with isograd"):
        demo_lm.license_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("demo", "--model", "abacus"), "--model is 'abacus'; accepted: digits, lm"),
        ((*LM, "--epochs", 3), "--epochs is 3, which --model digits has; --model lm takes --steps"),
        (("demo", "--steps", 3), "--steps is 3, which --model lm has; --model digits takes --epochs"),
        (("demo", "--device", "cuda"), "--device is 'cuda'; --model digits trains on the CPU, --model lm on both"),
        ((*LM, "--device", "mps"), "--device is 'mps'; accepted: cpu, cuda"),
        ((*LM, "--dtype", "float16"), "--dtype is 'float16'; accepted: float32, bfloat16"),
        (
            ("demo", "--dtype", "bfloat16"),
            "--dtype is 'bfloat16'; --model digits computes in float32, --model lm in both",
        ),
    ],
)
def test_options_that_do_not_go_together(cli, arguments, said):
    result = cli(*arguments)
    assert result.exit_code == 2
    assert result.stderr == f"isograd: {said}\n"


def test_without_a_gpu(cli, torch, tmp_path, monkeypatch):
    monkeypatch.setitem(demo_lm.DEVICES, "cuda", demo_lm.DEVICES["cpu"].__class__(lambda: False, None, None, None))
    result = cli(*LM, "--device", "cuda", "--output", tmp_path / "new")
    assert result.exit_code == 2
    assert result.stderr == "isograd: --device is 'cuda', which this machine does not have\n"
    assert not (tmp_path / "new").exists()


def test_without_torch(cli, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch", None)
    result = cli(*LM, "--output", tmp_path)
    assert result.exit_code == 2
    assert "The language model needs PyTorch, which is not installed: pip install 'isograd[torch]'" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("torch")
def test_an_interrupt_says_how_far_it_came_and_a_missing_matplotlib_what_to_install(cli, tmp_path, monkeypatch):
    from isograd.cli import language_model

    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    result = cli(*LM, "--json", "--steps", 1, "--output", tmp_path)
    assert result.exit_code == 0
    assert "pip install 'isograd[demo]'" in " ".join(result.stderr.split())
    assert json.loads(result.stdout)["plot"] is None
    advance = language_model.Training.advance

    def interrupted(run):
        if run.step == 1:
            raise KeyboardInterrupt
        advance(run)

    monkeypatch.setattr(language_model.Training, "advance", interrupted)
    result = cli(*LM, "--steps", 2, "--output", tmp_path)
    assert result.exit_code == 130
    assert "Interrupted. Training: 1 of 2" in result.stderr


@pytest.mark.usefixtures("torch")
def test_a_picture_that_cannot_be_written_hides_no_result(cli, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "isograd-demo-lm.png").mkdir()
    result = cli(*LM, "--steps", 1, "--output", tmp_path)
    assert "SHA-256 of the final weights" in result.stdout
    assert result.exit_code == 2
    assert "isograd-demo-lm.png' could not be written (Is a directory); the results are above" in result.stderr


def test_what_torch_is_asked_for_is_undone(torch):
    import torch as library

    before = library.get_num_threads(), library.are_deterministic_algorithms_enabled()
    seen = []
    demo_lm.train(
        1, "cpu", 0,
        lambda run: seen.append((library.get_num_threads(), library.are_deterministic_algorithms_enabled())),
    )  # fmt: skip
    assert seen == [(1, True)]
    assert (library.get_num_threads(), library.are_deterministic_algorithms_enabled()) == before
