"""`isograd.torch.convert`: modules that are known get order-free forwards, in place, and give them back."""

import copy
import io
from types import SimpleNamespace

import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch
from torch import nn

import isograd as ig
import isograd.torch as igt
from isograd.torch import converted, converting, rotary_positions

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Mistral": {"sliding_window": 4},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Olmo": {},
    "Olmo2": {},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False},
    "Qwen2Moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    },
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
    "Gemma": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "Gemma3": {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
}
DEFAULT = ("Llama", "Olmoe", "Gemma3")


def model_of(kind):
    transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")
    torch.manual_seed(0)
    config = "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config"
    config = getattr(transformers, config)(
        **SIZES, **MODELS[kind], attn_implementation="eager", experts_implementation="eager"
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for parameter in model.parameters():  # routers and norms begin with constants
        nn.init.normal_(parameter, std=0.2)
    return model


def step(model, words):
    """Logits and gradients of one step."""
    model.zero_grad()
    logits = model(words, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), words.roll(-1, 1).flatten()).backward()
    return [logits.detach(), *[p.grad for p in model.parameters() if p.grad is not None]]


def words_of(*shape):
    return torch.randint(1, 48, shape, generator=torch.Generator().manual_seed(3))


def distance(found, exact):
    """The largest error of each tensor, in parts of its largest element."""
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(found, exact, strict=True)]
    return [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]


def split_sums(model, words):
    """The operators of a step whose bits depend on how a batch is split."""
    with igt.audit(model) as audit:
        step(model, words)
    return {entry.operator for entry in audit.findings if "the batch split" in entry.depends}


@pytest.mark.parametrize(
    "kind", [kind if kind in DEFAULT else pytest.param(kind, marks=pytest.mark.thorough) for kind in MODELS]
)
def test_models_are_as_near_to_exact_ones_and_come_back(kind):
    model, words = model_of(kind), words_of(2, 9)
    before = step(model, words)
    attributes = {name: set(module.__dict__) for name, module in model.named_modules()}
    keys, implementation = list(model.state_dict()), model.config._attn_implementation
    sums = split_sums(model, words)

    handle = igt.convert(model)
    report = handle.report()
    found = step(model, words)
    with igt.use():  # for the loss, which is a function
        left = split_sums(model, words)
    assert left < sums
    assert left <= {"aten::mm", "aten::addmm", "aten::sum"}  # the last for biases of linear layers
    assert ("aten::sum" in left) == any("proj.bias" in name for name in keys)
    assert list(model.state_dict()) == keys
    assert not [module for module in handle.report().modules if module.passed]
    ends = ("Norm", "WordEmbedding", "Router", "Experts")
    assert any(name.startswith("attention of") for name in report.replaced)
    assert any(name.endswith("Embedding") for name in report.replaced)
    assert any(name.endswith("Norm") for name in report.replaced)
    assert not any(name.endswith(ends) for name in report.left)
    assert "Linear" in report.left

    handle.restore()
    handle.restore()
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == attributes
    assert model.config._attn_implementation == implementation
    assert all(map(torch.equal, step(model, words), before))

    exact = step(model.double(), words)
    theirs, ours = distance(before, exact), distance(found, exact)
    assert max(ours) <= 4 * max(theirs) + 1e-6
    assert all(own <= 8 * other + 2e-6 for own, other in zip(ours, theirs, strict=True))


