"""Tables of figures are those of the files in `benchmarks/results`, and no figure is typed."""

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool():
    """The modules that make tables, by name."""
    folders = [str(ROOT / "tools"), str(ROOT / "tools/site")]
    before = list(sys.path)
    sys.path[:0] = folders
    try:
        yield importlib.import_module
    finally:
        sys.path[:] = before


@pytest.fixture
def repository(tmp_path):
    """A repository with one file of results, and what writes its README."""
    rows = [
        {
            "operation": "softmax",
            "dtype": "float32",
            "shape": [8, 256],
            "axis": 1,
            "gb_per_s": {"isograd": 3.0, "a": 2.0},
        },
        {
            "operation": "softmax",
            "dtype": "float32",
            "shape": [8, 4, 9],
            "axis": 1,
            "gb_per_s": {"isograd": 1.0, "a": 2.0},
        },
    ]
    results = tmp_path / "benchmarks/results"
    results.mkdir(parents=True)
    content = {"machine": {"cpu": "Abacus", "recorded": "2026-01-02"}, "results": rows}
    (results / "cpu-abacus.json").write_text(json.dumps(content))

    def readme(text):
        (tmp_path / "README.md").write_text(text)
        return tmp_path / "README.md"

    return readme


def test_every_table_has_the_figures_of_the_files(tool):
    """Where it fails: `python tools/update_figures.py`."""
    tables = tool("site_tables")
    texts = tables.texts(ROOT)
    for path in texts:
        tables.require_current(path, ROOT)
    assert sum(len(tables.PLACE.findall(path.read_text(encoding="utf-8"))) for path in texts) > 40


def test_every_file_is_shown_with_its_machine_and_day(tool):
    figures = tool("site_figures")
    assert figures.number(0.12345) == "0.123"
    assert figures.number(12345.6) == "12,346"
    assert figures.table([("a", {"x": 1.0, "y": 2.0}), ("b", {"y": 3.0}), ("c", {"z": 4.0})]).count("|---|") == 2
    for path in sorted((ROOT / "benchmarks/results").glob("*.json")):
        results = tool("site_results").read(path)
        assert results.rows, path.name
        assert all(groups for _, groups in results.rows), path.name
        assert results.machine, path.name
        assert results.recorded.startswith("20"), path.name


def test_a_table_says_what_was_measured_where_and_when(tool, repository):
    path = repository("<!-- figures: cpu-abacus gb_per_s 256 -->\n<!-- end of figures -->\n")
    assert tool("site_tables").updated(path, path.parent).splitlines() == [
        "<!-- figures: cpu-abacus gb_per_s 256 -->",
        "| | isograd | a |",
        "|---|---:|---:|",
        "| softmax, float32, 8 x 256, axis 1 | 3.00 | 2.00 |",
        "",
        "In GB/s, measured on Abacus, recorded on 2026-01-02 ([file](benchmarks/results/cpu-abacus.json)).",
        "<!-- end of figures -->",
    ]


def test_a_share_has_a_column_for_each_problem(tool, repository):
    path = repository("<!-- figures: cpu-abacus others -->\n<!-- end of figures -->\n")
    lines = tool("site_tables").updated(path, path.parent).splitlines()
    assert lines[1:4] == ["| | 256 | 8 x 4 x 9, axis 1 |", "|---|---:|---:|", "| softmax, float32 | 1.50 | 0.50 |"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "<!-- figures: cpu-abacus gb_per_s -->\n| 7 |\n<!-- end of figures -->\n",
            "other figures than benchmarks/results",
        ),
        ("<!-- figures: cpu-abacus gb_per_s -->\n", "has no `<!-- end of figures -->`"),
        ("<!-- figures: cpu-abacus -->\n<!-- end of figures -->\n", "names a file and a unit"),
        ("<!-- figures: cpu-abacus ms -->\n<!-- end of figures -->\n", "asks for ms of cpu-abacus, which has none"),
        ("<!-- figures: cpu-other ms -->\n<!-- end of figures -->\n", "no benchmarks/results/cpu-other.json"),
        ("It moves 3.1 TB/s.\n", "not generated: It moves 3.1 TB/s."),
        ("It is 1.5 times as fast.\n", "not generated"),
        ("It takes 40 % more.\n", "not generated"),
    ],
)
def test_figures_that_are_stale_or_typed_are_found(tool, repository, text, message):
    tables = tool("site_tables")
    path = repository(text)
    with pytest.raises(tables.StaleFiguresError, match=message):
        tables.require_current(path, path.parent)


def test_code_may_have_figures(tool, repository):
    path = repository("```text\n3.1 TB/s\n```\n\nTwo rows of 256.\n")
    tool("site_tables").require_current(path, path.parent)


@pytest.mark.parametrize(
    "text",
    ['{"a": 1, "machine": {"cpu": "b"}}', '{\n "environment": {\n  "device": "b"\n }\n}', '{\n "device": "b"\n}'],
)
def test_a_file_without_a_day_gets_one(tool, text):
    update = tool("update_figures")
    dated = update.dated(text, "2026-01-02")
    content = json.loads(dated)
    where = tool("site_results").about(content)
    assert where.pop("recorded") == "2026-01-02"
    assert content == json.loads(text)
    assert dated.count("\n") in (text.count("\n"), text.count("\n") + 1)


def test_a_line_of_the_readme_needs_its_row_and_isograd(tool, tmp_path):
    overview = tool("site_overview")
    line = overview.LINES[0]._replace(chosen=lambda row: row["what"] == "b")
    with pytest.raises(ValueError, match="has no row for the README's line"):
        overview._figures(line, {"results": [{"what": "a"}]})
    with pytest.raises(ValueError, match=r"has no 'isograd' for .*, but torch"):
        overview._figures(line, {"results": [{"what": "b", "terabytes_per_second": {"torch": 1.0}}]})
