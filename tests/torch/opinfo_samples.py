"""Torch's own samples (OpInfo) judge isograd's operators: values, gradients, second derivatives, error inputs."""

import numpy as np
import pytest
import torch

pytest.importorskip("torch.testing._internal.common_methods_invocations", reason="needs torch's OpInfo database")
from torch.testing._internal.common_methods_invocations import op_db

import isograd as ig
from isograd.core import arrays

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def numpy(tensor):
    """A tensor as NumPy sees it."""
    return arrays.numpy_view(tensor.detach())


def same_bits(tensor, other):
    """Whether a tensor has the bits of an array or of another tensor, both in C order."""
    array = numpy(other.contiguous()) if isinstance(other, torch.Tensor) else np.ascontiguousarray(other)
    return numpy(tensor.contiguous()).tobytes() == array.tobytes()


def entry(name, variant=""):
    """Torch's entry for an operation."""
    (found,) = [op for op in op_db if (op.name, op.variant_test_name) == (name, variant)]
    return found


def sample_inputs(name, dtype, stride=1):
    """Every stride-th sample; a sample's tensors require gradients where torch differentiates them."""
    return list(entry(name).sample_inputs("cpu", dtype, requires_grad=True))[::stride]


def tensors_of(sample):
    """The tensors of a sample that require gradients."""
    values = (sample.input, *sample.args, *sample.kwargs.values())
    return [v for v in values if isinstance(v, torch.Tensor) and v.requires_grad]


def wide(sample):
    """The same sample in float64."""

    def widen(value):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.detach().double().requires_grad_(value.requires_grad)
        return value

    return sample.transform(widen)


def spread(sample):
    """The same sample with gaps between the elements of its tensors, in reverse order of dimensions."""

    def spread_out(value):
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        memory = torch.empty([2 * s for s in reversed(value.shape)], dtype=value.dtype)
        view = memory[tuple(slice(None, None, 2) for _ in value.shape)].permute(*reversed(range(value.dim())))
        view.copy_(value.detach())
        return view.requires_grad_(value.requires_grad)

    return sample.transform(spread_out)


def apply(function, sample):
    """A function of a sample, as torch's test suite calls it."""
    return function(sample.input, *sample.args, **sample.kwargs)


def assert_close(got, exact, dtype, ulps, scale=None):
    """Within `ulps` units of the last place of the scale (by default of the largest value) of an exact result."""
    assert got.shape == exact.shape
    if got.numel() == 0:
        return
    reach = exact.detach().abs().nan_to_num().max() if scale is None else scale
    bound = ulps * torch.finfo(dtype).eps * max(1.0, float(reach))
    torch.testing.assert_close(got.detach().double(), exact.detach().double(), equal_nan=True, rtol=0, atol=bound)


def check(function, name, sample, variant, ulps, exact=False):
    """Compare a function of a variant of a sample (the same values, another layout) with torch's of the sample.

    Shape and dtype are torch's; values and gradients are within ulps of torch's in float64.
    """
    op = entry(name)
    dtype = sample.input.dtype if sample.input.is_floating_point() else sample.args[0].dtype
    wider = wide(sample)
    got, expected, ideal = apply(function, variant), apply(op, sample), apply(op, wider)
    assert (got.shape, got.dtype, got.requires_grad) == (expected.shape, expected.dtype, expected.requires_grad)
    if exact:
        assert torch.equal(got, expected)
    assert_close(got, ideal, dtype, ulps)
    if not got.requires_grad:
        return
    dy = torch.randn(got.shape, generator=torch.Generator().manual_seed(1)).to(got.dtype)
    ours = torch.autograd.grad(got, tensors_of(variant), dy, allow_unused=True)
    theirs = torch.autograd.grad(ideal, tensors_of(wider), dy.double(), allow_unused=True)
    for a, b, leaf in zip(ours, theirs, tensors_of(variant), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype is leaf.dtype
            assert_close(a, b, dtype, ulps, scale=dy.abs().sum() + b.abs().max() if b.numel() else 1)


def check_derivatives(function, sample, forward=True, second=True):
    """First and second derivatives of a float64 sample."""
    leaves = tensors_of(sample)
    names = {id(leaf): i for i, leaf in enumerate(leaves)}

    def of_leaves(*values):
        def replaced(value):
            return values[names[id(value)]] if isinstance(value, torch.Tensor) and id(value) in names else value

        return apply(function, sample.transform(replaced))

    assert torch.autograd.gradcheck(of_leaves, leaves, check_forward_ad=forward, check_batched_grad=True)
    if second:
        assert torch.autograd.gradgradcheck(of_leaves, leaves, check_fwd_over_rev=forward)


def check_error_inputs(function, name):
    """What is an error to torch is one of isograd's, or of Python's where torch's argument does not exist."""
    op = entry(name)
    count = 0
    for error in op.error_inputs("cpu") if op.error_inputs_func else ():
        with pytest.raises((ig.IsogradError, TypeError)):
            apply(function, error.sample_input)
        count += 1
    return count
