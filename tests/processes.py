"""What tests/test_distributed.py runs in two processes, over gloo. One start of the two serves all scenarios."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

SIZE = 2
SECONDS = 30  # a collective that waits longer has been left by the other process
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(scenarios: Mapping[str, Callable[..., Any]], folder: Path, seconds: float = 150.0) -> dict[str, list[Any]]:
    """What each scenario returned in each process, or the traceback where it failed; hanging processes are killed."""
    context = multiprocessing.get_context("spawn")
    ports = _free_ports(4 * len(scenarios))
    started = [context.Process(target=_work, args=(rank, scenarios, folder, ports)) for rank in range(SIZE)]
    for process in started:
        process.start()
    deadline = time.monotonic() + seconds
    for process in started:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
    found = [torch.load(folder / f"{rank}.pt") if (folder / f"{rank}.pt").exists() else {} for rank in range(SIZE)]
    return {name: [results.get(name, "the process did not come this far") for results in found] for name in scenarios}


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _work(rank: int, scenarios: Mapping[str, Callable[..., Any]], folder: Path, ports: list[int]) -> None:
    torch.set_num_threads(1)
    sys.path.insert(0, str(EXAMPLES))
    results = {}
    for index, (name, scenario) in enumerate(scenarios.items()):
        start(rank, SIZE, ports[4 * index])
        try:
            results[name] = scenario(rank, folder / name, ports[4 * index + 1 : 4 * index + 4])
        except Exception:
            results[name] = traceback.format_exc()
        end()
        torch.save(results, folder / f"{rank}.pt")


def start(rank: int, size: int, port: int) -> None:
    """As torchrun leaves a process, and a process group."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=SECONDS))


def end() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class Collectives(TorchDispatchMode):
    """Counts the collectives, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it comes again, as what DTensor makes of it
        name = func.name().split("::")[1].removesuffix("_base_")
        if func.namespace in ("c10d", "_c10d_functional") and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def full(x: Tensor) -> Tensor:
    """The whole of a tensor, wherever its parts are."""
    from torch.distributed.tensor import DTensor

    x = x.detach()
    return x.full_tensor() if isinstance(x, DTensor) else x.clone()


# --- training ---------------------------------------------------------------------------------------------------------

STEPS, BATCH, LENGTH = 4, 4, 13  # a length that two processes cannot halve


def make_model() -> nn.Module:
    from foundry_kernels.models import ModelConfig, Transformer

    torch.manual_seed(0)
    config = ModelConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=64, max_seq_len=32, init_std=0.2)
    return Transformer(config)


def batches() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield torch.randint(8, (BATCH, LENGTH + 1), generator=generator)


def train(
    model: nn.Module,
    *,
    share: Callable[[Tensor], Tensor] = lambda batch: batch,
    accumulating: Callable[[nn.Module, bool], Any] = lambda model, last: contextlib.nullcontext(),
    parts: int = 1,
    around: Callable[[], Any] = contextlib.nullcontext,
) -> dict[str, Any]:
    """Losses, gradients and last weights of a few steps; the gradients by parameter, step for step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses: list[Tensor] = []
    grads: list[dict[str, Tensor]] = []
    for batch in batches():
        total = torch.zeros(())
        for index, part in enumerate(batch.chunk(parts)):
            mine = share(part)
            with around(), accumulating(model, index == parts - 1):
                _, loss = model(mine[:, :-1], mine[:, 1:])
                (loss / parts).backward()
            total += full(loss) / parts
        if dist.is_initialized():
            dist.all_reduce(total)
            total /= dist.get_world_size()
        losses.append(total)
        names = {name.removeprefix("module."): p for name, p in model.named_parameters()}
        grads.append({name: full(p.grad) for name, p in names.items()})
        optimizer.step()
        optimizer.zero_grad()
    weights = {name.removeprefix("module."): full(p) for name, p in model.named_parameters()}
    return {"losses": losses, "grads": grads, "weights": weights}


class Train:
    """Train the model divided as `examples/train_parallel.py` divides it."""

    def __init__(self, kind: str, parts: int = 1) -> None:
        self.kind, self.parts = kind, parts

    def __call__(self, rank: int, folder: Path, ports: list[int]) -> dict[str, Any]:
        from train_parallel import Parallel

        end()
        os.environ["MASTER_PORT"] = str(ports[0])
        processes = Parallel(self.kind, "cpu")
        model = processes.divide(make_model())
        with Collectives() as collectives:
            result = train(model, share=processes.share, accumulating=processes.accumulating, parts=self.parts)
        return result | {"collectives": collectives.counts}


