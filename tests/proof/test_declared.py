"""What a path does not know it refuses, or leaves to one that knows it: options of operations, choices of a model."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_type_hints

import pytest
import torch
from attention_inputs import plain_options

import foundry_kernels as fk
from foundry_kernels import RopeScaling, _triton
from foundry_kernels.core.registry import OPS, OpSpec, no_direct_call
from foundry_kernels.diagnostics import QKClip
from foundry_kernels.models import ModelConfig, Transformer
from foundry_kernels.models.config import CHOICES
from foundry_kernels.models.validate import EXPERT_FIELDS
from foundry_kernels.nn._layers import is_plain
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


@pytest.mark.parametrize("spec", OPS.values(), ids=lambda spec: spec.name)
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
    numbers = {"eps": 1e-6}  # a default of None is turned into a number before
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
    flat |= (spec.name, parameter.name) == ("linear_cross_entropy", "weight")
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
        return backward_launch.launch_bwd(q, None, q, q, q, q, lse, options, True, True, True, False, False)

    def bias() -> Any:
        options = attention_options(20)._replace(attn_mask=torch.zeros(1, 1, 20, 20))
        return backward_launch.launch_bwd(q, None, q, q, q, q, lse, options, False, False, False, False, True)

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
    given = {*LinearCrossEntropyOptions._fields, "bias", "class_weight", "backend"} - {"return_predictions"}
    assert given == {*Options.__annotations__, "return_lse", "return_z_loss"}


@pytest.mark.parametrize("name", [name for name in fk.compat.__all__ if callable(getattr(fk.compat, name))])
def test_a_keyword_that_a_function_of_compat_lacks_is_refused(name: str) -> None:
    function = getattr(fk.compat, name)
    parameters = inspect.signature(function).parameters.values()
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters)
    required = {p.name: None for p in parameters if p.default is p.empty}
    with pytest.raises(TypeError, match="unexpected keyword argument 'made_up'"):
        function(**required, made_up=1)


# --- a model's choices ------------------------------------------------------------------------------------------------

EXPERTS: dict[str, Any] = {"n_experts": 4}
LINEAR: dict[str, Any] = {"layer_types": ("linear_attention", "full_attention")}
#: For each field of ModelConfig another value than that of `SMALL`, with what it needs.
SMALL: dict[str, Any] = {"dim": 16, "n_layers": 2, "n_heads": 4, "vocab_size": 16, "max_seq_len": 16}
OTHER: dict[str, dict[str, Any]] = {
    "dim": {"dim": 32},
    "n_layers": {"n_layers": 1},
    "n_heads": {"n_heads": 2},
    "n_kv_heads": {"n_kv_heads": 2},
    "vocab_size": {"vocab_size": 24},
    "max_seq_len": {"max_seq_len": 24},
    "multiple_of": {"multiple_of": 32},
    "ffn_dim_multiplier": {"ffn_dim_multiplier": 1.5},
    "hidden_dim": {"hidden_dim": 24},
    "head_dim": {"head_dim": 8},
    "norm_eps": {"norm_eps": 0.1},
    "norm_round_before_weight": {"norm_round_before_weight": True},
    "rope_base": {"rope_base": 10.0},
    "rope_scaling": {"rope_scaling": RopeScaling("linear", 2.0)},
    "rope_interleaved": {"rope_interleaved": True},
    "tie_embeddings": {"tie_embeddings": True},
    "init_std": {"init_std": 0.1},
    "positions": {"positions": "alibi"},
    "rope_dim": {"rope_dim": 2},
    "norm": {"norm": "layer_norm"},
    "norm_bias": {"norm": "layer_norm", "norm_bias": False},
    "norm_placement": {"norm_placement": "post"},
    "embedding_norm": {"embedding_norm": True},
    "activation": {"activation": "gelu"},
    "ffn_rule": {"ffn_rule": "4d"},
    "attention_bias": {"attention_bias": True},
    "attention_out_bias": {"attention_out_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "output_bias": {"output_bias": True},
    "parallel_residual": {"parallel_residual": True},
    "shared_attention_norm": {"parallel_residual": True, "shared_attention_norm": True},
    "sliding_window": {"sliding_window": 3},
    "qk_norm": {"qk_norm": True},
    "embedding_dropout": {"embedding_dropout": 0.1},
    "residual_dropout": {"residual_dropout": 0.1},
    "attention_dropout": {"attention_dropout": 0.1},
    "activation_dropout": {"activation_dropout": 0.1},
    "output_dropout": {"output_dropout": 0.1},
    "causal": {"causal": False},
    "context_dim": {"context_dim": 8},
    "head": {"head": False},
    "logit_scale": {"logit_scale": 2.0},
    "attention_scale": {"attention_scale": 1.0},
    "alibi_scaled": {"positions": "alibi", "alibi_scaled": True},
    "relative_buckets": {"positions": "relative", "relative_buckets": 4},
    "relative_max_distance": {"positions": "relative", "relative_buckets": 4, "relative_max_distance": 4},
    "norm_weight_offset": {"norm_weight_offset": 1.0},
    "final_norm": {"final_norm": False},
    "embedding_scale": {"embedding_scale": 4.0},
    "token_types": {"token_types": 2},
    "qk_norm_over": {"qk_norm": True, "qk_norm_over": "projection"},
    "n_experts": EXPERTS,
    "dense_layers": {**EXPERTS, "dense_layers": (0,)},
    "dense_hidden_dim": {**EXPERTS, "dense_layers": (0,), "dense_hidden_dim": 8},
    "router_groups": {**EXPERTS, "router_groups": 2, "router_top_groups": 1},
    "router_top_groups": {**EXPERTS, "router_groups": 2, "router_top_groups": 1},
    "top_k": {**EXPERTS, "top_k": 3},
    "router_scoring": {**EXPERTS, "router_scoring": "sigmoid"},
    "router_renormalize": {**EXPERTS, "router_renormalize": False},
    "router_scale": {**EXPERTS, "router_scale": 2.0},
    "router_bias": {**EXPERTS, "router_bias": True},
    "selection_bias": {**EXPERTS, "selection_bias": True},
    "weight_expert_inputs": {**EXPERTS, "weight_expert_inputs": True},
    "shared_expert_dim": {**EXPERTS, "shared_expert_dim": 8},
    "shared_expert_gate": {**EXPERTS, "shared_expert_dim": 8, "shared_expert_gate": True},
    "load_balancing_coef": {**EXPERTS, "load_balancing_coef": 0.1},
    "router_z_coef": {**EXPERTS, "router_z_coef": 0.1},
    "init": {"init": "xavier"},
    "qk_norm_weight_offset": {"qk_norm": True, "qk_norm_weight_offset": 1.0},
    "attention_gate": {"attention_gate": True},
    "layer_types": LINEAR,
    "linear_v_heads": {**LINEAR, "linear_v_heads": 2},
    "linear_k_heads": {**LINEAR, "linear_k_heads": 2},
    "linear_k_dim": {**LINEAR, "linear_k_dim": 8},
    "linear_v_dim": {**LINEAR, "linear_v_dim": 8},
    "linear_conv_size": {**LINEAR, "linear_conv_size": 2},
}
FIELDS = [field.name for field in dataclasses.fields(ModelConfig)]
#: Fields that matter in training alone, or whose effect float32 does not show.
UNSEEN = {"multiple_of", "norm_round_before_weight", "embedding_dropout", "residual_dropout", "attention_dropout"}
UNSEEN |= {
    "init",
    "init_std",
    "max_seq_len",
    "load_balancing_coef",
    "router_z_coef",
    "activation_dropout",
    "output_dropout",
}
UNSEEN |= {"norm_weight_offset", "qk_norm_weight_offset"}  # weights begin as much lower
#: What is not decoded token by token, and what is said then.
NOT_DECODED = {"causal": "a cache needs causal=True", "context_dim": "context must be given"}
#: Fields that need each other.
PAIRED = {"router_groups", "router_top_groups"}

LINEAR_FIELDS = {name for name, fields in OTHER.items() if "layer_types" in fields}
#: The choices in `OTHER` that tensor parallelism and QK-clip refuse.
NOT_SHARDED = {"tie_embeddings", "positions", "embedding_dropout", "residual_dropout", "attention_dropout"}
NOT_SHARDED |= {"n_experts", *EXPERT_FIELDS}
ENCODERS = {"context_dim", "head", "relative_buckets", "relative_max_distance", "token_types"}
NOT_SHARDED |= {*ENCODERS, "activation_dropout", "output_dropout", "causal", "logit_scale", "attention_scale"}
NOT_SHARDED |= {"alibi_scaled", "norm_weight_offset", "final_norm", "embedding_scale", "qk_norm_over"}
NOT_SHARDED |= {*LINEAR_FIELDS, "qk_norm_weight_offset", "attention_gate"}
NOT_CLIPPED = {
    *LINEAR_FIELDS,
    "qk_norm_weight_offset",
    "attention_gate",
    *ENCODERS,
    "qk_norm",
    "qk_norm_over",
    "alibi_scaled",
}


@dataclass(frozen=True)
class MadeUp(ModelConfig):
    """A choice more than models have."""

    made_up: bool = False


class Mesh:
    """What the plan looks at before it refuses."""

    ndim = 1

    def size(self) -> int:
        return 2


def model_of(fields: dict[str, Any]) -> Transformer:
    """Makes a model with weights that hide nothing: no bias is 0, no norm 1."""
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**{**SMALL, **fields}))
    with torch.no_grad():
        for tensor in (*model.parameters(), *(b for n, b in model.named_buffers() if n.endswith("selection_bias"))):
            tensor.add_(0.3 * torch.randn(tensor.shape))
    return model.eval()


def test_every_field_has_another_value() -> None:
    assert list(OTHER) == FIELDS
    for name, fields in OTHER.items():
        assert getattr(ModelConfig(**{**SMALL, **fields}), name) != getattr(ModelConfig(**SMALL), name)


@torch.no_grad()
@pytest.mark.parametrize("name", FIELDS)
def test_decoding_knows_every_choice(name: str) -> None:
    """Token by token, on paths of their own, as all tokens at once."""
    model = model_of(OTHER[name])
    tokens = torch.randint(16, (2, 9), generator=torch.Generator().manual_seed(1))
    if name in NOT_DECODED:
        with pytest.raises(ValueError, match=NOT_DECODED[name]):
            model(tokens[:, :1], cache=model.make_cache(2))
        return
    whole, cache = model(tokens), model.make_cache(2)
    steps = torch.cat([model(token, cache=cache) for token in tokens.split(1, 1)], 1)
    torch.testing.assert_close(steps, whole, rtol=1e-4, atol=1e-4)
    if name not in UNSEEN:
        changes = {k: v for k, v in OTHER[name].items() if k != name and not {k, name} <= PAIRED}
        without = model_of(changes)(tokens)
        assert without.shape != whole.shape or (without - whole).abs().max() > 1e-3, "a choice that shows nowhere"


def refused(check: Callable[[Transformer], Any], model: Transformer) -> bool:
    try:
        check(model)
    except ValueError as error:
        return " is not sharded by this plan" in str(error) or " is not supported by QKClip" in str(error)
    return False


def divide(model: Transformer) -> Any:
    from foundry_kernels.distributed import tensor_parallel_plan

    return tensor_parallel_plan(model, Mesh())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("check", "unserved", "values"),
    [(divide, NOT_SHARDED, {"alibi", "sinusoidal", "relative"}), (QKClip, NOT_CLIPPED, {"relative"})],
    ids=["tensor parallelism", "QK-clip"],
)
def test_a_choice_that_is_not_declared_is_refused(
    check: Callable[[Transformer], Any], unserved: set[str], values: set[str]
) -> None:
    """A field's value, each value of a choice, a value and a field that are new."""
    assert {name for name, fields in OTHER.items() if refused(check, model_of(fields))} == unserved
    for field, known in CHOICES.items():
        if field not in (*EXPERT_FIELDS, "qk_norm_over"):  # which need others
            found = {value for value in known if refused(check, model_of({field: value}))}
            assert found == (values if field == "positions" else set()), field
    model = model_of({})
    model.config = dataclasses.replace(model.config)
    object.__setattr__(model.config, "positions", "made up")
    assert refused(check, model)
    model.config = MadeUp(**SMALL)
    assert not refused(check, model)
    model.config = MadeUp(**SMALL, made_up=True)
    assert refused(check, model)


def test_a_parameter_that_is_not_declared_is_not_sharded() -> None:
    model = model_of({})
    model.layers[1].attention.scale = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match=r"layers\.1\.attention\.scale is not sharded by this plan"):
        divide(model)


def test_a_model_has_no_fields_but_its_own() -> None:
    with pytest.raises(TypeError, match="config must have the fields of ModelConfig; got made_up too"):
        Transformer(MadeUp(**SMALL))


def test_hooks_of_a_layer_are_all_known() -> None:
    """A layer whose hooks nobody looks at would not be called in decoding."""
    from foundry_kernels.integrations.adapters.base import names_of

    plain = vars(torch.nn.Linear(4, 4, bias=False))
    own = {name for name in names_of(torch.nn.Module._call_impl.__code__) if isinstance(plain.get(name), dict)}
    # Which of the hooks are called differently.
    own -= {"_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"}
    assert own >= {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}
    for name in own:
        layer = torch.nn.Linear(4, 4, bias=False)
        assert is_plain(layer)
        getattr(layer, name)[0] = print
        assert not is_plain(layer), name
