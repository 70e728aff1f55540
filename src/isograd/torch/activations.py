"""The derivatives of activations beyond the first, by torch's own functions."""

import math

import torch
from torch import Tensor


def derivatives(x: Tensor, form: str) -> tuple[Tensor, Tensor, Tensor]:
    """The activation and its first two derivatives."""
    z = x.clamp(-1024, 1024) if form == "silu" else x.clamp(-64, 64)  # no power overflows, and beyond nothing changes
    if form == "none":
        share = torch.special.ndtr(x)
        density = torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        return x * share, share + z * density, density * (2 - z * z)
    v, dv, ddv = z, torch.ones_like(z), torch.zeros_like(z)
    if form == "tanh":
        scale = math.sqrt(8 / math.pi)
        v, dv, ddv = scale * (z + 0.044715 * z**3), scale * (1 + 0.134145 * z * z), scale * 0.26829 * z
    s = torch.sigmoid(v)
    first = s * torch.sigmoid(-v)
    return x * s, s + z * first * dv, 2 * first * dv + z * first * ((1 - 2 * s) * dv * dv + ddv)
