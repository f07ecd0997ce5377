"""Records statistics of a model's layers during forward and backward passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from foundry_kernels.diagnostics.health import Health, LayerHealth
from foundry_kernels.diagnostics.projections import FUSED, PAIRS, is_attention, query_key_weights, whole
from foundry_kernels.diagnostics.ranks import effective_rank, product_ranks
from foundry_kernels.diagnostics.statistics import Rows
from foundry_kernels.diagnostics.watch import Frame, Seen, Watch
from foundry_kernels.models import Transformer
from foundry_kernels.models.blocks import TransformerBlock
from foundry_kernels.nn import Attention

#: Ranks are computed from this many rows of activations, queries and keys: more rows take long and give the same ranks.
_ROWS = 512
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def check_model(model: object) -> Transformer:
    if not isinstance(model, Transformer):
        raise TypeError(f"model must be a foundry_kernels.models.Transformer; got {type(model).__name__}")
    return model


def attentions_of(model: Transformer) -> list[Attention]:
    return [cast(Attention, block.attention) for block in model.layers]


@dataclass
class _Attended:
    """A call of an attention module in a forward pass."""

    module: nn.Module
    block: nn.Module
    rows: Rows
    head_dim: int | None
    q: Tensor | None  # [H, rows, D], if the weights are not recognised
    k: Tensor | None
    activations: Tensor | None = None


class Recorder:
    """The result of `record`. Every forward pass replaces the recorded values of the previous one."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._names = {module: name for name, module in model.named_modules()}
        self._in_lists = {
            child for module in model.modules() if isinstance(module, _LISTS) for child in module.children()
        }
        self._attended: list[_Attended] = []
        self._is_new = True

    def _saw(self, frames: list[Frame], frame: Frame, seen: Seen) -> None:
        if self._is_new:
            self._attended, self._is_new = [], False
        if isinstance(frame.seen, _Attended) and frame.seen.rows.entropy.shape == seen.rows.entropy.shape:
            frame.seen.rows = frame.seen.rows + seen.rows  # an attention that works on one part at a time
            return
        head_dim = None if seen.q is None else seen.q.shape[-1]
        q, k = seen.q, seen.k
        if q is None or k is None or query_key_weights(frame.module, len(seen.rows.entropy), head_dim) is not None:
            q = k = None
        else:
            q, k = (_some(x.detach().transpose(0, 1).flatten(1, 2), 1) for x in (q, k))
        block = self._block(frames[: frames.index(frame) + 1])
        frame.seen = _Attended(frame.module, block, seen.rows, head_dim, q, k)
        self._attended.append(frame.seen)

    def _block(self, frames: list[Frame]) -> nn.Module:
        """The layer of the attention: the innermost element of a module list that has more weights than the
        attention."""
        inside = [frame.module for frame in reversed(frames) if frame.module in self._in_lists]
        for module in inside:
            if _feeding(module, {frames[-1].module}):
                return module
        if inside:
            return inside[0]
        *outer, attention = (frame.module for frame in frames)
        if len(outer) == 1 and any(isinstance(module, nn.Embedding) for module in outer[0].modules()):
            return attention  # rather than the whole model
        return outer[-1] if outer else attention

    def _left(self, frames: list[Frame], result: Any) -> None:
        module = frames[-1].module
        for attended in self._attended:
            if attended.block is module and attended.activations is None:
                hidden = _hidden(module, result)
                attended.activations = None if hidden is None else _some(hidden, 0)
        self._is_new = len(frames) == 1 or self._is_new

    @torch.no_grad()
    def health(self) -> Health:
        """Returns the health of the last forward pass and, after a backward pass, of its gradients.

        Under DDP or `fully_shard`, all processes must call it; attention and activations are those of the process's own
        tokens. (With tensor parallelism, no process has all heads.)

        Raises:
            RuntimeError: there was no forward pass, or no attention was recognised in it.
        """
        if not self._attended:
            raise RuntimeError(self._nothing())
        layers = [self._health_of(attended) for attended in self._attended]
        widths = [attended.head_dim for attended in self._attended if attended.head_dim is not None]
        return Health(layers, head_dim=max(widths, default=0))

    def _health_of(self, attended: _Attended) -> LayerHealth:
        heads = len(attended.rows.entropy)
        weights = query_key_weights(attended.module, heads, attended.head_dim)
        ranks, most, of = [], None, None
        if weights is not None:
            ranks, most, of = product_ranks(*weights, heads).tolist(), min(weights[0].shape[1:]), "weights"
        elif attended.q is not None and attended.k is not None:
            ranks = product_ranks(attended.q.mT, attended.k.mT, heads).tolist()
            most, of = min(*attended.q.shape[1:], attended.k.shape[1]), "activations"
        activations = attended.activations
        if activations is None or 0 in activations.shape:
            activation_rank, most_ranks = 0.0, 0
        else:
            activation_rank, most_ranks = float(effective_rank(activations)), min(activations.shape)
        around, feeding = self._branches(attended)
        return LayerHealth(
            entropy=attended.rows.fraction().tolist(),
            max_logit=attended.rows.max_logit.tolist(),
            qk_rank=ranks,
            activation_rank=activation_rank,
            most_ranks=most_ranks,
            gradient_norm=_gradient_norm([attended.block]),
            attention_gradient_norm=_gradient_norm(around),
            feed_forward_gradient_norm=_gradient_norm(feeding),
            name=self._names.get(attended.module, ""),
            most_qk_ranks=most,
            qk_rank_of=of,
        )

    def _branches(self, attended: _Attended) -> tuple[list[nn.Module], list[nn.Module]]:
        """The parts of a block that contain attention, and the parts of its feed-forward branch."""
        around = [child for child in _children(attended.block) if attended.module in set(child.modules())]
        if not around:
            return [attended.module], []
        return around, _feeding(attended.block, {each.module for each in self._attended})

    def _nothing(self) -> str:
        known = [name for module, name in self._names.items() if is_attention(module)]
        if known:
            shown = ", ".join(name or type(self.model).__name__ for name in known[:4])
            return (
                f"nothing was recorded: no forward pass ran inside `record` in which {shown} attended by the kernels "
                "here, by F.scaled_dot_product_attention or by a softmax over scores [B, H, T, S]; a model that runs "
                "something else, such as flex attention, needs attn_implementation='sdpa' or 'eager'"
            )
        return (
            f"nothing was recorded: no attention was recognised in {type(self.model).__name__}. Looked for: calls of "
            "flash_attention or F.scaled_dot_product_attention; and a softmax over scores [B, H, T, S] in a module "
            "that is torch.nn.MultiheadAttention, has 'Attention' or 'Attn' in the name of its class, or has "
            f"projections named {', '.join('/'.join(names) for names in PAIRS)} or {', '.join(FUSED)}"
        )