def norms():
    transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")
    models = transformers.models
    yield models.llama.modeling_llama.LlamaRMSNorm(24)
    yield models.olmo2.modeling_olmo2.Olmo2RMSNorm(24)
    yield models.olmo.modeling_olmo.OlmoLayerNorm(24)
    yield models.gemma.modeling_gemma.GemmaRMSNorm(24)
    yield nn.LayerNorm(24)
    yield nn.RMSNorm(24)
    yield nn.RMSNorm(24, elementwise_affine=False)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_norms_of_two_dtypes_have_torchs_dtype_and_nearly_its_value(weight_dtype):
    x = torch.randn(7, 24, generator=torch.Generator().manual_seed(1)).bfloat16()
    for norm in norms():
        for parameter in norm.parameters():
            nn.init.normal_(parameter)
        norm = norm.to(weight_dtype)
        theirs = norm(x)
        exact = copy.deepcopy(norm).float()(x.float())
        with igt.convert(norm) as handle:
            ours = norm(x)
            alone = torch.cat([norm(row) for row in x.split(1)])
            assert not handle.report().modules[0].passed
        assert ours.dtype is theirs.dtype
        assert torch.equal(ours, alone)
        bound = (theirs - exact).abs().max() + exact.abs().max() * 2**-9
        assert (ours - exact).abs().max() <= bound


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_norms_under_autocast_have_torchs_dtype(kind, monkeypatch):
    norm, x = kind(8), torch.ones(2, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        theirs = norm(x).dtype
        with igt.convert(norm) as handle:
            assert norm(x).dtype is theirs
    assert not handle.report().modules[0].passed
    on_gpu = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    y = torch.ones(2)
    assert converted._stored(y, on_gpu).dtype is torch.bfloat16
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    assert converted._stored(y, on_gpu).dtype is torch.float32


def test_gradients_of_a_norm_have_the_bits_of_any_order_of_rows_and_threads():
    norm = nn.LayerNorm(33)
    x = torch.randn(300, 33, generator=torch.Generator().manual_seed(2))
    dy = torch.randn(300, 33, generator=torch.Generator().manual_seed(4))
    order = torch.randperm(300, generator=torch.Generator().manual_seed(5))
    igt.convert(norm)
    found = []
    threads = ig.get_num_threads()
    try:
        for rows, count in ((slice(None), 1), (order, 1), (slice(None), 2)):
            ig.set_num_threads(count)
            norm.zero_grad()
            norm(x[rows]).backward(dy[rows])
            found.append((norm.weight.grad, norm.bias.grad))
    finally:
        ig.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_experts_are_those_of_transformers():
    model = model_of("Mixtral").model.layers[0].mlp
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    theirs = model(x)
    with igt.convert(model) as handle:
        ours, alone = model(x), model(x[:1, :1])
        assert handle.report().replaced == {"MixtralTopKRouter": 1, "MixtralExperts": 1, "SiLUActivation": 1}
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours[:1, :1], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gradient", [True, False])
def test_layers_of_torch(gradient):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(3, 5, 16)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    with torch.set_grad_enabled(gradient):
        theirs = model(x, src_key_padding_mask=padding)[~padding]
        with igt.convert(model) as handle, igt.audit(model) as audit:
            ours = model(x, src_key_padding_mask=padding)[~padding]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert handle.report().replaced == {
        "TransformerEncoder": 1,
        "TransformerEncoderLayer": 2,
        "MultiheadAttention": 2,
        "LayerNorm": 4,
    }
    ran = {entry.operator for entry in audit.entries}
    assert any("layernorm" in name for name in ran)
    assert not any("softmax" in name and "isograd" not in name for name in ran)


# --- what is left, and the handle ------------------------------------------------------------------------------------
class Doubled(nn.LayerNorm):
    def forward(self, x):
        return 2 * super().forward(x)


class Named(nn.LayerNorm):
    pass


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), Named(8), Doubled(8))
        self.words = nn.Embedding(10, 8)
        self.narrow = nn.Embedding(10, 8, max_norm=1.0)
        self.again = self.inner[2]
        self.patched = nn.LayerNorm(8)
        self.patched.forward = torch.neg

    def forward(self, ids):
        return self.patched(self.again(self.inner(self.words(ids) * self.scale + self.narrow(ids))))


def test_what_is_not_known_is_left_with_a_reason():
    model = Own()
    handle = igt.convert(model)
    found = {module.name: (module.replaced, module.note) for module in handle.report().modules}
    assert found == {
        "": (False, "not known"),
        "inner.0": (False, "native product: bits fixed on one kind of machine"),
        "inner.1": (False, found["inner.1"][1]),
        "inner.2": (True, "isograd.torch.layer_norm"),
        "inner.3": (False, "not known: has a forward of its own, not that of LayerNorm"),
        "words": (True, "isograd.torch.embedding"),
        "narrow": (False, "no operation of isograd's with max_norm"),
        "patched": (False, "its forward was set on the module"),
    }
    assert model(torch.arange(10)).isfinite().all()
    second = igt.convert(model)
    assert second.report().replaced == {}
    assert "converted already" in str(second.report())
    second.restore()
    assert handle.report().replaced == {"Named": 1, "Embedding": 1}
    assert "1 x Linear " in str(handle.report())
    handle.restore()
    assert model.patched.forward is torch.neg
    assert "forward" not in model.again.__dict__


