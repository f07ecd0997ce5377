"""The kernels in your own model: a small GPT in one file, in the style of nanoGPT.

python examples/nanogpt_style.py
python examples/nanogpt_style.py --steps 200 --compile
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import foundry_kernels as fk


@dataclass
class GPTConfig:
    block_size: int = 64
    vocab_size: int = 256  # a token is a byte
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 128


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, c = x.shape
        heads = self.c_attn(x).view(b, t, 3, self.n_head, c // self.n_head)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # views [B, H, T, D]; the operations support any strides
        q, k = fk.rope(q, k, cos, sin)
        y = fk.flash_attention(q, k, v, causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(b, t, c))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = 8 * config.n_embd // 3
        self.c_fc = nn.Linear(config.n_embd, 2 * width, bias=False)  # gate and up in one matmul
        self.c_proj = nn.Linear(width, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(fk.swiglu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = fk.nn.RMSNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = fk.nn.RMSNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, branch: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream is ``branch + x``: one pass sums and normalises it, here and in the next block."""
        y, x = self.ln_1(branch, x)
        y, x = self.ln_2(self.attn(y, cos, sin), x)
        return self.mlp(y), x


class GPT(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.h = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.ln_f = fk.nn.RMSNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        cos, sin = fk.rope_table(config.n_embd // config.n_head, config.block_size)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.wte(idx)
        branch = torch.zeros_like(x)
        for block in self.h:
            branch, x = block(branch, x, self.cos, self.sin)
        logits = self.lm_head(self.ln_f(branch, x)[0])
        if targets is None:
            return logits, None
        return logits, fk.cross_entropy(logits, targets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--compile", action="store_true", help="torch.compile, which takes a minute")
    options = parser.parse_args()

    torch.manual_seed(0)
    config = GPTConfig()
    model = GPT(config)
    run = torch.compile(model) if options.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    for step in range(options.steps):
        starts = torch.randint(len(text) - config.block_size - 1, (8,))
        batch = torch.stack([text[start : start + config.block_size + 1] for start in starts])
        _, loss = run(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0 or step == options.steps - 1:
            print(f"step {step:>3}  loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
