"""The commands attention, positions and initialization. They check their options before they load anything."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.diagnostics import pictures
from foundry_kernels.diagnostics.checkpoint import CheckpointError, read
from foundry_kernels.diagnostics.maps import PARTS, attention_maps, attention_weights, encoder_decoder_maps
from foundry_kernels.diagnostics.pictures._figure import FORMATS, MissingMatplotlib, require_matplotlib, save
from foundry_kernels.models import EncoderDecoder, ModelConfig, Transformer
from foundry_kernels.models.config import CHOICES
from foundry_kernels.models.presets import FAMILIES
from foundry_kernels.ops.rope import RopeScaling

#: Parameters of llama3's scaling, as in Llama 3.1.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


#: The options by the arguments that error messages name.
_OPTIONS = {
    "rotary_dim": "--dim", "dim": "--dim", "max_positions": "--positions", "positions": "--positions", "base": "--base",
    "factor": "--factor", "original_max_position_embeddings": "--trained", "n_heads": "--heads", "heads": "--shown",
    "n_layers": "--layers", "init_std": "--init-std", "max_seq_len": "--seq-len", "causal": "--compare",
}  # fmt: skip


class UsageError(Exception):
    """The options are invalid; the message is for the user."""


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    try:
        if options.out.suffix not in FORMATS:
            raise UsageError(f"--out must end in {', '.join(FORMATS)}; got {options.out}")
        require_matplotlib()
        figure = options.draw(options)
        save(figure, options.out)
    except (CheckpointError, UsageError, MissingMatplotlib) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: cannot write {options.out}: {error.strerror or error}", file=sys.stderr)
        return 2
    print(f"written to {options.out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m foundry_kernels.diagnostics")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _attention_options(commands.add_parser("attention", help="where heads look", description=_ATTENTION))
    positions = commands.add_parser("positions", help="tables and biases of positions", description=_POSITIONS)
    _positions_options(positions.add_subparsers(required=True, metavar="KIND"))
    found = commands.add_parser("initialization", help="activations and gradients by layer", description=_INITIAL)
    _initialization_options(found)
    return parser


# --- attention --------------------------------------------------------------------------------------------------------

_ATTENTION = (
    "Draw attention maps of a checkpoint, of all heads or one of them, or of given queries and keys. The same "
    "checkpoints as without a command work, and folders of transformers with an encoder (BERT) or both (T5, BART)."
)


def _attention_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", type=Path, nargs="?", help="the model; omit it with --qk")
    texts = parser.add_mutually_exclusive_group()
    texts.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 text; the model reads its first tokens")
    texts.add_argument("--prompt", metavar="TEXT", help="the text itself")
    add("--target", metavar="TEXT", help="the decoder's text, for an encoder with a decoder")
    add("--part", choices=PARTS, help="the attention of an encoder with a decoder (default: cross)")
    add("--qk", type=Path, metavar="FILE", help='torch.save({"q": q, "k": k}, FILE): [T, D], [H, T, D] or [1, H, T, D]')
    add("--head", metavar="LAYER.HEAD", help="one head, with its tokens (with --qk: its number); default: all heads")
    add("--compare", action="store_true", help="draw --head with and without a causal mask")
    add("--causal", action="store_true", help="mask the future of --qk")
    add("--tokens", type=int, default=32, help="maximum number of tokens (default: 32)")
    add("--out", type=Path, default=Path("attention.png"), metavar="FILE", help="PNG, SVG or PDF")
    parser.set_defaults(draw=_draw_attention)


def _draw_attention(options: argparse.Namespace) -> Any:
    if (options.checkpoint is None) == (options.qk is None):
        raise UsageError("give either a checkpoint or --qk")
    if options.tokens < 2:
        raise UsageError(f"--tokens must be at least 2; got {options.tokens}")
    if options.compare and options.head is None:
        raise UsageError("--compare needs --head, the one to compare")
    if options.qk is not None:
        return _draw_given(options)
    head = None if options.head is None else _layer_and_head(options.head)
    if options.causal:
        raise UsageError("--causal is for --qk; a checkpoint has its own mask, and --compare draws both")
    text = _text(options)[: 64 * options.tokens]  # enough of a long file: tokens are shorter
    model, tokens = read(options.checkpoint)
    name = "/".join(options.checkpoint.parts[-2:])
    if isinstance(model, EncoderDecoder):
        return _draw_pair(options, model, tokens, text, head, name)
    for asked in ("part", "target"):
        if getattr(options, asked) is not None:
            raise UsageError(f"--{asked} needs an encoder with a decoder; {options.checkpoint} is one Transformer")
    ids = _ids("the text", tokens(text), options.tokens, model)
    labels, batch = tokens.labels(ids), torch.tensor([ids])
    config = model.config
    shape = config.n_layers, config.n_heads
    _check_head(head, *shape)
    if head is None:
        found = _with_options(attention_maps, model, batch, _every(*shape))
        grid = _stacked(found, *shape)
        title = f"{name}: attention of {shape[0]} layers x {shape[1]} heads"
        return pictures.attention_grid(grid, causal=config.causal, window=config.sliding_window, title=title)
    title = f"{name}: attention of layer {head[0]}, head {head[1]}"
    if options.compare:
        maps = [_with_options(attention_maps, _masked(model, c), batch, [head])[head] for c in (True, False)]
        trained = "causal" if config.causal else "bidirectional"
        return pictures.causal_and_bidirectional(
            maps[0], maps[1], labels, window=config.sliding_window, title=f"{title}, trained {trained}"
        )
    weights = _with_options(attention_maps, model, batch, [head])[head]
    return pictures.attention_map(weights, labels, causal=config.causal, window=config.sliding_window, title=title)


def _draw_pair(
    options: argparse.Namespace, model: EncoderDecoder, tokens: Any, text: str, head: tuple[int, int] | None, name: str
) -> Any:
    part = options.part or "cross"
    if options.compare:
        raise UsageError("--compare needs a single Transformer; draw --part encoder and --part decoder")
    if part != "encoder" and not options.target:
        raise UsageError(f"--part {part} needs --target, what the decoder reads")
    source = _ids("the text", tokens(text), options.tokens, model)
    target = _ids("--target", tokens(options.target), options.tokens, model) if options.target else source[:1]
    config = model.encoder.config if part == "encoder" else model.decoder.config
    shape = config.n_layers, config.n_heads
    _check_head(head, *shape)
    pair = torch.tensor([source]), torch.tensor([target])
    wanted = _every(*shape) if head is None else [head]
    found = _with_options(encoder_decoder_maps, model, *pair, part, wanted)
    what = {"encoder": "encoder", "decoder": "decoder", "cross": "decoder's attention to the encoder"}[part]
    causal = part == "decoder"
    if head is None:
        title = f"{name}, {what}: {shape[0]} layers x {shape[1]} heads"
        return pictures.attention_grid(_stacked(found, *shape), causal=causal, title=title)
    of_source, of_target = tokens.labels(source), tokens.labels(target)
    rows = of_source if part == "encoder" else of_target
    columns = of_target if part == "decoder" else of_source
    title = f"{name}, {what}: layer {head[0]}, head {head[1]}"
    return pictures.attention_map(found[head], rows, columns, causal=causal, title=title)


def _draw_given(options: argparse.Namespace) -> Any:
    for asked in ("text", "prompt", "target", "part"):
        if getattr(options, asked) is not None:
            raise UsageError(f"--{asked} needs a checkpoint; --qk has neither tokens nor parts")
    try:
        content = torch.load(options.qk, map_location="cpu", weights_only=True)
        q, k = (torch.as_tensor(content[name]) for name in ("q", "k"))
    except Exception as error:  # damaged files raise errors of many types
        raise UsageError(
            f'--qk must be a file of {{"q": tensor, "k": tensor}}; {options.qk}: {_first_line(error)}'
        ) from None
    q, k = (x[(None,) * max(0, 4 - x.dim())] for x in (q, k))
    try:
        both = {causal: attention_weights(q, k, causal=causal) for causal in (True, False)}
    except (TypeError, ValueError) as error:
        raise UsageError(f"--qk {options.qk}: {error}") from None
    if len(q) != 1 or not both[True].numel():
        raise UsageError(f"--qk must have one sequence, with tokens; got q of shape {tuple(q.shape)}")
    weights = both[options.causal]
    if options.head is None and q.shape[1] > 1:
        title = f"{options.qk.name}: attention of {q.shape[1]} heads"
        return pictures.attention_grid(weights, causal=options.causal, title=title)
    try:
        head = int(options.head or 0)
    except ValueError:
        raise UsageError(f"--head must be the number of a head of --qk; got {options.head}") from None
    if not 0 <= head < q.shape[1]:
        raise UsageError(f"--head must be from 0 to {q.shape[1] - 1}; got {head}")
    title = f"{options.qk.name}: head {head}"
    if options.compare:
        return pictures.causal_and_bidirectional(both[True][0, head], both[False][0, head], title=title)
    return pictures.attention_map(weights[0, head], causal=options.causal, title=title)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _text(options: argparse.Namespace) -> str:
    if options.prompt is not None:
        return str(options.prompt)
    if options.text is None:
        raise UsageError("give a text with --text FILE or --prompt TEXT")
    try:
        return str(options.text.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the text {options.text}: {error}") from None


def _ids(name: str, tokens: list[int], most: int, model: Transformer | EncoderDecoder) -> list[int]:
    if len(tokens) < 2:
        raise UsageError(f"{name} must have at least 2 tokens; got {len(tokens)}")
    return tokens[: min(most, model.config.max_seq_len)]


def _layer_and_head(name: str) -> tuple[int, int]:
    layer, _, head = name.partition(".")
    if not (layer.isdecimal() and head.isdecimal()):
        raise UsageError(f"--head must be LAYER.HEAD, such as 0.3; got {name}")
    return int(layer), int(head)


def _check_head(head: tuple[int, int] | None, n_layers: int, n_heads: int) -> None:
    if head is not None and not (head[0] < n_layers and head[1] < n_heads):
        allowed = f"a layer from 0 to {n_layers - 1} and a head from 0 to {n_heads - 1}"
        raise UsageError(f"--head must be {allowed}; got {head[0]}.{head[1]}")


def _every(n_layers: int, n_heads: int) -> list[tuple[int, int]]:
    return [(layer, head) for layer in range(n_layers) for head in range(n_heads)]


def _stacked(found: dict[tuple[int, int], Tensor], n_layers: int, n_heads: int) -> Tensor:
    return torch.stack([found[pair] for pair in _every(n_layers, n_heads)]).unflatten(0, (n_layers, n_heads))


def _masked(model: Transformer, causal: bool) -> Transformer:
    """A model with the same weights and this mask."""
    if model.config.causal == causal:
        return model
    config = _with_options(dataclasses.replace, model.config, causal=causal)
    return Transformer.from_state(config, model.state_dict(), model, "auto")


# --- positions --------------------------------------------------------------------------------------------------------

_POSITIONS = "Draw the sinusoidal table, the rotary tables and scores, or ALiBi's biases, as models have them."


def _positions_options(kinds: Any) -> None:
    for kind, draw, dim in (("sinusoidal", _draw_sinusoidal, 128), ("rope", _draw_rotary, 64)):
        parser = kinds.add_parser(kind)
        parser.add_argument("--dim", type=int, default=dim, help=f"dimensions (default: {dim})")
        parser.add_argument("--positions", type=int, default=256 if kind == "rope" else 128)
        parser.add_argument("--base", type=float, default=10000.0, help="base of the wavelengths")
        if kind == "rope":
            scalings = "linear", "dynamic", "yarn", "llama3"
            parser.add_argument("--scaling", nargs="+", default=[], choices=scalings, help="draw these below")
            parser.add_argument("--factor", type=float, default=4.0, help="factor of the scalings (default: 4)")
            parser.add_argument("--trained", type=int, help="the length before scaling (default: positions / 4)")
        _end(parser, draw, f"positions-{kind}.png")
    parser = kinds.add_parser("alibi")
    parser.add_argument("--heads", type=int, default=8, help="number of heads of the model (default: 8)")
    parser.add_argument("--shown", type=int, nargs="+", metavar="HEAD", help="heads to draw the bias of")
    parser.add_argument("--positions", type=int, default=32)
    _end(parser, _draw_alibi, "positions-alibi.png")


def _end(parser: argparse.ArgumentParser, draw: Any, out: str) -> None:
    parser.add_argument("--out", type=Path, default=Path(out), metavar="FILE", help="PNG, SVG or PDF")
    parser.set_defaults(draw=draw)


def _draw_sinusoidal(options: argparse.Namespace) -> Any:
    return _with_options(pictures.sinusoidal, options.dim, options.positions, base=options.base)


def _draw_rotary(options: argparse.Namespace) -> Any:
    trained = max(1, options.positions // 4) if options.trained is None else options.trained
    scalings = {}
    for name in options.scaling:
        more: dict[str, Any] = {} if name == "linear" else {"original_max_position_embeddings": trained}
        more |= _LLAMA3 if name == "llama3" else {}
        described = f"{name} x {options.factor:g}" + ("" if name == "linear" else f", trained {trained}")
        scalings[described] = _with_options(RopeScaling, name, options.factor, **more)
    return _with_options(pictures.rotary, options.dim, options.positions, base=options.base, scalings=scalings)


def _draw_alibi(options: argparse.Namespace) -> Any:
    return _with_options(pictures.alibi, options.heads, options.positions, heads=options.shown)


def _with_options(function: Any, *values: Any, **named: Any) -> Any:
    try:
        return function(*values, **named)
    except (TypeError, ValueError) as error:
        name, _, rest = str(error).partition(" ")
        raise UsageError(f"{_OPTIONS.get(name, name)} {rest}") from None


# --- initialization ---------------------------------------------------------------------------------------------------

_INITIAL = (
    "Draw root mean squares of activations and gradients by layer, for new models with several initialisations, "
    "in one pass on random tokens."
)


def _initialization_options(parser: argparse.ArgumentParser) -> None:
    known = CHOICES["init"]
    add = parser.add_argument
    add("--schemes", nargs="+", default=list(known), choices=known, help="init of ModelConfig (default: all)")
    add("--family", choices=FAMILIES, default="llama", help="the model's other choices (default: llama)")
    add("--norm-placement", choices=CHOICES["norm_placement"], default="pre")
    add("--layers", type=int, default=48)
    add("--dim", type=int, default=256)
    add("--heads", type=int, default=4)
    add("--init-std", type=float, default=0.02)
    add("--batch", type=int, default=4)
    add("--seq-len", type=int, default=64)
    add("--seed", type=int, default=0)
    _end(parser, _draw_initialization, "initialization.png")


def _draw_initialization(options: argparse.Namespace) -> Any:
    for name in ("batch", "seq_len"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1; got {getattr(options, name)}")
    chosen = FAMILIES[options.family] | {
        "dim": options.dim, "n_layers": options.layers, "n_heads": options.heads, "init_std": options.init_std,
        "vocab_size": 1024, "max_seq_len": options.seq_len, "norm_placement": options.norm_placement,
    }  # fmt: skip
    if "n_kv_heads" in chosen:
        chosen["n_kv_heads"] = math.gcd(chosen["n_kv_heads"], max(1, options.heads))
    config = _with_options(ModelConfig, **chosen)
    generator = torch.Generator().manual_seed(options.seed)
    tokens = torch.randint(config.vocab_size, (options.batch, options.seq_len + 1), generator=generator)
    inputs = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return _with_options(pictures.initialization, config, options.schemes, *inputs, seed=options.seed)
