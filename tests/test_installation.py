"""The library as a process finds it: what an import brings along, where compiled code is kept, and on which CPU."""

import ctypes.util
import importlib.util
import os
import platform
import re
import shutil
import tomllib
from pathlib import Path

import pytest

import isograd

PACKAGE = Path(isograd.__file__).parent

# A digest over kernels of both walks, both directions, and three storage types.
DIGEST = """
import hashlib
import ml_dtypes
import numpy as np
import isograd as ig

def digest():
    rng = np.random.default_rng(70)
    total = hashlib.sha256()
    for function, dtype, shape, axis in (
        (ig.softmax, ml_dtypes.bfloat16, (300, 50), 0),
        (ig.log_softmax, np.float32, (5, 3000), 1),
        (ig.log_softmax_backward, np.float64, (5, 3000), 1),
    ):
        x = (30 * rng.standard_normal(shape)).astype(dtype)
        total.update(function(*((x, x) if function is ig.log_softmax_backward else (x,)), axis).tobytes())
    return total.hexdigest()
"""
# One kernel only, where a process has to compile it anew.
ONE = """
import hashlib
import numpy as np
import isograd as ig
dy, y = np.random.default_rng(71).standard_normal((2, 3, 200)).astype(np.float32)
print(hashlib.sha256(ig.log_softmax_backward(dy, y).tobytes()).hexdigest())
"""
KERNEL = "log_softmax_backward_rows"


@pytest.fixture(scope="module")
def right(run_python):
    return run_python(ONE)


@pytest.fixture
def package_copy(tmp_path):
    """The package's sources alone, in a folder of their own."""
    root = tmp_path / "site"
    shutil.copytree(PACKAGE, root / "isograd", ignore=shutil.ignore_patterns("__pycache__"))
    return root


def compiled_files(folder):
    return sorted(path.name for path in Path(folder).rglob("*.nbc"))


# --- imports --------------------------------------------------------------------------------------------------------
def test_import_and_numpy_calls_stay_light(run_python):
    code = """
    import sys
    import isograd
    heavy = {"torch", "triton", "mlx", "jax", "sklearn", "matplotlib", "typer", "rich"}
    print(sorted(heavy & set(sys.modules)))
    import numpy as np
    isograd.softmax_backward(np.ones((2, 3)), isograd.softmax(np.ones((2, 3))))
    isograd.kernels()
    print(sorted(heavy & set(sys.modules)))
    """
    assert run_python(code).splitlines() == ["[]", "[]"]


def test_everything_but_tensors_works_without_torch(run_python, right):
    absent = """
    import sys
    for name in ("torch", "triton", "mlx"):
        sys.modules[name] = None  # importing it raises ImportError
    """
    more = """
try:
    ig.SoftmaxPlan.select(ig.SoftmaxDescriptor((2, 3), "float32"), device="cuda")
except ig.UnsupportedError as error:
    print("torch is not installed" in str(error))
try:
    ig.softmax([1.0, 2.0])
except ig.InvalidProblemError as error:
    print("list" in str(error))
"""
    lines = run_python(absent.replace("\n    ", "\n") + ONE + more).splitlines()
    assert lines == [right, "True", "True"]


