"""Small attention problems with every option, for the tests of isograd.torch."""

import torch

_BOTH = {"causal": True, "window": (2, None), "softcap": 1.5, "sinks": True, "dropout_p": 0.2, "seed": 3}
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "upper_left": {"causal": True, "alignment": "upper_left"},
    "window": {"window": (1, 1)},
    "left_window": {"window": (2, None), "causal": True},
    "scale": {"scale": 0.5},
    "softcap": {"softcap": 0.7},
    "bias": {"bias": (1, 2, 3, 5)},
    "bias_of_keys": {"bias": (2, 1, 1, 5), "softcap": 2.0},
    "bias_of_heads": {"bias": (2, 1, 1)},
    "mask": {"mask": True},
    "segment_ids": {"segment_ids": True, "causal": True},
    "cu_seqlens": {"cu_seqlens": True, "causal": True},
    "sinks": {"sinks": True},
    "dropout": {"dropout_p": 0.4, "seed": (1 << 64) - 12345},
    "dropout_packed": {"dropout_p": 0.4, "seed": 7, "cu_seqlens": True},
    "everything": {"scale": 0.3, "bias": (2, 1, 3, 5), "mask": True, "segment_ids": True, **_BOTH},
    "everything_packed": {"cu_seqlens": True, **_BOTH},
}
NAMES = list(OPTIONS)


def tensors(dtype=torch.float64, batch=2, heads=(2, 1), lengths=(3, 5), dims=(16, 24), seed=0, layout="BHLD"):
    """q, k and v."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads[0], lengths[0], dims[0]), (heads[1], lengths[1], dims[0]), (heads[1], lengths[1], dims[1]))
    made = [torch.randn(batch, *shape, generator=generator).to(dtype) for shape in shapes]
    return [x.transpose(1, 2).contiguous() for x in made] if layout == "BLHD" else made


def problem(name, dtype=torch.float64, seed=0):
    """(q, k, v, bias or None, sinks or None) and a dict of the other arguments."""
    options = dict(OPTIONS[name])
    generator = torch.Generator().manual_seed(seed + 1)
    packed = options.pop("cu_seqlens", False)
    q, k, v = tensors(dtype, batch=1 if packed else 2, lengths=(6, 6) if packed else (3, 5), seed=seed)
    if packed:  # an empty sequence, one without keys, rows of none
        ends = [[0, 2, 2, 4, 5], [0, 3, 4, 4, 5]]
        options["cu_seqlens"] = tuple([torch.tensor(e, dtype=torch.int32) for e in ends])
    bias = options.pop("bias", None)
    if bias is not None:
        bias = torch.randn(bias, generator=generator).to(dtype)
        bias[..., 1:2] = -torch.inf if bias.shape[-1] > 1 else 0.5
    sinks = torch.randn(2, generator=generator).to(dtype) if options.pop("sinks", False) else None
    if options.pop("mask", False):
        mask = torch.rand(2, 1, 3, 5, generator=generator) < 0.6
        mask[1, :, 1] = False  # a row that sees nothing
        options["mask"] = mask
    if options.pop("segment_ids", False):
        ids = [[0, 0, 1], [2, 1, 9]], [[0, 0, 0, 1, 1], [1, 1, 2, 2, 2]]
        options["segment_ids"] = tuple([torch.tensor(i, dtype=torch.int32) for i in ids])
    return (q, k, v, bias, sinks), options


def call(function, options):
    """The function of those tensors of a problem that are there, and these tensors."""

    def of(q, k, v, bias=None, sinks=None):
        return function(q, k, v, bias=bias, sinks=sinks, **options)

    return of
