"""Numbers as options: what float32 does not hold to its full precision is refused by name, on every backend alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import foundry_kernels as fk
from foundry_kernels import nn
from foundry_kernels.core import checks, extension
from foundry_kernels.core.registry import BACKENDS
from foundry_kernels.models import ModelConfig, Transformer
from foundry_kernels.ops.flash_attention.checks import MAX_HEAD_DIM

X, Q = torch.randn(2, 4, generator=torch.Generator().manual_seed(0)), torch.ones(1, 2, 3, 4)
W, T, COS = torch.ones(4), torch.tensor([1, 2]), torch.ones(3, 2)
CU = torch.tensor([0, 2], dtype=torch.int32)
V = X.view(2, 1, 4)

#: By operation and option: a call with a number, and whether that may be 0 and negative.
POSITIVE, NOT_NEGATIVE, ANY = "positive", "not negative", "any"
OPTIONS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "rms_norm eps": (lambda v, **b: fk.rms_norm(X, W, v, **b), "eps", NOT_NEGATIVE),
    "rms_norm weight_offset": (lambda v, **b: fk.rms_norm(X, W, weight_offset=v, **b), "weight_offset", ANY),
    "add_rms_norm eps": (lambda v, **b: fk.add_rms_norm(X, X, W, v, **b), "eps", NOT_NEGATIVE),
    "add_rms_norm offset": (lambda v, **b: fk.add_rms_norm(X, X, W, weight_offset=v, **b), "weight_offset", ANY),
    "layer_norm eps": (lambda v, **b: fk.layer_norm(X, W, W, v, **b), "eps", NOT_NEGATIVE),
    "add_layer_norm eps": (lambda v, **b: fk.add_layer_norm(X, X, W, W, v, **b), "eps", NOT_NEGATIVE),
    "qk_norm_rope eps": (lambda v, **b: fk.qk_norm_rope(Q, Q, W, W, COS, COS, eps=v, **b), "eps", NOT_NEGATIVE),
    "qk_norm_rope offset": (
        lambda v, **b: fk.qk_norm_rope(Q, Q, W, W, COS, COS, weight_offset=v, **b),
        "weight_offset",
        ANY,
    ),
    "swiglu alpha": (lambda v, **b: fk.swiglu(X, alpha=v, **b), "alpha", ANY),
    "swiglu up_offset": (lambda v, **b: fk.swiglu(X, up_offset=v, **b), "up_offset", ANY),
    "swiglu limit": (lambda v, **b: fk.swiglu(X, limit=v, **b), "limit", POSITIVE),
    "flash_attention scale": (lambda v, **b: fk.flash_attention(Q, Q, Q, scale=v, **b), "scale", POSITIVE),
    "flash_attention softcap": (lambda v, **b: fk.flash_attention(Q, Q, Q, softcap=v, **b), "softcap", POSITIVE),
    "varlen scale": (
        lambda v, **b: fk.flash_attention_varlen(V, V, V, CU, CU, 2, 2, scale=v, **b),
        "scale",
        POSITIVE,
    ),
    "varlen softcap": (
        lambda v, **b: fk.flash_attention_varlen(V, V, V, CU, CU, 2, 2, softcap=v, **b),
        "softcap",
        POSITIVE,
    ),
    **{
        f"{name} {option}": (lambda v, loss=loss, option=option, **b: loss(**{option: v}, **b), option, kind)
        for name, loss in (
            ("cross_entropy", lambda **options: fk.cross_entropy(X, T, **options)),
            ("linear_cross_entropy", lambda **options: fk.linear_cross_entropy(X, X, T % 2, **options)),
        )
        for option, kind in (("softcap", POSITIVE), ("z_loss", NOT_NEGATIVE), ("label_smoothing", NOT_NEGATIVE))
    },
    "linear_cross_entropy logit_scale": (
        lambda v, **b: fk.linear_cross_entropy(X, X, T % 2, logit_scale=v, **b),
        "logit_scale",
        ANY,
    ),
}
#: The same of functions and modules that have no backend.
OTHERS: dict[str, tuple[Callable[[float], Any], str, str]] = {
    "rope_table base": (lambda v: fk.rope_table(4, 8, base=v), "base", POSITIVE),
    "RopeScaling": (lambda v: fk.RopeScaling("yarn", 2.0, 8, attention_factor=v), "attention_factor", POSITIVE),
    "RMSNorm": (lambda v: nn.RMSNorm(4, v), "eps", NOT_NEGATIVE),
    "RMSNorm weight_offset": (lambda v: nn.RMSNorm(4, weight_offset=v), "weight_offset", ANY),
    "LayerNorm": (lambda v: nn.LayerNorm(4, v), "eps", NOT_NEGATIVE),
    "SinusoidalEmbedding": (lambda v: nn.SinusoidalEmbedding(4, 8, base=v), "base", POSITIVE),
    "Router": (lambda v: nn.Router(4, 4, 2, scale=v), "scale", POSITIVE),
    "ModelConfig": (lambda v: ModelConfig(16, 1, 2, vocab_size=11, norm_eps=v), "norm_eps", POSITIVE),
}
SUBNORMAL = (5e-324, 1e-320, 1e-46, 1e-45, 1e-38)
LARGE = (3e38, 1e39, 1e300, math.inf, math.nan)


def refused(kind: str) -> tuple[float, ...]:
    below = {POSITIVE: (0.0, -0.5), NOT_NEGATIVE: (-0.5, -1e-46), ANY: (-1e-46, -1e300, -math.inf)}
    return SUBNORMAL + LARGE + below[kind]


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_operations(name: str, backend: str) -> None:
    call, option, kind = OPTIONS[name]
    for value in refused(kind):
        with pytest.raises(ValueError, match=rf"^{option} must be "):
            call(value, backend=backend)
    with pytest.raises(TypeError, match=rf"^{option} must be a float; got"):
        call(True, backend=backend)


@pytest.mark.parametrize("name", OTHERS)
def test_other_options(name: str) -> None:
    call, option, kind = OTHERS[name]
    for value in refused(kind):
        with pytest.raises(ValueError, match=rf"^{option} must be "):
            call(value)


def test_the_extension_has_the_same_limits() -> None:
    if extension.MISSING is not None:
        pytest.skip(extension.MISSING)
    limits = {"smallest": checks.SMALLEST, "largest": checks.LARGEST, "max_head_dim": MAX_HEAD_DIM}
    assert extension._C.limits() == limits


def test_what_is_said() -> None:
    bounds = "in 2^-126 .. 2^127, where float32 has its full precision"
    for value, text in ((math.nan, "finite and > 0"), (1e39, bounds)):
        with pytest.raises(ValueError) as error:
            checks.check_positive("softcap", value)
        assert str(error.value) == f"softcap must be {text}; got {value}"


@pytest.mark.parametrize("name", OPTIONS)
def test_the_least_and_the_largest_number(name: str) -> None:
    """Those that are taken give the same on every backend, gradients included."""
    call, option, kind = OPTIONS[name]
    values = [checks.SMALLEST, *([0.0] if kind != POSITIVE else []), *([-checks.SMALLEST] if kind == ANY else [])]
    if option != "label_smoothing" and not name.startswith(("swiglu", "linear_cross")) and option in ("eps", "softcap"):
        values += [] if "attention" in name or "varlen" in name else [checks.LARGEST]
    for value in values:
        if option == "softcap" and ("attention" in name or "varlen" in name):
            value = 1e-30  # scale / softcap is an option too
        found = {}
        for backend in ("reference", "auto"):
            result = call(value, backend=backend)
            found[backend] = result[0] if isinstance(result, tuple) else result
        assert found["auto"].isfinite().all() == found["reference"].isfinite().all(), value
        torch.testing.assert_close(found["auto"], found["reference"], rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tiny_soft_cap_has_gradients(backend: str) -> None:
    """The square of the cap is 0 in float32."""
    q = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for softcap in (1e-25, 1e25):
        (gradient,) = torch.autograd.grad(fk.flash_attention(q, q, q, softcap=softcap, backend=backend).sum(), q)
        (expected,) = torch.autograd.grad(fk.flash_attention(q, q, q, softcap=softcap, backend="reference").sum(), q)
        torch.testing.assert_close(gradient, expected)


def test_scale_over_softcap() -> None:
    for scale, softcap in ((1.0, 1e38), (1e30, 1e-30), (None, 1e38)):
        for backend in ("auto", *BACKENDS):
            with pytest.raises(ValueError, match="scale / softcap must be in"):
                fk.flash_attention(Q, Q, Q, scale=scale, softcap=softcap, backend=backend)


def test_numbers_in_a_graph_with_dynamic_shapes() -> None:
    torch.compiler.reset()

    def run(x: torch.Tensor, eps: float, alpha: float) -> torch.Tensor:
        return fk.swiglu(fk.rms_norm(x, None, eps), alpha=alpha)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="eager")
    for rows, eps, alpha in ((2, 1e-6, 1.5), (3, 1e-5, 0.5), (4, 0.0, 1.25)):
        x = torch.ones(rows, 8)
        torch.testing.assert_close(compiled(x, eps, alpha), run(x, eps, alpha))
    torch.compiler.reset()


# Generation --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(ModelConfig(dim=16, n_layers=1, n_heads=2, vocab_size=11, max_seq_len=16, init_std=1.0))


@pytest.mark.parametrize(
    "options", [{"temperature": 2.0**-126}, {"temperature": 1e-30}, {"top_p": 1e-30}, {"top_k": 1}]
)
def test_the_coldest_choice_is_the_likeliest(model: Transformer, options: dict[str, Any]) -> None:
    greedy = model.generate([[1, 2], [3]], 8, temperature=0.0)
    assert len({int(t) for row in greedy for t in row}) > 2
    found = model.generate([[1, 2], [3]], 8, **{"temperature": 1.0, **options})
    assert all(map(torch.equal, found, greedy))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 1e-45}, "temperature must be 0 or in 2"),
        ({"temperature": 1e300}, "temperature must be 0 or in 2"),
        ({"temperature": math.inf}, "temperature must be finite"),
        ({"top_p": 1e-320}, "top_p must be in 2"),
        ({"top_p": 1.5}, r"top_p must be None or in \(0, 1\]"),
        ({"top_p": math.nan}, r"top_p must be None or in \(0, 1\]"),
        ({"top_k": 0}, "top_k must be >= 1"),
    ],
)
def test_what_generate_refuses(model: Transformer, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model.generate([[1, 2]], 2, **{"temperature": 1.0, **options})
