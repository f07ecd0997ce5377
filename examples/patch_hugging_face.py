"""Fine-tune a model of Hugging Face transformers with these kernels. Only one line is new.

    python examples/patch_hugging_face.py
    python examples/patch_hugging_face.py --family qwen3 --steps 50

To download nothing, it creates a small model from a configuration. `from_pretrained` would change no other line.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import foundry_kernels as fk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="llama", help="model type in transformers")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        options.family,
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config)

    handle = fk.patch(model)  # the new line
    print(handle.report())

    text = torch.tensor(list(Path(__file__).read_bytes()))  # a token is a byte
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for step in range(options.steps):
        starts = torch.randint(len(text) - 64, (8,))
        batch = torch.stack([text[start : start + 64] for start in starts])
        loss = model(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0 or step == options.steps - 1:
            print(f"step {step:>3}  loss {loss.item():.3f}")

    model.eval()
    prompt = text[:16][None]
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False)
    print("continues with", bytes(tokens[0, 16:].tolist()))

    handle.undo()  # restores the model's classes; weights stay trained, and the state dict never changed


if __name__ == "__main__":
    main()
