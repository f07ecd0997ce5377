"""Log-probabilities of labels by a patched causal language model of transformers: `PatchHandle.log_probs`.

The model is called as for its loss, so that hooks (of FSDP2, of tensor parallelism) and wrappers run. The request is
one of the keyword arguments of the call, and the patched forward answers it in `causal_lm.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from foundry_kernels.core.checks import check_bool, check_int, check_integer, check_positive
from foundry_kernels.core.registry import is_dtensor
from foundry_kernels.integrations.attention.documents import Documents
from foundry_kernels.ops.linear_log_probs import linear_log_probs
from foundry_kernels.ops.log_probs import log_probs

#: The keyword argument of the patched forward.
KEYWORD = "foundry_log_probs"
#: Arguments of a model's forward that choose what it returns.
REFUSED = ("labels", "shift_labels", "num_items_in_batch", "logits_to_keep", "return_dict")


def is_encoder_decoder(model: Any) -> bool:
    """Returns whether a model makes its decoder's tokens of the labels, each of which its position predicts."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


class Request(NamedTuple):
    """A call's options, as for `PatchHandle.log_probs`."""

    return_entropy: bool
    return_lse: bool
    temperature: float
    ignore_index: int

    def targets(self, labels: Tensor, documents: Documents | None) -> Tensor:
        """Returns the target of each position: the label after it, if it is of the same document."""
        after = nn.functional.pad(labels[:, 1:], (0, 1), value=self.ignore_index)
        if documents is None:
            return after
        place = documents.of_queries()
        begins = nn.functional.pad(place[:, 1:] != place[:, :-1], (0, 1))
        return after.masked_fill(begins, self.ignore_index)

    def of_hidden(self, inputs: dict[str, Any], targets: Tensor, before: bool) -> Any:
        """Returns the results without logits. inputs: `linear_log_probs`'s, at temperature 1. before: whether a
        position predicts the label after it.

        The temperature divides logits after their soft cap c: ``c tanh(x / c) / T`` is the soft cap c / T of x / T.
        """
        cap = inputs["softcap"]
        scaled = inputs | {
            "logit_scale": inputs["logit_scale"] / self.temperature,
            "softcap": None if cap is None else cap / self.temperature,
        }
        return self._at_labels(linear_log_probs(target=targets, **scaled, **self._options()), before)

    def of_logits(self, logits: Tensor, targets: Tensor, backend: str, before: bool) -> Any:
        """Returns the results of a model whose head must be called; its logits are scaled and capped."""
        options = self._options()
        return self._at_labels(
            log_probs(logits, targets, logit_scale=1.0 / self.temperature, backend=backend, **options), before
        )

    def _options(self) -> dict[str, Any]:
        return {
            "ignore_index": self.ignore_index,
            "return_entropy": self.return_entropy,
            "return_lse": self.return_lse,
        }

    def _at_labels(self, found: Any, before: bool) -> Any:
        """Moves results from the position that predicts a token to that of the token."""
        results = [x.full_tensor() if is_dtensor(x) else x for x in (found if isinstance(found, tuple) else (found,))]
        if before:
            results = [nn.functional.pad(x[:, :-1], (1, 0)) for x in results]
        return tuple(results) if isinstance(found, tuple) else results[0]


def call(
    model: nn.Module,
    modules: Iterable[nn.Module],
    through: nn.Module | None,
    input_ids: Tensor | None,
    labels: Tensor,
    request: Request,
    inputs: Mapping[str, Any],
) -> Any:
    """Checks the arguments of `PatchHandle.log_probs`, and calls the model. modules: those that are patched."""
    heads = [module for module in modules if hasattr(module, "_foundry_makes_its_loss")]
    if not heads:
        raise ValueError(
            "log_probs needs a causal language model with a head, whose loss is patched (see report()); got "
            f"{type(model).__name__}"
        )
    if through is not None and not isinstance(through, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module or None; got {type(through).__name__}")
    check_integer("labels", labels)
    check_bool("return_entropy", request.return_entropy)
    check_bool("return_lse", request.return_lse)
    check_positive("temperature", request.temperature)
    check_int("ignore_index", request.ignore_index)
    if refused := [name for name in REFUSED if name in inputs]:
        raise ValueError(f"{refused[0]} must be left out: log_probs returns a value for each of labels")
    given = {"use_cache": False, **inputs, KEYWORD: request}
    if input_ids is not None:
        given["input_ids"] = input_ids
    if not any(map(is_encoder_decoder, heads)):
        tokens = inputs.get("inputs_embeds") if input_ids is None else input_ids
        if not isinstance(tokens, Tensor):
            raise TypeError(f"input_ids must be a tensor, or None with inputs_embeds; got {type(tokens).__name__}")
        if labels.dim() != 2 or labels.shape != tokens.shape[:2]:
            raise ValueError(
                f"labels must be [B, T] like the tokens, {list(tokens.shape[:2])}; got shape {list(labels.shape)}"
            )
    elif labels.dim() != 2:
        raise ValueError(f"labels must be [B, T]; got shape {list(labels.shape)}")
    found = (model if through is None else through)(labels=labels, **given)
    first = found[0] if isinstance(found, tuple) else found
    if not isinstance(first, Tensor) or first.shape != labels.shape:
        raise ValueError(
            f"{type(model if through is None else through).__name__} does not hand the call to the patched model as it "
            "is (a prompt that PEFT adds, for example), so there is no value for each label"
        )
    return found
