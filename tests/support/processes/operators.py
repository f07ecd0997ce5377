"""The operators on DTensors."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from processes import SIZE, Collectives, full


def divisions(row: Any, rule: Any, most: int) -> list[tuple[Any, dict[str, int], str]]:
    """Up to `most` cases for each letter that the rule shards, half of them of operations with the kernels of another
    one; in the interpreter the smallest of all, because Triton's operators have the same rule. Each is the case, the
    axis of each tensor with the letter, and a name."""
    from table import is_twin

    from foundry_kernels.distributed.sharding import letters
    from foundry_kernels.tools.check import numel

    largest = 17_000 if row.backend == "triton" else 40_000  # the interpreter is slow
    kinds: dict[str, dict[object, tuple[Any, dict[str, int], str]]] = {}
    for case in sorted(row.cases, key=numel) if row.backend == "triton" else row.cases:
        if not 16 <= numel(case) <= largest:
            continue
        args = {name: t for name, t in case.make(torch.float32, "meta").items() if t is not None}
        several = row.op.package.endswith("norm") and "weight" in args and args["weight"].dim() > 1
        if several or "normalized_shape" in case.options:
            continue  # operators see several dimensions as one
        rest = {n: x for n, x in case.options.items() if n != "attn_mask"}  # a mask by tiles is not a tensor
        dims, over = rule(args | rest)  # some only shard dimensions that are not reduced
        of = {name: letters(dims, name, t.dim()) for name, t in args.items()}
        divisible = over + "0123456789" * ("..." in over)
        for letter in sorted({x for found in of.values() for x in found if x in divisible}):
            axes = {name: found.index(letter) for name, found in of.items() if letter in found}
            sizes = {args[name].shape[axis] for name, axis in axes.items()}
            uneven = any(size % SIZE for size in sizes)
            if min(sizes) < SIZE or (len(sizes) > 1 and uneven):
                continue
            if uneven and row.op.name == "lora_linear" and args["x"].dim() > 2:
                continue  # its rows are flattened for matmuls, which DTensors refuse, as they do in F.linear
            kind = tuple((name, t.dim(), t.requires_grad) for name, t in args.items()), frozenset(case.options)
            kinds.setdefault(letter, {}).setdefault(kind, (case, axes, f"{row.id} {case.id} {letter}"))
    most = most // 2 if is_twin(row.op) else most
    chosen = [each for found in kinds.values() for each in [*found.values()][:: -(-len(found) // most)][:most]]
    return chosen if row.backend != "triton" else sorted(chosen, key=lambda each: numel(each[0]))[: most // 2 or 1]


def rules(rank: int, folder: Path, ports: list[int], most: int = 2) -> dict[str, Any]:
    """Runs every operation with a kernel on inputs sharded along each dimension of its rule. Returns differences to one
    process, the collectives, and the number of tested shardings."""
    from table import rows
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from foundry_kernels.testing import call, make_cotangents

    mesh = dist.device_mesh.init_device_mesh("cpu", (SIZE,))
    found: dict[str, Any] = {"tried": Counter(), "collectives": {}, "wrong": []}
    for row in rows():
        if row.op.sharding is None or not row.op.sharding.OPERATORS:  # its operators do not support DTensors
            continue
        for case, axes, id in divisions(row, row.op.sharding.sharding, most):
            args = case.make(torch.float32, "cpu")
            sharded = {
                name: t
                if t is None
                else distribute_tensor(
                    t.detach(), mesh, [Shard(axes[name]) if name in axes else Replicate()]
                ).requires_grad_(t.requires_grad)
                for name, t in args.items()
            }
            expected = call(row.op, args, case.options, backend=row.backend)
            with Collectives() as collectives:
                with torch.no_grad():  # first, so that a rule that ignores the requested results fails below
                    call(row.op, sharded, case.options, backend=row.backend)
                given = call(row.op, sharded, case.options, backend=row.backend)
                outputs = [o for o in given if o.requires_grad]
                sources = [e for e in expected if e.requires_grad]
                cotangents = make_cotangents(tuple(e.detach() for e in sources), "contiguous")
                parts = [
                    distribute_tensor(c, mesh, o.placements, src_data_rank=None)
                    for c, o in zip(cotangents, outputs, strict=True)
                ]
                wanted = [name for name, t in args.items() if t is not None and t.requires_grad]
                grads = _gradients(outputs, [sharded[n] for n in wanted], parts)
            if collectives.counts:
                found["collectives"][id] = dict(collectives.counts)
            whole = _gradients(sources, [args[n] for n in wanted], cotangents)
            for a, e in [*zip(given, expected, strict=True), *zip(grads, whole, strict=True)]:
                if (a is None) != (e is None) or (a is not None and not _near(full(a), e.detach())):
                    found["wrong"].append(id)
            found["tried"][row.id] += 1
    return found


def _gradients(outputs: Any, inputs: list[Any], cotangents: Any) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs; an operation on pages has none."""
    return torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True) if inputs else ()


