"""Activation checkpoints under `isograd.torch.use()`: the bits of a run without them, on any thread."""

import contextlib
import functools
import threading

import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

import isograd.torch as igt
from isograd.torch import checkpoints, switch

KINDS = {"reentrant": {"use_reentrant": True}, "not reentrant": {"use_reentrant": False}}


def tensors():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 2, 6, 16, generator=generator).requires_grad_()
    weight = torch.randn(16, 16, generator=generator).requires_grad_()
    return x, weight


def attend(x, weight):
    """Dropout, equal elements to choose from, a gather, and losses that save other tensors than torch's."""
    o = F.scaled_dot_product_attention(x @ weight, x, x, dropout_p=0.4)
    # All elements but one are equal: torch chooses others of them than isograd.
    tied = torch.zeros(24, 16).index_fill(1, torch.tensor([3]), 1.0) + 0 * o.reshape(24, 16)
    values, places = tied.topk(4, -1)
    chosen = o.reshape(24, 16).gather(1, places)
    target = places.new_tensor([1, 2, 3] * 8)
    rows = o.reshape(24, 16)
    loss = F.cross_entropy(rows, target) + F.kl_div(rows.log_softmax(-1), rows.detach().softmax(-1), reduction="sum")
    return chosen.square().sum() + values.sum() + loss


def gradients(run, backward):
    torch.manual_seed(3)
    x, weight = tensors()
    loss = run(x, weight)
    backward(loss)
    return loss.detach(), x.grad, weight.grad


def on_another_thread(loss):
    worker = threading.Thread(target=loss.backward)
    worker.start()
    worker.join()