def loss_parallel(rank: int, folder: Path, ports: list[int]) -> dict[str, Any]:
    """Tensor parallelism in which no process ever has all logits."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

    from foundry_kernels.distributed import tensor_parallel_plan

    mesh = dist.device_mesh.init_device_mesh("cpu", (SIZE,))
    model = make_model()
    model = parallelize_module(model, mesh, tensor_parallel_plan(model, mesh, loss_parallel=True))
    with torch.no_grad():
        assert model(torch.zeros(1, 4, dtype=torch.int64)).placements == (Shard(2),)
    return train(model, around=loss_parallel)


def step_collectives(rank: int, folder: Path, ports: list[int]) -> dict[str, int]:
    """One step of the model under tensor parallelism, without the optimizer."""
    from torch.distributed.tensor.parallel import parallelize_module

    from foundry_kernels.distributed import tensor_parallel_plan

    mesh = dist.device_mesh.init_device_mesh("cpu", (SIZE,))
    model = make_model()
    model = parallelize_module(model, mesh, tensor_parallel_plan(model, mesh))
    tokens = next(batches())
    with Collectives() as collectives:
        model(tokens[:, :-1], tokens[:, 1:])[1].backward()
    return dict(collectives.counts)


# --- operators --------------------------------------------------------------------------------------------------------


def rules(rank: int, folder: Path, ports: list[int]) -> dict[str, Any]:
    """Every operation with a kernel, on inputs divided along each dimension that its rule divides: what differs from
    one process, which collectives there were, and how many divisions were tried."""
    from table import rows
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from foundry_kernels.distributed.sharding import letters, operators
    from foundry_kernels.testing import call, make_cotangents

    mesh = dist.device_mesh.init_device_mesh("cpu", (SIZE,))
    found: dict[str, Any] = {"tried": Counter(), "collectives": {}, "wrong": []}
    sharding = {rule.__module__.rpartition(".")[0]: rule for rule in operators().values()}
    for row in rows():
        for case in row.small_cases:
            args = case.make(torch.float32, "cpu")
            dims, over = sharding[row.op.package](args)
            of = {name: letters(dims, name, t.dim()) for name, t in args.items() if t is not None}
            for letter in sorted({x for found_ in of.values() for x in found_ if x in over or x.isdigit()}):
                axes = {name: found_.index(letter) for name, found_ in of.items() if letter in found_}
                if any(args[name].shape[axis] < SIZE for name, axis in axes.items()):
                    continue
                divided = {
                    name: t
                    if t is None
                    else distribute_tensor(
                        t.detach(), mesh, [Shard(axes[name]) if name in axes else Replicate()]
                    ).requires_grad_(t.requires_grad)
                    for name, t in args.items()
                }
                id = f"{row.id} {case.id} {letter}"
                expected = call(row.op, args, case.options, backend=row.backend)
                with Collectives() as collectives:
                    with torch.no_grad():  # first, so that a rule that forgot what was asked for answers wrongly below
                        call(row.op, divided, case.options, backend=row.backend)
                    given = call(row.op, divided, case.options, backend=row.backend)
                    outputs = [o for o in given if o.requires_grad]
                    sources = [e for e in expected if e.requires_grad]
                    cotangents = make_cotangents(tuple(e.detach() for e in sources), "contiguous")
                    parts = [
                        distribute_tensor(c, mesh, o.placements, src_data_rank=None)
                        for c, o in zip(cotangents, outputs, strict=True)
                    ]
                    wanted = [name for name, t in args.items() if t is not None and t.requires_grad]
                    grads = torch.autograd.grad(outputs, [divided[n] for n in wanted], parts, allow_unused=True)
                if collectives.counts:
                    found["collectives"][id] = dict(collectives.counts)
                whole = torch.autograd.grad(sources, [args[n] for n in wanted], cotangents, allow_unused=True)
                pairs = [*zip(given, expected, strict=True), *zip(grads, whole, strict=True)]
                for a, e in pairs:
                    if (a is None) != (e is None) or (a is not None and not _near(full(a), e)):
                        found["wrong"].append(id)
                found["tried"][row.id] += 1
    return found


def _near(a: Tensor, e: Tensor) -> bool:
    return a.shape == e.shape and torch.allclose(a, e, rtol=1e-5, atol=2e-6 * max(1.0, float(e.abs().max())))


def mixtures(rank: int, folder: Path, ports: list[int]) -> dict[str, Any]:
    """Inputs of which some are DTensors and some are not, and inputs split where no row may be."""
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
    from torch.nn.functional import rms_norm as torch_rms_norm

    import foundry_kernels as fk

    mesh = dist.device_mesh.init_device_mesh("cpu", (SIZE,))
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(4, 6, generator=generator), torch.randn(6, generator=generator)
    result: dict[str, Any] = {}
    for name, function in {
        "torch": lambda x, w: torch_rms_norm(x, (6,), w, 1e-6),
        "native": lambda x, w: fk.rms_norm(x, w, backend="native"),
        "triton": lambda x, w: fk.rms_norm(x, w, backend="triton"),
    }.items():
        for kind, arguments in {
            "plain x": (x, distribute_tensor(weight, mesh, [Replicate()])),
            "plain weight": (distribute_tensor(x, mesh, [Shard(0)]), weight),
        }.items():
            try:
                function(*arguments)
                result[name, kind] = "accepted"
            except RuntimeError as error:
                result[name, kind] = str(error)
        if name == "torch":
            continue
        split = function(distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(weight, mesh, [Replicate()]))
        halves = dist_partial(x, mesh, Partial)
        summed = function(halves, distribute_tensor(weight, mesh, [Shard(0)]))
        result[name, "values"] = [full(split), full(summed)]
    vector = distribute_tensor(weight, mesh, [Replicate()])
    # The same tensors in another place: the second call must not be answered with what the first one has.
    y = fk.add_rms_norm(vector, vector, None, backend="native")[0]
    z = fk.rms_norm(vector, vector, backend="native")
    result["vector"] = [full(y), full(z)]
    return result


def dist_partial(x: Tensor, mesh: Any, partial: Any) -> Tensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(x / SIZE, mesh, [partial()])


def compiled(rank: int, folder: Path, ports: list[int]) -> dict[str, Any]:
    """torch.compile meets a DTensor before anything else of this package has."""
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


def norm_collectives(rank: int, folder: Path, ports: list[int]) -> dict[str, Any]:
    """A norm under sequence parallelism: forward, backward, and what reading the weight's gradient costs."""
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
            norm(x, r)[0].sum().backward()  # the stream that comes with it has no gradient
        with Collectives() as after:
            norm.weight.grad.full_tensor()
        placed = (
            x.grad.placements == r.grad.placements == (Shard(1),),
            bool(norm.weight.grad.placements[0].is_partial()),
        )
        result[backend] = (dict(during.counts), dict(after.counts), placed)
    return result


