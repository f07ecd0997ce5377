"""The settings of a comparison, saved in its folder, so that phases run later use the same ones."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from examples.studies.ablation.variants import Shape, split
from examples.training.text import TextError

#: The most predicted bytes of the held-out text.
HELD_OUT = 98304
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class UsageError(Exception):
    """Invalid options, or a folder that does not match them; the message is for the user."""


def exit_code(run: Callable[[], int]) -> int:
    """Returns the command's exit code: its own, 2 after printing a user error, or 130 after Ctrl-C."""
    try:
        return run()
    except (UsageError, TextError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


@dataclass(frozen=True)
class Settings:
    """The settings that all variants share, except the options in a variant's name. `dtype` bfloat16 is autocast with
    parameters in float32. `warm_up` is a fraction of the steps. `train_bytes` is the number of bytes to train on, from
    the start of the text (0: all except the held-out ones). `held_out` is the number of held-out bytes for losses."""

    dim: int = Shape.dim
    layers: int = Shape.layers
    heads: int = Shape.heads
    kv_heads: int = Shape.kv_heads
    seq_len: int = Shape.seq_len
    batch: int = 8
    steps: int = 600
    lr: float = 1e-3
    dtype: str = "bfloat16"
    warm_up: float = 0.1
    train_bytes: int = 0
    held_out: int = HELD_OUT
    device: str = "cpu"

    @property
    def shape(self) -> Shape:
        return Shape(self.dim, self.layers, self.heads, self.kv_heads, self.seq_len)

    def of(self, name: str) -> Settings:
        """These settings with the training options of a variant's name."""
        options = split(name)[1]
        return dataclasses.replace(self, **{key: value for key, value in options.items() if key in ("lr", "warm_up")})

    @property
    def warm_up_steps(self) -> int:
        return round(self.warm_up * self.steps)


FIELDS = {field.name: field.default for field in dataclasses.fields(Settings)}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the common options of programs with a folder of runs. Settings that are not given are None; see `settle`."""
    add = parser.add_argument
    add("--text", type=Path, metavar="FILE", help="any file, read as bytes; its last tenth is held out")
    add("--out", type=Path, default=Path("runs/ablation"), metavar="DIR", help="default: runs/ablation")
    add("--seeds", nargs="+", type=int, default=[0, 1], metavar="N", help="default: 0 1")
    add("--threads", type=int, metavar="N", help="default: PyTorch's")
    add("--page", type=Path, metavar="FILE", help="a Markdown page whose marked parts the report fills")
    about = {
        "seq_len": "bytes of a window",
        "batch": "windows of a step",
        "kv_heads": "key-value heads of grouped-query attention",
        "lr": "peak learning rate of AdamW",
        "dtype": "dtype of training; bfloat16 is autocast",
        "warm_up": "fraction of the steps with a rising learning rate",
        "train_bytes": "bytes of the text to train on; 0 is all except the tail",
        "held_out": "maximum number of bytes of the tail for losses",
        "device": "cpu or cuda",
    }
    for name, default in FIELDS.items():
        text = f"{about.get(name, '')} (default: {default})".strip()
        choices = {"dtype": tuple(DTYPES), "device": ("cpu", "cuda")}.get(name)
        add(f"--{_option(name)}", type=type(default), choices=choices, help=text)


def use_threads(count: int | None) -> None:
    if count is None:
        return
    if count < 1:
        raise UsageError(f"--threads must be at least 1; got {count}")
    torch.set_num_threads(count)


def check_device(name: str) -> None:
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: PyTorch finds no CUDA device")


def settle(folder: Path, given: Mapping[str, Any]) -> Settings:
    """The settings in the folder, otherwise the `given` ones (None: not given), otherwise the defaults.

    Raises:
        UsageError: the folder has other settings, or a value is out of range.
    """
    stored = load(folder / "settings.json") or {}
    values = {}
    for name, default in FIELDS.items():
        value = given.get(name)
        if value is None:
            value = stored.get(name, default)
        elif name in stored and stored[name] != value:
            raise UsageError(
                f"{folder} was begun with --{_option(name)} {stored[name]}; got {value}: choose another --out"
            )
        least = 0 if name == "train_bytes" else 1
        if isinstance(default, int) and value < least:
            raise UsageError(f"--{_option(name)} must be at least {least}; got {value}")
        values[name] = value
    if not (values["lr"] > 0.0 and math.isfinite(values["lr"])):
        raise UsageError(f"--lr must be finite and above 0; got {values['lr']}")
    if not 0.0 <= values["warm_up"] < 1.0:
        raise UsageError(f"--warm-up must be at least 0 and below 1; got {values['warm_up']}")
    check_device(values["device"])
    return Settings(**values)


def keep(folder: Path, settings: Settings) -> None:
    save(folder / "settings.json", dataclasses.asdict(settings))


def load(path: Path) -> Any:
    """The content of a JSON file, or None if there is no such file.

    Raises:
        UsageError: it is damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}; remove it to create it again") from None


def compact(content: Any, indent: int = 0) -> str:
    """JSON in compact lines: a mapping of mappings has one line for each of them, and everything else is on one
    line."""
    if not (isinstance(content, dict) and any(isinstance(value, dict) for value in content.values())):
        return json.dumps(content)
    space = " " * (indent + 1)
    lines = [f"{space}{json.dumps(str(key))}: {compact(value, indent + 1)}" for key, value in content.items()]
    return "{\n" + ",\n".join(lines) + "\n" + " " * indent + "}"


def save(path: Path, content: Any) -> None:
    """Writes the file atomically."""
    temporary = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(compact(content) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None


def _option(name: str) -> str:
    return name.replace("_", "-")
