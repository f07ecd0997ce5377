"""The loss of a causal language model of transformers, without the logits.

In training only the loss needs the logits, so a patched model does not compute them: its forward runs the decoder, and
`linear_cross_entropy` runs the head. Any other call (in eval mode, without labels, with a head that must be called)
runs the class's own forward, whose `loss_function` is `cross_entropy` of this package.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from foundry_kernels.core.registry import is_dtensor
from foundry_kernels.integrations.adapters import log_probs
from foundry_kernels.integrations.adapters.base import Adapter, split_names
from foundry_kernels.integrations.adapters.packed_model import own_class, reads_documents
from foundry_kernels.integrations.attention.call import current
from foundry_kernels.integrations.modules import is_model
from foundry_kernels.losses.tokens import over_items
from foundry_kernels.nn._head import PLANNED_INPUT, count_hooks, matrix_of
from foundry_kernels.ops.cross_entropy import cross_entropy
from foundry_kernels.ops.linear_cross_entropy import linear_cross_entropy

#: The report's text for a model whose loss does not compute logits.
NO_LOGITS = "logits of a call with labels are None in training mode; return_logits=True keeps them"

#: The report's text for a language model that has no row.
LOSS_STAYS = "its loss stays, with the logits: no adapter for this class"
#: The operations of a loss.
LOSSES = ("linear_cross_entropy", "cross_entropy")

#: The arguments of the loss of transformers, and of the function that it calls; of `kwargs` both read nothing.
LOSS = split_names("logits labels source target vocab_size num_items_in_batch ignore_index shift_labels kwargs")


def _one(module: Any) -> float:
    return 1.0


def _no_cap(module: Any) -> float | None:
    return None


@dataclass(frozen=True)
class CausalLM(Adapter):
    """A decoder, a head without a bias of its own making, and the loss of the next token.

    decoder: its name in the model. scale, cap: what the logits are multiplied by, and their soft cap, of a module.
    mixture: whether the loss of a router is added. uses: names that only this row's forward uses.
    """

    decoder: str = "model"
    scale: Callable[[Any], float] = _one
    cap: Callable[[Any], float | None] = _no_cap
    mixture: bool = False
    uses: tuple[str, ...] = field(default=())

    names = split_names(
        "last_hidden_state slice_logits_to_keep slice isinstance int lm_head loss_function config vocab_size "
        "CausalLMOutputWithPast past_key_values cache hidden_states attentions"
    )
    #: The cache has two names, by release.
    arguments = split_names(
        "self input_ids attention_mask position_ids past_key_values cache inputs_embeds labels use_cache kwargs "
        "logits_to_keep encoder_hidden_states encoder_attention_mask token_type_ids output_attentions "
        "output_hidden_states output_router_logits return_dict"
    )
    transparent: ClassVar[bool] = True

    def ops(self, module: nn.Module) -> tuple[str, ...]:
        return LOSSES

    def known(self) -> frozenset[str]:
        mixture = split_names(
            "output_router_logits load_balancing_loss_func router_logits num_experts num_experts_per_tok to device "
            "router_aux_loss_coef MoeCausalLMOutputWithPast"
        )
        return self.names | {self.decoder, *self.uses} | (mixture if self.mixture else set())

    def why_changed(self, original: type) -> str | None:
        losses = importlib.import_module("transformers.loss.loss_utils")
        for loss in (losses.ForCausalLMLoss, losses.fixed_cross_entropy):
            if unknown := sorted(inspect.signature(loss).parameters.keys() - LOSS):
                return f"its loss takes {', '.join(unknown)}: another version of it than this package knows"
        return super().why_changed(original)

    def why_not_without_logits(self, module: nn.Module) -> str | None:
        """Returns the reason why logits are always computed, or None."""
        head = getattr(module, "lm_head", None)
        if _matrix_of(head) is None:
            return f"its lm_head is no plain linear layer ({type(head).__name__}) or has hooks, so its logits are made"
        return None

    def members(self, original: Any) -> dict[str, Any]:
        theirs = importlib.import_module("transformers.loss.loss_utils").ForCausalLMLoss
        signature = inspect.signature(original.forward)
        can_return_tuple = importlib.import_module("transformers.utils.generic").can_return_tuple
        return {
            "forward": reads_documents(can_return_tuple(_forward_of(original.forward)), signature),
            "loss_function": property(_get_loss_function, _set_loss_function),
            "_foundry_get_loss": original.loss_function.fget,  # which the compiler cannot look up
            "_foundry_their_loss": staticmethod(theirs),
        }


def has_loss(module: Any) -> bool:
    """Returns whether a module is a model of transformers with a loss of the logits of its head."""
    if not is_model(module) or "labels" not in inspect.signature(type(module).forward).parameters:
        return False
    return module.get_output_embeddings() is not None


def _forward_of(theirs: Any) -> Any:
    """Returns a forward with the signature of `theirs`, which is called wherever logits are made."""
    signature = inspect.signature(theirs)
    positional = tuple(p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD)[1:]
    for_decoder = tuple(name for name in positional if name not in ("labels", "logits_to_keep", "return_dict"))
    # A decoder of a model that has this argument takes only what it names: what else there is goes to the loss.
    named_only = "return_dict" in positional
    cache = "cache" if "cache" in positional else "past_key_values"  # by release

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = kwargs.pop(log_probs.KEYWORD, None)
        given = {**dict(zip(positional, args, strict=False)), **kwargs}
        count = len(given)
        if cache == "cache" and "past_key_values" in given:  # its older name, which transformers takes as well
            given.setdefault(cache, given.pop("past_key_values"))
        labels: Any = given.get("labels")
        logits_to_keep = given.get("logits_to_keep", 0)
        refused = count < len(args) + len(kwargs)  # too many arguments, or one given twice: theirs says so
        if request is not None and not _head_is_read(self, logits_to_keep):
            logits = own_class(self).forward(self, **{**given, "labels": None, "return_dict": True}).logits
            return request.of_logits(logits, _targets(request, labels, logits), _backend(self))
        if request is None and (labels is None or refused or not _makes_no_logits(self, logits_to_keep)):
            return own_class(self).forward(self, *args, **{**kwargs, "return_dict": True})
        row, home = self._foundry_row, self._foundry_home
        rest = {name: value for name, value in given.items() if name not in positional}
        given = {name: given.get(name) for name in for_decoder}
        if request is not None:
            hidden = getattr(self, row.decoder)(**given, **({"return_dict": True} if named_only else rest))[0]
            return request.of_hidden(_head_inputs(self, hidden), _targets(request, labels, hidden))
        if row.mixture and given["output_router_logits"] is None:
            given["output_router_logits"] = self.config.output_router_logits
        outputs = getattr(self, row.decoder)(**given, **({"return_dict": True} if named_only else rest))
        result = {
            "loss": _loss_of_hidden(self, outputs.last_hidden_state, labels, logits_to_keep, **rest),
            "logits": None,
            cache: getattr(outputs, cache),
            "hidden_states": outputs.hidden_states,
            "attentions": outputs.attentions,
        }
        if row.mixture:
            balance = None
            if given["output_router_logits"]:
                routed = (outputs.router_logits, self.num_experts, self.num_experts_per_tok, given["attention_mask"])
                balance = home.load_balancing_loss_func(*routed)
                result["loss"] = result["loss"] + self.router_aux_loss_coef * balance.to(result["loss"].device)
            return home.MoeCausalLMOutputWithPast(**result, aux_loss=balance, router_logits=outputs.router_logits)
        if hasattr(outputs, "cross_attentions"):
            return home.CausalLMOutputWithCrossAttentions(**result, cross_attentions=outputs.cross_attentions)
        return home.CausalLMOutputWithPast(**result)

    made: Any = forward
    made.__signature__ = signature  # trainers and `generate` look at it
    return made


def _makes_no_logits(self: Any, logits_to_keep: int | Tensor) -> bool:
    state = getattr(self, "_foundry", None)  # none once the patch is undone, if a wrapper has derived its own class
    if state is None or not self.training or "linear_cross_entropy" not in state.backends:
        return False
    return _head_is_read(self, logits_to_keep) and self._foundry_get_loss() is self._foundry_their_loss


def _head_is_read(self: Any, logits_to_keep: int | Tensor) -> bool:
    """Returns whether a kernel can read the head's parameters, so that the head need not be called."""
    head = _matrix_of(self.lm_head)
    whole = isinstance(logits_to_keep, int) and logits_to_keep == 0
    if head is None or not (whole or hasattr(self._foundry_home, "slice_logits_to_keep")):
        return False
    # Otherwise, who knows how the tokens lie?
    return not is_dtensor(head[0]) or bool(whole and _input_of(self.lm_head))


