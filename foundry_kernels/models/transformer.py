"""A Llama-style decoder over the modules of this package; the backend is an argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foundry_kernels._checks import check_integer, check_rank
from foundry_kernels.models.cache import KVCache
from foundry_kernels.models.config import ModelConfig
from foundry_kernels.models.generate import generate
from foundry_kernels.nn import Attention, KeyValueStore, RMSNorm, RotaryEmbedding, SwiGLU, _decode
from foundry_kernels.nn._backend import Backend, describe, plan, serving
from foundry_kernels.nn._head import matrix_of
from foundry_kernels.ops.cross_entropy import cross_entropy
from foundry_kernels.ops.linear_cross_entropy import linear_cross_entropy
from foundry_kernels.registry import is_dtensor

#: The operations that the model calls.
OPERATIONS = (
    "rms_norm", "add_rms_norm", "rope", "swiglu", "flash_attention", "cross_entropy", "linear_cross_entropy"
)  # fmt: skip


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each after a norm that also adds the branch before it to the residual stream."""

    def __init__(self, config: ModelConfig, rope: RotaryEmbedding, factory: dict[str, Any]) -> None:
        super().__init__()
        norm = {"round_before_weight": config.norm_round_before_weight, **factory}
        self.attention_norm = RMSNorm(config.dim, config.norm_eps, **norm)
        self.attention = Attention(
            config.dim, config.n_heads, config.n_kv_heads, config.head_width, rope=rope, **factory
        )
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps, **norm)
        self.feed_forward = SwiGLU(config.dim, config.ffn_width, **factory)

    def forward(
        self, branch: Tensor | None, stream: Tensor, cache: KeyValueStore | None = None
    ) -> tuple[Tensor, Tensor]:
        """`branch`, the previous block's output (None before the first), is still to be added to `stream`; both
        ``[B, T, dim]``. Returns this block's branch, and the stream that it is to be added to."""
        if branch is None:
            y = self.attention_norm(stream)
        else:
            y, stream = self.attention_norm(branch.to(stream.dtype), stream)
        branch = self.attention(y, cache=cache)
        y, stream = self.ffn_norm(branch.to(stream.dtype), stream)
        return self.feed_forward(y), stream


