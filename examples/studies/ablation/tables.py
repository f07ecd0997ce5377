"""Measurements of parts: heads that share keys and values, attention without its matrix, and RMSNorm against
LayerNorm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import foundry_kernels as fk
from benchmarks.measure import Prepare, release, reused_memory
from examples.studies.ablation.machine import machine
from examples.studies.ablation.memory import peak_bytes
from examples.studies.ablation.settings import DTYPES, load, save
from examples.studies.ablation.speed import Contenders, Decoding, allocated, begin, ready, timed
from foundry_kernels.models import ModelConfig, Transformer

#: "backward" does not include the time of the forward pass.
DIRECTIONS = ("forward", "backward", "forward+backward")


@dataclass(frozen=True)
class Sizes:
    """The measured sizes: attention of `tokens` with `heads` of `head_dim`, and norms of `rows` of `width`. In
    grouped-query attention, `group` query heads share keys and values."""

    tokens: int = 2048
    heads: int = 8
    group: int = 4
    head_dim: int = 64
    layers: int = 4
    new_tokens: int = 16
    rows: int = 2048
    width: int = 4096
    seconds: float = 8.0  # for each comparison
    device: str = "cpu"

    @property
    def shared_heads(self) -> dict[str, int]:
        return {"MHA": self.heads, "GQA": max(1, self.heads // self.group), "MQA": 1}


SIZES = Sizes()


def measure(folder: Path) -> None:
    """Measures the parts that are missing in `tables.json`."""
    path, sizes = folder / "tables.json", SIZES
    kept = begin(load(path) or {}, {"machine": machine(sizes.device), "sizes": vars(sizes)})
    parts: dict[str, Callable[[Sizes], Any]] = {"heads": heads, "attention": attention_with_memory, "norms": norms}
    for part, measured in parts.items():
        if part not in kept:
            kept[part] = measured(sizes)
            save(path, kept)
            release()
        print(f"{part}: measured", flush=True)


# --- MHA, GQA, MQA ----------------------------------------------------------------------------------------------------


def heads(sizes: Sizes) -> dict[str, Any]:
    """Measures float32 models with several numbers of key-value heads: bytes of the cache, generation after `tokens`
    positions, and prefill of `tokens` positions. Measures generation and prefill also for attention alone."""
    dim, tokens = sizes.heads * sizes.head_dim, sizes.tokens
    config = ModelConfig(
        dim, sizes.layers, sizes.heads, vocab_size=256, max_seq_len=tokens + sizes.new_tokens, norm_eps=1e-5
    )
    prompt = torch.randint(256, (1, tokens), generator=torch.Generator().manual_seed(0)).to(sizes.device)
    models = {
        n: Transformer(replace(config, n_kv_heads=k)).to(sizes.device).eval() for n, k in sizes.shared_heads.items()
    }
    decode = {n: (Decoding(model, prompt, sizes.new_tokens), sizes.new_tokens) for n, model in models.items()}
    prefill = {n: (_prefill(model, prompt), 1) for n, model in models.items()}
    alone, whole = {}, {}
    for n, count in sizes.shared_heads.items():
        q, k, v = _qkv(sizes, torch.float32, count)
        alone[n] = (_repeated(20, q[:, :, -1:], k, v), 20)
        whole[n] = (_repeated(1, q, k, v), 1)
    parts: dict[str, Contenders] = {
        "decode": decode,
        "prefill": prefill,
        "decode_attention": alone,
        "prefill_attention": whole,
    }
    found = {name: timed(contenders, sizes.seconds) for name, contenders in parts.items()}
    return {
        n: {
            "kv_heads": count,
            "parameters": models[n].config.n_parameters,
            "cache_bytes": allocated(models[n].make_cache(1, tokens)),
            **{name: times[n] for name, times in found.items()},
        }
        for n, count in sizes.shared_heads.items()
    }


def _prefill(model: Transformer, prompt: Tensor) -> Prepare:
    def prepare() -> Callable[[], object]:
        cache = model.make_cache(1, prompt.shape[1])

        @torch.no_grad()
        def run() -> None:
            model(prompt, cache=cache, last_only=True)

        return run

    return prepare


def _repeated(times: int, q: Tensor, k: Tensor, v: Tensor) -> Prepare:
    @torch.no_grad()
    def run() -> None:
        for _ in range(times):
            fk.flash_attention(q, k, v, causal=True)

    return ready(run)


# --- attention with and without its matrix ----------------------------------------------------------------------------


def materialized(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Explicit attention: T x T scores, mask, softmax, matmul with the values."""
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


