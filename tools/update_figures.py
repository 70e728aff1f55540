"""Write the tables of figures in README, `docs` and `benchmarks/README.md` from `benchmarks/results`.

    python tools/update_figures.py [--check]

A file of results that does not say when it was recorded gets the day of its last commit, or today's. `--check` writes
nothing, and fails where a table has other figures than the files, or a text has a figure that is not in a table.
"""

from __future__ import annotations

import datetime
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools/site"))

import site_results  # noqa: E402
import site_tables  # noqa: E402

_ABOUT = re.compile(r'"(?:environment|machine)":\s*\{|\A\{')


def dated(text: str, day: str) -> str:
    """A file of results that says on which day it was recorded; everything else stays as it is written."""
    places = sorted(_ABOUT.finditer(text), key=lambda found: found[0] == "{")  # the file itself where it has neither
    end = places[0].end()
    space = re.match(r"\s*", text[end:])
    assert space is not None
    new = f'{text[:end]}{space[0]}"recorded": {json.dumps(day)},{space[0] or " "}{text[end:].lstrip()}'
    assert site_results.about(json.loads(new))["recorded"] == day
    return new


def _day(path: Path) -> str:
    """The day of a file's last commit; today where it has none, or was changed since."""
    name = str(path.relative_to(ROOT))
    try:
        changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", name], cwd=ROOT, check=False).returncode
        command = ["git", "log", "-1", "--format=%as", "--", name]
        day = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        changed, day = 1, ""
    return day if day and not changed else datetime.date.today().isoformat()


def main() -> None:
    """The script."""
    check = "--check" in sys.argv[1:]
    for path in sorted((ROOT / "benchmarks/results").glob("*.json")):
        text = path.read_text(encoding="utf-8")
        if not check and "recorded" not in site_results.about(json.loads(text)):
            path.write_text(dated(text, _day(path)), encoding="utf-8")
    for path in site_tables.texts(ROOT):
        try:
            if not check:
                path.write_text(site_tables.updated(path, ROOT), encoding="utf-8")
            site_tables.require_current(path, ROOT)
        except ValueError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
