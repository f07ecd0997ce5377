"""Context parallelism: ring attention alone, and models with sharded sequences."""

from __future__ import annotations

import copy
import math
import os
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from foundry_kernels.ops.flash_attention.case_makers import dense_case, packed_case
from foundry_kernels.testing import Case, normal
from foundry_kernels.testing.policy import make_cotangents
from processes import Collectives, full
from processes.training import batches, make_model, train

LENGTH = 8  # tokens of the model's sequences; a multiple of four processes
Given = tuple[Tensor, Tensor, dict[str, Any]]  # tokens, targets and other arguments of the model
LR = 0.02  # larger ones would amplify the rounding of the previous step with so few tokens

_SWAPPED: dict[str, Any] = {"layout": "swapped", "return_lse": True}
#: Every option; alone, if it determines the pieces of the ring.
CASES: tuple[Case, ...] = (
    dense_case(2, (4, 2), (64, 64), 16, "full", **_SWAPPED),
    dense_case(2, (4, 2), (64, 64), 16, "causal", causal=True, head_dim_v=8, **_SWAPPED),
    dense_case(1, (2, 1), (64, 64), 16, "window", causal=True, window=(11, None), **_SWAPPED),
    dense_case(1, (2, 2), (64, 64), 16, "right", window=(None, 3), **_SWAPPED),
    dense_case(
        2, (4, 2), (64, 64), 16, "options", window=(21, 18), softcap=3.0, scale=0.3, alibi_slopes=(2, 4),
        sinks=normal(), **_SWAPPED,
    ),
    packed_case((5, 0, 20, 9, 1, 29), (5, 0, 20, 9, 1, 29), (4, 2), 16, "causal", causal=True, return_lse=True),
    packed_case(
        (23, 31, 10), (23, 31, 10), (2, 1), 16, "options", window=(14, 9), alibi_slopes=(2,), sinks=normal(),
        return_lse=True,
    ),
)  # fmt: skip
KERNELS = (
    *((case, "native", dtype) for case in CASES for dtype in (torch.float32, torch.bfloat16)),
    *((case, "reference", torch.float64) for case in CASES),
    (CASES[-1], "triton", torch.float32),
)


def key(case: Case, backend: str, dtype: torch.dtype) -> str:
    return f"{case.id} {backend} {dtype}"


def _mesh() -> Any:
    return dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))


Found = tuple[tuple[Tensor, ...], dict[str, Tensor]]


def ring(rank: int, folder: Path, ports: list[int]) -> dict[str, Found]:
    """The full results and gradients of all cases. Each process has its part of the inputs and cotangents."""
    mesh = _mesh()
    found = {key(*kernel): _ring(*kernel, mesh) for kernel in KERNELS}
    return found if rank == 0 else {}


def _ring(case: Case, backend: str, dtype: torch.dtype, mesh: Any) -> Found:
    from foundry_kernels.distributed import gather_sequence, ring_attention, shard_sequence

    made: dict[str, Any] = case.make(dtype)
    packed = "cu_seqlens_q" in made
    options = {n: x for n, x in case.options.items() if not n.startswith("max_seqlen")}
    if packed:
        options["cu_seqlens"] = made.pop("cu_seqlens_q")
        made.pop("cu_seqlens_k")

    def part(x: Tensor) -> Tensor:
        x = x.detach().transpose(0, 1).unsqueeze(0) if packed and x.shape[0] == 64 else x.detach()
        return shard_sequence(x[None] if x.dim() == 2 else x, mesh, 2)

    def whole(x: Tensor) -> Tensor:
        x = gather_sequence(x, mesh, 2)
        return x if not packed else x[0] if x.dim() == 3 else x[0].transpose(0, 1)

    q, k, v = (part(made.pop(name)).requires_grad_() for name in "qkv")
    sinks = made.get("sinks")
    rows = dtype if dtype == torch.float64 else torch.float32
    shape = (64, case.args["q"].shape[1]) if packed else case.args["q"].shape[:3]
    outputs = (torch.empty(*shape, v.shape[-1], dtype=dtype), torch.empty(shape[::-1] if packed else shape, dtype=rows))
    cotangents = [part(x) for x in make_cotangents(outputs, case.cotangent)]
    given = ring_attention(q, k, v, mesh, backend=backend, **made, **options)
    assert isinstance(given, tuple)
    leaves = {"q": q, "k": k, "v": v} | ({} if sinks is None else {"sinks": sinks})
    grads = dict(zip(leaves, torch.autograd.grad(given, list(leaves.values()), cotangents), strict=True))
    if sinks is not None:
        dist.all_reduce(grads["sinks"])
    return tuple(whole(x) for x in given), {n: g if n == "sinks" else whole(g) for n, g in grads.items()}


