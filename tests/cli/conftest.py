"""The command in this process or in another one."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import isograd as ig
from isograd.cli.main import app


@pytest.fixture
def cli():
    """Run a command on streams of an encoding; the result has exit_code, stdout and stderr."""

    def run(*arguments, encoding="utf-8"):
        runner = CliRunner(charset=encoding, env={"COLUMNS": "100", "TERM": "dumb"})
        return runner.invoke(app, [str(a) for a in arguments])

    return run


@pytest.fixture
def cli_process():
    """Run a command in a process of its own and return what it printed as JSON."""

    def run(*arguments, **environment):
        command = [sys.executable, "-m", "isograd.cli", *map(str, arguments)]
        done = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    return run


@pytest.fixture
def two_threads():
    before = ig.get_num_threads()
    ig.set_num_threads(2)
    yield
    ig.set_num_threads(before)
