"""`isograd demo`: the accuracy, the published weights, the same bits in every process, and what is missing."""

import json
import sys

import numpy as np
import pytest

from isograd.cli import check, models, training

pytest.importorskip("sklearn")


def recorded(monkeypatch):
    """The runs of the training from now on."""
    runs, train = [], training.train
    monkeypatch.setattr(training, "train", lambda *a, **k: runs.append(train(*a, **k)) or runs[-1])
    return runs


def test_agreeing_weights_and_plot(cli, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    runs = recorded(monkeypatch)
    monkeypatch.setattr("isograd.cli.demo._published", lambda epochs, seed: training.digest(runs[0]))
    result = cli("demo", "--epochs", 3, "--output", tmp_path / "new")
    assert result.exit_code == 0, result.stdout + result.stderr
    assert "They agree" in result.stdout
    (run,) = runs
    assert result.stdout.count(training.digest(run)) == 2
    assert (tmp_path / "new" / "isograd-demo.png").read_bytes().startswith(b"\x89PNG")
    assert len(run.losses) == len(run.accuracies) == len(run.teacher_losses) == 3
    for losses in (run.losses, run.teacher_losses):
        assert losses[2] < losses[1] < losses[0]
    assert training.service(run, training.load_data()).sum(axis=1) == pytest.approx(np.ones(models.CLASSES))


@pytest.mark.exhaustive  # .ci/run compares the published weights by the command itself
def test_published_weights_accuracy_and_plot(cli, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    runs = recorded(monkeypatch)
    result = cli("demo", "--output", tmp_path / "new")
    assert result.exit_code == 0, result.stdout + result.stderr
    assert "They agree" in result.stdout
    assert result.stdout.count(check.published()["demo"]["weights"]) == 2
    assert (tmp_path / "new" / "isograd-demo.png").read_bytes().startswith(b"\x89PNG")
    (run,) = runs
    assert run.accuracies[-1] >= 0.96
    assert run.teacher_accuracy >= 0.96
    assert len(run.losses) == len(run.accuracies) == len(run.teacher_losses) == training.EPOCHS
    assert run.teacher_losses[-1] < 0.05 < 1 < run.teacher_losses[0]
    assert run.losses[-1] < 0.5 < 5 < run.losses[0]
    service = training.service(run, training.load_data())
    assert service.sum(axis=1) == pytest.approx(np.ones(models.CLASSES))
    assert (service.max(axis=0) > 0.1).sum() >= 4, "a few experts serve everything"


def test_altered_published_weights(cli, tmp_path, monkeypatch):
    monkeypatch.setattr("isograd.cli.demo._published", lambda epochs, seed: "0" * 64)
    result = cli("demo", "--epochs", 1, "--output", tmp_path)
    assert result.exit_code == 1
    assert "They differ" in result.stdout
    assert "isograd verify" in result.stdout


@pytest.mark.parametrize("changed", [("--epochs", 1), ("--epochs", 2, "--seed", 5)])
def test_other_settings_have_no_published_digest(cli, tmp_path, changed):
    result = cli("demo", *changed, "--output", tmp_path)
    assert result.exit_code == 0
    assert "no published digest" in result.stdout


@pytest.mark.thorough
def test_same_weights_in_processes_with_other_threads(cli, cli_process, tmp_path):
    command = ("demo", "--json", "--epochs", 2, "--output", tmp_path)
    one = cli_process(*command, ISOGRAD_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    two = cli_process(*command, ISOGRAD_NUM_THREADS="2", OPENBLAS_NUM_THREADS="2")
    assert one["sha256"] == two["sha256"]
    assert one["losses"] == two["losses"]
    assert one["agrees"] is None
    other = json.loads(cli(*command, "--seed", 1).stdout)
    assert other["sha256"] != one["sha256"]


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "train", lambda *a: pytest.fail("it began to train"))
    file = tmp_path / "file"
    file.write_text("")
    result = cli("demo", "--output", file)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"isograd: --output is '{file}', where no file can be written")


def test_a_picture_that_cannot_be_written_in_the_end_hides_no_result(cli, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "isograd-demo.png").mkdir()
    result = cli("demo", "--epochs", 1, "--output", tmp_path)
    assert "SHA-256 of the final weights" in result.stdout
    assert result.exit_code == 2
    assert "isograd-demo.png' could not be written (Is a directory); the results are above" in result.stderr


def test_an_interrupt_says_how_far_it_came(cli, tmp_path, monkeypatch):
    def interrupted(loss, *rest):
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "student_loss", interrupted)
    result = cli("demo", "--epochs", 1, "--output", tmp_path)
    assert result.exit_code == 130
    assert "Interrupted. Training: 1 of 2" in result.stderr
    assert "teacher: loss" in result.stderr


def test_without_scikit_learn(cli, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    result = cli("demo", "--output", tmp_path)
    assert result.exit_code == 2
    assert "scikit-learn, which is not installed: pip install 'isograd[demo]'" in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib(cli, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    result = cli("demo", "--json", "--epochs", 1, "--output", tmp_path)
    assert result.exit_code == 0
    assert "pip install 'isograd[demo]'" in " ".join(result.stderr.split())
    found = json.loads(result.stdout)
    assert found["plot"] is None
    assert len(found["sha256"]) == 64


def test_split_is_fixed_and_disjoint():
    data = training.load_data()
    assert data.train_x.shape == (1437, 64)
    assert data.test_x.shape == (360, 64)
    assert data.train_x.dtype == np.float32
    assert np.array_equal(np.bincount(np.concatenate([data.train_y, data.test_y])).sum(), 1797)
    again = training.load_data()
    assert np.array_equal(again.test_x, data.test_x)


@pytest.mark.parametrize(
    ("initial", "loss", "places"),
    [
        (models.teacher_weights, models.teacher_loss, {"w1": (63, 5), "b1": (7,), "w2": (100, 3), "b2": (9,)}),
        (
            models.student_weights,
            models.student_loss,
            {"router": (40, 2), "w1": (3, 63, 5), "b1": (2, 0, 7), "w2": (1, 20, 3), "b2": (4, 0, 9)},
        ),
    ],
)
def test_gradients_agree_with_finite_differences(initial, loss, places):
    x = np.linspace(0, 1, 3 * 64, dtype=np.float32).reshape(3, 64)
    target = np.array([3, 0, 9])
    if loss is models.student_loss:
        target = np.linspace(-1, 1, 3 * models.CLASSES, dtype=np.float32).reshape(3, models.CLASSES)
    weights = initial(64, seed=1)
    _, gradients = loss(weights, x, target)
    step = np.float32(2**-9)
    for name, index in places.items():
        losses = []
        for sign in (1, -1):
            moved = {key: w.copy() for key, w in weights.items()}
            moved[name][index] += sign * step
            losses.append(loss(moved, x, target)[0])
        assert gradients[name][index] == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=0.02, abs=1e-3)
