"""python -m foundry_kernels.diagnostics CHECKPOINT --text FILE: one page of heat maps and curves, and their numbers.

With `attention`, `positions` or `initialization` in place of CHECKPOINT, it draws one picture.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch

from foundry_kernels.diagnostics import attention_maps, record
from foundry_kernels.diagnostics.checkpoint import CheckpointError, load
from foundry_kernels.diagnostics.page import write_json, write_png
from foundry_kernels.diagnostics.pictures import commands

PICTURES = ("attention", "positions", "initialization")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m foundry_kernels.diagnostics",
        description="Draw the health of a checkpoint on a text: entropy and largest logits of attention, effective "
        "ranks, gradients, and where chosen heads look.",
        epilog=f"Other pictures are drawn by: python -m foundry_kernels.diagnostics {{{','.join(PICTURES)}}} --help",
    )
    add = parser.add_argument
    add("checkpoint", type=Path, help="a folder saved by transformers, a checkpoint of examples/train.py, or a file "
        'of torch.save({"config": dataclasses.asdict(config), "model": model.state_dict()})')  # fmt: skip
    add("--text", type=Path, required=True, metavar="FILE", help="UTF-8 text to run the model on")
    add("--out", type=Path, default=Path(), metavar="DIR", help="folder for health.png and health.json (default: .)")
    add("--batch", type=int, default=4, help="number of windows of the text")
    add("--seq-len", type=int, default=256, help="tokens of a window, at most the model's max_seq_len")
    add("--heads", nargs="*", default=["0.0"], metavar="LAYER.HEAD", help="heads to draw the attention of")
    add("--map-tokens", type=int, default=48, help="tokens in these maps")
    return parser.parse_args(argv)


def windows(tokens: list[int], batch: int, length: int) -> torch.Tensor:
    """[B, length + 1]: windows spread evenly over the text."""
    if len(tokens) < length + 1:
        raise CheckpointError(f"the text has {len(tokens)} tokens; windows of {length} need {length + 1}")
    starts = torch.linspace(0, len(tokens) - length - 1, batch).long()
    return torch.tensor(tokens)[starts[:, None] + torch.arange(length + 1)]


def chosen_heads(names: list[str]) -> list[tuple[int, int]]:
    try:
        return [(int(layer), int(head)) for layer, _, head in (name.partition(".") for name in names)]
    except ValueError:
        raise CheckpointError(f"--heads must be LAYER.HEAD, such as 0.3; got {' '.join(names)}") from None


def run(options: argparse.Namespace) -> int:
    if min(options.batch, options.seq_len, options.map_tokens) < 1:
        raise CheckpointError("--batch, --seq-len and --map-tokens must be at least 1")
    heads = chosen_heads(options.heads)
    try:
        text = options.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read the text {options.text}: {error}") from None
    model, encode = load(options.checkpoint)
    if not model.config.head:
        raise CheckpointError(f"{options.checkpoint} is an encoder without a head, which has no loss; try attention")
    tokens = encode(text)
    length = min(options.seq_len, model.config.max_seq_len)
    batch = windows(tokens, options.batch, length)
    with record(model.eval()) as recorder:
        _, loss = model(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        loss.backward()
    mean = loss.item()
    health = recorder.health()
    first = torch.tensor([tokens[: min(options.map_tokens, length)]])
    try:
        maps = attention_maps(model, first, heads)
    except ValueError as error:
        raise CheckpointError(f"--{error}") from None
    options.out.mkdir(parents=True, exist_ok=True)
    about = {"checkpoint": str(options.checkpoint), "text": str(options.text), "loss": mean, "tokens": length}
    write_json(options.out / "health.json", health, about)
    title = f"{options.checkpoint}: loss {mean:.3f} nats, perplexity {math.exp(mean):.1f}"
    try:
        write_png(options.out / "health.png", health, maps, title)
    except ImportError as error:
        print(f"no health.png: {error}", file=sys.stderr)
    print(title)
    print("\n".join(health.concerns()) or "nothing to worry about")
    print(f"written to {options.out / 'health.json'} and health.png")
    return 0


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] and argv[0] in PICTURES:
        return commands.main(argv)
    try:
        return run(parse(argv))
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
