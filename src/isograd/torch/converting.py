"""Modules of a model that are known get a forward of isograd's, in place and for as long as one likes."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.nn import Module

from isograd.errors import InvalidProblemError
from isograd.torch import converted, rotary_positions
from isograd.torch.converted import Call
from isograd.torch.huggingface import register_transformers
from isograd.torch.switch import NOT_SERVED, Products, checked_products

# The names of isograd's attention among those of transformers, by products.
_ATTENTION = {None: "isograd", "int16": "isograd_int16"}


class Forward:
    """The forward of one converted module. It is copied and pickled with its module."""

    def __init__(self, module: Module, call: Call) -> None:
        self.module, self.call = module, call
        self.passed: Counter[str] = Counter()  # why calls were passed on to the class's forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What isograd computes, or what the class does where isograd cannot serve the arguments."""
        try:
            return self.call(self.module, *args, **kwargs)
        except NOT_SERVED as error:
            if self.call is rotary_positions.attention and not isinstance(error, rotary_positions.NotRotatedError):
                raise  # behind the positions, where a cache holds the keys of this step already
            if not torch.compiler.is_compiling():
                self.passed[str(error)] += 1
            return type(self.module).forward(self.module, *args, **kwargs)


@dataclass(frozen=True, slots=True)
class ConvertedModule:
    """One module: its name in the model, its class, whether it was replaced, and by what or why not.

    passed: how many of its calls went to torch all the same, by reason. Calls in compiled code are not counted.
    """

    name: str
    kind: str
    replaced: bool
    note: str
    passed: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """Every module of a model; `print` shows a table of classes, those that were replaced first."""

    modules: tuple[ConvertedModule, ...]

    @property
    def replaced(self) -> dict[str, int]:
        """How many modules of each class were replaced."""
        return dict(Counter(module.kind for module in self.modules if module.replaced))

    @property
    def left(self) -> dict[str, int]:
        """How many modules of each class were left as they are."""
        return dict(Counter(module.kind for module in self.modules if not module.replaced))

    def __str__(self) -> str:
        groups = Counter((not module.replaced, module.kind, module.note) for module in self.modules)
        width = max([len(kind) for _, kind, _ in groups], default=0)
        lines = [
            f"{count:>6} x {kind:<{width}}  {'left' if left else 'replaced'}: {note}"
            for (left, kind, note), count in sorted(groups.items(), key=lambda group: group[0][0])
        ]
        for module in self.modules:
            lines += [
                f"{count:>6} calls of {module.name or module.kind} went to torch: {why}" for why, count in module.passed
            ]
        return "\n".join(lines) or "the model has no modules"


class Conversion:
    """What `convert` returns: `report()` says what was done and `restore()` undoes it, as the end of a `with` does."""

    def __init__(self, products: Products | None = None) -> None:
        self._products = products
        self._modules: list[ConvertedModule] = []
        self._forwards: dict[str, Forward] = {}
        self._attention: list[tuple[Any, str | None]] = []  # configurations, and the attention that each named before

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()

    def report(self) -> ConversionReport:
        """All modules of the model as they were found, and the calls that isograd could not serve so far."""
        found = []
        for module in self._modules:
            forward = self._forwards.get(module.name)
            passed = tuple(forward.passed.items()) if forward else ()
            found.append(ConvertedModule(module.name, module.kind, module.replaced, module.note, passed))
        return ConversionReport(tuple(found))

    def restore(self) -> None:
        """Give every module its own forward back; nothing of the conversion stays. A second call does nothing.

        Raises InvalidProblemError if something else was put over a converted forward since, by naming the modules;
        all others are restored then, and these once it has been taken away and `restore` is called again.
        """
        covered = []
        for name, forward in self._forwards.items():
            own = forward.module.__dict__
            if own.get("forward") is forward:
                del own["forward"]
            elif "forward" in own:
                covered.append(name)
        for config, before in reversed(self._attention):
            if config._attn_implementation == _ATTENTION[self._products]:
                _set_attention(config, before)
        if covered:
            raise InvalidProblemError(f"restore: forward was set on {', '.join(covered)} after the conversion")

    def _convert(self, name: str, module: Module) -> None:
        call, note = converted.find(module, self._products)
        kind = type(module).__qualname__
        if call is not None and isinstance(module.__dict__.get("forward"), Forward):
            call, note = None, "converted already"
        elif call is not None and "forward" in module.__dict__:
            call, note = None, "its forward was set on the module"
        if call is not None:
            self._forwards[name] = forward = Forward(module, call)
            module.forward = forward
        self._modules.append(ConvertedModule(name, kind, call is not None, note))

    def _convert_attention(self, name: str, model: Any) -> None:
        config = model.config
        if any(config is seen for seen, _ in self._attention):
            return
        why = converted.attention_is_left(model)
        if why is None and config._attn_implementation in _ATTENTION.values():
            why = "converted already"
        if why is None:
            attention = _ATTENTION[self._products]
            register_transformers(attention, precision=self._products)
            self._attention.append((config, config._attn_implementation))
            _set_attention(config, attention)
        kind = "isograd.torch.attention" + (" in int16" if self._products else "")
        note = why or f"{kind} instead of {self._attention[-1][1]}"
        self._modules.append(ConvertedModule(name, f"attention of {type(model).__qualname__}", why is None, note))


