"""Code in the README and on the pages of the site runs, and prints what the pages say.

A page's ```python blocks run in one namespace, in an empty folder. A ```text block after one is what it prints. Lines
of a ```console block that begin with `$ isograd` run too, and the lines below them are what they print.
"""

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from isograd.cli.main import app

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "docs/guides", "docs/explanation")
# Pages that load transformers or Lightning, which takes many seconds.
THOROUGH = {"docs/guides/lightning.md", "docs/guides/transformers.md", "docs/reproducible_training.md"}
APPLE = {"docs/metal.md"}  # code for a GPU that is not here


class Block(NamedTuple):
    line: int
    language: str
    text: str


def blocks(path):
    text = path.read_text(encoding="utf-8")
    return [
        Block(text.count("\n", 0, found.start()) + 2, found[1], found[2])
        for found in re.finditer(r"(?ms)^```(\w*)\n(.*?)^```$", text)
    ]


PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", *(path for folder in FOLDERS for path in (ROOT / folder).glob("*.md")))
    if any(block.language == "python" for block in blocks(path)) and str(path.relative_to(ROOT)) not in APPLE
)


def compared(text):
    """Output without digests, which follow from torch's products, and spaces at the ends of lines."""
    return [re.sub(r"\b[0-9a-f]{12}\b", "digest", line.rstrip()) for line in text.strip().splitlines()]


def run_page(path):
    """Run a page's blocks; AssertionError where one prints something else."""
    namespace, printed = {"__name__": "page"}, None
    for block in blocks(path):
        where = f"{path}:{block.line}"
        if block.language == "python":
            # Lines keep their numbers in tracebacks.
            code = compile("\n" * (block.line - 1) + block.text, str(path), "exec")
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(code, namespace)
            printed = output.getvalue()
        elif block.language == "text" and printed is not None:
            assert compared(printed) == compared(block.text), where
            printed = None
        elif block.language == "console":
            for command, expected in re.findall(r"(?m)^\$ isograd (.*)\n((?:(?!\$ ).*\n)*)", block.text):
                result = CliRunner().invoke(app, shlex.split(command))
                assert compared(result.stdout) == compared(expected), where


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.thorough] if page in THOROUGH else []) for page in PAGES]
)
def test_the_code_of_a_page_prints_what_the_page_says(page, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    run_page(ROOT / page)


def test_a_page_that_says_something_else_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\ntext\n\n```python\nprint(x + 1)\n```\n\n```text\n2\n```\n")
    run_page(page)
    page.write_text(page.read_text().replace("\n2\n", "\n3\n"))
    with pytest.raises(AssertionError, match=r"page.md:12"):
        run_page(page)
    page.write_text("```python\n\nraise KeyError\n```\n")
    with pytest.raises(KeyError):
        run_page(page)


def test_a_command_that_prints_something_else_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```console\n$ isograd diff no.trace no.trace\n```\n")
    run_page(page)
    page.write_text("```console\n$ isograd --version\nisograd 0\n```\n")
    with pytest.raises(AssertionError, match=r"page.md:2"):
        run_page(page)
