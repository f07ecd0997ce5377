"""A decoder over the modules of this package; its choices are data, and the backend is an argument."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foundry_kernels.core.autocast import autocast_dtype
from foundry_kernels.core.registry import is_dtensor
from foundry_kernels.models.blocks import add_branch, block_class, make_norm, operations
from foundry_kernels.models.cache import KVCache
from foundry_kernels.models.config import ModelConfig
from foundry_kernels.models.generate import generate
from foundry_kernels.models.inputs import check_range, check_targets, check_tokens
from foundry_kernels.nn import (
    AlibiSlopes,
    Experts,
    LayerNorm,
    RMSNorm,
    RotaryEmbedding,
    Router,
    RouterStats,
    SinusoidalEmbedding,
    load_balancing_loss,
    router_z_loss,
)
from foundry_kernels.nn._backend import Backend, describe, plan, serving
from foundry_kernels.nn._decode import layers_for
from foundry_kernels.nn._head import matrix_of
from foundry_kernels.nn._layers import is_observed
from foundry_kernels.nn._masks import check_masks, hide_padding, packed_positions
from foundry_kernels.nn._tables import FixedTables
from foundry_kernels.ops.cross_entropy import cross_entropy
from foundry_kernels.ops.flash_attention.attention_mask import AttentionMask
from foundry_kernels.ops.linear_cross_entropy import linear_cross_entropy


class Transformer(nn.Module):
    """A decoder-only transformer. By default RMSNorm, rotary positions, grouped-query attention, SwiGLU and no biases;
    :class:`ModelConfig` has the other choices, and presets.

    Parameters have the names and shapes of Meta's Llama, whose checkpoints load: `tok_embeddings`,
    `layers.N.{attention_norm, attention.{wq, wk, wv, wo}, ffn_norm, feed_forward.{w1, w2, w3}}`, `norm`, `output`.
    Where a choice asks for them there are `pos_embeddings`, `embedding_norm` and `layers.N.attention.{q_norm, k_norm}`;
    without a gate there is no `w3`, with a shared norm no `ffn_norm`, with "post" norms no `norm`; with experts
    `feed_forward` is a :class:`foundry_kernels.nn.MoE`. :meth:`from_hf` takes the models of transformers.

    Under autocast the residual stream keeps the dtype of the embedding; only the branches are in low precision.

    Args:
        config: the shape.
        backend: "auto", "reference", "triton", "native", or a mapping of operations to these. "auto" takes the first
            that supports each call: on a GPU triton, native, reference; on a CPU native, reference. A named backend is
            used for every operation that it has a kernel for, and never replaced silently: if a kernel does not support
            a call, that raises `BackendUnavailable`. Operations without such a kernel run on the reference, as a
            warning and `backends` say.
        device, dtype: of the parameters. On the meta device nothing is initialised: ``to_empty(device=...)``, then
            `init_weights()` or a checkpoint.

    Attributes:
        backends: the backend that each operation is called with.

    Raises:
        TypeError, ValueError: no ModelConfig, or an unknown backend.
        BackendUnavailable: a mapping names a kernel that does not exist.
    """

    def __init__(
        self,
        config: ModelConfig,
        backend: Backend = "auto",
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, ModelConfig):
            raise TypeError(f"config must be a ModelConfig; got {type(config).__name__}")
        if unknown := {f.name for f in fields(config)} - {f.name for f in fields(ModelConfig)}:
            raise TypeError(f"config must have the fields of ModelConfig; got {', '.join(sorted(unknown))} too")
        self.config = config
        self.backends = plan(backend, operations(config))
        self._head_backend = self.backends.get("swiglu", self.backends["flash_attention"])
        factory = {"device": device, "dtype": dtype, "backend": self.backends}
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim, device=device, dtype=dtype)
        self.pos_embeddings = _position_embedding(config, device, dtype)
        self.embedding_norm = make_norm(config, factory) if config.embedding_norm else None
        self._prepares = bool(config.embedding_norm or config.embedding_dropout or self.pos_embeddings is not None)
        rope = alibi = None  # one table, which the layers share
        if config.positions == "rope":
            rope = RotaryEmbedding(
                config.rotary_width,
                config.max_seq_len,
                base=config.rope_base,
                scaling=config.rope_scaling,
                interleaved=config.rope_interleaved,
                device=device,
                backend=self.backends,
            )
        elif config.positions == "alibi":
            alibi = AlibiSlopes(config.n_heads, device=device)
        block = block_class(config)
        self.layers = nn.ModuleList(block(config, rope, alibi, factory) for _ in range(config.n_layers))
        self._late_dropout = config.residual_dropout if block.drops_late else 0.0
        self.norm = None if config.norm_placement == "post" else make_norm(config, factory)
        # Tied weights are one parameter under one name: two names would come apart in `to_empty`.
        self.output = None
        if not config.tie_embeddings:
            self.output = nn.Linear(config.dim, config.vocab_size, config.output_bias, device=device, dtype=dtype)
        self.register_load_state_dict_pre_hook(_drop_redundant_keys)
        if not self.tok_embeddings.weight.is_meta:
            self.init_weights()

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Sets embeddings and projections to N(0, init_std), norms to 1, biases to 0, and computes the tables of
        positions."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, 0.0, self.config.init_std, generator=generator)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, Router | Experts):
                module.reset_parameters(self.config.init_std, generator)
            elif isinstance(module, RMSNorm | LayerNorm | FixedTables):
                module.reset_parameters()

    #: What knows the classes of transformers: `foundry_kernels.integrations.from_hf`, which is on a floor above.
    read_hf: ClassVar[Callable[[nn.Module, dict[str, Any]], tuple[ModelConfig, dict[str, Tensor]]]]
    check_hf: ClassVar[Callable[[dict[str, Tensor], dict[str, Tensor], nn.Module], None]]

    @classmethod
    def from_hf(cls, model: nn.Module, backend: Backend = "auto", **changes: Any) -> Transformer:
        """Returns the same model as one of transformers, with copies of its weights, in their dtype and on their
        device.

        Known are the causal language models of GPT-2, LLaMA, BLOOM and Falcon, and of Mistral, Qwen2, Qwen3, GPT-NeoX,
        OPT, Phi, StarCoder2, StableLM and the first GPT; with experts Mixtral, Qwen2-MoE and Qwen3-MoE. Logits are
        equal but for rounding. The mode is kept, and so are the checkpoint's dropouts, which matter in training only.

        Args:
            model: of transformers.
            backend: as for the class.
            changes: fields of the :class:`ModelConfig` that differ and leave the shapes as they are, such as a dropout
                or `max_seq_len` (which a table of learned positions cannot exceed).

        Raises:
            TypeError: a class that is not in the table.
            ValueError: an option of the checkpoint that this model does not have, or weights that are missing, not
                known, or of another shape; the message names them.
        """
        config, state = cls.read_hf(model, changes)
        weight = state["tok_embeddings.weight"]
        with torch.device("meta"):
            empty = cls(config, backend, dtype=weight.dtype)
        cls.check_hf(state, empty.state_dict(), model)
        ours = empty.to_empty(device=weight.device)
        ours.load_state_dict(state)
        return ours.train(model.training)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        attn_mask: Tensor | AttentionMask | None = None,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cache: KVCache | None = None,
        last_only: bool = False,
        ignore_index: int = -100,
        return_logits: bool = False,
        return_router_stats: bool = False,
    ) -> Tensor | tuple[Any, ...]:
        """Logits, or the loss where there are targets.

        Args:
            tokens: ``[B, T]`` int32 or int64, 0 <= token < vocab_size, T >= 1.
            targets: ``[B, T]`` int32 or int64, the token that follows each position, or `ignore_index`: for padding,
                and for the last token of each packed sequence.
            attn_mask: what a query sees of what is before it, in every layer: bool, a floating bias, or an
                :class:`foundry_kernels.AttentionMask`, of a shape that broadcasts to ``[B, H, T, S]``; S counts the
                positions in the cache too. A bias gets its gradient from all layers.
            lengths: ``[B]`` int32 or int64: of sequence b the keys at ``lengths[b]`` and behind it are padding, which
                no query sees; those in the cache count. With `attn_mask` too: at the cost that
                :class:`foundry_kernels.nn.Attention` names.
            cu_seqlens: ``[N + 1]`` int32 or int64: tokens are ``[1, total]`` and hold N sequences one after the other,
                each from ``cu_seqlens[n]`` on, whose positions begin at 0 and which see no other's. `total` may exceed
                max_seq_len. Not with a mask, lengths or a cache.
            max_seqlen: the longest of these sequences or any number above it; None is ``total``, which on a GPU
                launches empty programs where there are many sequences.
            cache: keys and values of the positions before `tokens`; those of `tokens` are appended. Inference only.
            last_only: logits of the last position only, ``[B, 1, V]``; not together with targets.
            ignore_index: positions with this target are ignored.
            return_logits: with targets, return the logits too.
            return_router_stats: return what the losses of the routers are made of too; needs a model with experts.

        Returns:
            logits ``[B, T, V]``, or with targets ``(None, loss)``, or ``(logits, loss)`` with `return_logits`; with
            `return_router_stats` a last item more, a :class:`foundry_kernels.nn.RouterStats` for each layer. The loss
            is the mean cross entropy in nats over the positions that count, float32 (float64 for a float64 model); 0
            where none counts. Without `return_logits` the logits exist for a chunk of tokens at a time
            (:func:`foundry_kernels.linear_cross_entropy`), unless `output` is no plain ``nn.Linear`` any more, or has
            hooks: then it is called. In training the losses of the routers are added, by `load_balancing_coef` and
            `router_z_coef` of the configuration; in eval mode the loss is the cross entropy alone.

        Raises:
            TypeError: tokens, targets, lengths or cu_seqlens are no int32 or int64 tensors, attn_mask of another kind.
            ValueError: a wrong rank, shape or device, more positions than max_seq_len, a cache that is full or does
                not fit, arguments that exclude each other, and, where they are on the CPU and nothing is being
                compiled, tokens or targets outside the vocabulary and packed sequences that are too long. (Elsewhere
                that would need a synchronization; the embedding then raises its own error.)
            BackendUnavailable: a named backend does not support this device or dtype.
        """
        config, weight = self.config, self.tok_embeddings.weight
        check_tokens(tokens, cache, cu_seqlens, max_seqlen, config, weight)
        if cache is not None:
            cache.check(tokens, self._key_dtype(), config.n_layers)
        if targets is not None:
            check_targets(targets, tokens, last_only, ignore_index, config.vocab_size)
        seen = self._seen(tokens, cache, attn_mask, lengths, cu_seqlens, max_seqlen)
        if return_router_stats and self.config.n_experts is None:
            raise ValueError(
                "return_router_stats needs a model with experts, whose configuration has n_experts; got True"
            )
        balances = targets is not None and self.training and self.config.balances
        stream = self._embed(tokens)
        if self._prepares:
            stream = self._prepare(stream, 0 if cache is None else cache.length, seen[1] if seen else None)
        branch: Tensor | None = None
        stats: list[RouterStats] = []
        for index, block in enumerate(self.layers):
            layer_cache = None if cache is None else cache.layer(index)
            if balances or return_router_stats:
                branch, stream, *of_router = block(branch, stream, layer_cache, True, *seen)
                stats.append(RouterStats(*of_router))
            else:
                branch, stream = block(branch, stream, layer_cache, False, *seen)
        if last_only:
            branch, stream = None if branch is None else branch[:, -1:], stream[:, -1:]
        # A block of "post" norms leaves no branch.
        y = stream if branch is None else add_branch(self.norm, branch, stream, self._late_dropout)[0]  # type: ignore[arg-type]
        if cache is not None:
            cache.advance(tokens.shape[1])
        asked = (stats,) if return_router_stats else ()
        if targets is None:
            logits = self._logits(y)
            return (logits, *asked) if asked else logits
        kept, loss = self._loss(y, targets, ignore_index, return_logits)
        return kept, self._with_router_losses(loss, stats) if balances else loss, *asked

    def _loss(self, y: Tensor, targets: Tensor, ignore_index: int, return_logits: bool) -> tuple[Tensor | None, Tensor]:
        """Returns the logits, where they are asked for, and the cross entropy."""
        if not return_logits and (head := self._head()) is not None:
            return None, self._loss_without_logits(y, head, targets, ignore_index)
        logits = self._logits(y)
        if is_dtensor(logits):
            loss = _divided_loss(logits, targets, ignore_index)
        else:
            backend = self.backends["cross_entropy"]
            loss = cross_entropy(logits, targets, ignore_index=ignore_index, backend=backend)
        return logits if return_logits else None, loss

    def _with_router_losses(self, loss: Tensor, stats: list[RouterStats]) -> Tensor:
        balancing, z = self.config.load_balancing_coef, self.config.router_z_coef
        if balancing:
            loss = loss + balancing * load_balancing_loss(stats)
        return loss + z * router_z_loss(stats) if z else loss

    def _head(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias that make logits, or None where only a call of `output` does."""
        return (self.tok_embeddings.weight, None) if self.output is None else matrix_of(self.output)

    def _loss_without_logits(
        self, y: Tensor, head: tuple[Tensor, Tensor | None], targets: Tensor, ignore_index: int
    ) -> Tensor:
        weight, bias = head
        backend = self.backends["linear_cross_entropy"]
        loss = linear_cross_entropy(y, weight, targets, bias=bias, ignore_index=ignore_index, backend=backend)
        return loss.full_tensor() if is_dtensor(loss) else loss  # type: ignore[attr-defined]

    def _embed(self, tokens: Tensor) -> Tensor:
        if not tokens.is_cpu or torch.compiler.is_compiling():
            return self.tok_embeddings(tokens)
        # The embedding looks at each token anyway. It is left to that, and ours is only to say which one it was.
        table = self.tok_embeddings
        looks = type(table) is nn.Embedding and table.num_embeddings == self.config.vocab_size
        if not looks or is_observed(table):
            check_range("tokens", tokens, self.config.vocab_size)
        try:
            return table(tokens)
        except IndexError:
            check_range("tokens", tokens, self.config.vocab_size)
            raise

    def _seen(
        self,
        tokens: Tensor,
        cache: KVCache | None,
        attn_mask: Tensor | AttentionMask | None,
        lengths: Tensor | None,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
    ) -> tuple[Any, ...]:
        """What every block is called with besides (see `TransformerBlock`): nothing in a plain call."""
        positions = None
        if attn_mask is not None or lengths is not None:
            batch, count = tokens.shape
            keys = count if cache is None else cache.length + count
            weight = self.tok_embeddings.weight
            check_masks(attn_mask, lengths, cu_seqlens, (batch, self.config.n_heads, count, keys), weight, "the model")
            if lengths is not None:
                attn_mask = hide_padding(attn_mask, lengths, keys)
        elif cu_seqlens is None:
            return ()
        else:
            positions = packed_positions(cu_seqlens, tokens.shape[1])
        return attn_mask, positions, cu_seqlens, max_seqlen

    def _prepare(self, stream: Tensor, start: int, positions: Tensor | None) -> Tensor:
        """Embeddings of the positions from `start` on, or of those that are given, to the stream that the first block
        reads."""
        table, norm, dropout = self.pos_embeddings, self.embedding_norm, self.config.embedding_dropout
        if isinstance(table, SinusoidalEmbedding):
            stream = table(stream, start, positions)
        elif table is not None:
            if positions is None:
                positions = torch.arange(start, start + stream.shape[1], device=stream.device)
            stream = stream + table(positions)
        if norm is not None:
            stream = norm(stream)
        return F.dropout(stream, dropout, self.training) if dropout else stream

    def _logits(self, y: Tensor) -> Tensor:
        layers = layers_for(y, self._head_backend)
        head = self.output
        return layers.product(y, self.tok_embeddings.weight) if head is None else layers.linear(y, head)

    def make_cache(self, batch_size: int, max_len: int | None = None) -> KVCache:
        """Returns an empty cache on the model's device, of the dtype that its keys have (autocast's, inside
        autocast)."""
        weight = self.tok_embeddings.weight
        return KVCache(self.config, batch_size, max_len, device=weight.device, dtype=self._key_dtype())

    @torch.no_grad()
    def generate(
        self, prompts: Tensor | Sequence[Tensor | Sequence[int]], max_new_tokens: int, **options: Any
    ) -> list[Tensor]:
        """Continues the prompts; see :func:`foundry_kernels.models.generate`."""
        return generate(self, prompts, max_new_tokens, **options)

    def serving(self, device: str | None = None, dtype: torch.dtype | None = None) -> dict[str, str]:
        """`backends` with "auto" resolved: for each operation the backend that runs on tensors of `dtype` on
        `device` ("cpu", "cuda"), None being those of the parameters."""
        weight = self.tok_embeddings.weight
        return serving(self.backends, device or weight.device.type, dtype or weight.dtype)

    def extra_repr(self) -> str:
        return f"backend={describe(self.backends)}"

    def _key_dtype(self) -> torch.dtype:
        weight = self.tok_embeddings.weight
        return autocast_dtype(weight) or weight.dtype


def _position_embedding(
    config: ModelConfig, device: Any, dtype: torch.dtype | None
) -> nn.Embedding | SinusoidalEmbedding | None:
    if config.positions == "learned":
        return nn.Embedding(config.max_seq_len, config.dim, device=device, dtype=dtype)
    if config.positions == "sinusoidal":
        return SinusoidalEmbedding(config.dim, config.max_seq_len, device=device)
    return None


def _divided_loss(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """Computes the same of logits that are sharded along the vocabulary, inside torch's `loss_parallel`."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    targets = targets.flatten().long()
    total = F.cross_entropy(wide.flatten(0, 1), targets, ignore_index=ignore_index, reduction="sum")
    return total / (targets != ignore_index).sum().clamp_min(1)


def _drop_redundant_keys(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Keys of Meta's checkpoints that say nothing new: the rotary frequencies, and a tied head's copy."""
    assert isinstance(module, Transformer)
    state_dict.pop(prefix + "rope.freqs", None)
    head, embeddings = state_dict.get(prefix + "output.weight"), state_dict.get(prefix + "tok_embeddings.weight")
    if module.output is None and head is not None and embeddings is not None and torch.equal(head, embeddings):
        del state_dict[prefix + "output.weight"]
