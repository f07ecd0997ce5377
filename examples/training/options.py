"""The options of `train.py`, and the recipe from them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import torch

from examples.training.loop import Recipe
from examples.training.parallel import KINDS
from examples.training.text import Bytes
from foundry_kernels import RopeScaling
from foundry_kernels.core.registry import BACKENDS
from foundry_kernels.models import ModelConfig
from foundry_kernels.models.presets import FAMILIES, choices

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: Fields of ModelConfig that these options set.
OWN_OPTIONS = {
    "dim": "--dim",
    "n_layers": "--layers",
    "n_heads": "--heads",
    "n_kv_heads": "--kv-heads",
    "vocab_size": "--tokens",
    "max_seq_len": "--seq-len",
}


class UsageError(Exception):
    """Invalid options; the message is for the user."""


def parse(argv: list[str] | None, description: str | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--text", type=Path, metavar="FILE", help="any file, read as bytes (default: the standard library's source)")
    add("--tokens", type=Path, metavar="FILE.bin", help="a token file of prepare_tokens.py, instead of a text")
    add("--backend", nargs="+", choices=("auto", *BACKENDS), metavar="NAME", help="default: reference auto")
    add("--device", help="cpu, cuda, cuda:1 (default: cuda if available)")
    add("--dtype", choices=DTYPES, default="float32", help="bfloat16: autocast, with parameters in float32")
    add("--steps", type=int, default=300)
    add("--batch", type=int, default=8)
    add("--accumulate", type=int, default=1, metavar="PARTS", help="split each batch into this many")
    add("--parallel", choices=KINDS, help="train on the processes that torchrun started; --batch is their total")
    add("--seq-len", type=int, default=128)
    add("--family", choices=FAMILIES, default="llama", help="the model family, without its size (default: llama)")
    add("--set", nargs="+", action="extend", default=[], metavar="FIELD=VALUE",
        help="other choices, fields of ModelConfig: --set norm=layer_norm positions=alibi")  # fmt: skip
    add("--dim", type=int, default=256)
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=8)
    add("--kv-heads", type=int, help="default: the family's own (llama: 4), reduced to a divisor of --heads")
    add("--lr", type=float, default=1e-3, help="peak learning rate of AdamW")
    add("--seed", type=int, default=0)
    add("--evaluate-every", type=int, default=100, metavar="STEPS", help="on held-out text; 0 for the end only")
    add("--diagnose-every", type=int, default=0, metavar="STEPS",
        help="log and draw entropy, logits, ranks and gradients by layer, the first step too")  # fmt: skip
    add("--sigma-reparam", action="store_true", help="make the spectral norms of query and key weights parameters")
    add("--compile", action="store_true", help="torch.compile the model; diagnosed steps run uncompiled")
    add("--out", type=Path, metavar="DIR", help="checkpoints, logs and plot (default: a new folder in runs/)")
    add("--tensorboard", action="store_true", help="write the log for TensorBoard as well: tensorboard --logdir DIR")
    add("--checkpoint-every", type=int, default=100, metavar="STEPS")
    add("--resume", action="store_true", help="continue the runs in --out")
    add("--plot", type=Path, metavar="FILE", help="PNG of the loss curves (default: loss.png in --out)")
    add("--plot-schedule", type=Path, metavar="FILE", help="draw the learning rate of --steps and --lr, then exit")
    add("--prompt", help="prompt of the sample at the end (default: the first held-out tokens)")
    add("--sample-tokens", type=int, default=240, help="tokens to generate at the end; 0 for none")
    add("--temperature", type=float, default=0.7)
    return parser.parse_args(argv)


def make_recipe(options: argparse.Namespace, prompt: int, vocab_size: int = Bytes.size) -> Recipe:
    """Checks the options. `prompt` is the prompt's length in tokens."""
    for name in ("steps", "batch", "accumulate", "seq_len", "checkpoint_every"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1; got {getattr(options, name)}")
    if options.batch % options.accumulate:
        raise UsageError(f"--batch must be a multiple of --accumulate {options.accumulate}; got {options.batch}")
    for name in ("sample_tokens", "evaluate_every", "diagnose_every"):
        if getattr(options, name) < 0:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 0; got {getattr(options, name)}")
    for name in ("lr", "temperature"):
        if not 0.0 < getattr(options, name) < float("inf"):
            raise UsageError(f"--{name} must be above 0; got {getattr(options, name)}")
    for name, needs in (("diagnose_every", "all heads"), ("sigma_reparam", "whole weights")):
        if getattr(options, name) and options.parallel == "tp":
            raise UsageError(f"--{name.replace('_', '-')} needs {needs} in each process; got --parallel tp")
    return Recipe(
        make_model_config(options, prompt, vocab_size),
        options.steps,
        options.batch,
        options.seq_len,
        options.lr,
        options.seed,
        DTYPES[options.dtype],
        _device(options.device),
        options.checkpoint_every,
        options.accumulate,
        options.evaluate_every,
        diagnose_every=options.diagnose_every,
        sigma_reparam=options.sigma_reparam,
        compile=options.compile,
    )


def make_model_config(options: argparse.Namespace, prompt: int, vocab_size: int) -> ModelConfig:
    """The family's fields, then those of --set; max_seq_len covers the training windows and the sample."""
    chosen = choices(options.family, _fields(options.set))
    if options.kv_heads is not None:
        chosen["n_kv_heads"] = options.kv_heads
    elif (own := 4 if options.family == "llama" else chosen.get("n_kv_heads")) is not None and options.heads > 0:
        chosen["n_kv_heads"] = math.gcd(options.heads, own)
    # Learned positions beyond the training windows would be untrained.
    sampled = 0 if chosen.get("positions") == "learned" else prompt + options.sample_tokens
    shape = {
        "dim": options.dim,
        "n_layers": options.layers,
        "n_heads": options.heads,
        "vocab_size": vocab_size,
        "max_seq_len": max(options.seq_len, sampled),
    }
    try:
        return ModelConfig(**{**chosen, **shape})
    except (TypeError, ValueError) as error:
        raise UsageError(f"the model's shape: {error}") from None


def _fields(assignments: list[str]) -> dict[str, Any]:
    """Parses FIELD=VALUE as fields of ModelConfig. A value is JSON, or otherwise a string."""
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    found: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or name not in known:
            raise UsageError(f"--set takes FIELD=VALUE with a field of ModelConfig; got {assignment}")
        if name in OWN_OPTIONS:
            raise UsageError(f"--set {name}: use {OWN_OPTIONS[name]} instead; got {assignment}")
        try:
            value = json.loads(text)
            found[name] = RopeScaling(**value) if name == "rope_scaling" and value is not None else value
        except json.JSONDecodeError:
            found[name] = text
        except (TypeError, ValueError) as error:
            raise UsageError(f"--set {assignment}: {error}") from None
    return found


def _device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA raises AssertionError
        raise UsageError(f"--device {name}: {str(error).splitlines()[0]}") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device must be cpu or cuda; got {name}")
    return device