def equal(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_recomputation_is_what_it_was_in_forward(kind):
    def checkpointed(x, weight):
        return checkpoint(attend, x, weight, **KINDS[kind])

    def nested(x, weight):
        def inner(x, weight):
            return checkpoint(attend, x.sin(), weight, **KINDS[kind])

        return checkpoint(inner, x, weight, **KINDS[kind])

    with igt.use():
        expected = gradients(attend, torch.Tensor.backward)
        assert equal(gradients(checkpointed, torch.Tensor.backward), expected)
        assert equal(gradients(checkpointed, torch.autograd.backward), expected)
        within = gradients(lambda x, weight: attend(x.sin(), weight), torch.Tensor.backward)
        assert equal(gradients(nested, torch.Tensor.backward), within)

    def in_a_block(run):
        def call(x, weight):
            with igt.use() as counting:
                loss = run(x, weight)
            switches.append(counting)
            return loss

        return call

    switches = []
    for backward in (torch.Tensor.backward, on_another_thread):
        assert equal(gradients(in_a_block(checkpointed), backward), expected)
        assert switches[-1].report().replaced["torch.nn.functional.scaled_dot_product_attention"] == 2
        assert equal(gradients(in_a_block(nested), backward), within)
    torch.softmax(torch.zeros(2), 0)
    assert "torch.softmax" not in switches[-1].report().replaced  # no mode stays behind


def test_a_block_holds_for_no_more_than_its_own_checkpoints():
    x, weight = tensors()
    with igt.use() as counting:
        pass
    torch.manual_seed(3)
    checkpoint(attend, x, weight, use_reentrant=False).backward()
    assert not counting.report().lines
    with igt.use() as outer, igt.use() as inner:
        loss = checkpoint(lambda t: torch.softmax(t, -1).exp().sum(), x, use_reentrant=False)
    with outer:
        loss.backward()
    assert inner.report().replaced == {"torch.softmax": 2}
    assert not outer.report().replaced


def test_selective_and_sequential_checkpoints_and_gradients_of_gradients():
    def selective(x, weight):
        contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.isograd.attention.default])
        return checkpoint(attend, x, weight, use_reentrant=False, context_fn=contexts)

    with igt.use():
        expected = gradients(attend, torch.Tensor.backward)
        assert equal(gradients(selective, torch.Tensor.backward), expected)
    x, weight = tensors()
    with igt.use():
        torch.manual_seed(3)
        loss = selective(x, weight)
    assert equal(torch.autograd.grad(loss, (x, weight)), expected[1:])

    layers = torch.nn.Sequential(*[torch.nn.Softmax(-1) for _ in range(4)])
    found = []
    for run in (layers, lambda t: checkpoint_sequential(layers, 2, t, use_reentrant=False)):
        x, _ = tensors()
        with igt.use():
            out = run(x)
        (g,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        found += [g.detach(), *torch.autograd.grad(g.square().sum(), x)]
    assert equal(found[:2], found[2:])


def test_checkpoints_under_compilation():
    torch._dynamo.reset()

    def loss(x):
        return torch.softmax(x, -1).square().sum()

    def whole(x):
        with igt.use():
            return checkpoint(loss, x, use_reentrant=False)

    x, _ = tensors()
    with igt.use():
        (expected,) = torch.autograd.grad(loss(x), x)
    inside = torch.compile(lambda t: checkpoint(loss, t, use_reentrant=False), backend="aot_eager", fullgraph=True)
    around = torch.compile(loss, backend="aot_eager")
    for run, replaced in (
        (inside, {"torch.softmax (compiled)": 1}),
        (lambda t: checkpoint(around, t, use_reentrant=False), {"torch.softmax (compiled)": 1}),
        (torch.compile(whole, backend="aot_eager", fullgraph=True), {}),
    ):
        with igt.use() if replaced else contextlib.nullcontext() as counting:
            out = run(x)
        assert torch.equal(torch.autograd.grad(out, x)[0], expected)
        assert not replaced or counting.report().replaced == replaced


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_recomputation_in_one_graph_is_what_it_was_in_forward(kind):
    def checkpointed(x, weight):
        return checkpoint(attend, x, weight, **KINDS[kind])

    def nested(x, weight):
        return checkpoint(lambda x, weight: checkpointed(x.sin(), weight), x, weight, **KINDS[kind])

    for run, plain in ((checkpointed, attend), (nested, lambda x, weight: attend(x.sin(), weight))):
        torch._dynamo.reset()
        compiled = torch.compile(run, backend="aot_eager", fullgraph=True)

        def in_a_block(x, weight):
            with igt.use():
                return compiled(x, weight)  # noqa: B023 - called at once

        with igt.use():
            expected = gradients(plain, torch.Tensor.backward)
            assert equal(gradients(compiled, torch.Tensor.backward), expected)
        assert equal(gradients(in_a_block, torch.Tensor.backward), expected)


def test_functions_of_users_that_recompute_in_the_block():
    class Recomputing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return torch.softmax(x, -1)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                return torch.autograd.grad(torch.softmax(x, -1), x, g)

    x, _ = tensors()
    with igt.use() as counting:
        Recomputing.apply(x).square().sum().backward()
        assert counting.report().replaced == {"torch.softmax": 2}
        assert not counting.report().operators  # isograd's own gradients are not looked at
        seen = x.grad
        (expected,) = torch.autograd.grad(torch.softmax(x, -1).square().sum(), x)
    assert torch.equal(seen, expected)


def test_an_unknown_torch_is_said(monkeypatch):
    class Strange:
        def __init__(self, something):
            pass

    monkeypatch.setattr(checkpoints.checkpoint, "_CheckpointFrame", Strange)
    message = checkpoints.hold(list)
    assert message == "torch.utils.checkpoint._CheckpointFrame.__init__ has no recompute_fn at place 1"
    monkeypatch.setattr(switch, "_NOT_HELD", message)
    (line,) = igt.use().report().lines
    assert (line.function, line.replaced, line.count) == ("torch.utils.checkpoint.checkpoint", False, 0)
    assert message in str(igt.use().report())


def small(kind):
    """A model of transformers with random weights."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0, "attention_dropout": 0.2,
    }  # fmt: skip
    name, _, balanced = kind.partition(" ")
    if name == "Olmoe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": bool(balanced)}
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes)).train()


# With the loss of balance, transformers takes the router's logits from forward, which a reentrant checkpoint runs
# without gradients: that loss has none there, whoever computes it.
MODELS = {"Llama": ["none", *KINDS], "Olmoe": ["none", *KINDS], "Olmoe balanced": ["none", "not reentrant"]}


def checkpointed(model, kind):
    if kind != "none":
        model.gradient_checkpointing_enable(KINDS[kind])
        if kind == "reentrant":
            model.enable_input_require_grads()
    return model


@pytest.mark.thorough
@pytest.mark.parametrize("kind", MODELS)
def test_models_of_transformers(kind):
    words = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    found = {}
    for checkpoints_of in MODELS[kind]:
        for inside in (True, False):
            model = checkpointed(small(kind), checkpoints_of)
            torch.manual_seed(5)
            with igt.use() as counting:
                outputs = model(input_ids=words, labels=words, use_cache=False)
                loss = outputs.loss
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
            assert counting.report().replaced["torch.nn.functional.scaled_dot_product_attention"] >= 2
            assert kind != "Olmoe balanced" or outputs.aux_loss.requires_grad
            found[checkpoints_of, inside] = [loss.detach(), *[p.grad for p in model.parameters()]]
    expected = found["none", True]
    for case, tensors_of in found.items():
        assert equal(tensors_of, expected), case


@pytest.mark.thorough
@pytest.mark.parametrize("kind", MODELS)
def test_trainer_with_checkpoints(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    words = torch.randint(1, 64, (8, 12), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in words]
    weights = []
    for checkpoints_of in MODELS[kind]:
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=3, per_device_train_batch_size=2, report_to=[], save_strategy="no", seed=7,
            use_cpu=True, disable_tqdm=True, gradient_checkpointing=checkpoints_of != "none",
            gradient_checkpointing_kwargs=KINDS.get(checkpoints_of),
        )  # fmt: skip
        trainer = transformers.Trainer(small(kind), arguments, train_dataset=data)
        with igt.use():
            trainer.train()
        weights.append([p.detach() for p in trainer.model.parameters()])
    assert all(equal(other, weights[0]) for other in weights[1:])
