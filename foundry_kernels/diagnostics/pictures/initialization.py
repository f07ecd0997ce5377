"""The effect of an initialisation on activations and gradients in a deep model, before any training."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.diagnostics.pictures._figure import make_figure
from foundry_kernels.models import ModelConfig, Transformer

#: The panels: a field of LayerScales, its title, and the first number on its axis.
_PANELS = (
    ("activations", "residual stream", 0),
    ("activation_gradients", "gradient of the residual stream", 0),
    ("weight_gradients", "gradient of a layer's weights", 1),
)


@dataclass
class LayerScales:
    """Root mean squares by layer.

    Attributes:
        activations: of the residual stream after the embeddings and after each layer, ``n_layers + 1`` numbers.
        activation_gradients: of the loss's gradient at the same places.
        weight_gradients: of the gradients of each layer's matrices, ``n_layers`` numbers.
    """

    activations: list[float] = field(default_factory=list)
    activation_gradients: list[float] = field(default_factory=list)
    weight_gradients: list[float] = field(default_factory=list)


def layer_scales(config: ModelConfig, tokens: Tensor, targets: Tensor, *, seed: int = 0) -> LayerScales:
    """Returns root mean squares by layer for a new model in one forward and backward pass.

    Args:
        config: the model's, with its initialisation; dropout is off.
        tokens, targets: ``[B, T]`` int32 or int64, as of :class:`foundry_kernels.models.Transformer`.
        seed: the weights' seed.

    Raises:
        TypeError, ValueError: as the model.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        empty = Transformer(config)
    model = empty.to_empty(device="cpu").eval()
    model.init_weights(generator)
    found = LayerScales()
    kept: list[Tensor] = []

    def keep(branch: Tensor | None, stream: Tensor) -> None:
        # The next norm adds the stream and the branch, so each has the gradient of the sum.
        total = stream if branch is None else stream + branch
        found.activations.append(_rms(total))
        part = stream if branch is None else branch
        part.retain_grad()
        kept.append(part)

    hooks = [model.layers[0].register_forward_pre_hook(lambda _, args: keep(*args[:2]))]
    hooks += [block.register_forward_hook(lambda _, __, result: keep(*result[:2])) for block in model.layers]
    _, loss = model(tokens, targets)
    loss.backward()
    for hook in hooks:
        hook.remove()
    found.activation_gradients = [_rms(part.grad) for part in kept]
    for block in model.layers:
        gradients = [p.grad.flatten() for p in block.parameters() if p.grad is not None and p.dim() > 1]
        found.weight_gradients.append(_rms(torch.cat(gradients)))
    return found


def initialization(
    config: ModelConfig, schemes: Sequence[str], tokens: Tensor, targets: Tensor, *, seed: int = 0
) -> Any:
    """Draws :func:`layer_scales` of a model for several initialisations (`init` of its configuration).

    Args:
        config: the model's.
        schemes: values of `init`.
        tokens, targets, seed: as for :func:`layer_scales`.

    Raises:
        ValueError: no or an unknown scheme, and as :func:`layer_scales`.
        MissingMatplotlib: matplotlib does not import.
    """
    if not schemes:
        raise ValueError("schemes must name an initialisation")
    configs = {name: dataclasses.replace(config, init=name) for name in schemes}  # checks all before running one
    depth, norm = config.n_layers, config.norm_placement
    figure, (axes,) = make_figure(
        1, 3, 11.0, 3.7, f"at initialisation: {depth} layers of width {config.dim}, {norm}-norm, seed {seed}"
    )
    marker = "." if depth <= 24 else None
    styles = itertools.cycle(("-", "--", ":"))  # so that equal curves stay visible
    for (name, chosen), style in zip(configs.items(), styles, strict=False):
        scales = layer_scales(chosen, tokens, targets, seed=seed)
        for axis, (part, _, first) in zip(axes, _PANELS, strict=True):
            values = getattr(scales, part)
            axis.plot(range(first, first + len(values)), values, style, marker=marker, label=_described(chosen, name))
    from matplotlib.ticker import MaxNLocator

    for axis, (_, heading, first) in zip(axes, _PANELS, strict=True):
        axis.set(xlabel="layer" if first else "layer (0: embeddings)", yscale="log")
        axis.set_title(heading, fontsize=10)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("root mean square")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(configs), fontsize=9)
    return figure


def _described(config: ModelConfig, scheme: str) -> str:
    return {
        "normal": f"normal: N(0, {config.init_std:g})",
        "xavier": "xavier: variance 2 / (fan_in + fan_out)",
        "depth_scaled": f"depth_scaled: N(0, {config.init_std:g}), wo and w2 / sqrt(2 n_layers)",
    }.get(scheme, scheme)


def _rms(values: Tensor | None) -> float:
    assert values is not None
    return float(values.detach().double().square().mean().sqrt())
