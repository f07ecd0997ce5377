"""Losses from hidden states, against the formulas of their papers in float64 over all logits: of sequences with and
without tokens, at ratios that overflow float32, and with NaN wherever nothing counts."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from slow import rest_slow
from torch import Tensor

from foundry_kernels import losses
from foundry_kernels.losses import policy, preference

B, T, D, V = 4, 6, 8, 13
Inputs = dict[str, Tensor]
#: Tokens of the four sequences. Those of a pair are the first and the third, the second and the fourth: one lacks its
#: rejected answer; the first lacks both; each lacks another side; there are none.
LENGTHS = ((6, 3, 1, 0), (0, 3, 0, 2), (0, 4, 2, 0), (0, 0, 0, 0))


def inputs(lengths: Sequence[int] = LENGTHS[0]) -> Inputs:
    """Sequences, and what other policies say of them."""
    g = torch.Generator().manual_seed(0)
    target = torch.randint(V, (B, T), generator=g)
    target[torch.arange(T) >= torch.tensor(lengths)[:, None]] = -100
    hidden, weight = torch.randn(B, T, D, generator=g), torch.randn(V, D, generator=g) * 0.5
    near = plain_logps(hidden.double(), weight.double(), target)[0] + 0.3 * torch.randn(B, T, generator=g)
    return {
        "hidden": hidden, "weight": weight, "target": target, "old": near.float(),
        "ref": torch.randn(B, T, generator=g) - 2.0, "advantages": torch.randn(B, generator=g),
        "each": torch.randn(B, T, generator=g), "ref_sums": -8.0 * torch.rand(B, generator=g),
        "good": torch.tensor([True, False, False, True]),
    }  # fmt: skip


def plain_logps(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    log_p = (hidden @ weight.t()).log_softmax(-1)
    mask = target != -100
    return log_p.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1) * mask, mask.double()


def grpo(
    x: Inputs, kind: str, beta: float, sequence: bool = False, high: float = 0.2, delta: float = math.inf,
    advantages: str = "advantages",
) -> Tensor:  # fmt: skip
    """One token after another."""
    logps, mask = plain_logps(x["hidden"], x["weight"], x["target"])
    total, per_sequence = logps.sum() * 0.0, []
    for b in range(B):
        n = int(mask[b].sum())
        mean_ratio = sum((logps[b, t] - x["old"][b, t] for t in range(n)), logps.new_zeros(())) / max(n, 1)
        found = logps.new_zeros(())
        for t in range(n):
            r = torch.exp(mean_ratio if sequence else logps[b, t] - x["old"][b, t])
            a = x[advantages][b] if advantages == "advantages" else x[advantages][b, t]
            loss = -torch.minimum(torch.clamp(r, max=delta) * a, torch.clamp(r, 0.8, 1.0 + high) * a)
            d = x["ref"][b, t] - logps[b, t]
            found = found + (loss + beta * (torch.exp(d) - d - 1.0) if beta else loss)
        total, per_sequence = total + found, [*per_sequence, found / max(n, 1)]
    if kind == "grpo":
        return sum(per_sequence, total * 0.0) / B
    tokens = max(float(mask.sum()), 1.0)
    return total / {"bnpo": tokens, "dapo": tokens, "dr_grpo": B * 9.0, "items": 7.0}[kind]


def sums(x: Inputs, average: bool = False) -> Tensor:
    logps, mask = plain_logps(x["hidden"], x["weight"], x["target"])
    return logps.sum(1) / (mask.sum(1).clamp(min=1.0) if average else 1.0)


def above(x: Inputs, average: bool = False) -> Tensor:
    """Over the reference, of which an answer without tokens has probability 1 too."""
    return sums(x, average) - torch.where((x["target"] != -100).any(1), x["ref_sums"], 0.0)


def pair(x: Inputs, average: bool = False) -> Tensor:
    found = above(x, average)
    return found[:2] - found[2:]


def over_pairs(x: Inputs, each: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The mean of a loss of the means of chosen and rejected tokens over the pairs that have both."""
    some, p = (x["target"] != -100).any(1), sums(x, average=True)
    found = [each(p[i], p[i + 2]) for i in range(2) if some[i] and some[i + 2]]
    return torch.stack(found).mean() if found else p.sum() * 0.0