#: Causal attention. The first one, the explicit form, is the baseline.
ATTENTION: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "explicit matrices": materialized,
    "PyTorch's SDPA": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "fk.flash_attention": lambda q, k, v: fk.flash_attention(q, k, v, causal=True),
}


@dataclass(frozen=True)
class Attend:
    """A run of one of `ATTENTION`, with its own inputs."""

    name: str
    sizes: Sizes
    dtype: torch.dtype
    direction: str

    def __call__(self) -> Callable[[], object]:
        inputs = [t.requires_grad_(self.direction != "forward") for t in _qkv(self.sizes, self.dtype)]
        return directed(ATTENTION[self.name], inputs, torch.ones_like(inputs[0]), self.direction)


def directed(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], dout: Tensor, direction: str
) -> Callable[[], object]:
    """Returns the timed function for a direction. For "backward", this already runs the forward pass."""
    if direction == "forward":
        return lambda: function(*inputs)
    if direction == "backward":
        out = function(*inputs)
        return lambda: out.backward(dout)
    return lambda: function(*inputs).backward(dout)


def attention(sizes: Sizes) -> dict[str, Any]:
    """Time in each dtype and direction."""
    found: dict[str, Any] = {}
    for dtype_name, dtype in DTYPES.items():
        for direction in DIRECTIONS:
            runs = {n: (Attend(n, sizes, dtype, direction), 1) for n in ATTENTION}
            with reused_memory():
                found[f"{direction} {dtype_name}"] = timed(runs, sizes.seconds)
    return found


def attention_with_memory(sizes: Sizes) -> dict[str, Any]:
    """Also measures the increase of peak memory by a run."""
    found = attention(sizes)
    for case, rows in found.items():
        direction, dtype = case.split()
        for name, row in rows.items():
            row["peak_bytes"] = peak_bytes(Attend(name, sizes, DTYPES[dtype], direction), device=sizes.device)
    return found


def _qkv(sizes: Sizes, dtype: torch.dtype, kv_heads: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    counts = (sizes.heads, kv_heads or sizes.heads, kv_heads or sizes.heads)
    shapes = [(1, count, sizes.tokens, sizes.head_dim) for count in counts]
    q, k, v = (torch.randn(shape, generator=generator).to(sizes.device, dtype) for shape in shapes)
    return q, k, v


# --- RMSNorm and LayerNorm --------------------------------------------------------------------------------------------

#: The first one, LayerNorm, is the baseline.
NORMS: dict[str, dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "fk": {
        "LayerNorm": lambda x, weight, bias: fk.layer_norm(x, weight, bias),
        "RMSNorm": lambda x, weight, bias: fk.rms_norm(x, weight, 1e-6),
    },
    "PyTorch": {
        "LayerNorm": lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias),
        "RMSNorm": lambda x, weight, bias: F.rms_norm(x, x.shape[-1:], weight, 1e-6),
    },
}


def norms(sizes: Sizes) -> dict[str, Any]:
    """Time of each norm for each dtype and direction. All four are measured in turns; the baseline is fk.layer_norm."""
    found: dict[str, Any] = {}
    flat = {f"{whose} {what}": norm for whose, both in NORMS.items() for what, norm in both.items()}
    for dtype_name, dtype in DTYPES.items():
        x = torch.randn(sizes.rows, sizes.width, generator=torch.Generator().manual_seed(0)).to(sizes.device, dtype)
        for direction in DIRECTIONS:
            inputs = [x.clone(), torch.ones_like(x[0]), torch.zeros_like(x[0])]
            for t in inputs:
                t.requires_grad_(direction != "forward")
            dy = torch.ones_like(x)
            contenders = {name: (_normalize(norm, inputs, dy, direction), 1) for name, norm in flat.items()}
            with reused_memory():
                found[f"{direction} {dtype_name}"] = timed(contenders, sizes.seconds, rounds=25)
    return found


def _normalize(
    norm: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: list[Tensor], dy: Tensor, direction: str
) -> Prepare:
    def prepare() -> Callable[[], object]:
        for t in inputs:
            t.grad = None
        return directed(norm, inputs, dy, direction)

    return prepare