def _near(a: Tensor, e: Tensor) -> bool:
    if a.shape != e.shape or e.numel() == 0:
        return a.shape == e.shape
    return torch.allclose(a, e, rtol=1e-5, atol=2e-6 * max(1.0, float(e.abs().max())))


def mixtures(rank: int, folder: Path, ports: list[int]) -> dict[str, Any]:
    """Mixtures of DTensors and plain tensors, and inputs sharded along a dimension that must stay whole."""
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    import foundry_kernels as fk

    mesh = dist.device_mesh.init_device_mesh("cpu", (SIZE,))
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(4, 6, generator=generator), torch.randn(6, generator=generator)
    result: dict[str, Any] = {}
    whole = distribute_tensor(weight, mesh, [Replicate()])
    for name in ("native", "triton"):
        function = functools.partial(fk.rms_norm, backend=name)
        split = function(distribute_tensor(x, mesh, [Shard(1)]), whole)
        halves = dist_partial(x, mesh, Partial)
        summed = function(halves, distribute_tensor(weight, mesh, [Shard(0)]))
        result[name] = [full(split), full(summed)]
        for mixed in (x, whole), (distribute_tensor(x, mesh, [Shard(0)]), weight):
            with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
                function(*mixed)
    # The same tensors with another placement: the second call must not use the first call's cached result.
    y = fk.add_rms_norm(whole, whole, None, backend="native")[0]
    z = fk.rms_norm(whole, whole, backend="native")
    result["vector"] = [full(y), full(z)]
    return result


def attention(rank: int, folder: Path, ports: list[int]) -> dict[str, Any]:
    """Attention with dropout, masks, a bias and a score function, with sharded sequences or heads: the collectives, the
    results and gradients, and those of one process."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import foundry_kernels as fk

    mesh = dist.device_mesh.init_device_mesh("cpu", (SIZE,))
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (2, 4, 20, 16), "k": (2, 2, 30, 16), "v": (2, 2, 30, 16)}
    inputs = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    mask = fk.AttentionMask.prefix(torch.tensor([11, 30]))
    biases = {
        "shared": torch.randn(20, 30, generator=generator),
        "of heads": torch.randn(4, 20, 30, generator=generator),
    }
    table = torch.randn(2, 4, 7, generator=generator)
    found: dict[str, Any] = {}
    for backend in ("native", "triton"):
        scored = fk.OPS["flash_attention"].why_not(backend, "cpu", None, ("score_mod",)) is None
        for what, bias in (("mask", mask), *biases.items(), *([("score", table)] if scored else [])):
            for axis in (0, 1):
                if backend == "triton" and (what, axis) not in (("mask", 0), ("of heads", 1), ("score", 1)):
                    continue  # the interpreter is slow
                results = []
                for placement in (Shard(axis), None):
                    given = dict(inputs) | ({"attn_mask": bias} if what != "mask" else {})
                    if placement is not None:
                        given = {n: distribute_tensor(x, mesh, [placement]) for n, x in given.items() if n in shapes}
                        if what != "mask":
                            sharded = what == "of heads" and axis == 1
                            given["attn_mask"] = distribute_tensor(bias, mesh, [Shard(0) if sharded else Replicate()])
                    leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
                    options: dict[str, Any] = {"attn_mask": mask} if what == "mask" else {}
                    if what == "score":
                        read = leaves.pop("attn_mask")
                        options["score_mod"] = lambda s, b, h, i, j, t=read: s + t[b, h, (i + j) % 7]
                    options |= {"dropout_p": 0.3, "dropout_seed": 5, "causal": True, "backend": backend}
                    with Collectives() as collectives:
                        out = fk.flash_attention(**leaves, **options)
                        wanted = [*leaves.values(), *([read] if what == "score" else [])]
                        grads = torch.autograd.grad(out.square().sum(), wanted)
                    if placement is not None:
                        counts = dict(collectives.counts)
                    results.append([full(x.detach()) for x in (out, *grads)])
                found[f"{backend} {what} {'bh'[axis]}"] = (counts, *results)
    return found


def dist_partial(x: Tensor, mesh: Any, partial: Any) -> Tensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(x / SIZE, mesh, [partial()])


def compiled(rank: int, folder: Path, ports: list[int]) -> dict[str, Any]:
    """torch.compile sees a DTensor before any other code of this package does."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import foundry_kernels as fk

    assert "foundry_kernels.distributed" not in sys.modules
    mesh = dist.device_mesh.init_device_mesh("cpu", (SIZE,))
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(4, 6, generator=generator), torch.randn(6, generator=generator)
    leaves = [distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(weight, mesh, [Replicate()])]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    y = torch.compile(fk.rms_norm, fullgraph=True, backend="aot_eager")(*leaves, backend="native")
    y.sum().backward()
    return {"y": full(y), "grads": [full(leaf.grad) for leaf in leaves]}