@pytest.mark.parametrize("activation", ["silu", "swish", "gelu", "gelu_pytorch_tanh", "relu"])
def test_gated_activations_are_one_operation(activation):
    pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    gated = {
        "silu": igt.silu_mul,
        "swish": igt.silu_mul,
        "gelu": igt.gelu_mul,
        "gelu_pytorch_tanh": lambda gate, up: igt.gelu_mul(gate, up, "tanh"),
    }.get(activation)
    torch.manual_seed(0)
    mlp = LlamaMLP(LlamaConfig(**SIZES, hidden_act=activation)).bfloat16()
    x = torch.randn(5, 32, dtype=torch.bfloat16)
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    own = mlp(x)
    handle = igt.convert(mlp)
    if gated is None:
        assert "no operation of isograd's for its activation, ReLU" in str(handle.report())
        assert mlp(x).equal(own)
        return
    expected = mlp.down_proj(gated(gate, up))
    assert mlp(x).equal(expected)
    assert not own.equal(expected)  # rounded twice
    seen = []
    hook = mlp.act_fn.register_forward_hook(lambda module, given, result: seen.append(result))
    assert mlp(x).equal(own)
    assert len(seen) == 1
    hook.remove()
    handle.restore()
    assert mlp(x).equal(own)


def test_activations_by_themselves():
    model = nn.Sequential(nn.SiLU(), nn.GELU(), nn.GELU("tanh"), nn.SiLU(inplace=True))
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    handle = igt.convert(model)
    assert handle.report().replaced == {"SiLU": 1, "GELU": 2}
    assert "left: no operation of isograd's in place" in str(handle.report())
    assert all(m(x).equal(e) for m, e in zip(model, (igt.silu(x), igt.gelu(x), igt.gelu(x, "tanh")), strict=False))
    assert handle.report().modules[1].passed == ()


@pytest.mark.parametrize("kind", ["Llama", "Olmo"])
def test_rotary_positions_are_applied_by_rotary(kind, monkeypatch):
    model = model_of(kind).eval()
    ids = torch.randint(0, 48, (2, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        own = model(ids).logits
    handle = igt.convert(model)
    report = str(handle.report())
    assert f"2 x {kind}Attention " in report
    assert "replaced: isograd.rotary_table" in report
    seen = []
    rotary = igt.rotary
    monkeypatch.setattr(
        rotary_positions, "rotary", lambda *args, **kwargs: seen.append(args) or rotary(*args, **kwargs)
    )
    with torch.no_grad():
        found = model(ids).logits
        cached = model(ids[:, :4], use_cache=True).past_key_values
        step = model(ids[:, 4:], past_key_values=cached).logits
    assert all(count == 0 for module in handle.report().modules for _, count in module.passed)
    assert len(seen) == 3 * 2 * 2
    q, cos, sin = seen[0]
    assert q.shape == (2, 4, 7, 8)
    table = [torch.from_numpy(t)[None, :7] for t in ig.rotary_table(32, 8)]
    assert all(torch.equal(a, b) for a, b in zip((cos, sin), table, strict=True))
    torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(step, found[:, 4:], rtol=1e-4, atol=1e-5)
    handle.restore()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, own)


def test_rotary_positions_of_other_kinds_are_left():
    pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")
    from transformers import LlamaConfig, LlamaModel

    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    report = str(igt.convert(LlamaModel(LlamaConfig(**SIZES, rope_parameters=scaled))).report())
    assert "LlamaRotaryEmbedding" in report
    assert "left: no operation of isograd's for rotary positions of the kind linear" in report
    assert "replaced: its rotary positions by isograd.torch.rotary" in report


def test_calls_that_cannot_be_served_go_to_torch_and_are_counted():
    norm = nn.LayerNorm(4)
    handle = igt.convert(norm)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        norm(torch.ones(2, 3))
    assert [count for _, count in handle.report().modules[0].passed] == [1]
    assert "1 calls of LayerNorm went to torch" in str(handle.report())


def test_an_interrupt_leaves_the_model_as_it_was(monkeypatch):
    model = nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4))
    calls = []

    def interrupted(module, products):
        calls.append(module)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return found(module, products)

    found = converted.find
    monkeypatch.setattr(converting.converted, "find", interrupted)
    with pytest.raises(KeyboardInterrupt):
        igt.convert(model)
    assert not any("forward" in module.__dict__ for module in model)


