"""A mixture of experts: many feed-forward blocks; each token goes through a few of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol, overload

import torch
from torch import Tensor, nn

from foundry_kernels.core.autograd import apply
from foundry_kernels.core.registry import _transformed
from foundry_kernels.nn._backend import Backend, describe, plan
from foundry_kernels.nn._scripting import refuse_scripting
from foundry_kernels.nn.mlp import ACTIVATIONS, GATES, MLP, GatedMLP, check_dropout, check_gate_options
from foundry_kernels.nn.router import Router, RouterStats, Routing
from foundry_kernels.ops.combine_experts import combine_experts
from foundry_kernels.ops.grouped_mm import grouped_mm


class Dispatch(NamedTuple):
    """The positions of the M = T k choices of T tokens after sorting by expert.

    Attributes:
        order: ``[M]``, the choice (token t's j-th is t k + j) that each sorted row holds.
        slots: ``[T, k]``, the sorted row of each choice, or -1 if the expert is on another process.
        offs: ``[E]`` int32, the end of each expert's rows.
    """

    order: Tensor
    slots: Tensor
    offs: Tensor

    @property
    def counts(self) -> Tensor:
        """``[E]`` int32, the rows of each expert."""
        return self.offs.diff(prepend=self.offs.new_zeros(1))


def dispatch(experts: Tensor, n_experts: int, *, partial: bool = False) -> Dispatch:
    """Sorts the choices ``[T, k]`` by expert, and those of one expert by token, without atomics and without waiting for
    a GPU. `partial`: experts from `n_experts` on are on other processes, and their rows come last."""
    ids, order = experts.flatten().sort(stable=True)
    numbers = torch.arange(n_experts, device=ids.device, dtype=ids.dtype)
    offs = torch.searchsorted(ids, numbers, right=True, out_int32=True)
    rows = torch.arange(order.shape[0], device=order.device)
    slots = torch.empty_like(rows).scatter(0, order, rows).view(experts.shape)
    return Dispatch(order, slots.masked_fill(experts >= n_experts, -1) if partial else slots, offs)


class _Gather(torch.autograd.Function):
    """Gathers the rows of x by expert. Its gradient is `combine_experts` with weights of 1: a gather with a float32
    sum, whereas the gradient of indexing adds to memory."""

    @staticmethod
    def forward(x: Tensor, tokens: Tensor, slots: Tensor, backend: str) -> Tensor:
        return x.index_select(0, tokens)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, slots, ctx.backend = inputs
        ctx.save_for_backward(slots)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor, None, None, None]:
        (slots,) = ctx.saved_tensors
        return combine_experts(dys[0], None, slots, backend=ctx.backend), None, None, None


def gather_rows(x: Tensor, where: Dispatch, backend: str) -> Tensor:
    """The rows of x ``[T, D]`` by expert ``[M, D]``; `backend` is that of combine_experts."""
    tokens = where.order // where.slots.shape[1]
    if _transformed():
        return x[tokens]
    if not (torch.is_grad_enabled() and x.requires_grad):  # a saved trace cannot contain an autograd function
        return x.index_select(0, tokens)
    gathered: Tensor = apply(_Gather, x, tokens, where.slots, backend)
    return gathered


#: Runs experts on rows ``[M, D]`` sorted by expert; offs ``[E]`` are the ends of the experts' rows.
RunRows = Callable[[Tensor, Tensor], Tensor]


class ExpertExchange(Protocol):
    """The interface that runs rows through experts of several processes; `fk.distributed.expert_parallel` sets it."""

    def own(self, parameter: Any) -> Tensor:
        """A parameter of this process's experts."""

    def run(self, rows: Tensor, counts: Tensor, run: RunRows, backend: str) -> Tensor:
        """Rows ``[M, D]`` by expert, of all experts, counts ``[E]`` of them, through the experts of all processes, of
        which `run` has this one's; `backend` is that of combine_experts."""

    def mean(self, stats: RouterStats) -> RouterStats:
        """The statistics of the tokens of all processes."""


Pair = tuple[Tensor, Tensor]


def run_experts(
    x: Tensor,
    weights: Tensor,
    where: Dispatch,
    gate_up: Tensor,
    down: Tensor,
    gate: Callable[[Tensor], Tensor],
    backends: Mapping[str, str],
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    weight_inputs: bool = False,
    exchange: ExpertExchange | None = None,
    pairs: tuple[Pair | None, Pair | None] = (None, None),
) -> Tensor:
    """x ``[T, D]`` through the experts of each token, weighted by `weights` ``[T, k]``, to ``[T, D]`` of x's dtype.

    gate_up ``[E, D, 2N]``, down ``[E, N, D]``; gate takes ``[M, 2N]`` to ``[M, N]``; `backends` has those of grouped_mm
    and combine_experts. With an `exchange` the weights are those of this process's experts. pairs: what
    is added to gate_up and to down, as the product of ``[E, D, r]`` and ``[E, r, 2N]``, which is not made.
    """
    product, combine = backends["grouped_mm"], backends["combine_experts"]
    rows = gather_rows(x, where, combine)
    if weight_inputs:
        rows = (rows * weights.flatten()[where.order].unsqueeze(1)).to(rows.dtype)
    has_bias = gate_up_bias is not None or down_bias is not None

    def run(rows: Tensor, offs: Tensor) -> Tensor:
        of_expert = _one_hot(offs, rows) if has_bias else None
        h = _biased(_product(rows, gate_up, offs, product, pairs[0]), of_expert, gate_up_bias)
        return _biased(_product(gate(h), down, offs, product, pairs[1]), of_expert, down_bias)

    y = run(rows, where.offs) if exchange is None else exchange.run(rows, where.counts, run, combine)
    if weights.dtype != y.dtype:
        weights = weights.float()
    return combine_experts(y, None if weight_inputs else weights, where.slots, backend=combine).to(x.dtype)


def _product(rows: Tensor, weight: Tensor, offs: Tensor, backend: str, pair: Pair | None) -> Tensor:
    y = grouped_mm(rows, weight, offs, backend=backend)
    if pair is None:
        return y
    a, b = pair
    return y + grouped_mm(grouped_mm(rows, a, offs, backend=backend), b, offs, backend=backend)


def _one_hot(offs: Tensor, rows: Tensor) -> Tensor:
    """``[M, E]`` bool: whether a sorted row is an expert's."""
    row = torch.arange(rows.shape[0], device=rows.device, dtype=offs.dtype).unsqueeze(1)
    return (row >= (offs - offs.diff(prepend=offs.new_zeros(1)))) & (row < offs)


def _biased(y: Tensor, of_expert: Tensor | None, bias: Tensor | None) -> Tensor:
    if bias is None or of_expert is None:
        return y
    # By a matmul, whose gradient is a matmul too; the gradient of indexing would add to memory in y's precision.
    return y + of_expert.to(y.dtype) @ bias.to(y.dtype)


class Experts(nn.Module):
    """E feed-forward blocks, ``down_e (activation(gate_e x) * up_e x)``, or without a gate ``down_e activation(up_e
    x)``; parameters are called and laid out as in transformers: `gate_up_proj` ``[E, 2N, D]``, the gate first, or
    `up_proj` ``[E, N, D]``; `down_proj` ``[E, D, N]``; and with `bias` `gate_up_proj_bias` or `up_proj_bias`, and
    `down_proj_bias`. The arguments are those of :class:`MoE`."""

    __prepare_scriptable__ = refuse_scripting

    def __init__(
        self,
        dim: int,
        width: int,
        n_experts: int,
        *,
        activation: str = "swiglu",
        gate_options: Mapping[str, Any] | None = None,
        bias: bool = False,
        weight_inputs: bool = False,
        dropout: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        for name, value in (("dim", dim), ("width", width), ("n_experts", n_experts)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        activations = GATES | ACTIVATIONS
        if activation not in activations:
            raise ValueError(f"activation must be one of {', '.join(activations)}; got {activation!r}")
        self.dim, self.width, self.n_experts = dim, width, n_experts
        self.activation, self.weight_inputs = activation, weight_inputs
        self.gate_options, self.dropout = check_gate_options(gate_options, activation), check_dropout(dropout)
        self.op, self._gate = activations[activation]
        self.backends = plan(backend, (self.op, "grouped_mm", "combine_experts"))
        self.exchange: ExpertExchange | None = None

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(n_experts, *shape, device=device, dtype=dtype))

        first, rows = ("gate_up_proj", 2 * width) if activation in GATES else ("up_proj", width)
        self._first = first, f"{first}_bias"
        self.register_parameter(first, parameter(rows, dim))
        self.down_proj = parameter(dim, width)
        self.register_parameter(f"{first}_bias", parameter(rows) if bias else None)
        self.down_proj_bias = parameter(dim) if bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(
        self,
        std: float | None = None,
        generator: torch.Generator | None = None,
        *,
        down_std: float | None = None,
    ) -> None:
        """Weights from N(0, std), `down_proj` from N(0, down_std) where it is given, or as `nn.Linear` has them; biases
        0."""
        first, first_bias = (getattr(self, name) for name in self._first)
        for weight, deviation in ((first, std), (self.down_proj, std if down_std is None else down_std)):
            bound = weight.shape[-1] ** -0.5
            if deviation is None:
                nn.init.uniform_(weight, -bound, bound, generator=generator)
            else:
                nn.init.normal_(weight, 0.0, deviation, generator=generator)
        for bias in (first_bias, self.down_proj_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, x: Tensor, weights: Tensor, where: Dispatch) -> Tensor:
        """x ``[T, D]``, weights ``[T, k]`` to ``[T, D]``."""
        exchange = self.exchange
        first, first_bias = (getattr(self, name) for name in self._first)

        def own(parameter: Tensor | None) -> Any:
            return parameter if parameter is None or exchange is None else exchange.own(parameter)

        return run_experts(
            x,
            weights,
            where,
            own(first).mT,
            own(self.down_proj).mT,
            self._activate,
            self.backends,
            gate_up_bias=own(first_bias),
            down_bias=own(self.down_proj_bias),
            weight_inputs=self.weight_inputs,
            exchange=exchange,
        )

    def _activate(self, gate_up: Tensor) -> Tensor:
        options = self.gate_options
        if self.dropout and self.training:
            options = {**options, "dropout_p": self.dropout}
        return self._gate(gate_up, backend=self.backends[self.op], **options)

    def extra_repr(self) -> str:
        text = f"dim={self.dim}, width={self.width}, n_experts={self.n_experts}, activation={self.activation!r}"
        text += f", gate_options={self.gate_options}" if self.gate_options else ""
        text += "" if self.down_proj_bias is None else ", bias=True"
        text += ", weight_inputs=True" if self.weight_inputs else ""
        text += f", dropout={self.dropout}" if self.dropout else ""
        return f"{text}, backend={describe(self.backends)}"


class MoE(nn.Module):
    r"""A mixture of experts: each token goes through `top_k` of `n_experts` feed-forward blocks.

    .. math:: y = \sum_{e \in C(x)} w_e(x) \, D_e \bigl(a(G_e x) \odot U_e x\bigr) + \mathrm{shared}(x)

    or :math:`D_e a(U_e x)` without a gate, with the choice C and weights w of :class:`Router`. No expert has a
    capacity, so no token is dropped. The choices are sorted by expert (a stable sort), go through
    :func:`foundry_kernels.grouped_mm`, the activation and `grouped_mm` again, and
    :func:`foundry_kernels.combine_experts` weighs and adds them in one pass. Gradients are exact: of x, of every expert
    (zeros for one that got no token), and of the router through the weights. Nothing waits for a GPU except the
    reference of `grouped_mm`.

    Args:
        dim: width D of the input and the output.
        width: width N of an expert.
        n_experts, top_k: E, and the experts of a token.
        activation: as of :class:`GatedMLP`, or without a gate as of :class:`MLP`.
        gate_options: of the experts' :func:`foundry_kernels.swiglu`: `alpha`, `limit`, `up_offset`, `interleaved`
            (GPT-OSS has 1.702, 7.0, 1.0 and True).
        scoring, renormalize, scale, selection_bias, n_groups, top_groups: of the :class:`Router`.
        router_bias: whether its logits have a bias.
        bias: whether the experts' projections (and those of the shared one) have one.
        weight_inputs: multiply an expert's input by its weight in place of its output (Llama 4).
        shared_width: width of one more block that every token goes through; None means no such block. Several shared
            experts are one block of their total width.
        shared_gate: multiply its output by ``sigmoid(v x)``, a scalar a token (Qwen2-MoE).
        dropout: dropout of the gated products of the experts and of the shared block in training, as in
            :class:`foundry_kernels.nn.GatedMLP`; each expert of a token has its own mask.
        backend: a backend's name, or a mapping of operations to names.

    Raises:
        ValueError: a size below 1, top_k > n_experts, `shared_gate` without `shared_width`, `gate_options` of another
            activation than "swiglu", a dropout outside [0, 1), an unknown `activation`, `scoring` or backend.

    Shazeer et al., 2017, arXiv:1701.06538; Gale et al., "MegaBlocks", 2022, arXiv:2211.15841; Dai et al.,
    "DeepSeekMoE" (shared experts), 2024, arXiv:2401.06066.
    """

    __prepare_scriptable__ = refuse_scripting

    def __init__(
        self,
        dim: int,
        width: int,
        n_experts: int,
        top_k: int,
        *,
        activation: str = "swiglu",
        gate_options: Mapping[str, Any] | None = None,
        scoring: str = "softmax",
        renormalize: bool = True,
        scale: float = 1.0,
        router_bias: bool = False,
        selection_bias: bool = False,
        n_groups: int | None = None,
        top_groups: int | None = None,
        bias: bool = False,
        weight_inputs: bool = False,
        shared_width: int | None = None,
        shared_gate: bool = False,
        dropout: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        if shared_gate and shared_width is None:
            raise ValueError("shared_gate needs shared_width: there is no shared expert; got True")
        factory = {"device": device, "dtype": dtype}
        self.router = Router(
            dim,
            n_experts,
            top_k,
            scoring=scoring,
            renormalize=renormalize,
            scale=scale,
            bias=router_bias,
            selection_bias=selection_bias,
            n_groups=n_groups,
            top_groups=top_groups,
            **factory,
        )
        block: dict[str, Any] = {
            "activation": activation,
            "bias": bias,
            "dropout": dropout,
            "backend": backend,
            **factory,
        }
        own: dict[str, Any] = {"gate_options": gate_options, "weight_inputs": weight_inputs}
        self.experts = Experts(dim, width, n_experts, **own, **block)
        shared = GatedMLP if activation in GATES else MLP
        self.shared = None if shared_width is None else shared(dim, shared_width, **block)
        self.shared_gate = nn.Linear(dim, 1, bias=False, **factory) if shared_gate else None

    @overload
    def forward(self, x: Tensor, return_stats: Literal[False] = False) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, return_stats: Literal[True]) -> tuple[Tensor, RouterStats]: ...
    def forward(self, x: Tensor, return_stats: bool = False) -> Tensor | tuple[Tensor, RouterStats]:
        """x ``[..., dim]`` to ``[..., dim]``, and with `return_stats` the input of :func:`load_balancing_loss` and
        :func:`router_z_loss`.

        The statistics are returned and not stored. An attribute would hold the graph of a step until the next one, and
        would have no gradient under activation checkpointing, which first runs the forward pass without a graph.
        """
        tokens = x.reshape(-1, x.shape[-1])
        routing: Routing = self.router(tokens)
        where = dispatch(routing.experts, self.router.n_experts)
        if self.training and self.router.selection_bias is not None:
            self.router.count(where.counts)
        y: Tensor = self.experts(tokens, routing.weights, where)
        if self.shared is not None:
            shared = self.shared(tokens)
            if self.shared_gate is not None:
                shared = self.shared_gate(tokens).sigmoid() * shared
            y = y + shared
        y = y.view(x.shape)
        if not return_stats:
            return y
        stats = self.router.stats(routing.logits, where.counts)
        return y, stats if self.experts.exchange is None else self.experts.exchange.mean(stats)
