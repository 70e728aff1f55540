"""The Metal text that MLX would compile for an Apple GPU: exported where there is none, and run in the emulator."""

from typing import Any

import numpy as np
import pytest
from choices import thorough
from emulator import FLUSHES, Library, library, needs_compiler
from problems import BFLOAT16, DTYPES, same_bits, stored

mx = pytest.importorskip("mlx.core", reason="needs mlx")

from isograd.cli.suites import SUITES, cases  # noqa: E402
from isograd.core import registry  # noqa: E402
from isograd.core.arrays import numpy_dtype as _numpy  # noqa: E402
from isograd.devices import metal  # noqa: E402
from isograd.devices.mlx_kernel import MetalKernel, dtype_name  # noqa: E402
from isograd.flash_attention.descriptors import AttentionBackwardDescriptor, AttentionDescriptor  # noqa: E402
from isograd.flash_attention.metal import MetalAttention  # noqa: E402
from isograd.flash_attention.options import AttentionOptions  # noqa: E402
from isograd.gather.plans import TakeAlongAxisBackwardDescriptor, TakeAlongAxisDescriptor  # noqa: E402
from isograd.ops.router.operation import MoeRouterDescriptor  # noqa: E402
from isograd.ops.softmax.operation import SoftmaxDescriptor  # noqa: E402

pytestmark = needs_compiler
_ALL = sorted({e.operation for e in registry.kernels() if e.device == "mlx" and isinstance(e.kernel, MetalKernel)})
BOUNDED = ("attention", "attention_backward")  # their bits are their own
OPERATIONS = [operation for operation in _ALL if operation not in BOUNDED]