def log_odds(p: Tensor) -> Tensor:
    return p - torch.log(-torch.expm1(p))


def likelihood(x: Inputs) -> Tensor:
    logps, mask = plain_logps(x["hidden"], x["weight"], x["target"])
    return -logps[:2].sum() / mask[:2].sum().clamp(min=1.0)


def kto(x: Inputs) -> Tensor:
    r = above(x)
    return torch.where(
        x["good"], 1.5 * (1 - torch.sigmoid(0.2 * (r - 0.4))), 0.7 * (1 - torch.sigmoid(0.2 * (0.4 - r)))
    ).mean()


def items(x: Inputs) -> float:
    return max(float((x["target"] != -100).sum()), 1.0)


class Loss:
    """A loss of inputs: names of positional ones, and of options by @name; and what it should be."""

    def __init__(
        self, function: Callable[..., Tensor], plain: Callable[[Inputs], Tensor], *names: str, **options: Any
    ) -> None:
        self.function, self.plain, self.names, self.options = function, plain, names, options

    def __call__(self, x: Inputs, **changes: Any) -> Tensor:
        given = {k: x[v[1:]] if isinstance(v, str) and v.startswith("@") else v for k, v in self.options.items()}
        return self.function(x["hidden"], x["weight"], x["target"], *(x[n] for n in self.names), **(given | changes))


GRPO, DPO = losses.grpo_loss, losses.dpo_loss
OLD: dict[str, Any] = {"old_per_token_logps": "@old"}
BOTH = OLD | {"ref_per_token_logps": "@ref", "beta": 0.04}

LOSSES: dict[str, Loss] = {
    **{
        f"grpo-{kind}": Loss(
            GRPO, lambda x, kind=kind: grpo(x, kind, 0.04), "advantages", loss_type=kind, max_completion_length=9,
            **BOTH,
        )
        for kind in policy.LOSS_TYPES
    },
    "grpo-items": Loss(GRPO, lambda x: grpo(x, "items", 0.04), "advantages", num_items_in_batch=7, **BOTH),
    "grpo-asymmetric": Loss(
        GRPO, lambda x: grpo(x, "dapo", 0.04, False, 0.28, 1.5), "advantages", epsilon_high=0.28, delta=1.5, **BOTH
    ),
    "grpo-each": Loss(GRPO, lambda x: grpo(x, "dapo", 0.0, advantages="each"), "each", **OLD),
    **{
        f"gspo-{names}-{delta}": Loss(
            GRPO, lambda x, names=names, delta=delta: grpo(x, "grpo", 0.0, True, 0.2, delta or math.inf, names), names,
            loss_type="grpo", importance_sampling_level="sequence", delta=delta, **OLD,
        )
        for names in ("advantages", "each")
        for delta in (None, 3.0)
    },
    "gspo-kl": Loss(
        GRPO, lambda x: grpo(x, "grpo", 0.04, True), "advantages", loss_type="grpo",
        importance_sampling_level="sequence", **BOTH,
    ),
    "ppo": Loss(losses.ppo_policy_loss, lambda x: grpo(x, "bnpo", 0.0), "advantages", "old"),
    "ppo-each": Loss(losses.ppo_policy_loss, lambda x: grpo(x, "bnpo", 0.0, advantages="each"), "each", "old"),
    "dpo": Loss(DPO, lambda x: F.softplus(-0.3 * pair(x)).mean(), "ref_sums", beta=0.3),
    "dpo-smoothed": Loss(
        DPO, lambda x: (0.9 * F.softplus(-0.3 * pair(x)) + 0.1 * F.softplus(0.3 * pair(x))).mean(), "ref_sums",
        beta=0.3, label_smoothing=0.1,
    ),
    "ipo": Loss(
        DPO, lambda x: (pair(x, average=True) - 1 / 0.6).square().mean(), "ref_sums", beta=0.3, loss_type="ipo"
    ),
    "hinge": Loss(DPO, lambda x: torch.relu(1 - 0.1 * pair(x)).mean(), "ref_sums", loss_type="hinge"),
    "kto": Loss(
        losses.kto_loss, kto, desirable="@good", ref_logps="@ref_sums", kl=0.4, beta=0.2, desirable_weight=1.5,
        undesirable_weight=0.7,
    ),
    "orpo": Loss(
        losses.orpo_loss,
        lambda x: likelihood(x) + over_pairs(x, lambda c, r: 0.3 * F.softplus(log_odds(r) - log_odds(c))), beta=0.3,
    ),
    "cpo": Loss(
        losses.cpo_loss,
        lambda x: 0.7 * likelihood(x) + F.softplus(0.3 * (sums(x)[2:] - sums(x)[:2])).mean(), beta=0.3, cpo_alpha=0.7,
    ),
    "simpo": Loss(
        losses.simpo_loss, lambda x: over_pairs(x, lambda c, r: F.softplus(0.5 - 2.0 * (c - r))), beta=2.0,
        simpo_gamma=0.5,
    ),
    "sft": Loss(losses.sft_loss, lambda x: -sums(x).sum() / items(x)),
    "sft-items": Loss(losses.sft_loss, lambda x: -sums(x).sum() / 40, num_items_in_batch=40),
}  # fmt: skip
every_loss = pytest.mark.parametrize("name", LOSSES)