# --- examples/train.py ------------------------------------------------------------------------------------------------

OPTIONS = ["--dim", "16", "--layers", "1", "--heads", "2", "--kv-heads", "2", "--batch", "4", "--seq-len", "16"]
OPTIONS += ["--device", "cpu", "--steps", "6", "--sample-tokens", "0", "--backend", "auto"]


class Resume:
    """The example in `first[1]` processes divided as `first[0]`, stopped half-way, and in `second[1]` to the end."""

    def __init__(self, first: tuple[str, int], second: tuple[str, int]) -> None:
        self.halves = (first, second)

    def __call__(self, rank: int, folder: Path, ports: list[int]) -> dict[str, Any]:
        import train
        import train_loop
        import train_text
        from train_parallel import Parallel

        recipe = train.make_recipe(train.parse(OPTIONS), 5)
        text = train_text.read_text(None, recipe.seq_len)
        run = None
        for half, (kind, size) in enumerate(self.halves):
            dist.barrier()
            end()
            if rank < size:
                os.environ |= {"WORLD_SIZE": str(size), "MASTER_PORT": str(ports[half])}
                folder.mkdir(exist_ok=True)
                run = train_loop.train(
                    recipe,
                    "auto",
                    text,
                    folder / "checkpoint",
                    resume=half == 1,
                    stop=lambda step, half=half: half == 0 and step == 3,
                    progress=False,
                    processes=Parallel(kind, "cpu"),
                )
                end()
            os.environ |= {"WORLD_SIZE": str(SIZE)}
            start(rank, SIZE, ports[2]) if half == 0 else None
        assert run is not None
        return {"losses": run.losses, "held_out": run.held_out, "weights": run.model and run.model.state_dict()}


def refusals(rank: int, folder: Path, ports: list[int]) -> list[str]:
    """What the example says of a model and of a batch that two processes cannot divide."""
    from train_parallel import Parallel, ParallelError

    from foundry_kernels.models import ModelConfig

    said = []
    for index, (kind, heads, batch) in enumerate([("tp", 3, 4), ("fsdp", 2, 3)]):
        end()
        os.environ["MASTER_PORT"] = str(ports[index])
        processes = Parallel(kind, "cpu")
        try:
            processes.check(ModelConfig(dim=24, n_layers=1, n_heads=heads, vocab_size=8), batch)
        except ParallelError as error:
            said.append(str(error))
    return said
