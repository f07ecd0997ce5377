"""The compiler, export and checkpointing on modules, the model and every kernel: no graph break, one recompilation at
most where lengths vary, and operators that a policy can name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from inspect import signature
from itertools import chain, combinations, permutations
from typing import Any

import pytest
import torch
from slow import cover, rest_slow
from table import Row, over_rows
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import foundry_kernels as fk
from foundry_kernels.models import ModelConfig, Transformer
from foundry_kernels.testing import Case, call, make_cotangents
from foundry_kernels.testing.policy import options_on
from foundry_kernels.tools.check import numel

CONFIG = ModelConfig(dim=16, n_layers=1, n_heads=4, n_kv_heads=2, vocab_size=11, max_seq_len=32)
LENGTHS = (5, 9, 13)


def make_model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(CONFIG)


def draw(length: int) -> Tensor:
    return torch.randint(CONFIG.vocab_size, (2, length), generator=torch.Generator().manual_seed(length))


# --- graph breaks and recompilations ----------------------------------------------------------------------------------


class Rotated(nn.Module):
    """The rotary module has no parameter and takes queries and keys; both are made of one input here."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = fk.nn.RotaryEmbedding(4, 32)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        q = (self.scale * x).unflatten(-1, (4, 4)).transpose(1, 2)
        return torch.cat(self.rope(q, q[:, :2]), 1)


#: The model below has all of them but the first.
MODULES: dict[str, Callable[[], nn.Module]] = {
    "MoE": lambda: fk.nn.MoE(16, 24, 4, 2, shared_width=8),
    "RMSNorm": lambda: fk.nn.RMSNorm(16),
    "SwiGLU": lambda: fk.nn.SwiGLU(16, 24),
    "RotaryEmbedding": Rotated,
    "Attention": lambda: fk.nn.Attention(16, 4, 2, rope=fk.nn.RotaryEmbedding(4, 32)),
}


def assert_compiles_whole(function: Any, inputs: Callable[[int], Tensor], parameters: list[nn.Parameter]) -> None:
    """Compiles without fullgraph=True, which would forbid a break rather than count it."""
    counters.clear()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=graphs)
    for length in LENGTHS:
        results, given = [], inputs(length)
        for run in (compiled, function):
            for parameter in parameters:
                parameter.grad = None
            out = run(given)
            out.float().square().mean().backward()
            results.append([out, *(p.grad for p in parameters)])
        torch.testing.assert_close(*results)
    assert not counters["graph_break"]
    assert graphs.frame_count <= 2  # a second one when the length turns out to vary


@pytest.mark.parametrize("name", rest_slow([*MODULES]))
def test_module_compiles_whole(name: str) -> None:
    torch.manual_seed(0)
    module = MODULES[name]()
    assert_compiles_whole(module, lambda length: torch.randn(2, length, 16), list(module.parameters()))