def test_every_loss_is_asked() -> None:
    assert {loss.function for loss in LOSSES.values()} == {getattr(losses, name) for name in losses.__all__}
    asked = {value for loss in LOSSES.values() for value in loss.options.values() if isinstance(value, str)}
    assert asked >= {*policy.LOSS_TYPES, "sequence", *preference.DPO_TYPES} - {"sigmoid"}


def of(function: Callable[[Inputs], Tensor], x: Inputs, dtype: torch.dtype) -> list[Tensor]:
    """The loss, and the gradients of hidden states and weight."""
    x = {k: v.to(dtype) if v.is_floating_point() else v for k, v in x.items()}
    leaves = [x[name].clone().requires_grad_() for name in ("hidden", "weight")]
    loss = function(x | dict(zip(("hidden", "weight"), leaves, strict=True)))
    assert loss.shape == ()
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def assert_close(found: Sequence[Tensor], exact: Sequence[Tensor], error: float) -> None:
    for a, e in zip(found, exact, strict=True):
        assert (a.double() - e).abs().max() <= error * max(1.0, float(e.abs().max()))


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_and_gradients(name: str, dtype: torch.dtype) -> None:
    loss = LOSSES[name]
    for lengths in LENGTHS:
        x = inputs(lengths)
        found, exact = of(loss, x, dtype), of(loss.plain, x, torch.float64)
        assert_close(found, exact, 1e-5 if dtype == torch.float32 else 1e-11)
        if lengths == LENGTHS[0]:
            assert all(e.any() for e in exact)
        elif not any(lengths):
            assert not any(gradient.any() for gradient in found[1:])


@every_loss
@pytest.mark.parametrize("value", rest_slow([math.nan, math.inf, -math.inf]))
def test_what_does_not_count_changes_no_bit(name: str, value: float) -> None:
    """Hidden states, log-probabilities and advantages of ignored tokens, and what belongs to sequences without any."""
    for lengths in LENGTHS:
        x = inputs(lengths)
        ignored, expected = x["target"] == -100, of(LOSSES[name], x, torch.float32)
        for each in x.values():
            if each.is_floating_point() and each.shape[:1] == (B,):
                each[ignored.all(1) if each.dim() == 1 else ignored] = value
        assert all(map(torch.equal, of(LOSSES[name], x, torch.float32), expected))


