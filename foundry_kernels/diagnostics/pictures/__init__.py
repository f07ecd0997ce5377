"""Pictures of attention, positions and initialisations.

Each function returns a ``matplotlib.figure.Figure``, which `savefig` writes and a notebook shows. The commands
`attention`, `positions` and `initialization` of `python -m foundry_kernels.diagnostics` draw them into files.

    maps = diagnostics.attention_maps(model, tokens, [(2, 1)])
    pictures.attention_map(maps[2, 1], labels, causal=True, title="layer 2, head 1").savefig("attention.png")
"""

from foundry_kernels.diagnostics.pictures.attention import (
    attention_grid,
    attention_map,
    causal_and_bidirectional,
)
from foundry_kernels.diagnostics.pictures.initialization import initialization, layer_scales
from foundry_kernels.diagnostics.pictures.positions import alibi, rotary, sinusoidal

__all__ = [
    "alibi",
    "attention_grid",
    "attention_map",
    "causal_and_bidirectional",
    "initialization",
    "layer_scales",
    "rotary",
    "sinusoidal",
]
