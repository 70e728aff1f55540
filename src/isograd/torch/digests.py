"""SHA-256 digests of whatever a module takes or returns."""

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class Leaf(NamedTuple):
    """One value: where it is within the whole, its type and shape, and its digest, or why there is none."""

    path: str
    value: str
    sha256: str | None
    unseen: str | None = None


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
_DEEPEST = 16  # levels of containers, which may hold themselves


class _Unseen(Exception):  # noqa: N818 - an answer, not an error
    """There are no bytes to read."""


def walk(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """What is in nested tuples, lists, mappings and dataclasses, with its place in them."""
    items: Iterable[tuple[str, Any]]
    if depth == _DEEPEST or isinstance(value, (Tensor, torch.Size)):
        yield path, value
        return
    if isinstance(value, Mapping):
        items = [(f"[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, (tuple, list)):
        items = [(f"[{i}]", item) for i, item in enumerate(value)]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(f".{f.name}", getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    else:
        yield path, value
        return
    for step, item in items:
        yield from walk(item, path + step, depth + 1)


def leaves(value: Any) -> Iterator[Leaf]:
    """The digest of everything in a value; of objects that are neither tensors nor numbers, the type alone."""
    for path, item in walk(value):
        name = type(item).__name__
        if isinstance(item, Tensor):
            yield tensor(item, path)
        elif isinstance(item, _PLAIN):
            text = item.hex() if type(item) is float else repr(item)
            yield Leaf(path, name, hashlib.sha256(f"{name} {text}".encode()).hexdigest())
        else:
            yield Leaf(path, name, None, "not a tensor, a number, or a container of them")


def tensor(value: Tensor, path: str = "") -> Leaf:
    """The digest of a tensor: over type, shape and bytes; of a sharded one, over the part that is here.

    Waits for the device. Modes of torch's are off meanwhile.
    """
    sha = hashlib.sha256()
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.no_grad():
        try:
            described = _add(sha, value)
        except (_Unseen, RuntimeError, NotImplementedError) as error:
            text = str(error).partition("\n")[0]
            return Leaf(path, f"{_name(value.dtype)}{list(value.shape)}", None, text)
    return Leaf(path, described, sha.hexdigest())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _add(sha: Any, value: Tensor) -> str:
    """Add a tensor to a digest; its description."""
    while torch._C._functorch.is_functorch_wrapped_tensor(value):  # of vmap or grad
        value = torch._C._functorch.get_unwrapped(value)
    described = f"{_name(value.dtype)}{list(value.shape)}"
    if hasattr(value, "trigger_wait"):  # a collective's result that may not be there yet
        value = value.trigger_wait()
    if is_traceable_wrapper_subclass(value):
        described += f" {type(value).__name__}"
        placements = getattr(value, "placements", None)
        if placements is not None:
            described += f"{list(placements)}"
        sha.update(described.encode())
        for attribute in value.__tensor_flatten__()[0]:  # a DTensor has a mesh among them
            if isinstance(part := getattr(value, attribute), Tensor):
                _add(sha, part)
        return described
    if value.layout in _SPARSE:
        sha.update(f"{described} {value.layout}".encode())
        for part in _SPARSE[value.layout]:
            _add(sha, getattr(value, part)())
        return f"{described} {value.layout}"
    sha.update(described.encode())
    sha.update(_bytes(value))
    return described


def _bytes(value: Tensor) -> memoryview:
    if value.is_meta or type(value).__name__ in ("FakeTensor", "FunctionalTensor"):
        raise _Unseen("a tensor without contents")
    if value.is_cuda and torch.cuda.is_current_stream_capturing():
        raise _Unseen("a CUDA graph is being captured")
    plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().data
