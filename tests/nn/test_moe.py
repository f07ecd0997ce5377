"""The mixture of experts against a loop over its experts, its losses against transformers', and its modes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import foundry_kernels as fk
from foundry_kernels.nn import MoE, load_balancing_loss, router_z_loss
from foundry_kernels.nn.moe import dispatch
from foundry_kernels.testing import compare

DIM, WIDTH, EXPERTS = 6, 5, 4

CLAMPED = {"alpha": 1.702, "limit": 1.5, "up_offset": 1.0, "interleaved": True}

#: What differs from Mixtral.
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3": {"renormalize": False, "top_k": 3},
    "qwen2": {"renormalize": False, "shared_width": 3, "shared_gate": True},
    "deepseek": {"scoring": "sigmoid", "scale": 2.5, "selection_bias": True, "shared_width": 7},
    "llama4": {"scoring": "sigmoid", "renormalize": False, "top_k": 1, "weight_inputs": True, "shared_width": 4},
    "biased": {"bias": True, "router_bias": True, "activation": "geglu", "shared_width": 3},
    "gpt-oss": {"bias": True, "router_bias": True, "gate_options": CLAMPED},
    "nemotron": {"bias": True, "activation": "relu2", "shared_width": 3},
    "all": {"top_k": EXPERTS},
    "one": {"top_k": 1, "renormalize": False},
}


def build(name: str = "mixtral", dtype: torch.dtype = torch.float64, **changes: Any) -> MoE:
    options = {"top_k": 2, **MIXTURES[name], **changes}
    mixture = MoE(DIM, WIDTH, EXPERTS, options.pop("top_k"), dtype=dtype, **options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in mixture.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        if mixture.router.selection_bias is not None:
            mixture.router.selection_bias.copy_(torch.tensor([0.4, -0.3, 0.0, 0.2]))
    return mixture


def inputs(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_loop(mixture: MoE, x: Tensor) -> Tensor:
    """Every expert of every token, and the weights from the scores of all experts; in the dtype of x."""
    router, experts = mixture.router, mixture.experts
    tokens = x.reshape(-1, x.shape[-1])
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    logits = F.linear(tokens.to(wide), router.weight.to(wide), None if router.bias is None else router.bias.to(wide))
    scores = logits.softmax(-1) if router.scoring == "softmax" else logits.sigmoid()
    key = scores if router.selection_bias is None else scores + router.selection_bias
    chosen = torch.zeros_like(scores).scatter(1, key.topk(router.top_k, -1).indices, 1.0)
    weights = scores * chosen
    if router.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = router.scale * weights
    total = torch.zeros_like(tokens, dtype=wide)
    plain = experts.activation == "relu2"
    first = "up_proj" if plain else "gate_up_proj"
    for e in range(EXPERTS):
        weight = weights[:, e : e + 1]
        given = (tokens * weight).to(x.dtype) if experts.weight_inputs else tokens
        bias = (
            (None, None)
            if experts.down_proj_bias is None
            else (getattr(experts, f"{first}_bias")[e], experts.down_proj_bias[e])
        )
        packed = F.linear(given, getattr(experts, first)[e], bias[0])
        if plain:
            product = F.relu(packed) ** 2
        elif experts.gate_options:
            gate, up = packed[:, ::2].clamp(max=1.5), packed[:, 1::2].clamp(-1.5, 1.5) + 1.0
            product = gate * torch.sigmoid(1.702 * gate) * up
        else:
            gate, up = packed.chunk(2, -1)
            product = (F.silu(gate) if experts.activation == "swiglu" else F.gelu(gate)) * up
        y = F.linear(product, experts.down_proj[e], bias[1])
        # Of an expert that was not chosen nothing counts, its bias neither.
        total = total + y * (chosen[:, e : e + 1] if experts.weight_inputs else weight)
    total = total.to(x.dtype)
    if (shared := mixture.shared) is not None:
        up = shared.w1(tokens)
        if plain:
            y = shared.w2(F.relu(up) ** 2)
        else:
            y = shared.w2((F.silu(up) if experts.activation == "swiglu" else F.gelu(up)) * shared.w3(tokens))
        total = total + (y if mixture.shared_gate is None else torch.sigmoid(mixture.shared_gate(tokens)) * y)
    return total.view(x.shape)


def gradients(mixture: MoE, y: Tensor, x: Tensor) -> dict[str, Tensor]:
    named = {"x": x, **dict(mixture.named_parameters())}
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(y.dtype)
    return dict(zip(named, torch.autograd.grad(y, list(named.values()), dy), strict=True))


def close(actual: Tensor, expected: Tensor, error: float = 1e-12) -> None:
    assert float((actual - expected).detach().abs().max()) <= error * (float(expected.detach().abs().max()) or 1.0)


# --- mathematics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_is_its_formula_with_all_gradients(name):
    mixture, x = build(name), inputs(3, 5).requires_grad_()
    y, expected = mixture(x), by_loop(mixture, x)
    close(y, expected)
    actual, wanted = gradients(mixture, y, x), gradients(mixture, expected, x)
    for key, grad in wanted.items():
        close(actual[key], grad)
    assert float(wanted["router.weight"].abs().max()) > 1e-3


def test_one_expert_gets_all_tokens_and_another_none():
    """Tokens on one side of a plane: experts 2 and 1 are everybody's, in this order, and 0 and 3 nobody's."""
    mixture = build()
    with torch.no_grad():
        mixture.router.weight.copy_(torch.tensor([-1.0, 1.0, 2.0, -2.0], dtype=torch.float64)[:, None].expand(-1, DIM))
    x = inputs(7).abs().requires_grad_()
    routing = mixture.router(x)
    assert torch.equal(routing.experts, torch.tensor([[2, 1]]).expand(7, 2))
    where = dispatch(routing.experts, EXPERTS)
    assert where.counts.tolist() == [0, 7, 7, 0]
    y, expected = mixture(x), by_loop(mixture, x)
    close(y, expected)
    actual, wanted = gradients(mixture, y, x), gradients(mixture, expected, x)
    for key, grad in wanted.items():
        close(actual[key], grad)
    for key in ("experts.gate_up_proj", "experts.down_proj"):
        assert not actual[key][[0, 3]].any()
        assert actual[key][[1, 2]].any()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_of_equal_scores_the_lowest_numbers_are_taken(scoring):
    router = fk.nn.Router(3, 6, 3, scoring=scoring, dtype=torch.float64)
    with torch.no_grad():
        router.weight.copy_(torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 1.0], dtype=torch.float64)[:, None].expand(-1, 3))
    routing = router(torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0], [0.0, 0.0, 0.0]], dtype=torch.float64))
    assert routing.experts.tolist() == [[1, 3, 4], [0, 2, 1], [0, 1, 2]]
    close(routing.weights[2], torch.full((3,), 1 / 3, dtype=torch.float64))
    close(routing.weights.sum(-1), torch.ones(3, dtype=torch.float64))


def test_dispatch_sorts_by_expert_then_by_token():
    experts = torch.tensor([[3, 1], [1, 5], [0, 3], [4, 1]])  # 4 and 5 live elsewhere
    where = dispatch(experts, 4, partial=True)
    assert where.offs.dtype == torch.int32
    assert where.offs.tolist() == [1, 4, 4, 6]
    assert where.order.tolist() == [4, 1, 2, 7, 0, 5, 6, 3]
    assert where.slots.tolist() == [[4, 1], [2, -1], [0, 5], [-1, 3]]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_gradients_of_the_router_by_differences(scoring):
    """Those of the weights, and of both losses, through the logits of all experts."""
    mixture, x = build(scoring=scoring, router_bias=True), inputs(4).requires_grad_()

    def outputs(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        changed = {"router.weight": weight, "router.bias": bias}
        y, stats = torch.func.functional_call(mixture, changed, (x, True))
        return y, load_balancing_loss(stats), router_z_loss(stats)

    router = mixture.router
    gap = router(x).logits.sort(-1).values.diff(dim=-1).min()
    assert gap > 1e-4  # no difference changes who is chosen
    assert torch.autograd.gradcheck(outputs, (x, router.weight, router.bias))


def test_in_bfloat16_it_is_as_exact_as_the_loop():
    mixture = MoE(64, 48, EXPERTS, 2, dtype=torch.bfloat16)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in mixture.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2)
    wide = MoE(64, 48, EXPERTS, 2, dtype=torch.float64)
    wide.load_state_dict(mixture.state_dict())
    x = torch.randn(40, 64).to(torch.bfloat16).requires_grad_()
    x64 = x.detach().double().requires_grad_()
    runs = ((mixture, mixture(x), x), (mixture, by_loop(mixture, x), x), (wide, by_loop(wide, x64), x64))
    results = [{"y": y, **gradients(used, y, given)} for used, y, given in runs]
    for key in results[0]:
        ours, loop, exact = (result[key] for result in results)
        compare(key, ours, loop, exact, float(exact.detach().abs().max()))


# --- losses of the router ---------------------------------------------------------------------------------------------


def test_losses_are_those_of_transformers_and_of_the_paper():
    theirs = pytest.importorskip("transformers.models.mixtral.modeling_mixtral").load_balancing_loss_func
    router = fk.nn.Router(DIM, EXPERTS, 2, dtype=torch.float64)
    layers = [inputs(9, seed=seed) for seed in (1, 2, 3)]
    routings = [router(x) for x in layers]
    stats = [router.stats(r.logits, dispatch(r.experts, EXPERTS).counts) for r in routings]
    expected = theirs(tuple(r.logits for r in routings), EXPERTS, 2)
    close(load_balancing_loss(stats), expected, 1e-6)  # theirs sums in float32
    close(
        *(
            torch.autograd.grad(loss, router.weight, retain_graph=True)[0]
            for loss in (load_balancing_loss(stats), expected)
        ),
        1e-6,
    )
    close(load_balancing_loss(stats[0]), theirs((routings[0].logits,), EXPERTS, 2), 1e-6)
    z = torch.stack([r.logits.exp().sum(-1).log().square().mean() for r in routings]).mean()
    close(router_z_loss(stats), z)


def test_even_routing_has_the_least_loss():
    router = fk.nn.Router(EXPERTS, EXPERTS, 1, renormalize=False, scoring="sigmoid", dtype=torch.float64)
    with torch.no_grad():
        router.weight.copy_(4.0 * torch.eye(EXPERTS))
    even, uneven = torch.eye(EXPERTS, dtype=torch.float64), torch.eye(EXPERTS, dtype=torch.float64)[[0, 0, 0, 1]]
    losses = []
    for x in (even, uneven):
        routing = router(x)
        losses.append(
            load_balancing_loss(router.stats(routing.logits, dispatch(routing.experts, EXPERTS).counts)).item()
        )
    assert losses[0] == pytest.approx(1.0)
    high, low = (s / (1 / (1 + math.exp(-4.0)) + 1.5) for s in (1 / (1 + math.exp(-4.0)), 0.5))
    probabilities = 0.75 * high + 0.25 * low, 0.25 * high + 0.75 * low
    assert losses[1] == pytest.approx(EXPERTS * (0.75 * probabilities[0] + 0.25 * probabilities[1]))  # 1.29


def test_the_selection_bias_balances_outside_of_the_gradient():
    mixture = build("deepseek", torch.float32)
    router = mixture.router
    x = inputs(64).float()
    x[:, 0] = 1.0
    with torch.no_grad():
        router.weight[:, 0] = torch.tensor([4.0, 2.0, -2.0, -4.0])
        router.selection_bias.zero_()

    def spread() -> int:
        counts = torch.bincount(router(x).experts.flatten(), minlength=EXPERTS)
        return int(counts.max() - counts.min())

    before = spread()
    mixture.eval()(x)
    assert not router.chosen.any()  # counted in training alone
    for _ in range(100):
        mixture.train()(x)
        fk.nn.update_selection_biases(nn.ModuleList([mixture]), rate=0.02)
        assert not router.chosen.any()
    assert spread() < 0.2 * before, (before, spread())
    close(router(x).weights.sum(-1), torch.full((64,), 2.5), 1e-6)  # of which it is no part
    assert not router.selection_bias.requires_grad
    assert "router.selection_bias" in mixture.state_dict()
    assert "router.chosen" not in mixture.state_dict()
    kept = router.selection_bias.clone()
    assert torch.equal(mixture.to(torch.bfloat16).router.selection_bias, kept)  # steps of 1e-3 need float32
    with torch.device("meta"):
        empty = build("deepseek")
    assert not empty.to_empty(device="cpu").router.chosen.any()
    with pytest.raises(RuntimeError, match="update_selection_bias needs a router with selection_bias=True"):
        build().router.update_selection_bias()


# --- modes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mixtral", "biased", "deepseek"])
def test_one_token_no_token_and_no_gradient(name):
    mixture = build(name)
    x = inputs(2, 5)
    with torch.no_grad():
        whole = mixture(x)
        tokens = torch.stack([torch.stack([mixture.eval()(x[b, t]) for t in range(5)]) for b in range(2)])
    close(tokens, whole)
    nothing = torch.zeros(0, 3, DIM, dtype=torch.float64, requires_grad=True)
    y, stats = mixture.train()(nothing, True)
    assert y.shape == (0, 3, DIM)
    (y.sum() + load_balancing_loss(stats) + router_z_loss(stats)).backward()
    assert all(p.grad is not None and not p.grad.any() for p in mixture.parameters())


@pytest.mark.filterwarnings("ignore:backend .* has no kernel yet")
@pytest.mark.parametrize("backend", ["triton", "native"])
def test_backends_agree_with_the_reference(backend):
    x = inputs(3, 3).float().requires_grad_()
    results = []
    for name in (backend, "reference"):
        mixture = build("qwen2", torch.float32, backend=name)
        y = mixture(x)
        results.append([y, *gradients(mixture, y, x).values()])
    for actual, expected in zip(*results, strict=True):
        close(actual, expected, 1e-5)


def test_under_autocast_the_router_stays_in_float32():
    mixture, x = build(dtype=torch.float32), inputs(3, 5).float()
    with torch.autocast("cpu", torch.bfloat16):
        routing, y = mixture.router(x.flatten(0, 1)), mixture(x)
    expected = mixture.router(x.flatten(0, 1))
    assert all(torch.equal(a, b) for a, b in zip(routing, expected, strict=True))
    assert y.dtype == torch.float32
    error = float((y - mixture(x)).detach().abs().max() / mixture(x).detach().abs().max())
    assert 1e-4 < error < 3e-2  # products of bfloat16
    y.sum().backward()
    assert {p.grad.dtype for p in mixture.parameters()} == {torch.float32}