@every_loss
@pytest.mark.parametrize("scale", rest_slow([100.0, 1.0]))
def test_extremes(name: str, scale: float) -> None:
    """Unlikely tokens of each policy, with advantages of either sign, of one and of none. Where the loss is finite, so
    are its gradients, and it is infinite only if it exceeds float32."""
    loss, largest = LOSSES[name], torch.finfo(torch.float32).max
    changeable = [key for key in ("old", "ref", "ref_sums") if key in loss.names or f"@{key}" in loss.options.values()]
    for changed in changeable or ["old"]:
        for value, rows in ((0.0, B), (-30.0, B), (-200.0, B), (-200.0, 1), (-math.inf, 1)):
            for sign in (torch.clone, torch.abs, torch.zeros_like):
                x = inputs()
                x["hidden"] *= scale
                x["advantages"], x["each"] = sign(x["advantages"]), sign(x["each"])
                x[changed][:rows] = value
                found, exact = of(loss, x, torch.float32), of(loss.plain, x, torch.float64)
                assert not found[0].isnan()
                assert found[0].isinf() or all(each.isfinite().all() for each in found)
                if all(each.isfinite().all() for each in exact):
                    if abs(float(exact[0])) > largest:
                        assert found[0].isinf()
                    else:
                        assert_close(found, exact, 1e-4)  # e^60 has 60 times the error of its exponent


def test_odds_of_certain_answers() -> None:
    """Log-probabilities of 0 in float32: chosen, rejected, and both. The odds of 1 in 13 tokens are 1 / 12."""
    target = torch.tensor([[3, 5], [1, 2]])
    certain = 500.0 * F.one_hot(target, V).float()
    most = -math.log(torch.finfo(torch.float32).tiny)
    for scale, expected in (((1, 0), 0.0), ((0, 1), math.log(13) + most + math.log(12)), ((1, 1), math.log(2))):
        x = (certain * torch.tensor(scale)[:, None, None]).requires_grad_()
        loss = losses.orpo_loss(x, torch.eye(V), target, beta=1.0)
        loss.backward()
        assert loss.item() == pytest.approx(expected)
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("count", [0, 0.0, torch.tensor(0), torch.tensor(0.0), torch.tensor([0])], ids=repr)
@pytest.mark.parametrize(
    "function",
    [f for name in losses.__all__ if "num_items_in_batch" in inspect.signature(f := getattr(losses, name)).parameters],
)
def test_a_count_of_nothing(function: Callable[..., Tensor], count: Any) -> None:
    """0 where no token counts. Where one does, the count is wrong, and the loss says so."""
    loss = next(each for each in LOSSES.values() if each.function is function)
    given: dict[str, Any] = {"num_items_in_batch": count} | ({"loss_type": "dapo"} if function is GRPO else {})
    found = of(lambda x: loss(x, **given), inputs(LENGTHS[-1]), torch.float32)
    assert not any(each.any() for each in found)
    assert of(lambda x: loss(x, **given), inputs(), torch.float32)[0].isinf()


@every_loss
def test_no_sequences(name: str) -> None:
    x = {key: value if key == "weight" else value[:0] for key, value in inputs().items()}
    assert not any(each.any() for each in of(LOSSES[name], x, torch.float32))


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
        (losses.grpo_loss, {"loss_type": "dr_grpo", "max_completion_length": 0}, ValueError,
         "max_completion_length must be >= 1; got 0"),
        *(
            (function, {"num_items_in_batch": count}, ValueError, f"num_items_in_batch must be {message}")
            for function in (losses.grpo_loss, losses.sft_loss)
            for count, message in ((-1, "finite and >= 0; got -1"), (torch.ones(2), "one number"))
        ),
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
