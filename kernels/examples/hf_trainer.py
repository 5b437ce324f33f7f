"""Fine-tune with the Trainer of transformers, stock and with patch_model: the same losses, a shorter step.

    python kernels/examples/hf_trainer.py --steps 50 --layers 4 --hidden 2048 --intermediate 8192 --context 1024

Needs transformers and accelerate. `patch_model` runs after the weights are loaded and before the Trainer is made; a
trainer of TRL takes a patched model in the same way. Without a GPU the patched model runs PyTorch's operations.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from swiglu_kernels import patch_model


class Bytes(Dataset):
    """Pieces of this file, byte by byte."""

    def __init__(self, count: int, context: int) -> None:
        text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
        starts = torch.randint(len(text) - context, (count,), generator=torch.Generator().manual_seed(0))
        self.pieces = [text[start : start + context] for start in starts.tolist()]

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


class Watch(TrainerCallback):
    """Notes the loss and the duration of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.times_ms: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self.began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop it when the GPU has finished."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times_ms.append((time.perf_counter() - self.began) * 1e3)

    def on_log(self, arguments: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        """Keep the loss of the step."""
        if "loss" in logs:
            self.losses.append(logs["loss"])


def train(options: argparse.Namespace, patched: bool) -> Watch:
    """Train a model of the same seed on the same data."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=options.hidden, intermediate_size=options.intermediate,
        num_hidden_layers=options.layers, num_attention_heads=max(4, options.hidden // 128),
        max_position_embeddings=options.context,
    )  # fmt: skip
    model, watch = LlamaForCausalLM(config), Watch()
    if patched:
        print(patch_model(model))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=options.steps, per_device_train_batch_size=options.batch, logging_steps=1,
            bf16=torch.cuda.is_available(), report_to=[], save_strategy="no", disable_tqdm=True, seed=0,
        )  # fmt: skip
        data = Bytes(options.batch * options.steps, options.context)
        Trainer(model=model, args=arguments, train_dataset=data, callbacks=[watch]).train()
    return watch


def main(given: Sequence[str] | None = None) -> tuple[Watch, Watch]:
    """Train both, print the comparison, and return what was noted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"steps": 20, "batch": 8, "context": 128, "layers": 2, "hidden": 256, "intermediate": 688}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(given)
    runs = stock, patched = train(options, patched=False), train(options, patched=True)
    steps_ms = [statistics.median(watch.times_ms[len(watch.times_ms) // 4 :]) for watch in runs]
    for name, watch, step_ms in zip(("stock", "patched"), runs, steps_ms, strict=True):
        print(f"{name:8} last loss {watch.losses[-1]:.4f}, median step {step_ms:.1f} ms")
    print(f"A step takes {steps_ms[1] / steps_ms[0]:.3f} of the stock model's time.")
    apart = max(abs(mine - other) for mine, other in zip(stock.losses, patched.losses, strict=True))
    print(f"The losses differ by at most {apart:.5f}.")
    return runs


if __name__ == "__main__":
    main()