def losses(rank: int, folder: Path, ports: list[int]) -> dict[str, Any]:
    """Means and sums of a loss with sharded tokens, forward and backward: the collectives, the results, and those of
    one process."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import foundry_kernels as fk

    mesh = dist.device_mesh.init_device_mesh("cpu", (SIZE,))
    generator = torch.Generator().manual_seed(0)
    logits, target = torch.randn(2, 6, 11, generator=generator), torch.randint(11, (2, 6), generator=generator)
    target[0, 1], weight = -100, torch.rand(11, generator=generator)
    found: dict[str, Any] = {}
    for backend in ("native", "triton"):
        for options in (
            {"reduction": "sum"},
            {"reduction": "mean"},
            {"reduction": "mean", "weight": weight, "z_loss": 0.1, "return_z_loss": True},
            {"reduction": "mean", "token_scaling": True, "return_token_accuracy": True},
        ):
            results = []
            for placement in (Shard(1), None):
                x, t, given = logits.clone(), target, options | {"backend": backend}
                if placement is not None:
                    x, t = (distribute_tensor(each, mesh, [placement]) for each in (x, t))
                    given |= {n: distribute_tensor(v, mesh, [Replicate()]) for n, v in given.items() if n == "weight"}
                x.requires_grad_()
                with Collectives() as collectives:
                    outputs = fk.cross_entropy(x, t, **given)
                    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                    outputs[0].backward()
                results.append([full(each.detach()) for each in (*outputs, x.grad)])
                if placement is not None:
                    counts = dict(collectives.counts)
            found[f"{backend} {' '.join(options)} {options['reduction']}"] = (counts, *results)
    return found


#: Calls with a sharded vocabulary: every option of a loss, each reduction, and log-probabilities.
VOCABULARY: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum", "chunk_size": 5},
    "none": {"reduction": "none"},
    "all": {
        "label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0, "logit_scale": 0.7,
        "return_lse": True, "return_z_loss": True,
    },
    "log-probs": {
        "function": "linear_log_probs", "softcap": 3.0, "logit_scale": 0.7, "return_entropy": True, "return_lse": True,
        "return_stats": True, "chunk_size": 5,
    },
    "tokens": {"token_scaling": True, "return_token_accuracy": True, "return_predicted_tokens": True},
}  # fmt: skip


def vocabulary(rank: int, folder: Path, ports: list[int]) -> dict[str, Any]:
    """A loss with sharded classes, and with whole or sharded tokens: the collectives of the forward and the backward
    pass, the results, and those of the reference in one process in float64. 11 classes and 1 class cannot be halved."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import foundry_kernels as fk

    mesh = dist.device_mesh.init_device_mesh("cpu", (SIZE,))
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Any] = {}
    plain = torch.randn(3, 8)
    try:
        fk.linear_cross_entropy(plain, distribute_tensor(plain, mesh, [Shard(0)]), torch.tensor([0, 1, 2]))
    except ValueError as error:
        found["refused"] = str(error)

    def run(
        leaves: dict[str, Tensor], target: Tensor, backend: str, options: dict[str, Any]
    ) -> tuple[Any, list[Tensor]]:
        leaves = {name: x.requires_grad_() for name, x in leaves.items()}
        function, options = getattr(fk, options.get("function", "linear_cross_entropy")), dict(options)
        options.pop("function", None)
        with Collectives() as forward:
            outputs = function(**leaves, target=target, backend=backend, **options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        with Collectives() as backward:
            sum(o.sum() * (3.0 + i) for i, o in enumerate(outputs) if o.requires_grad).backward()
        return (dict(forward.counts), dict(backward.counts)), [*outputs, *(x.grad for x in leaves.values())]

    for n_classes, dtype, (name, options) in (
        *((11, torch.float32, each) for each in VOCABULARY.items()),
        (11, torch.float64, ("all", VOCABULARY["all"])),
        (11, torch.bfloat16, ("mean", {})),
        (11, torch.float64, ("log-probs", VOCABULARY["log-probs"])),
        *((1, torch.float32, (name, VOCABULARY[name])) for name in ("all", "log-probs")),
    ):
        hidden, weight = torch.randn(2, 6, 8, generator=generator), torch.randn(n_classes, 8, generator=generator)
        hidden[0, 0], target = 3.0 * weight[-1], torch.randint(n_classes, (2, 6), generator=generator)
        target[0, :2] = torch.tensor([n_classes - 1, -100])  # one token with a certain class
        leaves = {"hidden": hidden.to(dtype), "weight": weight.to(dtype)}
        if name in ("all", "log-probs"):
            leaves["low"] = torch.randn(2, 6, 3, generator=generator).to(dtype)
            leaves["up"] = torch.randn(n_classes, 3, generator=generator).to(dtype)
        if name == "all":
            leaves["bias"] = torch.randn(n_classes, generator=generator).to(dtype)
            class_weight = torch.rand(n_classes, generator=generator)
        expected = None
        for placement in (Replicate(), Shard(1)):
            parts = {
                n: distribute_tensor(x, mesh, [placement if n in ("hidden", "low") else Shard(0)])
                for n, x in leaves.items()
            }
            given = dict(options)
            if name == "all":
                given["class_weight"] = distribute_tensor(class_weight, mesh, [Replicate()])
            counts, results = run(parts, target, "auto", given)
            placed = parts["weight"].grad.placements == (Shard(0),)
            if expected is None:
                whole = {n: x.double() for n, x in leaves.items()}
                more = {"class_weight": class_weight} if name == "all" else {}
                expected = run(whole, target, "reference", options | more)[1]
            id = f"{n_classes} {str(dtype).removeprefix('torch.')} {name} {placement}"
            found[id] = (counts, placed, [full(x) for x in results], [x.detach() for x in expected])
    return found


def compiled_vocabulary(rank: int, folder: Path, ports: list[int]) -> dict[str, Any]:
    """Losses with sharded classes, in one graph and without the compiler."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import foundry_kernels as fk

    mesh = dist.device_mesh.init_device_mesh("cpu", (SIZE,))
    generator = torch.Generator().manual_seed(0)
    found = {}
    for dtype, placement, name in (
        (torch.float32, Shard(1), "all"),
        (torch.float32, Replicate(), "tokens"),
        (torch.bfloat16, Replicate(), "mean"),
    ):
        hidden, weight = torch.randn(2, 6, 8, generator=generator), torch.randn(11, 8, generator=generator)
        target = torch.randint(11, (2, 6), generator=generator)
        target[0, 1] = -100

        def loss(x: Tensor, w: Tensor, target: Tensor, name: str = name) -> Any:
            found = fk.linear_cross_entropy(x, w, target, **VOCABULARY[name])
            return found if isinstance(found, tuple) else (found,)

        results = []
        for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
            x, w = (distribute_tensor(t.to(dtype), mesh, [p]) for t, p in ((hidden, placement), (weight, Shard(0))))
            outputs = function(x.requires_grad_(), w.requires_grad_(), target)
            (outputs[0] * 3.0).backward()
            results.append([full(t) for t in (*outputs, x.grad, w.grad)])
        found[name] = results
    return found


def norm_collectives(rank: int, folder: Path, ports: list[int]) -> dict[str, Any]:
    """The collectives of a norm under sequence parallelism: forward, backward, and for reading the weight's
    gradient."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import parallelize_module

    from foundry_kernels.distributed import SequenceParallelNorm
    from foundry_kernels.nn import RMSNorm

    mesh = dist.device_mesh.init_device_mesh("cpu", (SIZE,))
    result = {}
    for backend in ("native", "triton"):
        norm = parallelize_module(RMSNorm(16, backend=backend), mesh, SequenceParallelNorm())
        x, r = (distribute_tensor(torch.randn(2, 6, 16), mesh, [Shard(1)]).requires_grad_() for _ in range(2))
        with Collectives() as during:
            norm(x, r)[0].sum().backward()  # the returned stream has no gradient
        with Collectives() as after:
            norm.weight.grad.full_tensor()
        placed = (
            x.grad.placements == r.grad.placements == (Shard(1),),
            bool(norm.weight.grad.placements[0].is_partial()),
        )
        result[backend] = (dict(during.counts), dict(after.counts), placed)
    return result
