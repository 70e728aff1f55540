"""`isograd doctor`: what is installed, which devices, caches and threads there are, and what to do about it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

import isograd
from isograd.cli.measure import cpu_model
from isograd.cli.progress import output_console
from isograd.devices import cuda, metal, mlx_kernel
from isograd.runtime import parallel

PACKAGES = ("numpy", "numba", "llvmlite", "ml_dtypes", "torch", "triton", "transformers", "mlx")
# Settings under which kernels are slow or have other bits, and what comes of them.
SETTINGS = {
    "NUMBA_DISABLE_JIT": "CPU kernels cannot run; unset it",
    "NUMBA_CPU_NAME": "CPU kernels are compiled for another processor: the bits are the same, the speed is not",
    "TRITON_INTERPRET": "GPU kernels run in Triton's interpreter, in Python; unset it",
    "PYTORCH_MPS_FAST_MATH": "torch compiles Metal to other arithmetic, so isograd does not run on `mps`; unset it",
}
_OFF = ("", "0")


class Cache(NamedTuple):
    """A folder of compiled kernels: for which device, where, how many files and bytes; what is wrong with it."""

    device: str
    folder: Path
    files: int
    size: int
    problem: str | None


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print a machine-readable report.")] = False,
) -> None:
    """Show what is installed here, which devices, caches and threads there are, and what to do about it.

    Exit status: 0 where nothing has to be done, 1 where something has.
    """
    report = examined()
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        output_console().print("\n".join(_lines(report)), markup=False, highlight=False, soft_wrap=True)
    if report["advice"]:
        raise typer.Exit(1)


def examined() -> dict[str, Any]:
    """All that the command says."""
    found = {name: version(name) for name in PACKAGES}
    caches = [_cache("cpu", _cpu_folder())]
    if found["triton"]:
        caches.append(_cache("cuda", _gpu_folder()))
    devices = {"cuda": cuda.unavailable(), "mps": metal.unavailable(), "mlx": mlx_kernel.unavailable()}
    advice = [*_old(found), *_settings(), *(f"{c.folder}: {c.problem}" for c in caches if c.problem)]
    if found["torch"] and not found["triton"] and devices["cuda"] == "triton is not installed":
        advice.append("torch sees a GPU, and isograd's kernels for it need triton: pip install triton")
    return {
        "isograd": isograd.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {cpu_model()}",
        "packages": found,
        "threads": parallel.get_num_threads(),
        "processors": os.cpu_count(),
        "devices": {"cpu": None, **devices},
        "caches": [c._asdict() | {"folder": str(c.folder)} for c in caches],
        "advice": advice,
    }


def version(package: str) -> str | None:
    """The installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", re.split(r"[+a-z]", text)[0])))


def _old(found: dict[str, str | None]) -> Iterator[str]:
    """Packages that are older than isograd's own metadata asks for."""
    try:
        wanted = importlib.metadata.requires("isograd") or []
    except importlib.metadata.PackageNotFoundError:  # a folder of sources alone
        wanted = []
    least = {m[1].replace("-", "_"): m[2] for line in wanted if (m := re.match(r"([\w-]+)>=([\d.]+)", line))}
    for name, have in found.items():
        if have and name in least and _numbers(have) < _numbers(least[name]):
            yield f"{name} {have} is older than isograd needs: pip install '{name}>={least[name]}'"


def _settings() -> Iterator[str]:
    for name, effect in SETTINGS.items():
        if os.environ.get(name, "") not in _OFF:
            yield f"{name} is set: {effect}"


def _cpu_folder() -> Path:
    named = os.environ.get("NUMBA_CACHE_DIR")
    if named:
        return Path(named)
    package = Path(isograd.__file__).parent
    if os.access(package, os.W_OK):
        return package
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numba"


def _gpu_folder() -> Path:
    named = os.environ.get("TRITON_CACHE_DIR")
    return Path(named) if named else Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton/cache"


def _cache(device: str, folder: Path) -> Cache:
    """What is in a folder. Code is loaded from it, so nobody else may write there."""
    ending = ".nbc" if device == "cpu" else ""
    sizes = []
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # a file that another process has just moved
                sizes += [os.stat(os.path.join(path, name)).st_size] if name.endswith(ending) else []
    there = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    problem = None
    if not (os.path.isdir(there) and os.access(there, os.W_OK)):
        problem = "cannot be written, so kernels are compiled in every process; name another folder"
    elif os.path.isdir(folder) and os.stat(folder).st_mode & stat.S_IWOTH:
        problem = "every user can write there, and code is loaded from it: chmod o-w"
    return Cache(device, folder, len(sizes), sum(sizes), problem)


def _lines(report: dict[str, Any]) -> Iterator[str]:
    yield f"isograd {report['isograd']}, Python {report['python']}, {report['machine']}"
    yield "packages"
    for name, have in report["packages"].items():
        yield f"  {name:<12}  {have or 'not installed'}"
    yield "devices"
    yield f"  {'cpu':<12}  {report['threads']} threads of {report['processors']} processors"
    for name, missing in report["devices"].items():
        if name != "cpu":
            yield f"  {name:<12}  {'no: ' + missing if missing else 'yes'}"
    yield "compiled kernels"
    for cache in report["caches"]:
        yield f"  {cache['device']:<12}  {cache['files']} files, {cache['size'] / 1e6:.1f} MB in {cache['folder']}"
    yield "what to do" if report["advice"] else "Nothing has to be done. `isograd verify` checks the bits."
    yield from (f"  {line}" for line in report["advice"])
