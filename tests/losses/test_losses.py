"""Losses from hidden states, against the formulas of their papers in float64 over all logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from foundry_kernels import losses

B, T, D, V = 4, 6, 8, 13


def inputs() -> dict[str, Tensor]:
    """Sequences of 6, 3, 1 and 0 tokens that count, and what other policies say of them."""
    g = torch.Generator().manual_seed(0)
    target = torch.randint(V, (B, T), generator=g)
    for row, n in enumerate((6, 3, 1, 0)):
        target[row, n:] = -100
    hidden, weight = torch.randn(B, T, D, generator=g), torch.randn(V, D, generator=g) * 0.5
    near = plain_logps(hidden.double(), weight.double(), target)[0] + 0.3 * torch.randn(B, T, generator=g)
    return {
        "hidden": hidden, "weight": weight, "target": target, "old": near.float(),
        "ref": torch.randn(B, T, generator=g) - 2.0, "advantages": torch.randn(B, generator=g),
        "each": torch.randn(B, T, generator=g), "ref_sums": -8.0 * torch.rand(B, generator=g),
    }  # fmt: skip


def plain_logps(hidden: Tensor, weight: Tensor, target: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    log_p = (scale * hidden @ weight.t()).log_softmax(-1)
    mask = target != -100
    picked = torch.stack([row.gather(1, t.clamp(min=0)[:, None])[:, 0] for row, t in zip(log_p, target, strict=True)])
    return picked * mask, mask.double()


def grpo(
    x: dict[str, Tensor], kind: str, beta: float, sequence: bool, high: float = 0.2, delta: float = math.inf
) -> Tensor:
    """One token after another."""
    logps, mask = plain_logps(x["hidden"], x["weight"], x["target"])
    total, per_sequence = logps.new_zeros(()), []
    for b in range(B):
        n = int(mask[b].sum())
        mean_ratio = sum((logps[b, t] - x["old"][b, t] for t in range(n)), logps.new_zeros(())) / max(n, 1)
        found = logps.new_zeros(())
        for t in range(n):
            r = torch.exp(mean_ratio if sequence else logps[b, t] - x["old"][b, t])
            a = x["advantages"][b]
            loss = -torch.minimum(torch.clamp(r, max=delta) * a, torch.clamp(r, 0.8, 1.0 + high) * a)
            d = x["ref"][b, t] - logps[b, t]
            found = found + loss + beta * (torch.exp(d) - d - 1.0)
        total, per_sequence = total + found, [*per_sequence, found / max(n, 1)]
    if kind == "grpo":
        return sum(per_sequence, logps.new_zeros(())) / B
    return total / {"bnpo": float(mask.sum()), "dapo": float(mask.sum()), "dr_grpo": B * 9.0, "items": 7.0}[kind]


def sums(x: dict[str, Tensor], average: bool = False) -> Tensor:
    logps, mask = plain_logps(x["hidden"], x["weight"], x["target"])
    return logps.sum(1) / (mask.sum(1).clamp(min=1.0) if average else 1.0)


def log_odds(x: dict[str, Tensor]) -> Tensor:
    p = sums(x, average=True).exp()
    odds = p / (1.0 - p)
    return torch.log(odds[:2] / odds[2:])


def likelihood(x: dict[str, Tensor]) -> Tensor:
    logps, mask = plain_logps(x["hidden"], x["weight"], x["target"])
    return -logps[:2].sum() / mask[:2].sum()


def kto(x: dict[str, Tensor]) -> Tensor:
    r = sums(x) - x["ref_sums"]
    good = torch.tensor([True, False, False, True])
    return torch.where(
        good, 1.5 * (1 - torch.sigmoid(0.2 * (r - 0.4))), 0.7 * (1 - torch.sigmoid(0.2 * (0.4 - r)))
    ).mean()


def call(function: Callable[..., Tensor], *names: str, **options: Any) -> Callable[[dict[str, Tensor]], Tensor]:
    """The loss of inputs: names of positional ones, and of options by @name."""

    def run(x: dict[str, Tensor]) -> Tensor:
        given = {k: x[v[1:]] if isinstance(v, str) and v.startswith("@") else v for k, v in options.items()}
        return function(x["hidden"], x["weight"], x["target"], *(x[n] for n in names), **given)

    return run


_GRPO: dict[str, Any] = {"old_per_token_logps": "@old", "ref_per_token_logps": "@ref", "beta": 0.04}
GOOD = torch.tensor([True, False, False, True])

LOSSES: dict[str, tuple[Callable[[dict[str, Tensor]], Tensor], Callable[[dict[str, Tensor]], Tensor]]] = {
    **{
        f"grpo-{kind}": (
            call(losses.grpo_loss, "advantages", loss_type=kind, max_completion_length=9, **_GRPO),
            lambda x, kind=kind: grpo(x, kind, 0.04, False),
        )
        for kind in ("grpo", "bnpo", "dr_grpo", "dapo")
    },
    "grpo-items": (
        call(losses.grpo_loss, "advantages", num_items_in_batch=7, **_GRPO), lambda x: grpo(x, "items", 0.04, False)
    ),
    "grpo-asymmetric": (
        call(losses.grpo_loss, "advantages", epsilon_high=0.28, delta=1.5, **_GRPO),
        lambda x: grpo(x, "dapo", 0.04, False, 0.28, 1.5),
    ),
    "gspo": (
        call(losses.grpo_loss, "advantages", loss_type="grpo", importance_sampling_level="sequence", **_GRPO),
        lambda x: grpo(x, "grpo", 0.04, True),
    ),
    "ppo": (
        call(losses.ppo_policy_loss, "advantages", "old"), lambda x: grpo(x, "bnpo", 0.0, False)
    ),
    "dpo": (
        call(losses.dpo_loss, "ref_sums", beta=0.3, label_smoothing=0.1),
        lambda x: -(0.9 * torch.sigmoid(0.3 * pair(x)).log() + 0.1 * torch.sigmoid(-0.3 * pair(x)).log()).mean(),
    ),
    "ipo": (
        call(losses.dpo_loss, "ref_sums", beta=0.3, loss_type="ipo"),
        lambda x: (pair(x, average=True) - 1 / 0.6).square().mean(),
    ),
    "hinge": (
        call(losses.dpo_loss, "ref_sums", loss_type="hinge"), lambda x: torch.relu(1 - 0.1 * pair(x)).mean()
    ),
    "kto": (
        call(losses.kto_loss, desirable=GOOD, ref_logps="@ref_sums", kl=0.4, beta=0.2, desirable_weight=1.5,
             undesirable_weight=0.7),
        kto,
    ),
    "orpo": (
        call(losses.orpo_loss, beta=0.3), lambda x: likelihood(x) - 0.3 * torch.log(torch.sigmoid(log_odds(x))).mean()
    ),
    "cpo": (
        call(losses.cpo_loss, beta=0.3, cpo_alpha=0.7),
        lambda x: 0.7 * likelihood(x) - torch.log(torch.sigmoid(0.3 * (sums(x)[:2] - sums(x)[2:]))).mean(),
    ),
    "simpo": (
        call(losses.simpo_loss, beta=2.0, simpo_gamma=0.5),
        lambda x: -torch.log(torch.sigmoid(2.0 * (sums(x, True)[:2] - sums(x, True)[2:]) - 0.5)).mean(),
    ),
    "sft": (call(losses.sft_loss), lambda x: -sums(x).sum() / 10),
    "sft-items": (call(losses.sft_loss, num_items_in_batch=40), lambda x: -sums(x).sum() / 40),
}  # fmt: skip


def pair(x: dict[str, Tensor], average: bool = False) -> Tensor:
    above = sums(x, average) - x["ref_sums"]
    return above[:2] - above[2:]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_and_gradients(name: str, dtype: torch.dtype) -> None:
    ours, plain = LOSSES[name]
    given = inputs()
    if name in ("orpo", "simpo"):  # of a sequence without tokens the plain odds are infinite
        given["target"][3, 0] = 5
    results = []
    for function, kind in ((ours, dtype), (plain, torch.float64)):
        x = {k: v.to(kind) if v.is_floating_point() else v for k, v in given.items()}
        leaves = [x["hidden"].requires_grad_(), x["weight"].requires_grad_()]
        loss = function(x)
        results.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    error = 1e-5 if dtype == torch.float32 else 1e-11
    for a, e in zip(*results, strict=True):
        assert (a.double() - e).abs().max() <= error * max(1.0, float(e.abs().max()))
        assert e.abs().max() > 0


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo"])
def test_nothing_that_counts_is_a_loss_of_0(loss_type: str) -> None:
    x = inputs()
    hidden = x["hidden"].requires_grad_()
    loss = losses.grpo_loss(hidden, x["weight"], torch.full((B, T), -100), x["advantages"], loss_type=loss_type)
    loss.backward()
    assert loss == 0.0
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))


def test_values_of_ignored_tokens_do_not_matter() -> None:
    x = inputs()
    for name in ("old", "ref"):
        x[name][x["target"] == -100] = 1e4
    ours, plain = LOSSES["grpo-dapo"]
    torch.testing.assert_close(
        ours(x), plain({k: v.double() if v.is_floating_point() else v for k, v in x.items()}).float()
    )


@pytest.mark.parametrize(
    ("function", "changes", "error", "message"),
    [
        (losses.grpo_loss, {"loss_type": "rloo"}, ValueError, "loss_type must be one of grpo, bnpo"),
        (losses.grpo_loss, {"loss_type": "dr_grpo"}, ValueError, "'dr_grpo' needs max_completion_length"),
        (losses.grpo_loss, {"beta": 0.1}, ValueError, "beta=0.1 needs ref_per_token_logps"),
        (losses.grpo_loss, {"advantages": torch.zeros(3)}, ValueError, "advantages must have shape"),
        (losses.grpo_loss, {"old_per_token_logps": torch.zeros(B, 2)}, ValueError, "old_per_token_logps must have"),
        (losses.grpo_loss, {"importance_sampling_level": "word"}, ValueError, "importance_sampling_level must be one"),
        (losses.grpo_loss, {"epsilon": -0.1}, ValueError, "epsilon must"),
        (losses.grpo_loss, {"hidden": torch.zeros(T, D), "target": torch.zeros(T, dtype=torch.int64)}, ValueError,
         r"hidden must be \[B, T, D\]"),
        (losses.dpo_loss, {"loss_type": "kto", "ref_logps": None}, ValueError, "loss_type must be one of sigmoid"),
        (losses.dpo_loss, {"ref_logps": torch.zeros(3)}, ValueError, "ref_logps must have shape"),
        (losses.dpo_loss, {"ref_logps": None, "beta": 0.0}, ValueError, "beta must"),
        (losses.simpo_loss, {"hidden": torch.zeros(3, T, D), "target": torch.zeros(3, T).long()}, ValueError,
         "hidden must hold as many rejected sequences as chosen ones before them; got 3"),
        (losses.kto_loss, {"desirable": torch.ones(B), "ref_logps": torch.zeros(B)}, TypeError, "desirable must be"),
        (losses.sft_loss, {"num_items_in_batch": 0}, ValueError, "num_items_in_batch must be positive"),
    ],
)  # fmt: skip
def test_bad_input(
    function: Callable[..., Tensor], changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    x = inputs()
    given: dict[str, Any] = {n: x[n] for n in ("hidden", "weight", "target")}
    if function is losses.grpo_loss:
        given["advantages"] = x["advantages"]
    with pytest.raises(error, match=message):
        function(**(given | changes))