COLLECTIVES = {"c10d::_allgather_base_": "all-gather", "c10d::_reduce_scatter_base_": "reduce-scatter"}


class Traffic(TorchDispatchMode):
    """Counts the bytes sent by tag, those of one process's part in collectives, and the maximum bytes of new tensors at
    a time."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[int] = Counter()
        self.parts: Counter[str] = Counter()
        self.messages = self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "c10d::send":
            self.sent[args[3]] += sum(x.nbytes for x in args[0])
            self.messages += 1
        elif (kind := COLLECTIVES.get(func.name())) is not None:
            self.parts[kind] += min(x.nbytes for x in args[:2])
        found = func(*args, **(kwargs or {}))
        known = {x.untyped_storage()._cdata for x in args if isinstance(x, Tensor)}
        for x in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(x, Tensor) and x.numel() and x.untyped_storage()._cdata not in known:
                storage = x.untyped_storage()
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._free, storage.nbytes())
        return found

    def _free(self, n: int) -> None:
        self.live -= n


SHAPE = {"B": 2, "H": 8, "Hk": 2, "T": 512, "D": 16, "Dv": 8}


def traffic(rank: int, folder: Path, ports: list[int]) -> dict[str, Any]:
    """The bytes that one call sends and allocates, and the bytes that autograd saves."""
    from foundry_kernels.distributed import ring_attention

    mesh, n = _mesh(), dist.get_world_size()
    b, h, hk, t, d, dv = SHAPE.values()
    q, k, v = (torch.randn(b, heads, t // n, width, requires_grad=True) for heads, width in ((h, d), (hk, d), (hk, dv)))
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.data_ptr()] = x.nbytes
        return x

    with Traffic() as forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = ring_attention(q, k, v, mesh, causal=True)
    with Traffic() as backward:
        out.sum().backward()  # type: ignore[union-attr]
    counts = {name: (dict(x.sent), x.messages, x.peak) for name, x in (("forward", forward), ("backward", backward))}
    return counts | {"kept": sum(kept.values()), "size": n}


def dropout(rank: int, folder: Path, ports: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Output and gradients of the ring with dropout, and of the full matrix with the same dropped weights."""
    from foundry_kernels.distributed import gather_sequence, ring_attention, sequence_positions, shard_sequence
    from foundry_kernels.distributed.pieces import plan
    from foundry_kernels.distributed.zigzag import Place
    from foundry_kernels.ops.flash_attention.dropout import keep_mask, keep_scale

    mesh, p, seed, t, h = _mesh(), 0.3, 11, 64, 2
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, h, t, 8, generator=generator, dtype=torch.float64) for _ in range(4)]
    q, k, v = (shard_sequence(x, mesh, 2).requires_grad_() for x in whole[:3])
    out = ring_attention(q, k, v, mesh, causal=True, window=(40, None), dropout_p=p, dropout_seed=seed)
    assert isinstance(out, Tensor)
    place, chunk = Place.of(mesh), t // (2 * mesh.size())
    factor = torch.zeros(1, h, t, t, dtype=torch.float64)
    at = sequence_positions(t, mesh)
    for source, pieces in enumerate(plan(place, chunk, 40, 0, None, False)):
        other = torch.cat([torch.arange(chunk) + c * chunk for c in Place(source, place.size).chunks])
        for index, piece in enumerate(pieces):
            rows, cols = at[slice(*piece.queries)], other[slice(*piece.keys)]
            heads = ((rank * place.size + source) * 4 + index) * h + torch.arange(h)[None]
            kept = keep_mask((1, h, len(rows), len(cols)), p, torch.tensor(seed), heads)
            factor[:, :, rows[:, None], cols] = kept.double() * keep_scale(p)
    dist.all_reduce(factor)
    leaves = [x.clone().requires_grad_() for x in whole[:3]]
    scores = leaves[0] @ leaves[1].transpose(2, 3) / math.sqrt(8)
    ahead = torch.arange(t) - torch.arange(t)[:, None]
    weights = scores.masked_fill((ahead > 0) | (ahead < -40), -torch.inf).softmax(-1)
    expected = (weights * factor) @ leaves[2]
    expected_grads = torch.autograd.grad(expected, leaves, whole[3])
    grads = torch.autograd.grad(out, [q, k, v], shard_sequence(whole[3], mesh, 2))
    found = [gather_sequence(x, mesh, 2) for x in (out, *grads)]
    seen = (ahead <= 0) & (ahead >= -40)
    assert 0.27 < (factor[:, :, seen] == 0).double().mean() < 0.33, "not dropped with this probability"
    return list(zip(found, (expected.detach(), *expected_grads), strict=True))


# --- models -----------------------------------------------------------------------------------------------------------


