"""An option that a backend does not know is refused, or another backend runs."""

from __future__ import annotations

import ast
import inspect
from collections import namedtuple
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest
import torch
from attention_inputs import plain_options

import foundry_kernels as fk
from foundry_kernels import _triton
from foundry_kernels.core.registry import OPS, OpSpec, no_direct_call
from foundry_kernels.ops.flash_attention import Options
from foundry_kernels.ops.flash_attention.options import AttentionArguments, AttentionOptions
from foundry_kernels.testing import Case

INTERPRETED = pytest.mark.skipif(not _triton.INTERPRET, reason="launches in Triton's interpreter")

# --- operations -------------------------------------------------------------------------------------------------------

#: Arguments that say where or how a call is computed, and not what.
HOW = {"backend", "deterministic", "batch_invariant", "chunk_size"}


#: What has a default and must not be anything else.
REFUSED = {("flash_attention_varlen", "attn_mask")}


def options_of(spec: OpSpec) -> dict[str, Any]:
    """The public function's arguments that have a default, with it."""
    parameters = inspect.signature(spec.public).parameters.values()
    return {
        p.name: p.default
        for p in parameters
        if p.default is not p.empty and p.name not in HOW and (spec.name, p.name) not in REFUSED
    }


def is_set(case: Case, name: str, default: Any) -> bool:
    if name in case.args:
        return case.args[name] is not None
    return case.options.get(name, default) != default


@pytest.mark.parametrize("spec", OPS.values(), ids=lambda spec: spec.name)
def test_every_option_is_in_a_case(spec: OpSpec) -> None:
    """So that each backend, which is compared with the reference on all cases, cannot drop it."""
    for name, default in options_of(spec).items():
        assert any(is_set(case, name, default) for case in spec.cases.CASES[spec.name]), f"{name} is never set"


def rows_a_head(case: Case) -> int:
    """Lengths of attention's cases: below 9 the CPU, below 17 Triton has a path of its own."""
    q, k = case.args["q"], case.args["k"]
    assert q is not None
    assert k is not None
    return q.shape[1] // max(k.shape[1], 1) * q.shape[2]


@pytest.mark.parametrize("few", [True, False], ids=["few rows", "many rows"])
def test_every_option_is_in_a_case_of_each_path(few: bool) -> None:
    spec = OPS["flash_attention"]
    cases = [c for c in spec.cases.CASES[spec.name] if c.interpreted and (0 < rows_a_head(c) <= 8) == few]
    for name, default in options_of(spec).items():
        assert any(is_set(case, name, default) for case in cases), f"{name} is never set"


#: Its direct call takes tuples of several layers' arguments, from the function behind both public ones.
LAYERED = "lora_linear"


def test_a_direct_call_of_layers_is_given_every_argument() -> None:
    spec = OPS[LAYERED]
    native = spec.impl("native")
    assert native is not None
    if native.missing is not None:
        pytest.skip(native.missing)
    x = torch.ones(2, 4)
    layer = (torch.ones(3, 4), torch.ones(1, 4), torch.ones(3, 1), None, None, 1.0)
    assert len(layer) + 4 == len(inspect.signature(spec.public).parameters)  # and x, backend, two of dropout
    assert native.direct("auto", x, [layer], 0.0, None) is not None
    assert native.direct("auto", x, [layer], 0.0, None, False) is None
    assert native.direct("auto", x, [(*layer, None)], 0.0, None) is None


@pytest.mark.parametrize("spec", [s for s in OPS.values() if s.name != LAYERED], ids=lambda spec: spec.name)
def test_direct_calls_are_given_every_argument(spec: OpSpec) -> None:
    """All that the public function takes, or what it goes by before it asks: a C++ function that gets one argument more
    than it knows takes no call."""
    tree = ast.parse(inspect.getsource(spec.public).lstrip())
    asked = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "attr", "") == "direct"]
    native = spec.impl("native")
    assert bool(asked) == (native is not None and native.direct is not no_direct_call)
    if not asked:
        return
    (call,) = asked
    call.args = [name for arg in call.args for name in unpacked(tree, arg)]
    guards = [n.test for n in ast.walk(tree) if isinstance(n, ast.If) and call in list(ast.walk(n))]
    named = {n.id for part in (*guards, call) for n in ast.walk(part) if isinstance(n, ast.Name)}
    assert named >= set(inspect.signature(spec.public).parameters)
    assert native is not None
    assert native.direct(*[None] * (len(call.args) + 1)) is None
    # A default of None is turned into a number before; a teacher has a head or logits.
    numbers = {"eps": 1e-6, "teacher_logits": torch.ones(1, 1, 2, 2)}
    common = (
        "auto",
        *(made(spec, p) if p.default is p.empty else numbers.get(p.name, p.default) for p in parameters(spec, call)),
    )
    if spec.name not in ("rope", "qk_norm_rope"):  # whose tables have other shapes
        assert native.direct(*common) is not None
        assert native.direct(*common, False) is None


