"""QK-clip: limits attention's logits by scaling the weights that produce them."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from foundry_kernels.diagnostics.recorder import attentions_of, check_model
from foundry_kernels.diagnostics.reparam import SigmaReparam
from foundry_kernels.models import Transformer
from foundry_kernels.models.validate import EXPERT_FIELDS, refuse_choices
from foundry_kernels.nn import Attention

#: The configuration fields that may differ from their defaults, and their allowed values (None: any). With these, a
#: logit is a dot product of projections by `wq` and `wk`, plus terms that are never positive.
CLIPPED: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "vocab_size", "max_seq_len")),
    **dict.fromkeys(("init", "init_std")),
    **dict.fromkeys(("hidden_dim", "multiple_of", "ffn_dim_multiplier", "ffn_rule", "activation", "mlp_bias")),
    **dict.fromkeys(("norm", "norm_eps", "norm_round_before_weight", "norm_bias", "norm_placement", "embedding_norm")),
    **dict.fromkeys(("rope_base", "rope_scaling", "rope_interleaved", "rope_dim", "sliding_window")),
    **dict.fromkeys(("attention_bias", "attention_out_bias", "output_bias", "tie_embeddings")),
    **dict.fromkeys(("parallel_residual", "shared_attention_norm")),
    **dict.fromkeys(("embedding_dropout", "residual_dropout", "attention_dropout", "activation_dropout")),
    **dict.fromkeys(("output_dropout", "causal", "logit_scale", "attention_scale", "norm_weight_offset")),
    **dict.fromkeys(("final_norm", "embedding_scale")),
    **dict.fromkeys(("n_experts", *EXPERT_FIELDS)),
    "positions": ("rope", "alibi", "learned", "sinusoidal", "none"),
}
_REASONS = {"qk_norm": "it already bounds the logits"}


class QKClip:
    """After each optimizer step, scales down the query and key projections of heads whose largest logit in the step was
    above `limit`. With the new weights it would have been `limit`.

        clip = QKClip(model, limit=100.0)
        optimizer.register_step_post_hook(clip)

    A logit is the dot product of a query and a key. If a key head has one query head, both are multiplied by
    ``sqrt(limit / max_logit)``. If it has several, only the queries are multiplied, by ``limit / max_logit``, because
    query heads share the keys. Biases are scaled with their rows. ALiBi's bias is not scaled; it is never positive.

    The largest logits come from the attention kernels in all forward passes since the last step, including those of
    gradient accumulation, and stay on their device without synchronization.

    Args:
        model: a :class:`foundry_kernels.models.Transformer` with the choices in `CLIPPED`; QK-norm is not supported,
            because it already bounds the logits. A bias that a call adds to the scores counts too, although no weight
            produced it.
        limit: logits up to this one are not changed; above 0.

    Raises:
        TypeError: another model.
        ValueError: a model with a choice that is not in `CLIPPED`, or with :class:`SigmaReparam`, or a limit that is
            not above 0.

    Kimi Team, "Kimi K2: Open Agentic Intelligence", 2025, arXiv:2507.20534.
    """

    def __init__(self, model: Transformer, limit: float = 100.0) -> None:
        config = check_model(model).config
        refuse_choices(config, CLIPPED, "is not supported by QKClip", _REASONS)
        if not 0.0 < limit < float("inf"):
            raise ValueError(f"limit must be finite and above 0; got {limit}")
        self.limit = limit
        if SigmaReparam.is_in(model.state_dict()):
            raise ValueError(
                "model must have plain weights: SigmaReparam recomputes its weights, so they cannot be clipped"
            )
        self._attentions = attentions_of(model)
        self._largest: list[Tensor | None] = [None] * len(self._attentions)
        self._hooks: list[Any] = []
        for index, attention in enumerate(self._attentions):
            self._hooks += [
                attention.register_forward_pre_hook(self._ask, with_kwargs=True),
                attention.register_forward_hook(
                    lambda module, _, result, index=index: self._seen(index, module, result)
                ),
            ]

    def _ask(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return with_statistics(module, args, kwargs) if module.training else (args, kwargs)

    def _seen(self, index: int, module: nn.Module, result: Any) -> Any:
        if not module.training:
            return None
        out, _, max_logit = taken(module, result)
        largest, before = max_logit.detach().amax((0, 2)), self._largest[index]
        self._largest[index] = largest if before is None else torch.maximum(largest, before)
        return out

    @property
    def max_logits(self) -> list[Tensor | None]:
        """The largest logits of each layer, ``[H]``, since the last step; None where there was no forward pass."""
        return list(self._largest)

    @torch.no_grad()
    def __call__(self, *_: Any) -> None:
        """Rescales the weights; a hook calls it after each step of the optimizer."""
        for index, (attention, largest) in enumerate(zip(self._attentions, self._largest, strict=True)):
            if largest is not None:
                _scale(attention, (self.limit / largest.clamp_min(self.limit)).nan_to_num(1.0))
                self._largest[index] = None

    def remove(self) -> None:
        """Removes the hooks from the model."""
        for hook in self._hooks:
            hook.remove()


def _scale(attention: Attention, factor: Tensor) -> None:
    """Multiplies the weights by the heads' factors [H]; a factor of 1 changes no bit."""
    shared = attention.n_heads != attention.n_kv_heads
    each = factor if shared else factor.sqrt()
    for layer in (attention.wq,) if shared else (attention.wq, attention.wk):
        for parameter in (layer.weight, layer.bias):
            if parameter is not None:
                heads = parameter.view(attention.n_heads, attention.head_dim, -1)
                heads.mul_(each.to(parameter.dtype)[:, None, None])


def with_statistics(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A forward pre-hook that requests attention's statistics. A forward hook must remove them by `taken`."""
    return args, kwargs | {"return_stats": True}


_latest: WeakKeyDictionary[nn.Module, tuple[Tensor, Tensor]] = WeakKeyDictionary()


def taken(attention: nn.Module, result: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(y, entropy, max_logit) of a result of attention. Another hook may have removed the last two."""
    if isinstance(result, Tensor):
        return result, *_latest[attention]
    y, entropy, max_logit = result
    _latest[attention] = entropy, max_logit
    return y, entropy, max_logit