def rows(batch: Tensor) -> Given:
    return batch[:, :LENGTH], _targets(batch), {}


#: Linear attention in the first layer. A smaller epsilon would amplify rounding: with few tokens the norm behind it
#: divides by little.
HYBRID: dict[str, Any] = {
    "layer_types": ("linear_attention", "full_attention"), "linear_v_heads": 4, "linear_k_heads": 2, "linear_k_dim": 8,
    "norm_eps": 1e-4,
}  # fmt: skip


def make_hybrid() -> nn.Module:
    """In float64: each step amplifies the rounding of those before."""
    return make_model(**HYBRID).double()


def documents(batch: Tensor) -> Given:
    """Two rows after one another hold a document of 5 tokens and one of 19, which lies in several chunks."""
    tokens, targets = batch[:, :12].reshape(1, -1), batch[:, 1:13].reshape(1, -1).clone()
    targets[:, :2] = -100
    ends = [end + start for start in range(0, tokens.shape[1], 24) for end in (5, 24)]
    return tokens, targets, {"cu_seqlens": torch.tensor([0, *ends])}


def loss_of_whole(model: nn.Module, batch: Tensor, given: Callable[[Tensor], Given] = rows) -> Tensor:
    tokens, targets, options = given(batch)
    return model(tokens, targets, **options)[1]


def _targets(batch: Tensor) -> Tensor:
    """The targets of the first two tokens are ignored, so that processes have different numbers of targets."""
    targets = batch[:, 1 : LENGTH + 1].clone()
    targets[:, :2] = -100
    return targets


def loss_of_parts(mesh: Any, given: Callable[[Tensor], Given] = rows) -> Callable[[nn.Module, Tensor], Tensor]:
    from foundry_kernels.distributed import shard_sequence

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        tokens, targets, options = given(batch)
        return model(shard_sequence(tokens, mesh), shard_sequence(targets, mesh), **options)[1]

    return loss_of


class Train:
    """Trains the model with sharded sequences, and with DDP or FSDP2 over the same processes."""

    def __init__(self, kind: str, hybrid: bool = False) -> None:
        self.kind = kind
        self.make, self.given = (make_hybrid, documents) if hybrid else (make_model, rows)

    def __call__(self, rank: int, folder: Path, ports: list[int]) -> dict[str, Any]:
        from foundry_kernels.distributed import context_parallel

        mesh = _mesh()
        model: Any = context_parallel(self.make(), mesh)  # type: ignore[arg-type]
        if self.kind == "ddp":
            for layer in model.layers:  # each ring runs again in the backward pass
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
            model = nn.parallel.DistributedDataParallel(model)
        elif self.kind == "compiled":
            model.compile(backend="aot_eager")
            model = nn.parallel.DistributedDataParallel(model)
        else:
            _sharded(model, mesh)
        return train(model, loss_of=loss_of_parts(mesh, self.given), lr=LR)


