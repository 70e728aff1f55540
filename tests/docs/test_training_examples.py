"""The examples that train in PyTorch, with the Trainer and with Lightning: a few steps of each."""

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

import isograd.torch as igt

EXAMPLES = Path(__file__).parents[2] / "examples"
# Of every machine, after so many steps.
MOE = {3: "f0ce67d21893fa8972fea6d6ddd9495b5534ecd26b62fc324fdf998bed5f57be"}
LIGHTNING = {3: "fc99b0103a7428d8fffac9761d218677159cf088be65bb3c57c43e004314eed9"}
GENERIC = {"NUMBA_CPU_NAME": "generic", "ATEN_CPU_CAPABILITY": "default"}


@pytest.fixture
def example(restore_threads):
    """A function that loads an example; what it asks of torch for the whole process is undone."""
    before, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    torch.set_num_threads(1)

    def load(name):
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield load
    torch.use_deterministic_algorithms(before)
    torch.set_num_threads(threads)


def printed(text):
    return re.search(r"digest of the weights: ([0-9a-f]{64})", text).group(1)


def by_command(module, *arguments):
    """The digest that a script prints."""
    app = module.typer.Typer()
    app.command()(module.main)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return printed(result.stdout)


def by_process(name, *arguments, ranks=1, environment=None):
    """The digest that so many processes print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    settings = os.environ | {"OMP_NUM_THREADS": "1", "ISOGRAD_NUM_THREADS": "1"} | (environment or {})
    found = subprocess.run(
        [*command, str(EXAMPLES / f"{name}.py"), *arguments], env=settings, capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stderr
    return printed(found.stdout)


# --- a mixture of experts ---------------------------------------------------------------------------------------------
def test_the_mixture_has_the_published_weights(example):
    assert by_command(example("train_moe"), "--steps", "3") == MOE[3]


def test_the_mixture_refuses_another_device(example):
    module = example("train_moe")
    app = module.typer.Typer()
    app.command()(module.main)
    assert CliRunner().invoke(app, ["--device", "tpu"]).exit_code == 2


def test_the_mixture_learns_and_its_experts_divide_the_kinds(example):
    moe = example("train_moe")
    layer, task, errors = moe.trained(60, 1, "cpu")
    assert errors[-1] < 0.2 * errors[0]
    counts = moe.served(layer, task)
    assert counts.sum() == moe.ROWS * moe.CHOSEN
    assert ((counts.sort(dim=1).values[:, -3:].sum(1) / counts.sum(1)) > 0.8).all()


def test_nothing_in_the_mixtures_step_depends_on_an_order_or_the_machine(example):
    moe = example("train_moe")
    generator = torch.Generator().manual_seed(0)
    task, layer = moe.Task(generator, "cpu"), moe.Mixture(generator)
    x, y, _ = task.rows()
    with igt.audit(layer) as audit:
        loss = moe.losses(layer, x, y)
        (loss.error + 0.01 * loss.balance + 1e-3 * loss.size).backward()
    assert [entry.operator for entry in audit.findings] == []


@pytest.mark.thorough
def test_the_mixture_on_a_processor_without_wide_vectors():
    assert by_process("train_moe", "--steps", "3", environment=GENERIC | {"ISOGRAD_NUM_THREADS": "2"}) == MOE[3]


# --- the Trainer ------------------------------------------------------------------------------------------------------
def test_the_trainer_repeats_itself_and_learns(example):
    trainer = example("train_trainer")
    first = trainer.trained(4, 0, None, "cpu")
    assert len(first.losses) == 4 * trainer.UNITS
    assert torch.stack(first.losses[-4:]).mean() < torch.stack(first.losses[:4]).mean() - 0.3
    assert by_command(trainer, "--steps", "4") == trainer.digest(first.model)


@pytest.mark.thorough
def test_the_trainer_has_one_digest_for_any_number_of_ranks():
    alone = by_process("train_trainer", "--steps", "46")  # more than an epoch
    assert by_process("train_trainer", "--steps", "46", ranks=2) == alone


def test_an_epoch_of_the_trainer_has_whole_steps(example):
    trainer = example("train_trainer")
    assert len(trainer.Windows(trainer.TEXT)) % (trainer.UNITS * trainer.MICRO_BATCH) == 0


def test_deterministic_products_of_torch_have_what_they_ask_for(example, monkeypatch):
    for path in EXAMPLES.glob("train_*.py"):
        if "use_deterministic_algorithms(True)" in path.read_text(encoding="utf-8"):
            monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
            example(path.stem)
            assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == ":4096:8", path.name


# --- Lightning --------------------------------------------------------------------------------------------------------
def test_lightning_gives_the_published_weights(example):
    assert by_command(example("train_lightning"), "--steps", "3", "--products", "int16") == LIGHTNING[3]


def test_lightning_learns(example):
    found = example("train_lightning").trained(30, 0, "torch", "cpu")
    assert torch.stack(found.losses[-4:]).mean() < 0.5 * found.losses[0]


@pytest.mark.thorough
def test_lightning_has_one_digest_for_any_number_of_ranks():
    options = ("--steps", "3", "--products", "int16")
    assert by_process("train_lightning", *options, ranks=2, environment=GENERIC) == LIGHTNING[3]
