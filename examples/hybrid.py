"""Train a model of one layer of linear attention and one of full attention to look up values.

python examples/hybrid.py
python examples/hybrid.py --layers linear_attention linear_attention

A sequence lists pairs of a letter and a digit, and then asks for the digits of its letters in another order:
``b7 a2 c5 | a2 c5 b7``.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from foundry_kernels.models import ModelConfig, Transformer
from foundry_kernels.models.fields import FULL, LINEAR

LETTERS, DIGITS, PAIRS = 16, 10, 4
BAR = LETTERS + DIGITS
LISTED = 2 * PAIRS + 1  # tokens before the first question


def sequences(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens ``[count, 4 * PAIRS]``, and their targets: the answers, -100 elsewhere."""
    letters = torch.rand(count, LETTERS, generator=generator).argsort(1)[:, :PAIRS]
    digits = LETTERS + torch.randint(DIGITS, (count, PAIRS), generator=generator)
    order = torch.rand(count, PAIRS, generator=generator).argsort(1)
    listed = torch.stack([letters, digits], 2).flatten(1)
    asked = torch.stack([letters.gather(1, order), digits.gather(1, order)], 2).flatten(1)
    tokens = torch.cat([listed, torch.full((count, 1), BAR), asked], 1)
    targets = tokens[:, 1:].clone()
    targets[:, :LISTED] = -100
    targets[:, LISTED::2] = tokens[:, LISTED + 1 :: 2]
    targets[:, LISTED + 1 :: 2] = -100
    return tokens[:, :-1], targets


@torch.no_grad()
def share_correct(model: Transformer, generator: torch.Generator) -> float:
    """The fraction of new sequences' first questions with a correct answer, generated with the cache."""
    tokens, targets = sequences(256, generator)
    answers = torch.stack(model.generate(tokens[:, : LISTED + 1], 1))[:, -1]
    return float((answers == targets[:, LISTED]).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--layers", nargs="+", default=[LINEAR, FULL], choices=[LINEAR, FULL])
    parser.add_argument("--backend", default="auto")
    options = parser.parse_args()

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    config = ModelConfig(
        dim=64, n_layers=len(options.layers), n_heads=4, vocab_size=BAR + 1, max_seq_len=64, layer_types=options.layers
    )
    model = Transformer(config, options.backend)
    print(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(options.steps):
        tokens, targets = sequences(64, generator)
        _, loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step:>4} loss {loss.item():.3f}")
    print(f"answers {share_correct(model, generator):.0%} of new questions correctly")


if __name__ == "__main__":
    main()
