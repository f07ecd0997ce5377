"""A decoder or encoder made of this package's modules. Its architecture is data, and the backend is an argument."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foundry_kernels.core.late import module_above
from foundry_kernels.models.blocks import TransformerBlock, add_branch, make_norm, operations
from foundry_kernels.models.cache import KVCache, without_graph
from foundry_kernels.models.call import Call, Positions
from foundry_kernels.models.config import ModelConfig
from foundry_kernels.models.context import Context
from foundry_kernels.models.cross_blocks import block_class
from foundry_kernels.models.decode_block import decode_all
from foundry_kernels.models.embeddings import embed, position_embedding
from foundry_kernels.models.extend import extended
from foundry_kernels.models.generate import generate
from foundry_kernels.models.init import init_weights
from foundry_kernels.models.inputs import check_context, read_call
from foundry_kernels.models.log_probs import LogProbs, log_probs
from foundry_kernels.models.losses import add_router_losses, token_loss
from foundry_kernels.models.model import Model
from foundry_kernels.models.paged_cache import PagedBatch, PagedKVCache
from foundry_kernels.nn import (
    AlibiSlopes,
    Attention,
    RelativeBias,
    RotaryEmbedding,
    RouterStats,
)
from foundry_kernels.nn._backend import Backend, describe, plan, serving
from foundry_kernels.ops.flash_attention.attention_mask import AttentionMask
from foundry_kernels.ops.rope import RopeScaling


class Transformer(Model):
    """A decoder-only transformer, or with ``causal=False`` an encoder. By default it has RMSNorm, rotary positions,
    grouped-query attention, SwiGLU and no biases; :class:`ModelConfig` has other choices and presets.

    Parameters have the names and shapes of Meta's Llama, whose checkpoints load: `tok_embeddings`,
    `layers.N.{attention_norm, attention.{wq, wk, wv, wo}, ffn_norm, feed_forward.{w1, w2, w3}}`, `norm`, `output`. Some
    choices add `pos_embeddings`, `type_embeddings`, `embedding_norm`, `relative_bias`, `layers.N.attention.{q_norm,
    k_norm, wg}` and `layers.N.{cross_norm, cross_attention}`; without a gate there is no `w3`, with a shared norm no
    `ffn_norm`, with "post" norms no `norm`; with experts `feed_forward` is a :class:`foundry_kernels.nn.MoE`, and with
    linear attention `attention` is the layer of `linear_kind`. A block with one branch only has this one's.
    :meth:`from_hf` takes the models of transformers.

    Under autocast the residual stream keeps the dtype of the embedding; only the branches are in low precision.

    Args:
        config: the configuration.
        backend: "auto", "reference", "triton", "native", or a mapping of operations to these. "auto" uses the first
            backend that supports a call: on a GPU triton, native, reference; on a CPU native, reference. A named
            backend is used for every operation for which it has a kernel, without a silent fallback: if a kernel does
            not support a call, it raises `BackendUnavailable`. Operations without such a kernel run on the reference,
            which a warning and `backends` report.
        device, dtype: those of the parameters. On the meta device nothing is initialised: call
            ``to_empty(device=...)``, then `init_weights()` or load a checkpoint.

    Attributes:
        backends: the backend of each operation.

    Raises:
        TypeError, ValueError: config is not a ModelConfig, or the backend is unknown.
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
        self.pos_embeddings = position_embedding(config, device, dtype)
        types = config.token_types
        self.type_embeddings = nn.Embedding(types, config.dim, device=device, dtype=dtype) if types else None
        self.embedding_norm = make_norm(config, factory) if config.embedding_norm else None
        self.sequence_shard = None
        rope = alibi = None  # the layers share one table
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
            scale = config.attention_scale or config.head_width**-0.5
            alibi = AlibiSlopes(config.n_heads, scale=scale if config.alibi_scaled else None, device=device)
        self.relative_bias = None
        if config.relative:
            buckets = config.relative_buckets, config.relative_max_distance
            self.relative_bias = RelativeBias(
                config.n_heads, *buckets, causal=config.causal, device=device, dtype=dtype
            )
        blocks = [block_class(config, layer) for layer in range(config.n_layers)]
        self.layers = nn.ModuleList(block(config, rope, alibi, factory, n) for n, block in enumerate(blocks))
        self._late_dropout = config.residual_dropout if blocks[0].drops_late else 0.0
        self.norm = make_norm(config, factory) if config.ends_with_norm else None
        # A tied weight has only one name, because `to_empty` would split two names into two parameters.
        self.output = None
        if config.head and not config.tie_embeddings:
            self.output = nn.Linear(config.dim, config.vocab_size, config.output_bias, device=device, dtype=dtype)
        self.register_load_state_dict_pre_hook(_drop_redundant_keys)
        if not self.tok_embeddings.weight.is_meta:
            self.init_weights()

    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Sets projections as ``config.init`` says, embeddings to N(0, init_std), norms to 1, biases to 0, and computes
        the tables of positions."""
        init_weights(self, self.config, generator)

    @staticmethod
    def read_hf(model: nn.Module, changes: dict[str, Any]) -> tuple[ModelConfig, dict[str, Tensor]]:
        """Returns the configuration, with `changes`, and the weights of a model of transformers."""
        config, state = module_above("from_hf").read(model, changes)
        return config, state

    @classmethod
    def from_hf(cls, model: nn.Module, backend: Backend = "auto", **changes: Any) -> Transformer:
        """Converts a model of transformers. The result has copies of its weights, with their dtypes and device.

        Supported are the causal language models of GPT-2, LLaMA, BLOOM and Falcon, and of Mistral, Qwen2, Qwen3,
        GPT-NeoX, OPT, Phi, StarCoder2, StableLM, Gemma, Granite and the first GPT; with experts Mixtral, Qwen2-MoE,
        Qwen3-MoE, OLMoE, GLM-4-MoE, dots.llm1 and DeepSeek-V3; with linear attention Qwen3-Next, Qwen3.5, Kimi Linear,
        Mamba 2, Bamba, Granite 4, Nemotron-H and Falcon-H1; and the encoders of BERT, RoBERTa and XLM-RoBERTa without a
        head (a pooler is left out). Logits, or the last hidden states, are equal up to rounding. The mode and the
        checkpoint's dropout probabilities are preserved.

        Args:
            model: a model of transformers.
            backend: as for the class.
            changes: fields of the :class:`ModelConfig` to change, if shapes stay the same, such as a dropout or
                `max_seq_len` (at most the number of learned positions).

        Raises:
            TypeError: the class is not supported.
            ValueError: this model does not support an option of the checkpoint, or weights are missing, unknown or have
                another shape; the message names them.
        """
        config, state = cls.read_hf(model, changes)
        return cls.from_state(config, state, model, backend)

    @classmethod
    def from_state(
        cls, config: ModelConfig, state: dict[str, Tensor], model: nn.Module, backend: Backend
    ) -> Transformer:
        """Returns a model with copies of these weights, which were read from `model`."""
        weight = state["tok_embeddings.weight"]
        with torch.device("meta"):
            empty = cls(config, backend, dtype=weight.dtype)
        module_above("from_hf").check(state, empty.state_dict(), model)
        ours = empty.to_empty(device=weight.device)
        for name, parameter in ours.named_parameters():  # some of transformers' weights are float32 in any model
            parameter.data = parameter.data.to(state[name].dtype)
        ours.load_state_dict(state)
        return ours.train(model.training)

    @without_graph
    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        attn_mask: Tensor | AttentionMask | None = None,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        token_types: Tensor | None = None,
        context: Tensor | Context | None = None,
        context_lengths: Tensor | None = None,
        cache: KVCache | PagedKVCache | PagedBatch | None = None,
        last_only: bool = False,
        ignore_index: int = -100,
        return_logits: bool = False,
        return_hidden: bool = False,
        return_log_probs: LogProbs | None = None,
        return_router_stats: bool = False,
    ) -> Tensor | tuple[Any, ...]:
        """Returns logits, or the loss if there are targets; a model without a head returns the last hidden states.

        Args:
            tokens: ``[B, T]`` int32 or int64, 0 <= token < vocab_size, T >= 1.
            targets: ``[B, T]`` int32 or int64, the token that follows each position, or `ignore_index`: for padding,
                and for the last token of each packed sequence.
            attn_mask: an additional mask for every layer: bool, a floating bias, or an
                :class:`foundry_kernels.AttentionMask`, with a shape that broadcasts to ``[B, H, T, S]``; S includes the
                positions in the cache. A bias gets its gradient from all layers.
            lengths: ``[B]`` int32 or int64: the keys of sequence b from ``lengths[b]`` on, counting those in the cache,
                are padding, which no query sees. It may be combined with `attn_mask`;
                :class:`foundry_kernels.nn.Attention` states the cost.
            cu_seqlens: ``[N + 1]`` int32 or int64: tokens are ``[1, total]`` and hold N sequences one after the other,
                each from ``cu_seqlens[n]`` on. The positions of each begin at 0, and sequences do not see each other.
                It does not support a mask, lengths or a :class:`KVCache`.
            max_seqlen: the longest of these sequences, or an upper bound. None is ``total``, which on a GPU launches
                empty programs if there are many sequences, and grows rotary or sinusoidal tables to that size. Under
                torch.compile, "dynamic" scaling uses it as the longest length.
            token_types: ``[B, T]`` int32 or int64, 0 <= type < ``config.token_types``; None is type 0 for all.
            context: ``[B, S, context_dim]``, to which the layers of a model with `context_dim` also attend; or the
                result of :meth:`read_context` for it, for many calls.
            context_lengths: ``[B]`` int32 or int64: the positions of context b from ``context_lengths[b]`` on are
                padding, which no query sees. The result of `read_context` includes its lengths.
            cache: keys and values of the positions before `tokens`; those of `tokens` are appended. A backward pass
                then raises RuntimeError, and nothing is saved for one. With a :class:`PagedKVCache`, or sequences of it
                (its `batch`), rows of `tokens` may continue at different positions, and with `cu_seqlens` by different
                numbers of tokens; not with a mask or lengths.
            last_only: logits of the last position only, ``[B, 1, V]``; not together with targets. With `cu_seqlens`
                and a cache of the last token of each sequence, ``[1, N, V]``.
            ignore_index: positions with this target are ignored.
            return_logits: with targets, return the logits too.
            return_hidden: return the head's input instead of logits, for :mod:`foundry_kernels.losses`; not together
                with targets.
            return_log_probs: return these of the targets instead of the loss; see :meth:`log_probs`.
            return_router_stats: also return the routers' statistics; needs a model with experts.

        Returns:
            logits ``[B, T, V]`` (without a head hidden states ``[B, T, dim]``), or with targets ``(None, loss)``, or
            ``(logits, loss)`` with `return_logits`; with `return_router_stats` one more item, a
            :class:`foundry_kernels.nn.RouterStats` for each layer with experts. The loss is the mean cross entropy in
            nats over the positions that are not ignored, in float32 (float64 for a float64 model); 0 if all are
            ignored. Without `return_logits` the logits exist for a chunk of tokens at a time
            (:func:`foundry_kernels.linear_cross_entropy`), unless `output` is not a plain ``nn.Linear`` or has hooks:
            then it is called. In training mode the routers' losses are added with the factors `load_balancing_coef` and
            `router_z_coef`; in eval mode the loss is the cross entropy alone.

        Raises:
            TypeError: tokens, targets, token_types, lengths or cu_seqlens are not int32 or int64 tensors, or attn_mask
                or context has another type.
            ValueError: a wrong rank, shape or device; more positions than a learned table has; a cache that is full or
                does not fit; arguments that exclude each other or do not apply to the model; a missing context; and, on
                the CPU outside of torch.compile, tokens or targets outside the vocabulary and packed sequences longer
                than max_seqlen. (Elsewhere this check would synchronize; the embedding then raises its own error.)
            BackendUnavailable: a named backend does not support this device or dtype.
        """
        config = self.config
        batch = cache.batch() if isinstance(cache, PagedKVCache) else cache
        call = Call(
            tokens, targets, attn_mask, lengths, cu_seqlens, max_seqlen, token_types, context, context_lengths, batch,
            last_only, ignore_index,
        )  # fmt: skip
        mask, positions = read_call(self, call)
        if return_hidden and targets is not None:
            raise ValueError("return_hidden must be False with targets, of which the loss is returned; got True")
        if return_log_probs is not None and (targets is None or return_logits):
            raise ValueError("return_log_probs needs targets, and return_logits must be False")
        if return_router_stats and config.n_experts is None:
            raise ValueError(
                "return_router_stats needs a model with experts, whose configuration has n_experts; got True"
            )
        paged, at = None, positions
        if isinstance(batch, PagedBatch):
            paged = batch.begin(tokens, cu_seqlens, self._key_dtype(), config.n_layers)
            at = Positions(paged.step.positions, cu_seqlens, paged.step.max_seqlen_k)
        stored = batch if isinstance(batch, KVCache) else paged
        balances = targets is not None and return_log_probs is None and self.training and config.balances
        stream = embed(self, call, at)
        read = context
        if isinstance(read, Tensor):
            of_context = None if context_lengths is None else AttentionMask.prefix(context_lengths)
            read = Context([read] * config.n_layers, of_context)
        branch: Tensor | None = None
        stats: list[RouterStats] = []
        given = () if mask is None and positions is None and read is None else (mask, positions)
        decoded = None
        if stored is not None and not given:
            decoded = decode_all(self.layers, TransformerBlock, stream, stored)
        if decoded is not None:
            branch, stream = decoded
        for index, block in enumerate(self.layers if decoded is None else ()):
            layer_cache = None if stored is None else stored.layer(index)
            passed = given if read is None else (*given, read.layers[index], read.mask)
            branch, stream, *of_router = block(branch, stream, layer_cache, balances or return_router_stats, *passed)
            if of_router:
                stats.append(RouterStats(*of_router))
        if last_only:
            last = slice(-1, None) if paged is None or cu_seqlens is None else cu_seqlens[1:] - 1
            branch, stream = None if branch is None else branch[:, last], stream[:, last]
        y = self._finish(branch, stream)
        if stored is not None:
            stored.advance(tokens.shape[1])
        asked = (stats,) if return_router_stats else ()
        if targets is None or return_log_probs is not None:
            if targets is not None and return_log_probs is not None:
                found = return_log_probs.of(self, y, targets, ignore_index)
            else:
                found = y if return_hidden else self._logits(y)
            return (found, *asked) if asked else found
        kept, loss = token_loss(self, y, targets, ignore_index, return_logits)
        return kept, add_router_losses(self, loss, stats) if balances else loss, *asked

    def _finish(self, branch: Tensor | None, stream: Tensor) -> Tensor:
        """The input of the head."""
        config, norm = self.config, self.norm
        if branch is not None:  # None for blocks with "post" norms
            scale = config.residual_scale
            if norm is None:
                y = torch.add(stream, branch, alpha=scale)
            else:
                y, _ = add_branch(norm, branch, stream, self._late_dropout, scale)
        else:
            y = stream if norm is None else norm(stream)
        if config.output_dropout:
            y = F.dropout(y, config.output_dropout, self.training)
        return y if config.logit_scale == 1.0 else y * config.logit_scale

    def read_context(self, context: Tensor, lengths: Tensor | None = None) -> Context:
        """Returns the keys and values of a context ``[B, S, context_dim]`` in every layer, for calls with ``context=``.

        Args:
            lengths: ``[B]`` int32 or int64, or None: as `context_lengths` of :meth:`forward`.

        Raises:
            TypeError, ValueError: as :meth:`forward`.
        """
        check_context(context, lengths, None, self.tok_embeddings.weight, self.config)
        attentions: list[Attention] = [block.cross_attention for block in self.layers]  # type: ignore[misc]
        mask = None if lengths is None else AttentionMask.prefix(lengths)
        return Context([attention.keys_values(context) for attention in attentions], mask)

    def extended(self, max_seq_len: int, rope_scaling: RopeScaling | str | None = None) -> Self:
        """Returns the model for `max_seq_len` positions, with this one's parameters; see
        :func:`foundry_kernels.models.extend.extended`."""
        return extended(self, max_seq_len, rope_scaling)

    generate = generate
    log_probs = log_probs

    def serving(self, device: str | None = None, dtype: torch.dtype | None = None) -> dict[str, str]:
        """Returns `backends` with "auto" resolved: for each operation the backend that tensors of `dtype` on `device`
        ("cpu", "cuda") run on. None means the dtype or device of the parameters."""
        weight = self.tok_embeddings.weight
        return serving(self.backends, device or weight.device.type, dtype or weight.dtype)

    def extra_repr(self) -> str:
        return f"backend={describe(self.backends)}"


def _drop_redundant_keys(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Redundant keys of Meta's checkpoints: the rotary frequencies, and the copy of a tied head."""
    assert isinstance(module, Transformer)
    state_dict.pop(prefix + "rope.freqs", None)
    head, embeddings = state_dict.get(prefix + "output.weight"), state_dict.get(prefix + "tok_embeddings.weight")
    if module.output is None and head is not None and embeddings is not None and torch.equal(head, embeddings):
        del state_dict[prefix + "output.weight"]
