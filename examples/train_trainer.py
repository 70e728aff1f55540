"""Train a small Llama with the Trainer of Hugging Face transformers, with the same bits on any number of ranks.

    python examples/train_trainer.py --steps 60
    torchrun --nproc-per-node 2 examples/train_trainer.py --steps 60

A step is UNITS backward passes over the same sequences each, whoever makes them: the Trainer deals batches out to the
ranks in turn, and `gradient_accumulation_steps` is UNITS over the number of ranks. `GradientSum` adds their gradients
as integers, and a callback hands the sum to the optimizer. So the digest that is printed at the end is the same for
every number of ranks that divides UNITS, on one kind of machine with one version of torch. With `--products int16`
matrix products are order-free too; what is left to the machine is how transformers draws the first weights.
"""

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what torch's deterministic products on a GPU ask for

import torch
import transformers
import typer
from torch import Tensor, nn

import isograd.torch as igt

CONTEXT, UNITS, MICRO_BATCH = 32, 4, 2
TEXT = Path(__file__).parents[1] / "LICENSE"


class Windows(torch.utils.data.Dataset):
    """Pieces of a text, a number a byte; as many as fill whole steps, as ranks would fill up a last one otherwise."""

    def __init__(self, path: Path) -> None:
        numbers = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
        of_step = CONTEXT * MICRO_BATCH * UNITS
        self.rows = numbers[: len(numbers) // of_step * of_step].view(-1, CONTEXT)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


class Finish(transformers.TrainerCallback):
    """The gradients of all units become `p.grad` just before the optimizer reads them, and are clipped."""

    def __init__(self, trainer: "OrderFreeTrainer") -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the Trainer after the last backward pass of a step."""
        self.trainer.total.finish()
        igt.clip_grad_norm_(self.trainer.model.parameters(), 1.0)


class OrderFreeTrainer(transformers.Trainer):
    """A Trainer each of whose backward passes is a unit of `GradientSum`."""

    def __init__(self, *arguments: Any, products: str | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.switch, self.total, self.losses = igt.use(products=products), None, []
        self.add_callback(Finish(self))

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
        """A unit: its own mean loss, whatever else is in the step."""
        if self.total is None:  # now the model is wrapped
            self.total = igt.distributed.GradientSum(model, units=self.args.gradient_accumulation_steps)
        model.train()
        with self.switch:
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
            loss.backward()
        self.losses.append(loss.detach())
        return loss.detach() / self.args.gradient_accumulation_steps


def small() -> nn.Module:
    """A Llama of two layers over bytes, on isograd's modules."""
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, use_cache=False,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def trained(steps: int, seed: int, products: str | None, device: str) -> OrderFreeTrainer:
    """A Trainer that is done."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if UNITS % ranks:
        raise typer.BadParameter(f"{ranks} ranks; accepted: a number that divides the {UNITS} units of a step")
    transformers.set_seed(seed)
    model = small()
    igt.convert(model, products=products)
    optimizer = igt.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (steps - step) / steps)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=UNITS // ranks, max_grad_norm=0, seed=seed, data_seed=seed,
            use_cpu=device == "cpu", ddp_find_unused_parameters=False, report_to=[], save_strategy="no",
            logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = OrderFreeTrainer(
            model, arguments, train_dataset=Windows(TEXT), optimizers=(optimizer, schedule), products=products
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return trainer


def digest(model: nn.Module) -> str:
    """SHA-256 over the bits of all weights."""
    bits = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        bits.update(name.encode())
        bits.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    return bits.hexdigest()


def main(
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 60,
    seed: Annotated[int, typer.Option(min=0, help="Of the weights and the batches.")] = 0,
    products: Annotated[Literal["torch", "int16"], typer.Option(help="Whose matrix products.")] = "torch",
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where.")] = "cpu",
) -> None:
    """Train a small Llama on the text of the license and print the digest of its weights."""
    torch.use_deterministic_algorithms(True)
    trainer = trained(steps, seed, None if products == "torch" else products, device)
    if trainer.is_world_process_zero():
        loss = torch.stack(trainer.losses[-UNITS:]).mean()
        typer.echo(f"loss of this rank's last units: {loss:.3f}")
        typer.echo(f"digest of the weights: {digest(trainer.model)}")


if __name__ == "__main__":
    typer.run(main)
