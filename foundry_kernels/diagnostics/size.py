"""python -m foundry_kernels size MODEL: the cost of a model, by part."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from foundry_kernels.core.registry import BackendUnavailable
from foundry_kernels.diagnostics.checkpoint import CheckpointError, load_config
from foundry_kernels.models import ModelConfig, presets
from foundry_kernels.models.count import OPTIMIZERS, flops_by_part

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m foundry_kernels size",
        description="Print a model's parameters, key-value cache and floating-point operations by part, and with "
        "--training the memory of a step. No weight is loaded.",
    )
    add = parser.add_argument
    names = ", ".join(presets.names())
    add("model", help=f"a preset ({names}), a folder saved by transformers, or a checkpoint's file")
    add("--length", type=int, help="tokens of a sequence (default: the model's max_seq_len)")
    add("--batch", type=int, default=1, help="sequences (default: 1)")
    add("--dtype", choices=tuple(DTYPES), default="bfloat16", help="of weights and cache (default: bfloat16)")
    add("--training", action="store_true", help="also weights, gradients, optimizer state and activations of a step")
    add("--optimizer", choices=tuple(OPTIMIZERS), default="adamw", help="(default: adamw)")
    add("--autocast", choices=tuple(DTYPES)[1:], help="dtype of torch.autocast in the step")
    add("--backend", choices=("auto", "reference"), default="auto", help="backend of the activations (default: auto)")
    return parser.parse_args(argv)


def config_of(name: str) -> ModelConfig:
    known = presets.names()
    if name in known:
        family, size = known[name]
        return ModelConfig(**presets.fields(family, size, {}))
    if not Path(name).exists():
        raise CheckpointError(f"{name} is neither a checkpoint nor a preset: {', '.join(known)}")
    return load_config(Path(name))


def lines(config: ModelConfig, options: argparse.Namespace) -> list[str]:
    length = config.max_seq_len if options.length is None else options.length
    dtype, parameters = DTYPES[options.dtype], config.parameters_by_part()
    found = [f"{parameters.total:,} parameters, {parameters.total * dtype.itemsize / 2**30:.2f} GiB in {options.dtype}"]
    found += [f"  {_title(name):<18} {n:>18,} {100 * parameters.shares[name]:6.1f} %" for name, n in parameters.items()]
    if config.n_experts is not None:
        found.append(f"  {config.parameters_by_part(active=True).total:,} of them are active for a token")
    if config.causal:
        size = config.cache_bytes(options.batch, length, dtype) / 2**30
        found += ["", f"key-value cache of {options.batch} x {length} tokens in {options.dtype}: {size:.2f} GiB"]
    flops = flops_by_part(config, length)
    total = sum(flops.values())
    found += ["", f"{total / 1e9:,.2f} GFLOP a token in a forward pass of {length} tokens, 3 times as many in training"]
    found += [f"  {_title(name):<18} {n / 1e9:>18,.3f} {100 * n / total:6.1f} %" for name, n in flops.items()]
    if options.training:
        autocast = None if options.autocast is None else DTYPES[options.autocast]
        memory = config.training_bytes(
            options.batch, length, dtype=dtype, autocast=autocast, optimizer=options.optimizer, backend=options.backend
        )
        parts: Mapping[str, Mapping[str, int]] = {f.name: getattr(memory, f.name) for f in dataclasses.fields(memory)}
        found += ["", f"{memory.total / 2**30:,.2f} GiB of a training step of {options.batch} x {length} tokens"]
        found.append(f"  {'GiB':<18} " + " ".join(f"{name:>12}" for name in parts))
        for part in parameters:
            found.append(f"  {_title(part):<18} " + " ".join(f"{of[part] / 2**30:12.3f}" for of in parts.values()))
        sums = (sum(of.values()) / 2**30 for of in parts.values())
        found.append(f"  {'total':<18} " + " ".join(f"{number:12.3f}" for number in sums))
    return found


def _title(name: str) -> str:
    return name.replace("feed_forward", "feed-forward").replace("_", " ")


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    try:
        print("\n".join(lines(config_of(options.model), options)))
    except (CheckpointError, ValueError, BackendUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
