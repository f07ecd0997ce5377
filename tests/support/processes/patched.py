"""A patched Llama of transformers, sharded by torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from processes import SIZE, Collectives, full
from processes.training import train


def make_llama() -> Any:
    from foundry_kernels.integrations.adapters.tiny import tiny_model

    return tiny_model("llama")


def loss_of_llama(model: nn.Module, batch: Tensor) -> Tensor:
    tokens = batch + 3  # lower ones are special tokens
    return model(tokens, labels=tokens, use_cache=False).loss


def _every_second(batch: Tensor) -> Tensor:
    return batch[dist.get_rank() :: SIZE]


def vocabulary(rank: int, folder: Path, ports: list[int]) -> dict[str, Any]:
    """One step of a patched Llama whose head is sharded so that its loss is computed without calling it, and of one
    without sharding: logits, losses, gradients of the head and of the embedding, collectives."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import PrepareModuleOutput, parallelize_module

    import foundry_kernels as fk
    from foundry_kernels.distributed import VocabularyParallel

    mesh = dist.device_mesh.init_device_mesh("cpu", (SIZE,))
    tokens = torch.arange(3, 15).view(2, 6)
    plans: dict[str, dict[str, Any]] = {
        "alone": {},
        "whole": {"lm_head": VocabularyParallel(output_layouts=Replicate())},
        "sequence": {
            "model.norm": PrepareModuleOutput(
                output_layouts=Replicate(), desired_output_layouts=Shard(1), use_local_output=False
            ),
            "lm_head": VocabularyParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    }
    found = {}
    for name, plan in plans.items():
        model = make_llama().train()
        fk.patch(model)
        model = parallelize_module(model, mesh, plan) if plan else model
        with Collectives() as collectives:
            output = model(tokens, labels=tokens, use_cache=False)
        output.loss.backward()
        grads = [full(x.weight.grad) for x in (model.lm_head, model.model.embed_tokens)]
        found[name] = (output.logits, dict(collectives.counts), output.loss.detach(), grads)
    return found


def log_probs(rank: int, folder: Path, ports: list[int]) -> dict[str, Any]:
    """What `PatchHandle.log_probs` returns for a model that is sharded in each way, and for one without sharding:
    the collectives of the forward pass, the results and every gradient."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import parallelize_module

    import foundry_kernels as fk
    from foundry_kernels.distributed import VocabularyParallel

    mesh = dist.device_mesh.init_device_mesh("cpu", (SIZE,), mesh_dim_names=("tp",))
    vocabulary = {"lm_head": VocabularyParallel(output_layouts=Replicate())}
    ways: dict[str, Any] = {
        "alone": lambda model: model,
        "fsdp": lambda model: _fsdp(model, mesh),
        "ddp": lambda model: _ddp(model, mesh),
        "tp": lambda model: _tensor_parallel(model, mesh),
        "vocabulary": lambda model: parallelize_module(model, mesh, vocabulary),
    }
    if importlib.util.find_spec("transformers.distributed.tensor_parallel") is not None:
        ways["own plan"] = lambda model: _own_plan(model, mesh)
    tokens = torch.arange(3, 15).view(2, 6)
    labels = tokens.clone()
    labels[0, :2] = -100
    found = {}
    for name, shard in ways.items():
        model = make_llama().train()
        handle = fk.patch(model)
        wrapped = shard(model)
        options = {"temperature": 0.7, "return_entropy": True, "return_lse": True}
        with Collectives() as collectives:
            results = handle.log_probs(tokens, labels, model=wrapped if name == "ddp" else None, **options)
        sum((n + 1) * x.square().sum() for n, x in enumerate(results)).backward()
        grads = {key: full(p.grad) for key, p in model.named_parameters()}
        values = dict(zip(("log_probs", "entropy", "lse"), (x.detach() for x in results), strict=True))
        found[name] = (dict(collectives.counts), values | grads)
    return found


def own_plan(rank: int, folder: Path, ports: list[int]) -> dict[str, Any]:
    """One step of patched models that transformers shards by their own `tp_plan`, before or after the patch, or whose
    heads are sharded by parallel styles, and of one process: whether there are logits, the collectives, the loss and
    every gradient."""
    import foundry_kernels as fk
    from foundry_kernels.integrations.adapters.tiny import tiny_model

    mesh = dist.device_mesh.init_device_mesh("cpu", (SIZE,), mesh_dim_names=("tp",))
    tokens = torch.arange(3, 15).view(2, 6)
    found = {}
    for family, order in (
        ("llama", "tp patch"),
        ("qwen3", "tp patch"),
        ("qwen3", "patch tp"),
        ("qwen3", "patch styles"),
    ):
        steps = []
        for sharded in (True, False):
            model = tiny_model(family).train()
            for what in order.split():
                if what == "patch":
                    fk.patch(model)
                elif sharded and what == "styles":
                    _heads_parallel(model, mesh)
                elif sharded:
                    _own_plan(model, mesh)
            with Collectives() as collectives:
                output = model(tokens, labels=tokens, use_cache=False)
            output.loss.backward()
            grads = {name: full(p.grad) for name, p in model.named_parameters()}
            kinds = dict(collectives.counts)
            steps.append((output.logits is None, kinds, {"loss": output.loss.detach(), **grads}))
        found[f"{family}, {order}"] = steps
    return found


def _own_plan(model: Any, mesh: Any) -> Any:
    """Shards by the model's `tp_plan`, like `from_pretrained`, which needs accelerate."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan = model._resolve_parallel_plans(DistributedConfig(tp_size=SIZE))[0]
    apply_tensor_parallelism(model, mesh, plan)
    return model


def _heads_parallel(model: Any, mesh: Any) -> None:
    """Shards heads, with norms of queries and keys."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from foundry_kernels.distributed import HeadParallelNorm

    styles: dict[str, Any] = {f"{name}_proj": ColwiseParallel() for name in "qkv"}
    styles |= {"o_proj": RowwiseParallel(), "q_norm": HeadParallelNorm(), "k_norm": HeadParallelNorm()}
    parallelize_module(model, mesh, {f"model.layers.*.self_attn.{name}": style for name, style in styles.items()})


class Sharded:
    """Trains a patched model sharded by `kind`, then undoes the patch. Returns the numbers, and the results of patch
    and undo."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, rank: int, folder: Path, ports: list[int]) -> dict[str, Any]:
        import foundry_kernels as fk

        mesh = dist.device_mesh.init_device_mesh("cpu", (SIZE,))
        model = make_llama()
        handle = fk.patch(model)
        sharded = {"fsdp": _fsdp, "tp": _tensor_parallel, "ddp": _ddp}[self.kind](model, mesh)
        options: dict[str, Any] = {} if self.kind == "tp" else {"share": _every_second}
        with Collectives() as collectives:
            result = train(sharded, loss_of=loss_of_llama, **options)
        tokens = torch.arange(3, 15)[None]
        with torch.no_grad():
            logits = sharded(tokens, use_cache=False).logits
            handle.undo()
            plain = sharded(tokens, use_cache=False).logits
        classes = sorted({type(module).__name__ for module in model.modules()})
        return result | {"collectives": collectives.counts, "logits": (logits, plain), "classes": classes}


def _fsdp(model: Any, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _ddp(model: Any, mesh: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def _tensor_parallel(model: Any, mesh: Any) -> nn.Module:
    """Shards heads, feed-forward width and vocabulary, and the residual stream and its norms along the sequence."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    whole, split = Replicate(), Shard(1)
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=split, use_local_output=False),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=split, output_layouts=whole),
    }
    for index in range(len(model.model.layers)):
        layer = {
            "input_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": split}, desired_input_kwarg_layouts={"hidden_states": whole}
            ),
            **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
            "self_attn.o_proj": RowwiseParallel(output_layouts=split, use_local_output=False),
            "post_attention_layernorm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=split, desired_input_layouts=whole),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(output_layouts=split, use_local_output=False),
        }
        plan |= {f"model.layers.{index}.{name}": style for name, style in layer.items()}
    return parallelize_module(model, mesh, plan)
