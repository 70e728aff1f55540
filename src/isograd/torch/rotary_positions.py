"""Rotary positions of transformers' models: their sine and cosine, and attention that applies them by `rotary`."""

import functools
import inspect
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor

from isograd.errors import IsogradError, UnsupportedError
from isograd.rotary import rotary_table
from isograd.torch.exported import rotary
from isograd.torch.indexing import embedding

_APPLIED = "apply_rotary_pos_emb"  # the function that the modules of transformers call by this name
_forwards: dict[Any, Callable[..., Any]] = {}  # by class
_DIMENSIONS = {1: -2, 2: -3}  # of positions, by where transformers inserts one for heads


# torch.compile calls this while it traces, and would warn of a cache that it sees.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _tables(length: int, dim: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    return _made(length, dim, base, device)


@functools.lru_cache(maxsize=16)
def _made(length: int, dim: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    cos, sin = rotary_table(length, dim, base=base)
    return torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device)


def _base(config: Any) -> float:
    """The base of the angles: transformers 5 has it among the parameters of positions, 4 by itself."""
    parameters = getattr(config, "rope_parameters", None)
    return float(config.rope_theta if parameters is None else parameters["rope_theta"])


def wide_positions(m: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions from the table of `isograd.rotary_table`, whose halves are the same."""
    tables = _tables(m.config.max_position_embeddings, 2 * m.inv_freq.numel(), _base(m.config), x.device)
    cos, sin = (torch.cat([embedding(position_ids, half)] * 2, -1) * m.attention_scaling for half in tables)
    return cos, sin


def positions(m: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The same in the dtype of x."""
    cos, sin = wide_positions(m, x, position_ids)
    return cos.to(x.dtype), sin.to(x.dtype)


class NotRotatedError(UnsupportedError):
    """Queries or keys that are not served; nothing has been done with them yet."""


def _apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """What transformers' modules call: queries and keys, rotated; cos and sin have both halves."""
    pairs = q.shape[-1] // 2
    if unsqueeze_dim not in _DIMENSIONS or cos.shape[-1] != 2 * pairs:
        raise NotRotatedError(
            f"rotary: cos has shape {tuple(cos.shape)} for queries {tuple(q.shape)}; accepted: whole heads"
        )
    halves, dim = (cos[..., :pairs], sin[..., :pairs]), _DIMENSIONS[unsqueeze_dim]
    try:
        return rotary(q, *halves, dim=dim), rotary(k, *halves, dim=dim)
    except IsogradError as error:
        raise NotRotatedError(str(error)) from error


def applies(kind: Any) -> bool:
    """Whether the forward of a class calls transformers' function by its name; then there is another one for it."""
    found: bool = _APPLIED in inspect.unwrap(kind.forward).__code__.co_names
    if found:
        _forwards[kind] = _changed(kind.forward)
    return found


def attention(m: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of an attention module with rotary positions of isograd's."""
    kind: Any = type(m)
    if kind not in _forwards:  # a copy that was loaded in another process
        _forwards[kind] = _changed(kind.forward)
    return _forwards[kind](m, *args, **kwargs)


def _changed(function: Any) -> FunctionType:
    """A copy of a function, or of what a decorator made of one, with another function under the name."""
    inner = getattr(function, "__wrapped__", None)
    scope, cells = function.__globals__, function.__closure__
    if inner is None:
        scope = {**scope, _APPLIED: _apply}
    else:
        changed = _changed(inner)
        cells = tuple([CellType(changed) if cell.cell_contents is inner else cell for cell in cells or ()])
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