def unpacked(tree: ast.AST, arg: ast.expr) -> list[ast.expr]:
    """An argument, or those that a starred one stands for: a tuple which the function has a name for."""
    if not isinstance(arg, ast.Starred):
        return [arg]
    (given,) = (
        n.value
        for n in ast.walk(tree)
        if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == ast.unparse(arg.value)
    )
    assert isinstance(given, ast.Tuple)
    return given.elts


def made(spec: OpSpec, parameter: inspect.Parameter) -> torch.Tensor:
    """A tensor that an operation takes for an argument, beside others of `[1, 1, 2, 2]`, or of `[2, 2]`."""
    if parameter.name == "target":
        return torch.zeros(1, 1, 2, dtype=torch.int64)
    if parameter.name == "slots":
        return torch.zeros(2, 2, dtype=torch.int64)
    if parameter.name == "offs":
        return torch.ones(2, dtype=torch.int32)
    if (spec.name, parameter.name) == ("grouped_mm", "weight"):
        return torch.ones(2, 2, 2)
    if spec.name == "gated_delta_rule_step" and parameter.name != "state":
        return torch.ones(1, 1) if parameter.name in ("g", "beta") else torch.ones(1, 1, 2)
    flat = spec.name in ("combine_experts", "grouped_mm")
    flat |= spec.name.startswith("linear_") and parameter.name == "weight"
    return torch.ones(2, 2) if flat else torch.ones(1, 1, 2, 2)


def parameters(spec: OpSpec, call: ast.Call) -> list[inspect.Parameter]:
    known = inspect.signature(spec.public).parameters
    return [known[arg.id] for arg in call.args[1:] if isinstance(arg, ast.Name)]


# --- attention's options ----------------------------------------------------------------------------------------------


class Extended(namedtuple("Extended", (*AttentionOptions._fields, "made_up"))):
    """The options with one more."""

    packed = AttentionOptions.packed
    select = AttentionOptions.select
    operator_args = AttentionOptions.operator_args
    refuse_others = AttentionOptions.refuse_others


def attention_options(tokens: int) -> AttentionOptions:
    return plain_options(tokens, tokens, 0.5, window_right=0)


def backends_of_attention() -> list[Any]:
    """Each function of a backend, as `resolve` gives it out."""
    return [
        pytest.param(impl.fn, id=f"{name}-{impl.backend}")
        for name in ("flash_attention", "flash_attention_varlen")
        for impl in OPS[name].impls
        if impl.missing is None
    ]


@pytest.mark.parametrize("attend", backends_of_attention())
def test_an_option_of_attention_that_is_not_declared_is_refused(attend: Callable[..., Any]) -> None:
    q = torch.ones(1, 2, 4, 8)
    options = attention_options(4)
    if "varlen" in str(attend.__name__):
        q = q[0].transpose(0, 1)
        lengths = torch.tensor([0, 4], dtype=torch.int32)
        options = options._replace(cu_seqlens_q=lengths, cu_seqlens_k=lengths)
    for value in (True, 2.0, torch.ones(2)):
        with pytest.raises(fk.BackendUnavailable, match=r"backend '\w+' does not support made_up; got "):
            attend(q, q, q, Extended(*options, value))


@pytest.mark.parametrize("public", [fk.flash_attention, fk.flash_attention_varlen], ids=lambda f: f.__name__)
def test_the_public_functions_take_the_arguments_of_attention(public: Callable[..., Any]) -> None:
    """In the same order, which is also that of the direct call, with the same types and defaults."""
    known, types = AttentionArguments._field_defaults, get_type_hints(AttentionArguments)
    taken = {name: p.default for name, p in inspect.signature(public).parameters.items() if name in known}
    assert taken == known
    assert {name: kind for name, kind in get_type_hints(public).items() if name in known} == types
    order = [name for name in taken if name != "attn_mask"]  # for readers, it comes first there
    assert order == [name for name in known if name != "attn_mask"]
    keywords = {name: kind for name, kind in get_type_hints(Options).items() if name != "backend"}
    assert keywords == {name: kind for name, kind in types.items() if not name.startswith("return_")}


