"""Draws score-functions.png: what the functions of docs/score-functions.md make of scores of 1, in head 0."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot

HERE = Path(__file__).parent
NAMES = ("alibi", "t5", "documents", "neighbours", "gated")


def functions() -> dict[str, Any]:
    """What the page defines."""
    defined: dict[str, Any] = {}
    torch.manual_seed(3)
    for block in re.findall(r"```python\n(.*?)```", (HERE.parent / "score-functions.md").read_text("utf-8"), re.DOTALL):
        exec(block, defined)  # the page's own code
    return {name: defined[name] for name in NAMES}


def main() -> None:
    figure, axes = pyplot.subplots(1, len(NAMES), figsize=(12, 2.6), layout="constrained")
    q_idx, kv_idx = torch.arange(36)[:, None], torch.arange(36)
    zero = torch.zeros((), dtype=torch.int64)
    for axis, (name, fn) in zip(axes, functions().items(), strict=True):
        made = torch.broadcast_to(fn(torch.ones(36, 36), zero, zero, q_idx, kv_idx), (36, 36)).detach()
        image = axis.imshow(made.where(made.isfinite(), torch.nan), cmap="viridis", interpolation="nearest")
        axis.set(title=name, facecolor="white", xticks=[0, 35], yticks=[0, 35])
        figure.colorbar(image, ax=axis, shrink=0.7)
    axes[0].set(xlabel="key", ylabel="query")
    figure.savefig(HERE / "score-functions.png", dpi=90)


if __name__ == "__main__":
    main()