def _sharded(model: Any, mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
    return model


def with_data_parallelism(rank: int, folder: Path, ports: list[int]) -> dict[str, Any]:
    """Two by two of four processes: batches over one dimension, sequences over the other, parameters over both."""
    from foundry_kernels.distributed import context_parallel

    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model = _sharded(context_parallel(make_model(), mesh["cp"]), mesh["dp", "cp"])  # type: ignore[arg-type]
    mine = mesh.get_local_rank("dp")
    return train(model, share=lambda batch: batch[mine::2], loss_of=loss_of_parts(mesh["cp"]), lr=LR)


def with_tensor_parallelism(rank: int, folder: Path, ports: list[int]) -> dict[str, Any]:
    """Two by two of four processes: heads over one dimension, sequences and parameters over the other."""
    from torch.distributed.tensor.parallel import parallelize_module

    from foundry_kernels.distributed import context_parallel, tensor_parallel_plan

    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    model: Any = make_model()
    model = parallelize_module(model, mesh["tp"], tensor_parallel_plan(model, mesh["tp"]))
    model = _sharded(context_parallel(model, mesh["cp"]), mesh["cp"])
    return train(model, loss_of=loss_of_parts(mesh["cp"]), lr=LR)


KIMI = {"linear_kind": "kimi_delta", "kv_lora_rank": 6, "rope_dim": 2, "n_kv_heads": None, "v_head_dim": 6}
#: Choices that depend on the positions of tokens, and packed documents.
CHOICES: dict[str, dict[str, Any]] = {
    "learned": {"positions": "learned", "norm": "layer_norm", "activation": "gelu", "tie_embeddings": True},
    "alibi": {"positions": "alibi", "sliding_window": 5},
    "sinusoidal": {"positions": "sinusoidal", "norm_placement": "post", "causal": False},
    "qk_norm": {"qk_norm": True, "parallel_residual": True},
    "experts": {"n_experts": 4, "load_balancing_coef": 0.0, "router_z_coef": 0.0},
    "packed": {"sliding_window": 6},
    "packed, learned": {"positions": "learned"},
    "hybrid": HYBRID | {"linear_conv_size": 3},
    "hybrid, linear": {"layer_types": ("linear_attention",) * 2, "linear_conv_size": 1, "n_experts": 4},
    "hybrid, gated": HYBRID | {"linear_conv_size": 2, "qk_norm": True, "attention_gate": True, "rope_dim": 2},
    "packed, hybrid": HYBRID | {"linear_v_dim": 6},
    "hybrid, mamba": HYBRID | {"linear_kind": "mamba2", "linear_bias": True, "linear_conv_size": 3},
    "hybrid, kimi": HYBRID | KIMI | {"positions": "none", "linear_conv_size": 3},
    "packed, hybrid, kimi": HYBRID | KIMI | {"q_lora_rank": 8},
    "packed, hybrid, mamba": HYBRID | {"linear_kind": "mamba2", "linear_dt_limit": (0.01, 2.0)},
}


#: In float64, which shows differences of 1e-11.
WIDE = ("hybrid, linear", "hybrid, gated")


def choices(rank: int, folder: Path, ports: list[int]) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Logits, loss and gradients of one step, sharded and in one process."""
    from foundry_kernels.distributed import context_parallel, gather_sequence, shard_sequence
    from foundry_kernels.models import ModelConfig, Transformer

    mesh, found = _mesh(), {}
    for name, fields in CHOICES.items():
        torch.manual_seed(0)
        sizes = {"n_kv_heads": 2, "vocab_size": 64, "max_seq_len": 32, "init_std": 0.2}
        config = ModelConfig(16, 2, 4, **{**sizes, **fields})
        whole = Transformer(config, dtype=torch.float64 if name in WIDE else None)
        model = context_parallel(copy.deepcopy(whole), mesh)
        batch = next(batches())
        length = 32 if "packed" in name else 16 if "hybrid" in name else LENGTH
        tokens, targets = batch[:, :LENGTH].reshape(-1, length), _targets(batch)
        targets = targets.reshape(tokens.shape)
        options = {"cu_seqlens": torch.tensor([0, 3, 14, 30, 32])} if "packed" in name else {}
        given = [shard_sequence(x, mesh) for x in (tokens, targets)]
        logits, loss = model(*given, return_logits=True, **options)
        model(*given, **options)[1].backward()
        expected_logits, expected_loss = whole(tokens, targets, return_logits=True, **options)
        expected_loss.backward()
        actual = {"loss": loss.detach(), "logits": gather_sequence(logits.detach(), mesh)}
        for parameter, x in model.named_parameters():
            assert x.grad is not None
            dist.all_reduce(x.grad)
            actual[parameter] = x.grad / mesh.size()
        expected = {"loss": expected_loss.detach(), "logits": expected_logits.detach()}
        found[name] = (actual, expected | {parameter: full(x.grad) for parameter, x in whole.named_parameters()})
    return found


def collectives(rank: int, folder: Path, ports: list[int]) -> dict[str, int]:
    """The collectives of one step of the model without the exchange of gradients."""
    from foundry_kernels.distributed import context_parallel

    mesh = _mesh()
    model = context_parallel(make_model(), mesh)  # type: ignore[arg-type]
    with Collectives() as seen:
        loss_of_parts(mesh)(model, next(batches())).backward()
    return dict(seen.counts)


def state_traffic(rank: int, folder: Path, ports: list[int]) -> dict[str, tuple[dict[str, int], int]]:
    """By length, the bytes that two layers of linear attention give to collectives, and the messages of rings."""
    from foundry_kernels.distributed import context_parallel, shard_sequence

    mesh, found = _mesh(), {}
    model = context_parallel(make_model(**HYBRID | {"layer_types": ("linear_attention",) * 2}), mesh)  # type: ignore[arg-type]
    for length in (24, 48):
        tokens = shard_sequence(torch.zeros(2, length, dtype=torch.int64), mesh)
        with Traffic() as seen:
            model(tokens, tokens)[1].backward()
        found[f"{length} tokens"] = dict(seen.parts), seen.messages
    return found


def dying(rank: int, folder: Path, ports: list[int]) -> list[str]:
    """The error in a process whose neighbour has died."""
    from foundry_kernels.distributed import ring_attention

    mesh = _mesh()
    q = torch.randn(1, 1, 4, 8)
    ring_attention(q, q, q, mesh)
    if rank == 1:
        os._exit(7)
    try:
        ring_attention(q, q, q, mesh)
    except RuntimeError as error:
        return [str(error)]
    return []
