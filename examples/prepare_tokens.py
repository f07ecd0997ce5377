"""Create a token file for `train.py --tokens`, for large texts (it is memory-mapped) and for tokens other than bytes.

    python examples/prepare_tokens.py --text shakespeare.txt --out shakespeare.bin --vocab 2000
    python examples/train.py --tokens shakespeare.bin

With --vocab, tokens are byte pairs of an encoding that is trained on the text; without it, bytes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if not __package__:  # run as a file; installed packages take precedence over the checkout
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from examples.training.text import BYTES, TextError
from examples.training.tokens import train_byte_pairs, write_tokens


def run(options: argparse.Namespace) -> None:
    text, out = options.text, options.out
    if out.suffix != ".bin":
        raise TextError(f"--out must end in .bin; got {out}")
    if options.vocab is not None and options.vocab <= BYTES.size:
        raise TextError(f"--vocab must be above {BYTES.size}, the number of bytes; got {options.vocab}")
    for file in (out, out.with_suffix(".json")):
        if file.exists():
            raise TextError(f"{file} exists; choose another --out")
    vocabulary = BYTES if options.vocab is None else train_byte_pairs(text, options.vocab)
    count = write_tokens(text, out, vocabulary)
    print(f"{out}: {count:,} tokens of {text.stat().st_size / count:.2f} bytes, a vocabulary of {vocabulary.size:,}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, metavar="FILE")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.bin")
    parser.add_argument("--vocab", type=int, metavar="N", help="train an encoding of N tokens on the text")
    try:
        run(parser.parse_args(argv))
    except TextError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