class Transformer(nn.Module):
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases.

    Parameters have the names and shapes of Meta's Llama, whose checkpoints load: `tok_embeddings`,
    `layers.N.{attention_norm, attention.{wq, wk, wv, wo}, ffn_norm, feed_forward.{w1, w2, w3}}`, `norm`, `output`.

    Under autocast the residual stream keeps the dtype of the embedding; only the branches are in low precision.

    Args:
        config: the shape.
        backend: "auto", "reference", "triton", "native", or a mapping of operations to these. "auto" takes the first
            that can serve each call: on a GPU triton, native, reference; on a CPU native, reference. A named backend is
            used for every operation that it has a kernel for, and never replaced silently: if a kernel cannot serve a
            call, that raises `BackendUnavailable`. Operations without such a kernel run on the reference, as a warning
            and `backends` say.
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
        self.config = config
        self.backends = plan(backend, OPERATIONS)
        factory = {"device": device, "dtype": dtype, "backend": self.backends}
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim, device=device, dtype=dtype)
        rope = RotaryEmbedding(  # one table, which the layers share
            config.head_width,
            config.max_seq_len,
            base=config.rope_base,
            scaling=config.rope_scaling,
            interleaved=config.rope_interleaved,
            device=device,
            backend=self.backends,
        )
        self.layers = nn.ModuleList(TransformerBlock(config, rope, factory) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps, round_before_weight=config.norm_round_before_weight, **factory)
        # Tied weights are one parameter under one name: two names would come apart in `to_empty`.
        self.output = None
        if not config.tie_embeddings:
            self.output = nn.Linear(config.dim, config.vocab_size, bias=False, device=device, dtype=dtype)
        self.register_load_state_dict_pre_hook(_drop_redundant_keys)
        if not self.tok_embeddings.weight.is_meta:
            self.init_weights()

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Set embeddings and projections to N(0, init_std), norms to 1, and compute the rotary tables."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, 0.0, self.config.init_std, generator=generator)
            elif isinstance(module, RMSNorm | RotaryEmbedding):
                module.reset_parameters()

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        cache: KVCache | None = None,
        last_only: bool = False,
        ignore_index: int = -100,
        return_logits: bool = False,
    ) -> Tensor | tuple[Tensor | None, Tensor]:
        """Logits, or the loss where there are targets.

        Args:
            tokens: ``[B, T]`` int32 or int64, 0 <= token < vocab_size, T >= 1.
            targets: ``[B, T]`` int32 or int64, the token that follows each position, or `ignore_index`.
            cache: keys and values of the positions before `tokens`; those of `tokens` are appended. Inference only.
            last_only: logits of the last position only, ``[B, 1, V]``; not together with targets.
            ignore_index: positions with this target are ignored.
            return_logits: with targets, return the logits too.

        Returns:
            logits ``[B, T, V]``, or with targets ``(None, loss)``, or ``(logits, loss)`` with `return_logits`. The loss
            is the mean cross entropy in nats over the positions that count, float32 (float64 for a float64 model); 0
            where none counts. Without `return_logits` the logits exist for a chunk of tokens at a time
            (:func:`foundry_kernels.linear_cross_entropy`), unless `output` is no plain ``nn.Linear`` any more, or has
            hooks: then it is called.

        Raises:
            TypeError: tokens or targets are no int32 or int64 tensors.
            ValueError: a wrong rank, shape or device, more positions than max_seq_len, a cache that is full or does
                not fit, and, where they are on the CPU and nothing is being compiled, tokens or targets outside the
                vocabulary. (Elsewhere that would need a synchronization; the embedding then raises its own error.)
            BackendUnavailable: a named backend cannot serve this device or dtype.
        """
        self._check(tokens, targets, cache, last_only, ignore_index)
        stream = self._embed(tokens)
        branch: Tensor | None = None
        for index, block in enumerate(self.layers):
            branch, stream = block(branch, stream, None if cache is None else cache.layer(index))
        assert branch is not None  # there is at least one layer
        if last_only:
            branch, stream = branch[:, -1:], stream[:, -1:]
        y, _ = self.norm(branch.to(stream.dtype), stream)
        if cache is not None:
            cache.advance(tokens.shape[1])
        if targets is not None and not return_logits and (head := self._head()) is not None:
            return None, self._loss_without_logits(y, head, targets, ignore_index)
        logits = self._logits(y)
        if targets is None:
            return logits
        if is_dtensor(logits):
            loss = _divided_loss(logits, targets, ignore_index)
        else:
            backend = self.backends["cross_entropy"]
            loss = cross_entropy(logits, targets, ignore_index=ignore_index, backend=backend)
        return logits if return_logits else None, loss

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
        if not looks or _decode.is_observed(table):
            _check_range("tokens", tokens, self.config.vocab_size)
        try:
            return table(tokens)
        except IndexError:
            _check_range("tokens", tokens, self.config.vocab_size)
            raise

    def _logits(self, y: Tensor) -> Tensor:
        head, backend = self.output, self.backends["swiglu"]
        if _decode.serves(y, backend):
            few = _decode.multiply(y, self.tok_embeddings.weight) if head is None else _decode.project(y, head)
            if few is not None:
                return few
        return F.linear(y, self.tok_embeddings.weight) if head is None else head(y)

    def make_cache(self, batch_size: int, max_len: int | None = None) -> KVCache:
        """An empty cache on the model's device, of the dtype that its keys have (autocast's, inside autocast)."""
        weight = self.tok_embeddings.weight
        return KVCache(self.config, batch_size, max_len, device=weight.device, dtype=self._key_dtype())

    @torch.no_grad()
    def generate(
        self, prompts: Tensor | Sequence[Tensor | Sequence[int]], max_new_tokens: int, **options: Any
    ) -> list[Tensor]:
        """Continue the prompts; see :func:`foundry_kernels.models.generate`."""
        return generate(self, prompts, max_new_tokens, **options)

    def serving(self, device: str | None = None, dtype: torch.dtype | None = None) -> dict[str, str]:
        """`backends` with "auto" resolved: for each operation the backend that serves tensors of `dtype` on
        `device` ("cpu", "cuda"), None being those of the parameters."""
        weight = self.tok_embeddings.weight
        return serving(self.backends, device or weight.device.type, dtype or weight.dtype)

    def extra_repr(self) -> str:
        return f"backend={describe(self.backends)}"

    def _key_dtype(self) -> torch.dtype:
        weight = self.tok_embeddings.weight
        if torch.is_autocast_enabled(weight.device.type) and weight.dtype != torch.float64:
            return torch.get_autocast_dtype(weight.device.type)
        return weight.dtype

    def _check(
        self, tokens: Tensor, targets: Tensor | None, cache: KVCache | None, last_only: bool, ignore_index: int
    ) -> None:
        device, vocab_size = self.tok_embeddings.weight.device, self.config.vocab_size
        check_integer("tokens", tokens)
        check_rank("tokens", tokens, 2, "[B, T]")
        if tokens.shape[1] == 0:
            raise ValueError(f"tokens must hold at least one position; got shape {tuple(tokens.shape)}")
        if tokens.device != device:
            raise ValueError(f"tokens must be on the model's device {device}; got {tokens.device}")
        start = 0 if cache is None else cache.length
        if start + tokens.shape[1] > self.config.max_seq_len:
            cached = f" behind {start} cached ones" if start else ""
            raise ValueError(
                f"tokens hold {tokens.shape[1]} positions{cached}; max_seq_len is {self.config.max_seq_len}"
            )
        if cache is not None:
            cache.check(tokens, self._key_dtype(), self.config.n_layers)
        if targets is not None:
            check_integer("targets", targets)
            if last_only:
                raise ValueError("targets need the logits of all positions; got last_only=True")
            if targets.shape != tokens.shape:
                raise ValueError(f"targets must have tokens' shape {tuple(tokens.shape)}; got {tuple(targets.shape)}")
            if targets.device != device:
                raise ValueError(f"targets must be on the model's device {device}; got {targets.device}")
        if targets is not None and device.type == "cpu" and not torch.compiler.is_compiling():
            _check_range("targets", targets[targets != ignore_index], vocab_size)


def _check_range(name: str, tokens: Tensor, vocab_size: int) -> None:
    if tokens.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(tokens))
    if low < 0 or high >= vocab_size:
        raise ValueError(f"{name} must be in 0 .. {vocab_size - 1}; got {low if low < 0 else high}")


def _divided_loss(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """The same of logits that are divided along the vocabulary, inside torch's `loss_parallel`."""
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