def test_a_forward_on_top_is_not_taken_away():
    model = nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4))
    handle = igt.convert(model)
    inner = model[0].forward
    model[0].forward = lambda x: inner(x)
    with pytest.raises(ig.InvalidProblemError, match="forward was set on 0 after"):
        handle.restore()
    assert "forward" not in model[1].__dict__
    model[0].forward = inner
    handle.restore()
    assert "forward" not in model[0].__dict__
    with pytest.raises(ig.InvalidProblemError, match=r"model is a int; expected a torch\.nn\.Module"):
        igt.convert(3)


def test_copies_pickles_hooks_meta_tensors_and_frozen_parameters():
    model = nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4))
    model[0].weight.requires_grad_(False)
    igt.convert(model)
    seen = []
    model[1].register_forward_hook(lambda module, args, output: seen.append(module))
    ids = torch.arange(9)
    y = model(ids)
    assert seen == [model[1]]
    model[1]._forward_hooks.clear()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        with torch.no_grad():
            other[1].bias += 1
        assert other[1].forward.module is other[1]
        assert torch.equal(other(ids), model(ids) + 1)
    y.sum().backward()
    assert model[0].weight.grad is None
    assert model[1].bias.grad.tolist() == [9.0] * 4
    assert copy.deepcopy(model).to("meta")(ids.to("meta")).shape == (9, 4)


def test_attention_that_isograd_has_no_kernel_for_is_left():
    def why(backend, parameter=torch.float32, **config):
        model = nn.Linear(2, 2).to(parameter)
        model._supports_attention_backend, model.config = backend, SimpleNamespace(hidden_size=1024, **config)
        return converted.attention_is_left(model)

    assert why(True, num_attention_heads=4) is None
    assert why(True, num_attention_heads=4, head_dim=257) == "its heads have 257 elements; accepted: up to 256"
    assert why(True, num_attention_heads=2) == "its heads have 512 elements; accepted: up to 256"
    assert why(True, torch.float8_e5m2, num_attention_heads=4) == "has parameters of torch.float8_e5m2"
    assert why(False) == "does not take its attention from transformers' interface"


@pytest.mark.thorough
@pytest.mark.parametrize("converted_first", [True, False])
def test_wrapped_models(converted_first, tmp_path):
    distributed = pytest.importorskip("torch.distributed.fsdp", reason="needs FSDP2")
    words = torch.arange(9)

    def gradients(wrap):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4))
        if converted_first:
            handle = igt.convert(model)
            wrapped = wrap(model)
        else:
            wrapped = wrap(model)
            handle = igt.convert(wrapped)
        assert handle.report().replaced.keys() >= {"LayerNorm"}
        y = wrapped(words)
        y.square().sum().backward()
        assert not any(module.passed for module in handle.report().modules)
        found = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
        handle.restore()
        assert not any("forward" in module.__dict__ for module in wrapped.modules())
        return y, *found

    def sharded(model):
        distributed.fully_shard(model[0])
        return distributed.fully_shard(model)

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        plain = gradients(lambda model: model)
        for wrap in (nn.parallel.DistributedDataParallel, sharded):
            assert all(map(torch.equal, gradients(wrap), plain))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.thorough
def test_compiled_models_are_converted_and_restored():
    model = nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4))
    ids = torch.arange(9)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    theirs = compiled(ids)
    with igt.convert(model):
        eager = model(ids)
        with igt.use() as switch:
            assert torch.equal(compiled(ids), eager)
        assert any("layernorm" in name for name in {**switch.report().operators, **switch.report().replaced})
    assert torch.equal(compiled(ids), theirs)