@pytest.fixture(autouse=True)
def apple(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which MLX could run Metal kernels."""
    monkeypatch.setattr("isograd.devices.mlx_kernel.metal_unavailable", lambda: None)


def _mlx(array: np.ndarray[Any, Any]) -> Any:
    array = np.array(array, order="C")
    return mx.array(array.view(np.uint16)).view(mx.bfloat16) if array.dtype == BFLOAT16 else mx.array(array)


_VIEWS = {"bfloat16": BFLOAT16}


def _numpy_type(dtype: Any) -> np.dtype[Any]:
    name = str(dtype).rpartition(".")[2]
    return _VIEWS.get(name, np.dtype(name if name != "bool" else "?"))


class Graph:
    """An exported function: which primitives make which arrays from which."""

    def __init__(self, function: Any, *arrays: Any) -> None:
        self.inputs: list[str] = []
        self.outputs: list[str] = []
        self.constants: dict[str, np.ndarray[Any, Any]] = {}
        self.primitives: list[dict[str, Any]] = []
        mx.export_function(self._note, function, *arrays)

    def _note(self, part: dict[str, Any]) -> None:
        if part["type"] in ("inputs", "outputs"):
            setattr(self, part["type"], [name for name, *_ in part[part["type"]]])
        elif part["type"] == "constants":
            self.constants = {name: np.array(value) for name, value in part["constants"]}
        elif part["type"] == "primitive":
            self.primitives.append(part)

    @property
    def sources(self) -> list[str]:
        """The Metal texts."""
        return [p["arguments"][1] for p in self.primitives if p["name"] == "CustomKernel"]

    def run(self, seed: int, *arrays: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """Evaluate, kernels in the emulator."""
        values = self.constants | dict(zip(self.inputs, arrays, strict=True))
        for primitive in self.primitives:
            given = [values[name] for name, *_ in primitive["inputs"]]
            made = primitive["outputs"]
            if primitive["name"] == "CustomKernel":
                results = self._kernel(primitive["arguments"], given, made, seed)
            elif primitive["name"] == "Transpose":
                results = [np.transpose(given[0], primitive["arguments"][0])]
            else:
                assert primitive["name"] == "View"
                results = [given[0].view(_numpy_type(made[0][2]))]
            values |= {name: value for (name, *_), value in zip(made, results, strict=True)}
        return [np.ascontiguousarray(values[name]) for name in self.outputs]

    @staticmethod
    def _kernel(arguments: list[Any], given: list[Any], made: list[Any], seed: int) -> list[np.ndarray[Any, Any]]:
        name, source, grid, _, _, size, *_ = arguments
        contiguous = [np.ascontiguousarray(a) for a in given]
        results = [np.zeros(shape, _numpy_type(dtype)) for _, shape, dtype in made]
        compiled: Library = library(source, ("-O0",))
        compiled.run(name, *contiguous, *results, threads=grid, group_size=size, seed=seed, flush=FLUSHES)
        return results


def _graph(descriptor: Any, **inputs: np.ndarray[Any, Any]) -> Graph:
    checked = descriptor.validated()
    kernel = registry.find_kernel(checked, "mlx", None)
    assert isinstance(kernel, MetalKernel)
    names = list(inputs)
    arrays = [_mlx(a) for a in inputs.values()]
    for operand, array in zip(checked.operands(), arrays, strict=False):
        assert operand.dtype == dtype_name(array)
    return Graph(lambda *a: kernel.evaluate(checked, dict(zip(names, a, strict=True))), *arrays)


def _small(operation: str, dtype: str) -> list[Any]:
    """Cases without empty arrays or large ones."""
    sizes = [(case, [a.size for a in case.inputs.values()]) for case in cases(operation, dtype)]
    return [case for case, size in sizes if min(size) > 0 and max(size) <= 8000]


@pytest.mark.parametrize(("operation", "dtype"), [(o, DTYPES[i % 3]) for i, o in enumerate(OPERATIONS)])
def test_bits_of_the_exported_kernels(operation: str, dtype: str) -> None:
    suite = SUITES[operation]
    found = _small(operation, dtype)
    for number, case in enumerate(found[:: max(len(found) // 3, 1)]):
        inputs = {name: np.array(a, order="C") for name, a in case.inputs.items()}
        expected = suite.reference(**case.inputs, **{n: v for n, v in case.options.items() if n != "unique_indices"})
        graph = _graph(suite.descriptor(case, dtype), **inputs)
        got = graph.run(number % 4, *inputs.values())
        for result, wanted in zip(got, expected if isinstance(expected, tuple) else (expected,), strict=True):
            assert same_bits(result, np.ascontiguousarray(wanted)), case.name


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_text_passes_the_strict_compiler(operation: str) -> None:
    """MLX puts inputs of fewer than eight elements into constant memory, others into device memory."""
    pytest.importorskip("clang.cindex", reason="needs libclang")
    from strict_pass import complaints

    suite = SUITES[operation]
    small = sorted(_small(operation, "float16"), key=lambda case: max(a.size for a in case.inputs.values()))
    for case in (small[0], small[-1]):
        (source,) = _graph(suite.descriptor(case, "float16"), **case.inputs).sources
        assert source.isascii()
        assert complaints(source) == []
    inputs = [a.size for a in small[0].inputs.values()]
    spaces = source_spaces(_graph(suite.descriptor(small[0], "float16"), **small[0].inputs).sources[0])
    assert spaces[: len(inputs)] == ["constant" if size < 8 else "device" for size in inputs]


def source_spaces(source: str) -> list[str]:
    """The address space of every buffer of the kernel that MLX wrote."""
    signature = source[source.rindex("[[kernel]] void custom_kernel") :]
    return [line.split()[line.split()[0] == "const"] for line in signature.splitlines() if "[[buffer(" in line]


def _attention(shape: tuple[int, ...], dtype: str) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    """Inputs of the backward, and the descriptor's fields, for queries q and keys k of some lengths."""
    batch, heads, n, m, dim = shape
    rng = np.random.default_rng(dim)
    sizes = {"do": (heads, n), "q": (heads, n), "k": (1, m), "v": (1, m), "o": (heads, n)}
    inputs = {name: stored(rng.standard_normal((batch, *size, dim)), dtype) for name, size in sizes.items()}
    inputs["lse"] = (5 + rng.standard_normal((batch, heads, n))).astype(np.float32)
    inputs["dlse"] = rng.standard_normal((batch, heads, n)).astype(np.float32)
    names = ("batch", "heads", "kv_heads", "q_length", "k_length", "head_dim", "v_dim", "dtype")
    fields = dict(zip(names, (batch, heads, 1, n, m, dim, dim, dtype), strict=True))
    return inputs, fields | {"options": AttentionOptions(causal=True)}


@pytest.mark.parametrize(
    ("shape", "dtype"), [((1, 2, 3, 5, 64), "float32"), thorough((2, 2, 20, 40, 128), "bfloat16")], ids=str
)
def test_attention(shape: tuple[int, ...], dtype: str) -> None:
    """The bits that PyTorch's launcher has, also where lse is in constant memory."""
    pytest.importorskip("clang.cindex", reason="needs libclang")
    from emulated import run
    from problems import array, tensor
    from strict_pass import complaints

    inputs, fields = _attention(shape, dtype)
    for make, names in ((AttentionDescriptor, ("q", "k", "v")), (AttentionBackwardDescriptor, tuple(inputs))):
        descriptor = make(**fields) if make is AttentionDescriptor else make(**fields, dlse=True)
        given = {name: inputs[name] for name in names}
        graph = _graph(descriptor, **given)
        for source in graph.sources:
            assert complaints(source) == []
        outputs = {o.name: tensor(np.zeros(o.shape, _numpy(o.dtype))) for o in descriptor.operands() if o.output}
        compiled = library(metal.source("flash_attention"), ("-O0",))
        run(
            MetalAttention(),
            descriptor,
            1,
            FLUSHES,
            compiled,
            **{name: tensor(a) for name, a in given.items()},
            **outputs,
        )
        for got, wanted in zip(graph.run(2, *given.values()), outputs.values(), strict=True):
            assert same_bits(got, array(wanted))


@pytest.mark.parametrize("operation", _ALL)
def test_what_the_kernels_promise(operation: str) -> None:
    case = cases(operation, "float32")[0]
    descriptor = SUITES[operation].descriptor(case, "float32").validated()
    sku = registry.find_kernel(descriptor, "mlx", None).sku(descriptor)
    assert (sku.backend, sku.arch) == ("metal", "apple")
    assert sku.precision_guarantee.deterministic
    assert sku.precision_guarantee.bit_stable_across_hardware == operation.startswith("take_along_axis")


def test_nothing_to_compute_and_nothing_to_take_from() -> None:
    def evaluated(descriptor: Any, **inputs: Any) -> list[Any]:
        checked = descriptor.validated()
        results = registry.find_kernel(checked, "mlx", None).evaluate(checked, inputs)
        return [np.array(r).tolist() for r in results]

    none, places = mx.zeros((2, 0)), mx.zeros((2, 0), dtype=mx.int64)
    assert evaluated(SoftmaxDescriptor((2, 0), "float32", 0), x=none) == [[[], []]]
    take = TakeAlongAxisDescriptor((2, 3), (2, 0), "float32")
    assert evaluated(take, x=mx.zeros((2, 3)), indices=places) == [[[], []]]
    add = TakeAlongAxisBackwardDescriptor((2, 3), (2, 0), "float32")
    assert evaluated(add, indices=places, dv=none) == [[[0, 0, 0]] * 2]
    assert evaluated(MoeRouterDescriptor((0, 3), 2, "float32"), logits=mx.zeros((0, 3))) == [[], []]
    q, k = mx.zeros((1, 1, 2, 16)), mx.zeros((1, 1, 0, 16))
    o, lse = evaluated(AttentionDescriptor(1, 1, 1, 2, 0, 16, 16, "float32"), q=q, k=k, v=k)
    assert not np.any(o)
    assert lse == [[[-np.inf] * 2]]
    empty, places = np.zeros((2, 0), np.float16), np.zeros((2, 3), np.int64)
    graph = _graph(TakeAlongAxisDescriptor((2, 0), (2, 3), "float16"), x=empty, indices=places)
    assert np.isnan(graph.run(0, empty, places)[0]).all()


def test_an_axis_that_is_not_the_last_one_is_moved() -> None:
    from isograd.ops.softmax import reference

    x = stored(np.random.default_rng(1).standard_normal((9, 5)), "bfloat16")
    graph = _graph(SoftmaxDescriptor((9, 5), "bfloat16", 0), x=x)
    assert [p["name"] for p in graph.primitives] == ["Transpose", "CustomKernel", "Transpose"]
    assert same_bits(graph.run(0, x)[0], reference.softmax(x, 0))
