"""isograd's attention in models of Hugging Face transformers, small and of random weights."""

import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch

import isograd as ig
import isograd.torch as igt
from isograd.torch import huggingface

CAUSAL, FULL = SimpleNamespace(is_causal=True), SimpleNamespace(is_causal=False)


def tensors(q_length=5, k_length=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, q_length, 16), (2, 2, k_length, 16), (2, 2, k_length, 16))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


# --- without transformers ---------------------------------------------------------------------------------------------
def test_the_convention_of_attention_functions():
    q, k, v = tensors()
    sinks, places = torch.randn(4), torch.randn(1, 4, 5, 5)
    mask = (torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(1)) < 0.7) | torch.eye(5, dtype=torch.bool)
    floats = torch.zeros(2, 1, 5, 5).masked_fill(~mask, torch.finfo(torch.float32).min)
    for (module, given), expected in (
        ((CAUSAL, {}), {"causal": True}),
        ((SimpleNamespace(), {}), {"causal": True}),
        ((FULL, {}), {}),
        ((CAUSAL, {"is_causal": False, "position_ids": None}), {}),
        ((FULL, {"is_causal": True, "scaling": 0.3}), {"causal": True, "scale": 0.3}),
        ((CAUSAL, {"attention_mask": mask}), {"mask": mask}),
        ((CAUSAL, {"attention_mask": mask, "sliding_window": 2}), {"mask": mask}),  # the mask has the window already
        ((CAUSAL, {"attention_mask": floats}), {"bias": floats}),
        ((CAUSAL, {"s_aux": sinks, "softcap": 3.0}), {"causal": True, "sinks": sinks, "softcap": 3.0}),
        ((CAUSAL, {"s_aux": sinks.bfloat16()}), {"causal": True, "sinks": sinks.bfloat16().float()}),
        ((CAUSAL, {"position_bias": places}), {"causal": True, "bias": places}),
        ((CAUSAL, {"position_bias": places, "attention_mask": mask}), {"bias": places, "mask": mask}),
        ((CAUSAL, {"position_bias": places, "attention_mask": floats}), {"bias": places + floats}),
    ):
        o, weights = huggingface.attention_forward(module, q, k, v, given.pop("attention_mask", None), **given)
        assert weights is None
        assert torch.equal(o, igt.attention(q, k, v, **expected).transpose(1, 2))


def test_one_query_sees_a_whole_cache_and_first_ones_only_themselves():
    q, k, v = tensors(k_length=9)
    first, _ = huggingface.attention_forward(CAUSAL, q, k, v, None)
    assert torch.equal(first, igt.attention(q, k[:, :, :5], v[:, :, :5], causal=True).transpose(1, 2))
    last, _ = huggingface.attention_forward(CAUSAL, q[:, :, :1], k, v, None)
    assert torch.equal(last, igt.attention(q[:, :, :1], k, v).transpose(1, 2))


def test_packed_sequences_are_separate():
    q, k, v = (t[:1] for t in tensors(9, 9))
    ends = torch.tensor([0, 4, 9])
    given = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 5, "max_length_k": 5}
    o, _ = huggingface.attention_forward(CAUSAL, q, k, v, None, sliding_window=3, **given)
    for part in (slice(0, 4), slice(4, 9)):
        alone = igt.attention(*[t[:, :, part] for t in (q, k, v)], causal=True, window=(2, 0))
        assert torch.equal(o[:, part], alone.transpose(1, 2))
    with pytest.raises(ig.UnsupportedError, match="position_bias"):
        huggingface.attention_forward(CAUSAL, q, k, v, None, position_bias=torch.zeros(1, 1, 9, 9), **given)


def test_dropout_and_weights():
    q, k, v = tensors()
    torch.manual_seed(0)
    o, _ = huggingface.attention_forward(CAUSAL, q, k, v, None, dropout=0.5)
    torch.manual_seed(0)
    assert torch.equal(o, igt.attention(q, k, v, causal=True, dropout_p=0.5).transpose(1, 2))
    with pytest.warns(UserWarning, match="does not return weights"):
        huggingface.attention_forward(CAUSAL, q, k, v, None, output_attentions=True)


def test_registration_without_transformers_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs transformers 4\.53 or newer"):
        igt.register_transformers()


# --- with transformers ------------------------------------------------------------------------------------------------
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "Llama": {},
    "Mistral": {"sliding_window": 4},
    "Gemma2": {"sliding_window": 4, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    "GptOss": {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1},
}


def model_of(kind, implementation):
    transformers = pytest.importorskip("transformers", minversion="4.53", reason="needs transformers")
    igt.register_transformers()
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **MODELS[kind], attn_implementation=implementation)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize(("kind", "padded"), [("Llama", False), ("Mistral", True), ("Gemma2", False), ("GptOss", True)])
def test_models_compute_what_they_do_with_eager_attention(kind, padded):
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(3, 64, (2, 11), generator=generator)
    mask = torch.ones(2, 11, dtype=torch.int64)
    if padded:
        mask[1, :3] = 0
    labels = words.masked_fill(mask.cumsum(1) < 2, -100)  # none that a place of the padding would predict
    found = {}
    for implementation in ("eager", "isograd"):
        model = model_of(kind, implementation)
        result = model(words, attention_mask=mask, labels=labels)
        result.loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found[implementation] = result.logits, gradients
    (ours, our_gradients), (theirs, their_gradients) = found["isograd"], found["eager"]
    seen = mask.bool()
    torch.testing.assert_close(ours[seen], theirs[seen], rtol=1e-4, atol=1e-5)
    assert our_gradients.keys() == their_gradients.keys()
    for name, gradient in our_gradients.items():
        torch.testing.assert_close(gradient, their_gradients[name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize(("kind", "cache"), [("Llama", "static"), ("GptOss", "dynamic")])
def test_generation_with_a_cache(kind, cache):
    words = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    mask = torch.ones_like(words)
    mask[1, :2] = 0
    generated = [model_of(kind, name).generate(words, attention_mask=mask, **options) for name in ("eager", "isograd")]
    assert torch.equal(*generated)


def test_packed_sequences_of_a_model():
    model = model_of("Llama", "isograd")
    words = torch.randint(3, 64, (1, 9), generator=torch.Generator().manual_seed(1))
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    packed = model(words, position_ids=places, use_cache=False).logits
    for part in (slice(0, 4), slice(4, 9)):
        torch.testing.assert_close(packed[:, part], model(words[:, part]).logits)


def test_the_number_of_items_that_a_trainer_passes():
    model = model_of("Llama", "eager")
    words = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    given = {"labels": words, "num_items_in_batch": torch.tensor(37)}  # of a batch of which this is a part
    expected = model(words, **given).loss

    def loss(logits, labels, vocab_size, num_items_in_batch, **rest):
        return igt.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), count=num_items_in_batch)

    model.loss_function = loss
    torch.testing.assert_close(model(words, **given).loss, expected)