def triton_paths() -> dict[str, Callable[[], Any]]:
    """Each variant in which attention is launched in Triton, on a small problem."""
    from foundry_kernels.ops.flash_attention.triton import backward_launch, launch

    q = torch.ones(1, 1, 20, 16)
    lse = torch.ones(1, 1, 20, dtype=torch.float64)

    def backward(deterministic: bool) -> Any:
        options = attention_options(20)._replace(deterministic=deterministic)
        return backward_launch.launch_bwd(q, None, q, q, q, q, lse, options, True, True, True, False, False, ())

    def bias() -> Any:
        options = attention_options(20)._replace(attn_mask=torch.zeros(1, 1, 20, 20))
        return backward_launch.launch_bwd(q, None, q, q, q, q, lse, options, False, False, False, False, True, ())

    few = q[:, :, :2]
    return {
        "forward": lambda: launch.launch_fwd(q, q, q, attention_options(20), True, False),
        "few queries": lambda: launch.launch_fwd(few, q, q, attention_options(20), True, False),
        "backward": lambda: backward(True),
        "backward, one kernel": lambda: backward(False),
        "gradient of a bias": bias,
    }


@INTERPRETED
@pytest.mark.parametrize("path", ["forward", "few queries", "backward", "backward, one kernel", "gradient of a bias"])
def test_a_flag_that_a_kernel_of_attention_lacks_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gluon's kernel, which leaves such a call to another: tests/proof/test_gluon_launch.py."""
    from foundry_kernels.ops.flash_attention.triton import problem as problems

    own, seen = problems._Problem, []

    def problem(*args: Any) -> Any:
        made = own(*args)
        made.arguments = made.arguments | {"MADE_UP": True}
        seen.append(made)
        return made

    run = triton_paths()[path]
    run()
    monkeypatch.setattr(problems, "_Problem", problem)
    monkeypatch.setattr(problems, "_PROBLEMS", {})
    with pytest.raises(TypeError, match=r"flash_attention_(fwd|decode|dkdv|dbias)_kernel has no MADE_UP"):
        run()
    assert seen[0].few_queries == (path == "few queries")
    monkeypatch.undo()
    run()


# --- linear_cross_entropy, compat -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiles", [True, False], ids=["tiles", "chunks"])
def test_every_option_is_in_a_case_of_each_strategy(tiles: bool) -> None:
    spec = OPS["linear_cross_entropy"]
    cases = [c for c in spec.cases.CASES[spec.name] if (c.options.get("chunk_size") == "tiles") == tiles]
    for name, default in options_of(spec).items():
        assert any(is_set(case, name, default) for case in cases), f"{name} is never set"


def test_a_sharded_vocabulary_declares_every_option() -> None:
    pytest.importorskip("torch.distributed.tensor")
    from foundry_kernels.ops.linear_cross_entropy import Options
    from foundry_kernels.ops.linear_cross_entropy.options import LinearCrossEntropyOptions
    from foundry_kernels.ops.linear_cross_entropy.vocab_parallel import CrossEntropyOfOwnClasses
    from foundry_kernels.ops.linear_log_probs.options import LinearLogProbsOptions
    from foundry_kernels.ops.linear_log_probs.vocab_parallel import LogProbsOfOwnClasses

    assert LinearCrossEntropyOptions._fields == CrossEntropyOfOwnClasses.supported
    assert LinearLogProbsOptions._fields == LogProbsOfOwnClasses.supported
    # The backend is done with before, the tensors are arguments.
    given = {*LinearCrossEntropyOptions._fields, "bias", "low", "up", "class_weight", "backend"} - {
        "return_predictions"
    }
    assert given == {*Options.__annotations__, "return_lse", "return_z_loss"}


@pytest.mark.parametrize("name", [name for name in fk.compat.__all__ if callable(getattr(fk.compat, name))])
def test_a_keyword_that_a_function_of_compat_lacks_is_refused(name: str) -> None:
    function = getattr(fk.compat, name)
    parameters = inspect.signature(function).parameters.values()
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters)
    required = {p.name: None for p in parameters if p.default is p.empty}
    with pytest.raises(TypeError, match="unexpected keyword argument 'made_up'"):
        function(**required, made_up=1)
