"""The notebook finds its planted difference, and prints what is kept in it."""

import os
import re
import stat
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch.library", reason="needs torch")

NOTEBOOK = Path(__file__).parents[2] / "examples/planted_divergence.ipynb"


def outputs(notebook):
    """What each cell of code printed, without colors, and what follows from torch's products: digests, counts."""
    printed = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            text = re.sub(r"\x1b\[[0-9;]*m|\r", "", "".join(o.text for o in cell.outputs))
            text = re.sub(r"\b[1-9]\d*(?= (of \d+ )?differ)", "some", re.sub(r"\b[0-9a-f]{12}\b", "digest", text))
            printed.append(text.strip().splitlines())
    return printed


@pytest.mark.thorough
def test_the_notebook_finds_the_planted_difference(tmp_path, monkeypatch):
    import nbclient
    import nbformat

    command = tmp_path / "bin/isograd"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m isograd.cli "$@"\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    kept = outputs(notebook)
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    found = outputs(notebook)
    symptom = next(i for i, lines in enumerate(kept) if lines and lines[0].endswith("other bits"))
    # Losses are those of this machine's products.
    assert [line.split()[2:] for line in found.pop(symptom)] == [line.split()[2:] for line in kept.pop(symptom)]
    assert found == kept
    diff = next(lines for lines in found if lines and lines[0].startswith("a: mine.trace"))
    assert "  forward: blocks.1.norm, output" in diff
