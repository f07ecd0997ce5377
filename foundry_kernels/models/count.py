"""Costs of a model, from its configuration: parameters, bytes of a cache and of training, floating-point operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from foundry_kernels.core.checks import check_int
from foundry_kernels.core.late import module_above
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.models.fields import ModelFields
from foundry_kernels.models.validate import check_cache

#: Numbers that an optimizer stores for each parameter, in the parameter's dtype, as in torch.
OPTIMIZERS = {"adamw": 2, "adam": 2, "sgd": 0, "sgd_momentum": 1}


class Parts(dict[str, int]):
    """A number for each part of a model, in the order of the forward pass; a dict with a `total`."""

    @property
    def total(self) -> int:
        return sum(self.values())

    @property
    def shares(self) -> dict[str, float]:
        """Returns each part's share of the total, 0 .. 1."""
        total = max(self.total, 1)
        return {name: number / total for name, number in self.items()}

    def times(self, factor: int) -> Parts:
        """Returns every number times `factor`, for example to convert parameters to bytes."""
        return Parts({name: factor * number for name, number in self.items()})


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of a training step, each by part of the model.

    Attributes:
        weights, gradients, optimizer: for the parameters; see :func:`foundry_kernels.models.count.parameters_by_part`.
        activations: tensors that the forward pass saves for the backward pass, by the module that saves them first.
            "norms" includes the residual stream. "head" includes everything that the loss saves: with fused kernels the
            gradients of the last hidden states and the head's matrix, without them the logits.
    """

    weights: Parts
    gradients: Parts
    optimizer: Parts
    activations: Parts

    @property
    def total(self) -> int:
        return sum(parts.total for parts in (self.weights, self.gradients, self.optimizer, self.activations))


def parameters_by_part(config: ModelFields, active: bool = False) -> Parts:
    """Returns the parameters of the model by part; their total is `config.n_parameters`.

    Args:
        active: count only `top_k` experts, the ones that a token uses.

    Returns:
        "embedding": tokens, token types, learned positions. "attention": the projections with their biases, those to a
        context, and the table of relative positions. "feed_forward": blocks or experts with their biases, shared
        experts, routers. "norms": those of blocks, of queries and keys, of embeddings, and the last one. "head": the
        output projection; 0 if it is tied, because its matrix is the embedding's.
    """
    dim, norm, n_layers = config.dim, config.dim * (2 if config.norms_have_bias else 1), config.n_layers
    blocks = n_layers * (1 if config.shared_attention_norm or config.one_branch else 2)
    attention, norms = _attention(config, dim), _qk_norms(config)
    if config.context_dim is not None:
        attention, norms = attention + _attention(config, config.context_dim), 2 * norms
        blocks += n_layers
    full, linear = len(config.full_layers), len(config.linear_layers)
    of_linear, its_norm, _ = _linear_attention(config)
    learned = config.max_seq_len if config.positions == "learned" else 0
    dense = len(config.dense_layers)
    feed_forward = (len(config.mlp_layers) - dense) * _feed_forward(config, active)
    feed_forward += dense * _block(config, config.dense_hidden_dim or config.ffn_width)
    own_head = config.head and not config.tie_embeddings
    return Parts(
        embedding=dim * (config.vocab_size + config.token_types + learned),
        attention=full * attention + linear * of_linear + config.relative_buckets * config.n_heads * config.relative,
        feed_forward=feed_forward,
        norms=full * norms + linear * its_norm + norm * (blocks + config.embedding_norm + config.ends_with_norm),
        head=config.vocab_size * (dim * own_head + config.output_bias),
    )


def _attention(config: ModelFields, source: int) -> int:
    """The projections. source: the input width of the key and value projections."""
    q, kv = config.n_heads * config.head_width, config.kv_heads * config.head_width
    biased = q * (1 + config.attention_gate) + 2 * kv
    if config.kv_lora_rank is not None:
        biased = config.kv_lora_rank + config.rotary_width + (config.q_lora_rank or 0)
    biases = biased * config.attention_bias + config.dim * config.attention_out_has_bias
    return _projections(config, source) + biases


def _projections(config: ModelFields, source: int) -> int:
    """The matrices of `_attention`."""
    dim, heads, width = config.dim, config.n_heads, config.head_width
    if config.kv_lora_rank is None:
        return dim * heads * width * (2 + config.attention_gate) + 2 * source * config.kv_heads * width
    shared, values, latent = config.rotary_width, config.value_width, config.kv_lora_rank
    q = dim * heads * width if config.q_lora_rank is None else config.q_lora_rank * (dim + heads * width)
    return q + dim * (latent + shared) + latent * heads * (width - shared + values) + heads * values * dim


def _linear_attention(config: ModelFields) -> tuple[int, int, float]:
    """The parameters of a layer with linear attention besides its norm, those of its norm, and the floating-point
    operations of its projections for a token."""
    if not config.linear_layers:
        return 0, 0, 0.0
    mixer = module_above("mixers").make_mixer(config, device="meta")
    norm = sum(p.numel() for name, p in mixer.named_parameters() if "norm" in name)
    matrices = sum(layer.weight.numel() for layer in mixer.modules() if isinstance(layer, torch.nn.Linear))
    return sum(p.numel() for p in mixer.parameters()) - norm, norm, 2.0 * matrices


def _qk_norms(config: ModelFields) -> int:
    if config.kv_lora_rank is not None:
        return config.kv_lora_rank + (config.q_lora_rank or 0)
    heads = 2 if config.qk_norm_over == "head" else config.n_heads + config.kv_heads
    return heads * config.head_width * config.qk_norm


def _matrices(config: ModelFields, width: int) -> int:
    return (3 if config.gated else 2) * config.dim * width


def _block(config: ModelFields, width: int) -> int:
    """The parameters of a feed-forward block."""
    biases = (2 if config.gated else 1) * width + config.dim
    return _matrices(config, width) + biases * config.mlp_bias


def _feed_forward(config: ModelFields, active: bool) -> int:
    """The feed-forward parameters of a layer (of a layer with experts, if the model has any)."""
    if config.n_experts is None:
        return _block(config, config.ffn_width)
    experts = config.top_k if active else config.n_experts
    count = experts * _block(config, config.ffn_width) + config.n_experts * (config.dim + config.router_bias)
    count += 0 if config.shared_expert_dim is None else _block(config, config.shared_expert_dim)
    return count + config.dim * config.shared_expert_gate


def cache_bytes(config: ModelFields, batch: int, length: int, dtype: torch.dtype) -> int:
    """Returns the bytes of a :class:`KVCache`: ``n_layers batch n_kv_heads length (D + Dv)`` elements, of keys and
    values.

    A layer with linear attention has a state in place of keys and values, whose size does not depend on the length
    (:class:`HybridCache`). The cache allocates all `length` positions, even with a sliding window. Keys and values of a
    context are not included. A :class:`PagedKVCache` of ``batch * length`` positions with ``n_sequences = batch`` takes
    the same.

    Args:
        batch: sequences.
        length: positions that the cache can hold, `max_len`.
        dtype: the dtype of keys and values.

    Raises:
        TypeError, ValueError: a size is not an int or is below 1, `dtype` is not a dtype, or the model does not support
            this cache (it is not causal, or has fewer learned positions).
    """
    itemsize = _itemsize("dtype", dtype)
    check_cache(config, batch, length)
    linear, of = len(config.linear_layers), config.linear_heads
    states = linear * batch * of.channels * (config.linear_conv_size - 1) * itemsize
    states += linear * batch * of.values * of.k_dim * wide_dtype(dtype).itemsize
    heads, *widths = config.cached_heads
    return len(config.full_layers) * batch * heads * length * sum(widths) * itemsize + states


def _itemsize(name: str, dtype: object) -> int:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} must be a torch.dtype; got {dtype!r:.60}")
    return dtype.itemsize


def flops_by_part(config: ModelFields, length: int, context_length: int | None = None) -> dict[str, float]:
    """Returns the floating-point operations of a forward pass for each token of a sequence of `length`, by part.

    A multiply-add counts as 2. Only matmuls are counted, as for model FLOPs utilization (MFU): projections in
    "attention", scores and the weighted sums of values in "attention_scores", the feed-forward part (`top_k` experts,
    the shared one, the router) and the head. Norms, activations, the rotation, the softmax and embeddings are not
    counted. A training step counts as 3 forward passes, because the backward pass has two matmuls for each one;
    recomputation is not counted.

    Linear attention counts its projections in "attention" and, in "attention_scores", the matmuls of a token with the
    state of a head: three, and two for Mamba-2 (its chunks take more).

    Scores are counted for the keys that a query sees, averaged over the positions: ``(length + 1) / 2`` keys in a
    causal model, fewer with a window, all in an encoder. A backend that also computes masked scores, such as the
    reference, executes more: without a window ``2 length / (length + 1)`` times as many.

    Args:
        length: tokens of a sequence.
        context_length: for a model with `context_dim`, the tokens of the context; None is `length`. The context's keys
            and values are computed once, and this work is shared by the tokens of the sequence.

    Raises:
        TypeError, ValueError: a length is not an int or is below 1, or the model has no context.
    """
    check_int("length", length, 1)
    q, kv = config.n_heads * config.head_width, config.kv_heads * config.head_width
    projections = 2.0 * _projections(config, config.dim)
    scores = 2.0 * config.n_heads * (config.head_width + config.value_width) * _keys_seen(config, length)
    if config.context_dim is not None:
        context_length = length if context_length is None else context_length
        check_int("context_length", context_length, 1)
        projections += 4.0 * config.dim * q + 4.0 * config.context_dim * kv * context_length / length
        scores += 4.0 * q * context_length
    elif context_length is not None:
        raise ValueError(f"context_length needs a model with context_dim; got {context_length}")
    dense = len(config.dense_layers)
    experts = 2.0 * _matrices(config, config.ffn_width)
    if config.n_experts is not None:
        experts = config.top_k * experts + 2.0 * config.dim * (config.n_experts + config.shared_expert_gate)
        experts += 2.0 * _matrices(config, config.shared_expert_dim or 0)
    feed_forward = (len(config.mlp_layers) - dense) * experts
    feed_forward += dense * 2.0 * _matrices(config, config.dense_hidden_dim or config.ffn_width)
    linear, heads = len(config.linear_layers), config.linear_heads
    full, per_state = len(config.full_layers), 2.0 * module_above("mixers").MIXERS[config.linear_kind].PRODUCTS
    return {
        "attention": full * projections + linear * _linear_attention(config)[2],
        "attention_scores": full * scores + linear * per_state * heads.values * heads.k_dim,
        "feed_forward": feed_forward,
        "head": 2.0 * config.dim * config.vocab_size * config.head,
    }


def flops_per_token(
    config: ModelFields, length: int, context_length: int | None = None, training: bool = False
) -> float:
    """Returns the sum of :func:`flops_by_part`, and with `training` 3 times as much."""
    return (3.0 if training else 1.0) * sum(flops_by_part(config, length, context_length).values())


def _keys_seen(config: ModelFields, length: int) -> float:
    """Keys that a query sees, averaged over the positions."""
    window = length if config.sliding_window is None else min(config.sliding_window, length)
    # Position i sees min(i, window - 1) earlier positions and, without `causal`, as many later ones.
    before = (window * (window - 1) / 2 + (length - window) * (window - 1)) / length
    return 1.0 + (before if config.causal else 2.0 * before)


def training_bytes(
    config: ModelFields,
    batch: int,
    length: int,
    *,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    optimizer: str | float = "adamw",
    backend: str | Mapping[str, str] = "auto",
    context_length: int | None = None,
    device: str = "cpu",
) -> TrainingMemory:
    """Returns the bytes that a training step of ``[batch, length]`` tokens holds at the start of its backward pass: the
    weights, their gradients (which exist from the second micro-batch on), the optimizer's state and the saved
    activations.

    Activations are counted, not estimated: the forward pass and the loss run on fake tensors, and the storages that
    autograd saves are added up, each once, without the parameters. So the count is exact for every configuration and
    backend, and takes the host time of one forward pass.

    Not counted are temporary tensors of the running operation, such as gradients of activations and a chunk of the
    logits (the peak of a model with 4 layers is less than 20 % above the total, with more layers less), the tables of
    positions, and the allocator's overhead.

    Args:
        batch, length: number of sequences, and tokens of each.
        dtype: the dtype of parameters and gradients and, without autocast, of activations.
        autocast: the dtype of ``torch.autocast``, whose copies of the weights count as activations of their part; None
            is no autocast.
        optimizer: "adamw", "adam", "sgd" or "sgd_momentum", with torch's state, or bytes for each parameter: 12 for
            float32 moments and a float32 copy of the weights.
        backend: as for :class:`Transformer`. "auto" is what this installation runs on `device`: fused kernels, or the
            reference without them.
        context_length: for a model with `context_dim`, the tokens of the context; None is `length`. The context's
            gradients are not counted.
        device: the device of the fake tensors: "cpu", or "cuda" if torch has a GPU.

    Raises:
        TypeError, ValueError: as :class:`Transformer` and its forward pass; an unknown optimizer.
        BackendUnavailable: a named backend does not support the device or dtype.
    """
    check_int("batch", batch, 1)
    check_int("length", length, 1)
    for name, given in (("dtype", dtype), ("autocast", autocast)):
        if not isinstance(given, torch.dtype) and (name, given) != ("autocast", None):
            raise TypeError(f"{name} must be a torch.dtype; got {given!r:.60}")
    parameters = parameters_by_part(config)
    weights = parameters.times(dtype.itemsize)
    if isinstance(optimizer, str):
        if optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)} or bytes; got {optimizer!r}")
        state = weights.times(OPTIMIZERS[optimizer])
    elif optimizer < 0:
        raise ValueError(f"optimizer must be at least 0 bytes for each parameter; got {optimizer}")
    else:
        state = Parts({name: round(optimizer * number) for name, number in parameters.items()})
    run: Callable[..., Parts] = module_above("memory").activations
    activations = run(config, batch, length, dtype, autocast, backend, context_length, device)
    return TrainingMemory(weights, weights.times(1), state, activations)
