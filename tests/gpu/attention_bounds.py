"""What the tests of attention on a GPU share: results as NumPy arrays, and the bound that plans promise."""

from typing import Any

import ml_dtypes
import numpy as np
import torch

from isograd.flash_attention import bounds, reference
from isograd.flash_attention.options import AttentionOptions

# With one visible key dS is 0, with two little is left of dP - D, whose D is made from the rounded o; a plain
# computation takes D from the same dP. There the promised bound has to hold, and not FlashAttention's rule.
FEW_KEYS = 2


def to_numpy(t: Any) -> Any:
    if t.dtype == torch.bfloat16:
        return t.cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return t.cpu().numpy()


def check_bound(found: dict[str, Any], options: AttentionOptions, name: str) -> None:
    """A gradient of a problem without further operands is within the plan's bound."""
    given = {x: to_numpy(found[x]) for x in ("do", "q", "k", "v", "o", "lse")}
    exact = reference.oracle_attention_backward(**given, options=options)
    limits = bounds.error_bound("attention_backward", narrowed=True)(**given, options=options)
    error = np.abs(to_numpy(found[name]).astype(np.float64) - getattr(exact, name))
    assert np.all(error <= limits[("dq", "dk", "dv").index(name)]), (name, options)
