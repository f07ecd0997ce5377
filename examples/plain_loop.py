"""A training loop without a framework: accumulated gradients, bfloat16 autocast, clipping, a learning-rate schedule.

    python examples/plain_loop.py
    python examples/plain_loop.py --device cuda --steps 500

The model is from this package. Parameters and optimizer are float32, matmuls are bfloat16, and each operation rounds
only once.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from foundry_kernels.models import ModelConfig, Transformer

ACCUMULATE = 4  # batches per step
LENGTH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = Transformer(ModelConfig(dim=128, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=256, max_seq_len=LENGTH))
    model.to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=max(options.steps, 2))
    text = torch.tensor(list(Path(__file__).read_bytes()))

    for step in range(options.steps):
        total = 0.0
        for _ in range(ACCUMULATE):
            starts = torch.randint(len(text) - LENGTH - 1, (8,))
            batch = torch.stack([text[start : start + LENGTH + 1] for start in starts]).to(options.device)
            with torch.autocast(options.device, torch.bfloat16):
                _, loss = model(batch[:, :-1], batch[:, 1:])
            (loss / ACCUMULATE).backward()
            total += loss.item() / ACCUMULATE
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"step {step:>3}  loss {total:.3f}  gradient norm {norm.item():.2f}")


if __name__ == "__main__":
    main()
