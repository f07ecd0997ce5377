"""A patched Llama with PEFT's adapters, sharded by torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from processes import SIZE, Collectives, full
from processes.patched import _fsdp, make_llama


def _tensor_parallel(model: Any, mesh: Any) -> nn.Module:
    """Shards heads and feed-forward width with the adapters: B where a layer's outputs are sharded, A where its inputs
    are."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {}
    for parent, wide, narrow in (("self_attn", "qkv", "o"), ("mlp", ("gate", "up"), ("down",))):
        at = f"model.layers.*.{parent}"
        for name in wide:
            plan |= {f"{at}.{name}_proj.{part}": ColwiseParallel() for part in ("base_layer", "lora_B.default")}
        for name in narrow:
            plan |= {f"{at}.{name}_proj.{part}": RowwiseParallel() for part in ("base_layer", "lora_A.default")}
    return parallelize_module(model, mesh, plan)


def _vocabulary(model: Any, mesh: Any) -> nn.Module:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import parallelize_module

    from foundry_kernels.distributed import VocabularyParallel

    return parallelize_module(model, mesh, {"lm_head.base_layer": VocabularyParallel(output_layouts=Replicate())})


def sharded(rank: int, folder: Path, ports: list[int]) -> dict[str, Any]:
    """One step of a patched model with adapters that is sharded in each way, and of one without sharding: whether it
    makes logits, the collectives of the forward pass, the layers that ran on the operation, the loss, the gradients of
    the adapters, and the reasons of the report."""
    import peft

    import foundry_kernels as fk
    from foundry_kernels.integrations.adapters import lora as lora_linear_layer
    from foundry_kernels.integrations.adapters import lora_layers

    served: list[int] = []
    together = lora_layers.together

    def counted(x: Any, layers: Any) -> Any:
        results = together(x, layers)
        served.append(0 if results is None else len(layers))
        return results

    vars(lora_layers)["together"] = counted
    vars(lora_linear_layer)["together"] = counted

    mesh = dist.device_mesh.init_device_mesh("cpu", (SIZE,))
    tokens = torch.arange(3, 15).view(2, 6)
    ways: dict[str, Any] = {
        "alone": lambda model, mesh: model,
        "tp": _tensor_parallel,
        "vocabulary": _vocabulary,
        "fsdp": _fsdp,
    }
    found = {}
    for name, shard in ways.items():
        torch.manual_seed(0)
        targets = [f"{x}_proj" for x in ("q", "k", "v", "o", "gate", "up", "down")]
        config = peft.LoraConfig(r=4, target_modules=[*targets, "lm_head"], init_lora_weights=False)
        model = peft.get_peft_model(make_llama(), config).get_base_model().train()
        handle = fk.patch(model)
        shard(model, mesh)
        served.clear()
        with Collectives() as collectives:
            output = model(tokens, labels=tokens, use_cache=False)
        output.loss.backward()
        grads = {key: full(p.grad) for key, p in model.named_parameters() if p.requires_grad}
        left = {str(entry.reason) for entry in handle.report().left}
        found[name] = (output.logits is None, dict(collectives.counts), sum(served), output.loss.detach(), grads, left)
    return found
