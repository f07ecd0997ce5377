"""Train an encoder and a decoder to spell words backwards, in under a minute on a CPU.

python examples/reverse.py
python examples/reverse.py --copy --positions relative --norm-placement pre
python examples/reverse.py --plot alignment.png
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.diagnostics import encoder_decoder_maps, pictures
from foundry_kernels.models import EncoderDecoder, ModelConfig

PAD, START, STOP = 26, 27, 28  # after the letters
LONGEST = 10


def words(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random words ``[count, LONGEST]``, padded, and their lengths."""
    letters = torch.randint(26, (count, LONGEST), generator=generator)
    lengths = torch.randint(2, LONGEST + 1, (count,), generator=generator)
    return letters.masked_fill(torch.arange(LONGEST) >= lengths[:, None], PAD), lengths


def answers(source: Tensor, lengths: Tensor, copy: bool) -> Tensor:
    """The decoder's targets ``[count, LONGEST + 1]``: the word, reversed unless `copy`, then STOP, then -100."""
    place = torch.arange(LONGEST + 1)
    taken = place if copy else lengths[:, None] - 1 - place
    said = source.gather(1, taken.expand(len(source), -1).clamp(0, LONGEST - 1))
    said = said.masked_fill(place == lengths[:, None], STOP)
    return said.masked_fill(place > lengths[:, None], -100)


def share_correct(model: EncoderDecoder, copy: bool, generator: torch.Generator) -> float:
    """The fraction of new words with a correct answer."""
    source, lengths = words(256, generator)
    found = model.generate(source, LONGEST + 1, source_lengths=lengths, stop_token=STOP)
    wanted = answers(source, lengths, copy)
    return sum(row[1:].tolist() == w[w >= 0].tolist() for row, w in zip(found, wanted, strict=True)) / len(found)


def names(tokens: list[int]) -> list[str]:
    return [{START: "START", STOP: "STOP"}.get(token) or chr(ord("a") + token) for token in tokens]


def alignment(model: EncoderDecoder, source: list[int], said: list[int]) -> Any:
    """Draws the last layer's attention to the source for each output token, averaged over heads."""
    layer = model.decoder.config.n_layers - 1
    heads = [(layer, head) for head in range(model.decoder.config.n_heads)]
    read, written = torch.tensor([source]), torch.tensor([[START, *said[:-1]]])
    maps = encoder_decoder_maps(model, read, written, "cross", heads)
    mean = torch.stack(list(maps.values())).mean(0)
    title = f"cross-attention of layer {layer}, mean of {len(heads)} heads"
    figure = pictures.attention_map(mean, names(said), names(source), title=title)
    figure.axes[0].set(xlabel="the encoder reads", ylabel="the decoder says")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--copy", action="store_true", help="copy words instead of reversing them")
    parser.add_argument("--positions", default="sinusoidal", choices=["relative", "learned", "sinusoidal", "rope"])
    parser.add_argument("--norm-placement", default="post", choices=["pre", "post"])
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw where the decoder attends")
    options = parser.parse_args()
    if options.plot:
        import matplotlib  # noqa: F401  (before the training, if it is missing)

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    sinusoids = options.positions == "sinusoidal"  # then embeddings must have the same width
    config = ModelConfig(
        dim=64, n_layers=2, n_heads=4, vocab_size=29, max_seq_len=LONGEST + 2, tie_embeddings=True,
        positions=options.positions, norm_placement=options.norm_placement,
        init_std=64**-0.5 if sinusoids else 0.02, embedding_scale=64**0.5 if sinusoids else 1.0,
    )  # fmt: skip
    model = EncoderDecoder(config, backend=options.backend, start_token=START)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=max(options.steps, 2))
    for step in range(options.steps):
        source, lengths = words(64, generator)
        # The decoder reads its targets shifted by one, after `start_token`.
        _, loss = model(source, targets=answers(source, lengths, options.copy), source_lengths=lengths)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % max(options.steps // 8, 1) == 0 or step == options.steps - 1:
            print(f"step {step:>3}  loss {loss.item():.3f}", flush=True)

    task = "copied" if options.copy else "reversed"
    print(f"{share_correct(model, options.copy, generator):.0%} of new words are {task} without a mistake")
    word = [ord(letter) - ord("a") for letter in "foundry"]
    (spelled,) = model.generate([word], LONGEST, stop_token=STOP)
    said = spelled[1:].tolist()
    print("foundry ->", "".join(names([token for token in said if token < 26])))
    if options.plot:
        alignment(model, word, said).savefig(options.plot, dpi=110)
        print(f"where the decoder looks: {options.plot}")


if __name__ == "__main__":
    main()