def _children(block: nn.Module) -> Iterator[nn.Module]:
    for child in block.children():
        if isinstance(child, _LISTS):
            yield from _children(child)
        else:
            yield child


def _feeding(block: nn.Module, attentions: set[nn.Module]) -> list[nn.Module]:
    """The parts of a block that have matrices but no attention."""
    if block in attentions:
        return []
    return [
        child
        for child in _children(block)
        if any(p.dim() > 1 for p in child.parameters())
        and not any(inner in attentions or is_attention(inner) for inner in child.modules())
    ]


def _some(x: Tensor, dim: int) -> Tensor:
    """A copy of at most `_ROWS` rows of x, spread evenly."""
    rows = x.shape[dim]
    index = [slice(None)] * dim + [slice(0, None, max(1, rows // _ROWS))]
    return x[tuple(index)].narrow(dim, 0, min(rows, _ROWS)).detach().clone()


def _hidden(module: nn.Module, result: Any) -> Tensor | None:
    """The activations ``[rows, dim]`` that a layer returns."""
    if isinstance(module, TransformerBlock):
        branch, stream = result[:2]
        result = stream.detach() if branch is None else stream.detach() + branch.detach()
    if isinstance(result, Mapping):
        result = list(result.values())
    if isinstance(result, tuple | list):
        result = next((x for x in result if isinstance(x, Tensor) and x.is_floating_point()), None)
    if not isinstance(result, Tensor) or not result.is_floating_point() or result.dim() < 2:
        return None
    result = result.detach()
    return torch.cat(result.unbind()) if result.is_nested else result.flatten(0, -2)


def _gradient_norm(modules: list[nn.Module]) -> float | None:
    parameters = {p: None for module in modules for p in module.parameters() if p.grad is not None}
    grads = [whole(cast(Tensor, p.grad)) for p in parameters]
    return float(nn.utils.get_total_norm(grads)) if grads else None


@contextmanager
def record(model: nn.Module) -> Iterator[Recorder]:
    """Records the forward passes of `model` in this block; the model's results do not change.

    If attention runs on this package's kernels (`fk.models`, `fk.nn`, a model after `fk.patch`), the kernels return
    entropy and the largest logit. In other models they are computed in blocks of rows, from the arguments of
    ``F.scaled_dot_product_attention`` or from the scores of a softmax in an attention module. They include masks,
    windows, soft caps, sinks and shared heads.

    Compiled code runs uncompiled, and torch.nn's fused inference of whole layers is off. So results may differ by
    rounding, and torch.nn's encoder has values at padded positions that are otherwise 0 in inference.

    Args:
        model: any model: of transformers, of torch.nn, of this package, patched or not, or your own. With a cache, the
            last forward pass may have only one token.

    Yields:
        a :class:`Recorder`, whose `health()` has a :class:`LayerHealth` for each call of attention.

    Raises:
        TypeError: model is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    recorder = Recorder(getattr(model, "_orig_mod", model))
    with Watch(recorder._saw, recorder._left).on(recorder.model):
        yield recorder
