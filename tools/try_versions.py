"""Run the default tests beside the oldest versions that pyproject.toml admits, or beside the newest that pip finds.

    python tools/try_versions.py oldest|newest [--python PYTHON] [--folder FOLDER] [PYTEST ARGUMENTS ...]

Makes an environment (`--folder` keeps it, and takes one that is there), installs the package with what its tests need,
and prints the versions for the table of CONTRIBUTING.md before the tests run. Needs some GB of disk: torch is large.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
OLDEST = ROOT / "tests/oldest.txt"
_VERSIONS = """
import importlib.metadata as m, platform
print("Python", platform.python_version(), *(f"{n} {m.version(n)}," for n in NAMES))
"""


def requirements(choice: str) -> list[str]:
    """What pip installs beside the package: its own requirements and those of its tests, and torch without a pin."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["demo"], *extras["mlx"], *extras["test"]]
    wanted = [r.replace("torch==", "torch>=") if r.startswith("torch==") else r for r in wanted]
    if choice == "oldest":  # the pin of the tests is newer than the oldest
        wanted = [re.sub(r">=[^;]*", "", r) if r.startswith("torch>=") else r for r in wanted]
    return [r for r in wanted if not r.startswith("isograd[")]


def names() -> list[str]:
    """The packages whose versions are of interest: those of `oldest.txt`."""
    return [line.split("==")[0] for line in OLDEST.read_text(encoding="utf-8").splitlines() if "==" in line]


def main() -> None:
    """The script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("choice", choices=("oldest", "newest"))
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--folder", type=Path)
    options, tests = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        python = str(folder / "bin/python")
        if not Path(python).exists():
            subprocess.run([options.python, "-m", "venv", str(folder)], check=True)
        constraints = ["-c", str(OLDEST)] if options.choice == "oldest" else ["--upgrade"]
        install = [python, "-m", "pip", "install", "--quiet", *constraints, *requirements(options.choice)]
        subprocess.run(install, check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "-e", str(ROOT)], check=True)
        subprocess.run([python, "-c", _VERSIONS.replace("NAMES", repr(names()))], check=True)
        sys.exit(subprocess.run([python, "-m", "pytest", *tests], cwd=ROOT, check=False).returncode)


if __name__ == "__main__":
    main()