def _set_attention(config: Any, name: str | None) -> None:
    """The attention of one configuration; those inside it keep theirs."""
    config._attn_implementation = {"": name}


def convert(model: Module, *, products: Products | None = None) -> Conversion:
    """Replace, in place, the forward of every module that is known by one whose sums are order-free.

        handle = igt.convert(model)
        print(handle.report())               # every class: replaced by what, or left and why
        ...                                  # train
        handle.restore()                     # or: with igt.convert(model): ...

    Replaced, of torch.nn: Embedding, LayerNorm, RMSNorm, SiLU, GELU, Softmax, LogSoftmax, CrossEntropyLoss, KLDivLoss,
    MultiheadAttention, TransformerEncoder and TransformerEncoderLayer (whose fast path without gradients is not taken).
    Of transformers: norms, MLPs (their gated activation; products stay), silu and both forms of gelu by themselves,
    routers, experts and rotary positions of Llama, Qwen 2 and 3, Mistral, Mixtral, OLMo and OLMoE, Gemma 1 to 3, and
    the attention of every model that takes it from transformers' interface, as `register_transformers` does.

    Rotary positions of the default kind come from `isograd.rotary_table`, for positions below max_position_embeddings,
    since sine and cosine of torch's differ between machines; those of other kinds are left. All are applied by
    `isograd.torch.rotary`, rounded once.

    Left, and listed: without `products` matrix products, of which torch's own have fixed bits on one kind of machine;
    other activations; dropout, which `use(samples=...)` replaces; modules with another forward than their class's; and
    whatever is not known. What a forward calls as a function, such as a loss inside a model, is `use()`'s business. A
    norm rounds its result once, where transformers' rounds a narrow one before the weight, and a gated activation is
    rounded once, after the product.

    products: "int16" replaces products as well, by those of `isograd.torch.linear` with that precision: Linear and
    transformers' Conv1D (biases' gradients are order-free sums then), those of routers, experts and the layers of
    nn.Transformer; attention is `isograd.torch.attention` with precision="int16". So no sum of such a model depends on
    what computes it, forward or backward. Modules of float64 keep torch's products, and isograd's attention
    without them.

    Experts wait for the GPU once a call, for the numbers of their rows, and multiply one after the other. Without
    products a bias of a linear layer stays torch's with the layer: its gradient is a sum in floats.

    Parameters, keys of the state_dict, hooks and classes stay. So a model may be converted before or after
    DistributedDataParallel, fully_shard and torch.compile (a compiled one is traced anew). Copies and pickles of a
    converted model are converted; a copy has no handle. A module that is shared is converted once, and a second
    conversion finds nothing to do. An error or interrupt in here leaves the model as it was. Arguments that isograd
    cannot serve go to the module's own forward, and the report counts them.

    Raises InvalidProblemError for what is no module, and for other products.
    """
    checked_products("convert", products)
    if not isinstance(model, Module):
        raise InvalidProblemError(f"convert: model is a {type(model).__name__}; expected a torch.nn.Module")
    handle = Conversion(products)
    try:
        for name, module in model.named_modules():
            if converted.takes_attention(module):
                handle._convert_attention(name, module)
            if not isinstance(module, converted.CONTAINERS):
                handle._convert(name, module)
    except BaseException:
        handle.restore()
        raise
    return handle
