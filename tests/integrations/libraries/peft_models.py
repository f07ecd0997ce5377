"""Tiny models with PEFT's adapters, and what tests compare of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.integrations.adapters.tiny import tiny_model

peft = pytest.importorskip("peft")

IDS = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(0))
SOME = ["q_proj", "v_proj", "gate_proj", "down_proj"]

#: What an adapter may be, and whether the operation serves it.
KINDS: dict[str, tuple[dict[str, Any], bool]] = {
    "all": ({"target_modules": "all-linear"}, True),
    "some": ({"target_modules": SOME}, True),
    "rslora": ({"target_modules": SOME, "use_rslora": True}, True),
    "head": ({"target_modules": ["q_proj", "lm_head"]}, True),
    "embedding": ({"target_modules": ["embed_tokens", "o_proj"]}, True),
    "dora": ({"target_modules": "all-linear", "use_dora": True}, False),
    "bias": ({"target_modules": "all-linear", "lora_bias": True}, False),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def adapted(kind: str, patched: str = "", family: str = "llama", **options: Any) -> tuple[Any, Any]:
    """A model with adapters, and the handle of its patch, made "before" or "after" they were added."""
    model: Any = tiny_model(family)
    handle = fk.patch(model) if patched == "before" else None
    torch.manual_seed(0)
    given = {"r": 4, "task_type": "CAUSAL_LM", "init_lora_weights": False, **KINDS[kind][0], **options}
    model = peft.get_peft_model(model, peft.LoraConfig(**given))
    return model, fk.patch(model) if patched == "after" else handle


def step(model: Any, ids: Tensor = IDS, **options: Any) -> tuple[Tensor, Tensor]:
    """The loss, and the gradients of the adapters."""
    loss = model.train()(input_ids=ids, labels=ids, **options).loss
    loss.backward()
    found = [p.grad.flatten() for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    return loss.detach(), torch.cat(found)


def near(actual: Tensor, expected: Tensor) -> bool:
    return bool((actual - expected).abs().max() <= 2e-5 * expected.abs().max())


def logits(model: Any, **options: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model.eval()(input_ids=IDS, **options).logits
    return out


def saved(model: Any, ids: Tensor) -> dict[torch.dtype, int]:
    """Bytes that a step saves for its backward pass, by dtype, without the parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        seen.setdefault(x.untyped_storage().data_ptr(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        kept = model.train()(input_ids=ids, labels=ids).loss
    found: dict[torch.dtype, int] = {}
    for at, x in seen.items():
        if at not in own:
            found[x.dtype] = found.get(x.dtype, 0) + x.untyped_storage().nbytes()
    del kept
    return found
