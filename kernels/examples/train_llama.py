"""Train a small Llama twice, stock and with patch_model, and compare the loss curves.

    python kernels/examples/train_llama.py --steps 200 --out curves/

Needs transformers, and matplotlib for the picture. The text is the source of Python's standard library, byte by byte.
The yardstick is the run-to-run noise: the same stock model again with products rounded in another order (gate and up as
one packed product), and from other seeds. Without a GPU the patched model runs PyTorch's operations, and says so.
"""

import argparse
import csv
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from swiglu_kernels import patch_model

CONTEXT = 512


def corpus(length: int) -> Tensor:
    """The first bytes of the standard library's modules, in the order of their names."""
    text = bytearray()
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= length:
            break
    return torch.frombuffer(text[:length], dtype=torch.uint8).long()


def model_of(seed: int, device: torch.device) -> LlamaForCausalLM:
    """A two-layer Llama over bytes."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 256, "hidden_size": 512, "intermediate_size": 1376, "max_position_embeddings": CONTEXT}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=8)).to(device)


def pack_projections(model: LlamaForCausalLM) -> None:
    """Compute gate and up by one product of the same weights: the same model, rounded in another order."""
    for layer in model.model.layers:
        mlp = layer.mlp

        def forward(x: Tensor, mlp: torch.nn.Module = mlp) -> Tensor:
            gate, up = (x @ torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).T).chunk(2, dim=-1)
            return mlp.down_proj(torch.nn.functional.silu(gate) * up)

        mlp.forward = forward


def train(model: LlamaForCausalLM, text: Tensor, steps: int, batch: int, dtype: torch.dtype) -> list[float]:
    """Losses of each step; every run sees the same batches."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    order = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT, (batch,), generator=order)
        tokens = torch.stack([text[start : start + CONTEXT] for start in starts.tolist()]).to(device)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train, print the comparison, write losses.csv and losses.png."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path("curves"))
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    text = corpus(2_000_000)

    def run(seed: int, change: Callable[[LlamaForCausalLM], object] | None = None) -> list[float]:
        model = model_of(seed, device)
        if change is not None and (report := change(model)) is not None:
            print(report)
        return train(model, text, options.steps, options.batch, dtype)

    curves = {
        "stock": run(0),
        "patched": run(0, patch_model),
        "patched, recompute": run(0, lambda model: patch_model(model, save="input", weight_grad="torch")),
        "stock, packed product": run(0, pack_projections),
        "stock, seed 1": run(1),
        "stock, seed 2": run(2),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "losses.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["step", *curves])
        rows.writerows([step, *losses] for step, losses in enumerate(zip(*curves.values(), strict=True)))
    print(f"{'curve':24} {'last loss':>9}  difference from stock: mean, largest")
    for name, losses in curves.items():
        differences = [abs(mine - stock) for mine, stock in zip(losses, curves["stock"], strict=True)]
        print(f"{name:24} {losses[-1]:9.4f}  {statistics.mean(differences):.5f}, {max(differences):.5f}")
    draw(curves, options.out / "losses.png")


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Loss over steps, and below it each curve's difference from stock."""
    try:
        from matplotlib import pyplot
    except ImportError:
        print("matplotlib is not installed: no picture")
        return
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 7), height_ratios=(3, 2))
    for number, (name, losses) in enumerate(curves.items()):
        style = {"color": f"C{number}", "linewidth": 1, "linestyle": ":" if "seed" in name else "-"}
        above.plot(losses, label=name, **style)
        if name != "stock":
            below.semilogy([abs(mine - stock) for mine, stock in zip(losses, curves["stock"], strict=True)], **style)
    above.set_ylabel("loss (nats per byte)")
    above.legend()
    below.set_ylabel("|loss - stock's|")
    below.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"drawn: {path}")


if __name__ == "__main__":
    main()
