"""torch's own samples (OpInfo) for softmax and log_softmax: values, gradients, layouts, errors."""

import itertools
import warnings

import numpy as np
import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch

pytest.importorskip("torch.testing._internal.common_methods_invocations", reason="needs torch's OpInfo database")
from torch.testing._internal.common_methods_invocations import op_db

import isograd as ig
import isograd.torch as igt
from isograd.core import arrays
from isograd.ops.softmax import bounds, reference

CALLS = {
    "softmax": igt.softmax,
    "log_softmax": igt.log_softmax,
}
ENTRIES = [op for op in op_db if op.name in CALLS]
CASES = [(op, dtype) for op in ENTRIES for dtype in sorted(op.supported_dtypes("cpu"), key=str)]
STORED = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def test_there_are_entries():
    assert {(op.name, op.variant_test_name) for op in ENTRIES} >= set(itertools.product(CALLS, ("", "with_dtype")))


def compare(got, expected, wide, name, axis):
    """Within the stated bound of the exact value, and as close to torch's result as torch's rounding allows."""
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    if got.numel() == 0:
        return
    dtype = str(got.dtype).removeprefix("torch.")
    x = wide.numpy().reshape(1) if wide.dim() == 0 else wide.numpy()
    exact = getattr(reference, f"oracle_{name}")(x, axis)
    bound = getattr(bounds, name)(dtype, x, axis)
    values = got.detach().double().numpy().reshape(exact.shape).astype(np.longdouble)
    error = np.abs(values - exact)
    assert np.all((error <= bound) | np.isnan(exact)), (error / bound).max()
    # torch's log_softmax of 16 bits loses small results beside large ones, so the difference is measured absolutely.
    atol = torch.finfo(got.dtype).eps * max(1.0, float(np.abs(x).max()))
    torch.testing.assert_close(got.detach(), expected.detach(), equal_nan=True, atol=atol, rtol=2 * atol)


@pytest.mark.parametrize(("op", "dtype"), CASES, ids=lambda v: getattr(v, "formatted_name", str(v)))
def test_values_and_gradients(op, dtype):
    call = CALLS[op.name]
    gradients = dtype in STORED
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # discarding imaginary parts, as torch's own call does
        for sample in op.sample_inputs("cpu", dtype, requires_grad=gradients):
            for x in (sample.input, _spread(sample.input)):
                check(op, call, x, sample, gradients)


def _spread(x):
    """The same values with gaps between them, in reverse order of dimensions."""
    if x.dim() == 0:
        return x
    wide = torch.empty([2 * s for s in reversed(x.shape)], dtype=x.dtype)
    view = wide[tuple(slice(None, None, 2) for _ in x.shape)].permute(*reversed(range(x.dim())))
    view.copy_(x.detach())
    return view.requires_grad_(x.requires_grad)


def check(op, call, x, sample, gradients):
    args, kwargs = sample.args, sample.kwargs
    target = kwargs.get("dtype") or (args[1] if len(args) > 1 else None) or x.dtype
    if target not in STORED:
        with pytest.raises(ig.UnsupportedError):
            call(x, *args, **kwargs)
        return
    got, expected = call(x, *args, **kwargs), op(x, *args, **kwargs)
    axis = kwargs.get("dim", args[0] if args else None)
    converted = x.detach().to(target)
    compare(got, expected, converted.double() if target is not torch.float64 else converted, op.name, axis)
    assert got.requires_grad == expected.requires_grad
    if not gradients:
        return
    dy = torch.randn(got.shape, generator=torch.Generator().manual_seed(1)).to(got.dtype)
    for gradient in (dy, torch.ones((), dtype=got.dtype).expand(got.shape)):
        (ours,) = torch.autograd.grad(got, x, gradient, retain_graph=True)
        (theirs,) = torch.autograd.grad(expected, x, gradient, retain_graph=True)
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        # The two subtract a sum from dy: what is left carries the rounding of the sum's terms, and torch's that of y.
        unit = torch.finfo(min((got.dtype, x.dtype), key=lambda d: torch.finfo(d).bits)).eps
        scale = gradient.abs().sum(axis, keepdim=True).double() + 1 if got.dim() else 2.0
        assert torch.all((ours.double() - theirs.double()).abs() <= 4 * unit * scale)


@pytest.mark.parametrize("op", ENTRIES, ids=lambda op: op.formatted_name)
def test_out(op):
    for sample in op.sample_inputs("cpu", torch.float32):
        expected = CALLS[op.name](sample.input, *sample.args, **sample.kwargs)
        out = torch.empty_like(expected)
        assert CALLS[op.name](sample.input, *sample.args, **sample.kwargs, out=out) is out
        assert same_bits(out, expected)


def same_bits(a, b):
    return arrays.numpy_view(a).tobytes() == arrays.numpy_view(b).tobytes()


@pytest.mark.parametrize("op", ENTRIES, ids=lambda op: op.formatted_name)
def test_error_inputs(op):
    # torch lists none for these today; what it lists later must be an error here too.
    for error in op.error_inputs("cpu") if op.error_inputs_func else ():
        with pytest.raises((ig.IsogradError, TypeError)):
            CALLS[op.name](error.sample_input.input, *error.sample_input.args, **error.sample_input.kwargs)