def _loss_of_hidden(
    self: Any,
    hidden: Tensor,
    labels: Tensor,
    logits_to_keep: int | Tensor,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    if not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
        hidden = self._foundry_home.slice_logits_to_keep(hidden, logits_to_keep)
    targets = _next_tokens(labels, shift_labels, ignore_index).to(hidden.device)
    inputs = _head_inputs(self, hidden)
    if is_dtensor(inputs["weight"]):
        targets = targets.view(labels.shape)
    else:
        inputs["hidden"] = hidden.reshape(-1, hidden.shape[-1])
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss: Any = linear_cross_entropy(target=targets, ignore_index=ignore_index, reduction=reduction, **inputs)
    return _by_items(loss.full_tensor() if is_dtensor(loss) else loss, num_items_in_batch)


def _head_inputs(self: Any, hidden: Tensor) -> dict[str, Any]:
    """Returns the arguments by which an operation computes the logits of `hidden`, and its backend."""
    row: CausalLM = self._foundry_row
    head = _matrix_of(self.lm_head)
    assert head is not None  # or the head is called
    return {
        "hidden": _on_mesh(hidden, self.lm_head) if is_dtensor(head[0]) else hidden,
        "weight": head[0],
        "bias": head[1],
        "softcap": row.cap(self),
        "logit_scale": row.scale(self),
        "backend": _backend(self),
    }


def _backend(self: Any) -> str:
    backends: dict[str, str] = self._foundry.backends
    return backends.get("linear_cross_entropy") or backends["cross_entropy"]


def _targets(request: log_probs.Request, labels: Tensor, hidden: Tensor) -> Tensor:
    """Returns the target of each position of a call that is running."""
    call = current()
    documents = None if call is None or call.queries != labels.shape[1] else call.documents
    return request.targets(labels.to(hidden.device), documents)


def _matrix_of(head: Any) -> tuple[Tensor, Tensor | None] | None:
    """`matrix_of`, also of a head that transformers' `tp_plan` has sharded by its classes."""
    return matrix_of(head) if _sharded_by_transformers(head) is None else (head.weight, head.bias)


def _sharded_by_transformers(head: Any) -> Mapping[str, Any] | None:
    """What the forward knows that the style "colwise_gather_output" has given the head in place of its own: the style
    (`self`), `module` and `mesh`. None where the head has another."""
    if type(head) is not nn.Linear or "forward" not in vars(head) or count_hooks(head):
        return None
    style = sys.modules.get("transformers.distributed.tensor_parallel")
    if style is None or not inspect.isfunction(head.forward):
        return None
    known = inspect.getclosurevars(head.forward).nonlocals
    theirs = getattr(known.get("original_forward"), "__func__", None) is nn.Linear.forward
    given: Any = known.get("self")
    if not theirs or type(given) is not style.ColwiseParallel or known.get("module") is not head:
        return None
    replicated = given.input_layouts.is_replicate() and given.output_layouts.is_replicate()
    return known if replicated and is_dtensor(known["module"].weight) else None


def _input_of(head: nn.Module) -> Any:
    """The mesh of a vocab-sharded head, and the placements of a plain tensor on it; None if they are unknown."""
    if (known := _sharded_by_transformers(head)) is not None:
        return known["mesh"], (known["self"].input_layouts,)
    return getattr(head, PLANNED_INPUT, None)


def _on_mesh(hidden: Tensor, head: nn.Module) -> Tensor:
    """Returns what the head would make of its input, whose classes are sharded over devices."""
    if is_dtensor(hidden):
        return hidden
    mesh, layouts = _input_of(head)
    tensor = importlib.import_module("torch.distributed.tensor")
    return tensor.DTensor.from_local(hidden, mesh, layouts, run_check=False)


def _next_tokens(labels: Tensor, shift_labels: Tensor | None, ignore_index: int) -> Tensor:
    """Returns the label of each position: the token that follows it, and none for the last."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return shift_labels.reshape(-1)


def _by_items(loss: Tensor, num_items_in_batch: Any) -> Tensor:
    """Returns a sum over the number of items, where that is given: float32 whatever the model's dtype. Over 0 items it
    is 0 or infinite; without a patch 0 / 0 is NaN."""
    return loss.float() if num_items_in_batch is None else over_items(loss.float(), num_items_in_batch)


def _set_loss_function(self: Any, value: Any) -> None:
    self._foundry_original.loss_function.fset(self, value)


def _get_loss_function(self: Any) -> Any:
    """Returns the next-token loss on the kernels; any other loss runs as before."""
    theirs = self._foundry_get_loss()
    state = getattr(self, "_foundry", None)
    if state is None or "cross_entropy" not in state.backends or theirs is not self._foundry_their_loss:
        return theirs
    return partial(_loss_of_logits, theirs, state.backends["cross_entropy"])


def _loss_of_logits(
    theirs: Any,
    backend: str,
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    if is_dtensor(logits) or logits.shape[-1] != vocab_size:  # sharded over devices; or a matter of `view`
        options = {"ignore_index": ignore_index, "shift_labels": shift_labels, **kwargs}
        loss: Tensor = theirs(logits, labels, vocab_size, num_items_in_batch, **options)
        return loss
    loss = cross_entropy(
        logits.reshape(-1, vocab_size),
        _next_tokens(labels, shift_labels, ignore_index).to(logits.device),
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
        backend=backend,
    )
    return _by_items(loss, num_items_in_batch)