def test_the_oldest_versions_are_the_bounds():
    """`.ci/run` installs the package beside those of `oldest.txt`."""
    tests = Path(__file__).parent
    project = tomllib.loads((tests.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["torch"]]
    wanted += [line for line in extras["test"] if line.startswith(("accelerate", "transformers"))]
    bounds = dict(re.match(r"([\w-]+)>=([\d.]+)", line).groups() for line in wanted)
    pins = dict(line.split("==") for line in (tests / "oldest.txt").read_text().splitlines() if "==" in line)

    def padded(version):
        return (*map(int, version.split(".")), 0, 0)[:3]

    assert {name: padded(version) for name, version in pins.items()} == {
        name: padded(version) for name, version in bounds.items()
    }


def test_what_is_installed_beside_the_oldest_and_newest_versions_has_no_pin():
    spec = importlib.util.spec_from_file_location("try_versions", Path(__file__).parents[1] / "tools/try_versions.py")
    try_versions = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(try_versions)
    for choice in ("oldest", "newest"):
        wanted = try_versions.requirements(choice)
        assert not [line for line in wanted if "==" in line.split(";")[0] or "[isograd" in line]
        assert {re.match(r"[\w-]+", line)[0] for line in wanted} >= set(try_versions.names())


# --- other machines' instructions -----------------------------------------------------------------------------------
@pytest.mark.thorough
def test_a_cpu_without_wide_vectors_returns_the_same_bits(run_python):
    code = DIGEST + "print(digest())\nfrom numba.core.registry import cpu_target\n"
    code += "print(cpu_target.target_context.codegen()._tm_features)"
    namespace = {}
    exec(DIGEST, namespace)
    printed = run_python(code, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="").splitlines()
    assert printed[0] == namespace["digest"]()
    assert "+avx" not in printed[-1]
    assert "+fma" not in printed[-1]


# --- compiled code on disk ------------------------------------------------------------------------------------------
@pytest.mark.thorough
def test_compiled_code_is_kept_beside_the_sources_until_one_of_them_changes(run_python, right, package_copy):
    environment = {"PYTHONPATH": str(package_copy), "NUMBA_CACHE_DIR": None}
    assert run_python(ONE, **environment) == right
    names = compiled_files(package_copy)
    assert any(KERNEL in name for name in names)
    assert run_python(ONE, **environment) == right
    assert compiled_files(package_copy) == names
    # A device function changes; Numba alone looks at the kernel's own file, which stays as it is.
    source = package_copy / "isograd" / "numerics" / "numba_ops.py"
    changed = "\n\n_right = exp_parts_32\n\n\n@device_function\ndef exp_parts_32(d):\n"
    changed += "    s, t, z = _right(d)\n    return s, t + t, z\n"
    source.write_text(source.read_text() + changed)
    assert run_python(ONE, **environment) != right


def block_cache_folders(package):
    """Make the package's folders as useless for a cache as read-only ones, for root too: a file is in the way."""
    for folder in [package, *package.rglob("*")]:
        if folder.is_dir():
            (folder / "__pycache__").write_text("")


@pytest.mark.thorough
def test_a_read_only_package_keeps_compiled_code_in_the_users_folder(run_python, right, package_copy, tmp_path):
    block_cache_folders(package_copy / "isograd")
    home = tmp_path / "home"
    home.mkdir()
    environment = {"PYTHONPATH": str(package_copy), "NUMBA_CACHE_DIR": None, "HOME": str(home), "XDG_CACHE_HOME": None}
    assert run_python(ONE, **environment) == right
    assert compiled_files(package_copy) == []
    assert any(KERNEL in name for name in compiled_files(home))


@pytest.mark.thorough
def test_without_any_writable_folder_kernels_still_work(run_python, right, package_copy, tmp_path):
    block_cache_folders(package_copy / "isograd")
    (tmp_path / "file").write_text("")
    nowhere = str(tmp_path / "file" / "home")  # cannot be made, not even by root
    environment = {"PYTHONPATH": str(package_copy), "NUMBA_CACHE_DIR": None, "HOME": nowhere, "XDG_CACHE_HOME": nowhere}
    assert run_python(ONE, **environment) == right
    assert compiled_files(tmp_path) == []


def test_the_cache_key_holds_every_source_that_kernels_are_made_of(package_copy):
    def digest():
        path = package_copy / "isograd" / "runtime" / "numba_compile.py"
        specification = importlib.util.spec_from_file_location("copied_numba_compile", path)
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        return module._source_digest()

    before = digest()
    assert before == digest()
    package = package_copy / "isograd"
    for source in (
        "numerics/numba_ops.py",
        "numerics/constants.py",
        "rows/numba_exponentials.py",
        "ops/softmax/numba.py",
    ):
        text = (package / source).read_text()
        (package / source).write_text(text + "# changed\n")
        assert digest() != before, source
        (package / source).write_text(text)
    assert digest() == before


# --- the first call of a process under a foreign environment --------------------------------------------------------
@pytest.mark.thorough
@pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64", "aarch64", "arm64"), reason="values of fenv.h"
)
def test_importing_and_compiling_under_another_rounding_mode(run_python, right, tmp_path):
    # Constants are rounded when modules are imported and kernels compiled; both may happen inside a foreign call.
    upward = 0x800 if platform.machine().lower() in ("x86_64", "amd64") else 1 << 22
    # The inputs are made under the default mode, so that the library alone is in question.
    inputs = repr(str(tmp_path / "x.npy"))
    assert run_python(ONE + f"np.save({inputs}, [dy, y])") == right
    code = f"""
    import ctypes
    assert ctypes.CDLL({ctypes.util.find_library("m")!r}).fesetround({upward}) == 0
    import hashlib
    import numpy as np
    import isograd as ig
    print(hashlib.sha256(ig.log_softmax_backward(*np.load({inputs})).tobytes()).hexdigest())
    """
    cache = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    under_mode = run_python(code, **cache)
    later = run_python(ONE, **cache)  # what the first process left on disk
    assert (under_mode, later) == (right, right)
    assert os.listdir(tmp_path / "cache")