@pytest.mark.parametrize("autocast", rest_slow([True, False]), ids=["autocast", "float32"])
def test_model_compiles_whole(autocast: bool) -> None:
    model = make_model()

    def loss(tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(tokens, tokens)[1]

    assert_compiles_whole(loss, draw, list(model.parameters()))


def test_a_default_device_in_a_graph() -> None:
    def made() -> tuple[Tensor, Tensor]:
        mask = fk.AttentionMask.from_function(lambda b, h, i, j: i >= j, None, None, 9, 9)
        q = torch.ones(1, 6, 9, 8).tril()
        return fk.nn.alibi_slopes(6), fk.flash_attention(q, q, q, attn_mask=mask)

    torch.testing.assert_close(torch.compile(made, fullgraph=True, backend="eager")(), made())


def test_module_with_inductor() -> None:
    """The default compiler, which generates code around the operators, forward and backward."""
    norm = fk.nn.RMSNorm(16, backend="native")
    compiled = torch.compile(norm, fullgraph=True)
    x, residual = torch.randn(2, 5, 16), torch.randn(2, 5, 16, requires_grad=True)
    results = []
    for run in (compiled, norm):
        norm.weight.grad = residual.grad = None
        y, h = run(torch.sin(x), residual)
        (y.square().sum() + h.sum()).backward()
        results.append([y, h, norm.weight.grad, residual.grad])
    torch.testing.assert_close(*results)


# --- every operation --------------------------------------------------------------------------------------------------


#: A case, and of the arguments that are to be another argument's tensor that one's name.
Call = tuple[Case, Mapping[str, str]]


def assert_calls_compile_whole(row: Row, compiler: str, *series: Sequence[Call]) -> None:
    """One graph of calls of an operation, each checkpointed if it has a backward pass, where sizes and the numbers
    among the options are symbols. Results, gradients and what is written are those of eager calls. The graph of the
    first series serves the others, whose sizes differ."""
    mutated, has_gradients = row.op.cases.MUTATED.get(row.op.name, ()), row.has_gradients
    function, backend = row.op.public, row.backend

    def one(args: dict[str, Tensor | None], options: dict[str, Any], numbers: dict[str, float]) -> Any:
        return function(**args, **{**options, **numbers}, backend=backend)

    def graph(*given: Any) -> list[Any]:
        calls = [partial(one, *each) for each in zip(*given, strict=True)]
        return [checkpoint(f, use_reentrant=False) if has_gradients else f() for f in calls]

    graphs, compilations = CompileCounterWithBackend(compiler), 0
    compiled = torch.compile(graph, fullgraph=True, dynamic=True, backend=graphs)
    for calls in series:
        options = [dict(options_on(row.device, case.options)) for case, _ in calls]
        numbers = [{k: each.pop(k) for k, v in [*each.items()] if isinstance(v, float)} for each in options]
        results = []
        for run in (graph, compiled):
            args = []
            for case, roles in calls:
                own = case.make(torch.float32, row.device)
                args.append(own | {k: own[of] for k, of in roles.items()})
                for name, t in () if has_gradients else own.items():
                    if t is not None and t.is_floating_point() and name not in mutated:
                        t.requires_grad_()  # and there is no backward pass
            with torch.fx.experimental._config.patch(use_duck_shape=False):  # equal sizes may be different symbols
                outputs = tuple(tree_leaves(run(args, options, numbers)))
            found = [*outputs, *(own[name] for own in args for name in mutated)]
            if has_gradients:
                wanted = {id(t): t for t in tree_leaves(args) if isinstance(t, Tensor) and t.requires_grad}
                made = tuple(o for o in outputs if o.requires_grad)
                cotangents = make_cotangents(made, "contiguous")
                found += torch.autograd.grad(made, list(wanted.values()), cotangents, allow_unused=True)
            results.append(found)
        torch.testing.assert_close(*results)
        # Strides of a dimension of size 1, of no elements and of a reference's gradients (autograd's) are any.
        promised = outputs if backend == "reference" else found
        strides = [
            [x.squeeze().stride() for x in each[: len(promised)] if isinstance(x, Tensor) and x.numel()]
            for each in results
        ]
        assert strides[0] == strides[1]
        compilations = compilations or graphs.frame_count
    if backend != "reference" and "scale" not in signature(function).parameters:  # loops; a scale by the width
        assert graphs.frame_count == compilations  # two, if there are numbers


def but_for_sizes(case: Case) -> str:
    """All of a case but its values and the sizes that are symbols to the compiler, which has 0, 1 and halves of 2 as
    exceptions."""

    def kind(n: Any) -> Any:
        return "a size" if type(n) is int and n > 2 else n

    args = [(k, a and (a.layout, a.dtype, a.grad, [kind(n) for n in a.shape])) for k, a in case.args.items()]
    return str((args, [(k, kind(v)) for k, v in case.options.items()]))


def has_several_results(case: Case) -> bool:
    """Not empty, of a single token, or without a token that counts."""
    shapes = [a.shape for a in case.args.values() if a is not None]
    return 0 not in chain(*shapes) and shapes[0].count(1) < 2 and "all-ignored" not in case.id


def with_every_option(row: Row) -> tuple[list[Call], list[Call]]:
    """As few cases as have all options other than by default, and leave out each argument; and these in other sizes,
    where there are such cases."""
    cases = {c.id: c for c in row.cases if numel(c) <= (20_000 if row.backend == "native" else 4_000)}
    cases = {name: c for name, c in cases.items() if has_several_results(c)}
    usual = signature(row.op.public).parameters
    alike: dict[str, list[Case]] = {}
    for case in cases.values():
        alike.setdefault(but_for_sizes(case), []).append(case)

    def points(case: Case) -> set[Any]:
        given = {k: v for k, v in case.options.items() if v != usual[k].default}
        kinds = {(k, v if isinstance(v, str | bool) else type(v)) for k, v in given.items()}
        return {*kinds, *((k, a is None) for k, a in case.args.items()), len(alike[but_for_sizes(case)]) > 1}

    chosen = [cases[name] for name in cover(list(cases.values()), points)]
    others = [next((c for c in alike[but_for_sizes(case)] if c is not case), case) for case in chosen]
    return [(case, {}) for case in chosen], [(case, {}) for case in others]


def with_one_tensor_in_several_roles(row: Row) -> list[Call]:
    """As few cases as have all pairs of arguments that can be one tensor, such as queries and keys."""
    calls: list[Call] = []
    done: set[tuple[str, ...]] = set()
    for case in sorted(row.small_cases, key=numel):
        roles = roles_of_one_tensor(row, case)
        alike = [sorted({of, *(name for name, other in roles.items() if other == of)}) for of in roles.values()]
        pairs = {pair for names in alike for pair in combinations(names, 2)}
        if not done.issuperset(pairs):
            calls.append((case, roles))
            done |= pairs
    return calls


def roles_of_one_tensor(row: Row, case: Case) -> dict[str, str]:
    """The arguments that can be the tensor of another one, with that one's name: those that the reference takes."""
    args, found = case.make(torch.float32, row.device), dict[str, str]()
    tensors = {k: t for k, t in args.items() if t is not None and k not in row.op.cases.MUTATED.get(row.op.name, ())}
    for (name, x), (of, y) in permutations(tensors.items(), 2):
        fits = x.dim() == y.dim() and x.dtype == y.dtype and x.requires_grad <= y.requires_grad
        if fits and name not in (*found, *found.values()) and of not in found:
            given = {k: args[v] for k, v in (found | {name: of}).items()}
            with suppress(ValueError, TypeError, IndexError):
                call(row.op, args | given, case.options, backend="reference")
                found[name] = of
    return found


@over_rows("reference", "triton", "native", slow=("reference", "triton"), twins=False)
@pytest.mark.parametrize("compiler", rest_slow(["eager", "aot_eager"]))
def test_every_operation_compiles_whole(row: Row, compiler: str) -> None:
    given, others = with_every_option(row)
    roles = with_one_tensor_in_several_roles(row)
    assert_calls_compile_whole(row, compiler, given + roles, others + roles)


# --- export -----------------------------------------------------------------------------------------------------------


def test_model_is_exported_with_its_kernels_for_any_length(tmp_path: Any) -> None:
    """The program names the operators, takes another length, and survives being written and read."""
    model = make_model().eval()
    shapes = {name: {1: torch.export.Dim.AUTO} for name in ("tokens", "targets")} | {"return_logits": None}
    native = {f"foundry_kernels::{op}" for op, backend in model.serving().items() if backend == "native"}
    assert native
    for return_logits in (False, True):
        program = torch.export.export(
            model, (draw(7), draw(7)), {"return_logits": return_logits}, dynamic_shapes=shapes, strict=False
        )
        calls = {node.target for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
        named = {op._schema.name.removesuffix("_fwd") for op in calls if op.namespace == "foundry_kernels"}
        unused = "foundry_kernels::" + ("linear_cross_entropy" if return_logits else "cross_entropy")
        assert native - {unused} == named
    torch.export.save(program, tmp_path / "model.pt2")
    for each in (program, torch.export.load(tmp_path / "model.pt2")):
        found = each.module()(draw(12), draw(12), return_logits=True)
        torch.testing.assert_close(found, model(draw(12), draw(12), return_logits=True))


# --- checkpointing ----------------------------------------------------------------------------------------------------


def _policy(save: bool, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what this package's operators return, or nothing."""
    ours = isinstance(op, torch._ops.OpOverload) and op.namespace == "foundry_kernels"
    return CheckpointPolicy.MUST_SAVE if ours and save else CheckpointPolicy.MUST_RECOMPUTE


def checkpointed(function: Any, save: bool, *args: Any) -> Any:
    contexts = partial(create_selective_checkpoint_contexts, partial(_policy, save))
    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)


class Calls(TorchDispatchMode):
    """Counts the calls of this package's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "foundry_kernels":
            self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def gradients_and_calls(row: Row, case: Case, save: bool | None) -> tuple[tuple[Any, ...], Counter[str]]:
    """Gradients of one call, which is checkpointed unless `save` is None; and the operators that ran."""
    args = case.make(torch.float32, row.device)
    names = list(args)

    def function(*given: Any) -> tuple[Tensor, ...]:
        return call(row.op, dict(zip(names, given, strict=True)), case.options, backend=row.backend)

    with Calls() as calls:
        outputs = function(*args.values()) if save is None else checkpointed(function, save, *args.values())
        outputs = [o for o in outputs if o.requires_grad]
        wanted = [t for t in args.values() if t is not None and t.requires_grad]
        grads = torch.autograd.grad(outputs, wanted, make_cotangents(tuple(outputs), "contiguous"), allow_unused=True)
    return grads, calls.counts


@over_rows(gradients=True)
def test_selective_checkpointing_names_the_operators(row: Row) -> None:
    """A policy that keeps them runs each once; one that does not runs the forward operators again."""
    for case in row.small_cases[: 1 if row.backend == "triton" else 3]:
        expected, plain = gradients_and_calls(row, case, None)
        for save in (True, False):
            grads, calls = gradients_and_calls(row, case, save)
            for a, e in zip(grads, expected, strict=True):
                assert (a is None and e is None) or torch.equal(a, e), case.id
            repeated = calls - plain
            assert bool(repeated) is not save, f"{case.id}: {calls}, and {plain} without checkpointing"


@pytest.mark.parametrize("save", [True, False], ids=["keep", "recompute"])
def test_selective_checkpointing_under_the_compiler(save: bool) -> None:
    """The kept operator is not in the backward graph; the other one is."""
    found: dict[str, Counter[str]] = {}

    def keep(kind: str, module: torch.fx.GraphModule, inputs: Any) -> Any:
        targets = [node.target for node in module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
        found[kind] = Counter(target._schema.name for target in targets)
        return module.forward

    def block(x: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(fk.rms_norm(torch.sin(x), weight, backend="native"))

    backend = aot_autograd(fw_compiler=partial(keep, "forward"), bw_compiler=partial(keep, "backward"))
    x, weight = (torch.randn(shape, requires_grad=True) for shape in ((4, 8), (8,)))
    compiled = torch.compile(lambda: checkpointed(block, save, x, weight), fullgraph=True, backend=backend)
    grads = torch.autograd.grad(compiled().sum(), (x, weight))
    torch.testing.assert_close(grads, torch.autograd.grad(block(x, weight).sum(), (x, weight)))
    assert found["forward"]["foundry_kernels::rms_norm_fwd"] == 1
    assert found["backward"]["foundry_kernels::rms_norm_fwd"] == (0 if save else 1)
    assert found["backward"]["foundry_kernels::rms_norm_bwd"] == 1


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_checkpointed_blocks_of_the_model(reentrant: bool) -> None:
    model = make_model()
    results = []
    for wrap in (False, True):
        model.zero_grad()
        if wrap:
            for block in model.layers:
                block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)
        model(draw(9), draw(9))[1].backward()
        results.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *results))
