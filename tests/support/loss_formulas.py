"""Losses by the formulas of their papers, over all logits, one token or pair after another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from distillation_formula import distilled
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
        "ref_means": -2.0 * torch.rand(B, generator=g),
        "good": torch.tensor([True, False, False, True]), "ratios": 0.5 + torch.rand(B, T, generator=g),
        "ref_each": torch.randn(B, T, generator=g) - 2.0, "pair_weights": torch.rand(B // 2, generator=g),
        "nll": torch.randint(V, (B, T), generator=g).masked_fill_(target != -100, 0)
        .add_(target.clamp(min=0)).masked_fill_((target == -100) & (torch.arange(T) == T - 1), -100),
        "teacher": torch.randn(B, T, D + 3, generator=g), "teacher_weight": torch.randn(V, D + 3, generator=g) * 0.5,
        "ids": torch.rand(B, T, V, generator=g).topk(3)[1],
        "listed": torch.randn(B, T, 4, generator=g).log_softmax(-1)[..., :3],
    }  # fmt: skip


def plain_logps(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    log_p = (hidden @ weight.t()).log_softmax(-1)
    mask = target != -100
    return log_p.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1) * mask, mask.double()


def plain_entropies(x: Inputs) -> Tensor:
    p = (x["hidden"] @ x["weight"].t()).softmax(-1)
    return -(p * p.log()).sum(-1)


def clip(r: Tensor, low: float, high: float) -> Tensor:
    return torch.clamp(r, low, high)


def surrogate(kind: str, r: Tensor, a: Tensor, logp: Tensor, high: float, delta: float) -> Tensor:
    """What one token adds, by its importance weight, advantage and log-probability."""
    if kind == "cispo":
        return -torch.clamp(r, max=high).detach() * a * logp
    if kind == "sapo":
        t = 1.0 if a > 0 else 1.05
        return -a * torch.sigmoid(t * (r - 1.0)) * 4.0 / t
    if kind == "vespo":
        k, rate = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
        return -(math.exp(rate) * r**k * torch.exp(-rate * r)).detach() * a * logp
    if kind == "gmpo":  # r is clipped
        return -r * a
    return -torch.minimum(torch.clamp(r, max=delta) * a, torch.clamp(r, 0.8, 1.0 + high) * a)


def grpo(
    x: Inputs, kind: str, beta: float, level: str = "token", high: float = 0.2, delta: float = math.inf,
    advantages: str = "advantages", kl: str = "k3", keep: Tensor | None = None, steps: int = 1,
    ratios: Tensor | None = None, bonus: float = 0.0,
) -> Tensor:  # fmt: skip
    """One token after another. `keep`: which of them have a policy loss."""
    logps, mask = plain_logps(x["hidden"], x["weight"], x["target"])
    total, per_sequence = logps.sum() * 0.0, []
    for b in range(B):
        n = int(mask[b].sum())
        each_ratio = [logps[b, t] - x["old"][b, t] for t in range(n)]
        acting = [t for t in range(n) if keep is None or keep[b, t]]
        found = logps.new_zeros(())
        for t in range(n):
            a = x[advantages][b] if advantages == "advantages" else x[advantages][b, t]
            log_r = each_ratio[t]
            if level == "sequence":
                log_r = sum(each_ratio) / n
            elif level == "sequence_token":
                log_r = sum(each_ratio).detach() / n + logps[b, t] - logps[b, t].detach()
            elif kind == "rloo":
                log_r = sum(each_ratio)
            elif kind == "vespo":
                log_r = sum(torch.clamp(each, -20.0, 20.0) for each in each_ratio)
                log_r = log_r if ratios is None else log_r + sum(torch.log(ratios[b, s]) for s in range(n))
                log_r = torch.clamp(log_r, math.log(1e-8), 20.0)
            elif kind == "gmpo":
                clipped = [torch.clamp(each_ratio[s], max=high) if a > 0 else torch.clamp(each_ratio[s], min=-0.2)
                           for s in acting]  # fmt: skip
                log_r = sum(clipped, logps.new_zeros(())) / max(len(acting), 1)
            r, d = torch.exp(log_r), x["ref"][b, t] - logps[b, t]
            if t in acting or kind == "gmpo":
                loss = surrogate(kind, r, a, logps[b, t], high, delta)
                found = found + (loss if ratios is None or kind == "vespo" else loss * ratios[b, t])
            if beta:
                k3 = torch.exp(d) - d - 1.0
                found = found + beta * {"k1": -d, "k2": d * d / 2.0, "k3": k3, "unbiased": k3 * r}[kl]
        total, per_sequence = total + found, [*per_sequence, found / max(n, 1)]
    tokens = max(float(mask.sum()), 1.0)
    if kind in ("grpo", "sapo", "gmpo", "rloo"):
        loss = sum(per_sequence, total * 0.0) / B / steps
    else:
        by = {"bnpo": tokens * steps, "dr_grpo": B * 9.0 * steps, "items": 7.0, "luspo": B * steps}
        loss = total / by.get(kind, tokens)
    if bonus:
        which = (mask > 0) if keep is None else keep
        loss = loss - bonus * torch.where(which, plain_entropies(x), 0.0).sum() / max(int(which.sum()), 1) / steps
    return loss


def of_top_entropy(x: Inputs, part: float) -> Tensor:
    counts, found = x["target"] != -100, plain_entropies(x).detach()
    some = found[counts]
    return counts & (found >= (torch.quantile(some, 1.0 - part) if len(some) else 0.0))


def on_policy(x: Inputs, most: float) -> Tensor:
    """The tokens of the sequences that an off-policy mask keeps."""
    logps, mask = plain_logps(x["hidden"], x["weight"], x["target"])
    drift = (torch.where(mask > 0, x["old"] - logps, 0.0).sum(1) / mask.sum(1).clamp(min=1.0)).detach()
    return (mask > 0) & ((x["advantages"] >= 0) | (drift <= most))[:, None]


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


def by_token(x: Inputs, average: bool = False) -> Tensor:
    """Over a reference whose log-probabilities are given for each token."""
    logps, mask = plain_logps(x["hidden"], x["weight"], x["target"])
    found = torch.where(mask > 0, logps - x["ref_each"], 0.0).sum(1) / (mask.sum(1).clamp(min=1.0) if average else 1.0)
    return found[:2] - found[2:]


def shortened(x: Inputs, alpha: float) -> Tensor:
    logps, mask = plain_logps(x["hidden"], x["weight"], x["target"])
    found = []
    for b in range(B):
        both = min(int(mask[b].sum()), int(mask[(b + 2) % 4].sum()))
        each = [(logps[b, t] - x["ref_each"][b, t]) * (1.0 if t < both else alpha) for t in range(int(mask[b].sum()))]
        found.append(sum(each, logps[b].sum() * 0.0))
    return torch.stack(found[:2]) - torch.stack(found[2:])


def divided(x: Inputs, divergence: str) -> Tensor:
    s = above(x)
    found = {
        "forward_kl": lambda: 1.0 - torch.exp(torch.clamp(-s, max=80.0)),
        "js_divergence": lambda: math.log(2.0) + F.logsigmoid(s),
        "alpha_divergence": lambda: (torch.exp(torch.clamp(-0.4 * s, max=80.0)) - 1.0) / -0.4,
    }[divergence]()
    return found[:2] - found[2:]


def dpo_of(x: Inputs, name: str) -> Tensor:
    """The mean over the pairs, by the formulas of the papers."""
    if name == "sft":
        return likelihood(x)
    s, e, beta = above(x), 0.1, 0.3
    win, lose = beta * s[:2], beta * s[2:]
    h, sp = win - lose, F.softplus
    if name == "sigmoid_norm":
        some, lengths = (x["target"] != -100).any(1), (x["target"] != -100).sum(1).clamp(min=1)
        m = torch.where(some, sums(x) / lengths - x["ref_means"], 0.0)
        return sp(-beta * (m[:2] - m[2:])).mean()
    if name == "aot":
        counts = (x["target"] != -100).any(1)
        ref, p = torch.where(counts, x["ref_sums"], 0.0), sums(x)
        h = beta * ((p[:2] - p[2:]).sort()[0] - (ref[:2] - ref[2:]).sort()[0])
    if name == "aot_unpaired":
        h = win.sort()[0] - lose.sort()[0]
    q = torch.sigmoid(h)
    return {
        "exo_pair": lambda: q * (-sp(-h) - math.log(1 - e)) + (1 - q) * (-sp(h) - math.log(e)),
        "nca_pair": lambda: sp(-win) + 0.5 * sp(win) + 0.5 * sp(lose),
        "robust": lambda: ((1 - e) * sp(-h) - e * sp(h)) / (1 - 2 * e),
        "bco_pair": lambda: sp(-win) + sp(lose),
        "sppo_hard": lambda: (s[:2] - 0.5 / beta) ** 2 + (s[2:] + 0.5 / beta) ** 2,
        "aot": lambda: (1 - e) * sp(-h) + e * sp(h),
        "aot_unpaired": lambda: (1 - e) * sp(-h) + e * sp(h),
        "apo_zero": lambda: 1 - torch.sigmoid(win) + torch.sigmoid(lose),
        "apo_down": lambda: torch.sigmoid(win) + 1 - torch.sigmoid(win - lose),
        "discopop": lambda: sp(-h) * (1 - torch.sigmoid(h / 0.5)) + torch.exp(-h) * torch.sigmoid(h / 0.5),
    }[name]().mean()


def log_odds(p: Tensor) -> Tensor:
    return p - torch.log(-torch.expm1(p))


def alpha_of(log_p: Tensor) -> Tensor:
    return (1.0 - torch.exp(torch.clamp(-0.25 * log_p, max=80.0))) / 0.25


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

    def given(self, x: Inputs) -> dict[str, Any]:
        return {k: x[v[1:]] if isinstance(v, str) and v.startswith("@") else v for k, v in self.options.items()}

    def __call__(self, x: Inputs, **changes: Any) -> Any:
        given = self.given(x) | changes
        return self.function(x["hidden"], x["weight"], x["target"], *(x[n] for n in self.names), **given)


GRPO, DPO = losses.grpo_loss, losses.dpo_loss
OLD: dict[str, Any] = {"old_per_token_logps": "@old"}
BOTH = OLD | {"ref_per_token_logps": "@ref", "beta": 0.04}

LOSSES: dict[str, Loss] = {
    **{
        f"grpo-{kind}": Loss(
            GRPO, lambda x, kind=kind: grpo(x, kind, 0.04, high=1.5 if kind == "cispo" else 0.2), "advantages",
            loss_type=kind, max_completion_length=9, epsilon_high=1.5 if kind == "cispo" else 0.2, **BOTH,
        )
        for kind in policy.LOSS_TYPES
    },
    **{
        f"grpo-kl-{kl}": Loss(GRPO, lambda x, kl=kl: grpo(x, "bnpo", 0.3, kl=kl), "advantages", loss_type="bnpo",
                              kl_estimator=kl, **BOTH | {"beta": 0.3})
        for kl in ("k1", "k2", "unbiased")
    },
    **{
        f"grpo-entropy-{kind}": Loss(
            GRPO, lambda x, kind=kind: grpo(x, kind, 0.04, keep=of_top_entropy(x, 0.4), steps=3, bonus=0.2),
            "advantages", loss_type=kind, top_entropy_quantile=0.4, gradient_accumulation_steps=3, entropy_coef=0.2,
            **BOTH,
        )
        for kind in ("bnpo", "gmpo")
    },
    "grpo-off-policy": Loss(
        GRPO, lambda x: grpo(x, "grpo", 0.0, keep=on_policy(x, 0.0)), "advantages", loss_type="grpo",
        off_policy_mask_threshold=0.0, **OLD,
    ),
    "gspo-token": Loss(
        GRPO, lambda x: grpo(x, "grpo", 0.0, "sequence_token", advantages="each"), "each", loss_type="grpo",
        importance_sampling_level="sequence_token", **OLD,
    ),
    **{
        f"{kind}-corrected": Loss(
            GRPO, lambda x, kind=kind: grpo(x, kind, 0.0, ratios=x["ratios"]), "advantages", loss_type=kind,
            importance_sampling_ratio="@ratios", **OLD,
        )
        for kind in ("dapo", "vespo")
    },
    "grpo-items": Loss(GRPO, lambda x: grpo(x, "items", 0.04), "advantages", num_items_in_batch=7, **BOTH),
    "grpo-asymmetric": Loss(
        GRPO, lambda x: grpo(x, "dapo", 0.04, "token", 0.28, 1.5), "advantages", epsilon_high=0.28, delta=1.5, **BOTH
    ),
    "grpo-each": Loss(GRPO, lambda x: grpo(x, "dapo", 0.0, advantages="each"), "each", **OLD),
    **{
        f"gspo-{names}-{delta}": Loss(
            GRPO, lambda x, names=names, delta=delta: grpo(x, "grpo", 0.0, "sequence", 0.2, delta or math.inf, names),
            names,
            loss_type="grpo", importance_sampling_level="sequence", delta=delta, **OLD,
        )
        for names in ("advantages", "each")
        for delta in (None, 3.0)
    },
    "gspo-kl": Loss(
        GRPO, lambda x: grpo(x, "grpo", 0.04, "sequence"), "advantages", loss_type="grpo",
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
    **{
        f"dpo-{name}": Loss(
            DPO, lambda x, name=name: dpo_of(x, name), "ref_means" if name == "sigmoid_norm" else "ref_sums", beta=0.3,
            loss_type=name, label_smoothing=0.1 if name in preference.SMOOTHED else 0.0, discopop_tau=0.5,
        )
        for name in preference.DPO_TYPES
        if name not in ("sigmoid", "ipo", "hinge")
    },
    **{
        f"dpo-{name}": Loss(
            DPO, lambda x, name=name: F.softplus(-0.3 * divided(x, name)).mean(), "ref_sums", beta=0.3,
            f_divergence_type=name, f_alpha_divergence_coef=0.6,
        )
        for name in ("forward_kl", "js_divergence", "alpha_divergence")
    },
    "ld-dpo": Loss(DPO, lambda x: F.softplus(-0.3 * shortened(x, 0.4)).mean(), "ref_each", beta=0.3, ld_alpha=0.4),
    "mpo-weighted": Loss(
        DPO, lambda x: (x["pair_weights"] * (
            0.8 * F.softplus(-0.3 * by_token(x)) + 0.2 * (by_token(x, True) - 1 / 0.6).square() + likelihood(x)
        )).mean(), "ref_each", beta=0.3, loss_type=("sigmoid", "ipo", "sft"), loss_weights=(0.8, 0.2, 1.0),
        pair_weights="@pair_weights",
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
    **{
        f"cpo-{name}": Loss(losses.cpo_loss, plain, beta=0.4, cpo_alpha=0.0, loss_type=name, **more)
        for name, plain, more in (
            ("hinge", lambda x: torch.relu(1 - 0.4 * (sums(x)[:2] - sums(x)[2:])).mean(), {}),
            ("ipo", lambda x: over_pairs(x, lambda c, r: (c - r - 1 / 0.8).square()), {}),
            ("simpo", lambda x: over_pairs(
                x, lambda c, r: 0.9 * F.softplus(0.5 - 0.4 * (alpha_of(c) - alpha_of(r)))
                + 0.1 * F.softplus(0.4 * (alpha_of(c) - alpha_of(r)) - 0.5)), {"label_smoothing": 0.1, "alpha": 0.25}),
        )
    },
    "orpo-nll": Loss(
        losses.orpo_loss,
        lambda x: likelihood(x | {"target": x["nll"]})
        + over_pairs(x, lambda c, r: 0.3 * F.softplus(log_odds(r) - log_odds(c))), beta=0.3, nll_target="@nll",
    ),
    "apo-unpaired": Loss(
        losses.kto_loss, lambda x: torch.where(x["good"], torch.sigmoid(-0.2 * above(x)),
                                               torch.sigmoid(0.2 * above(x))).mean(),
        desirable="@good", ref_logps="@ref_sums", kl=0.4, beta=0.2, loss_type="apo_zero_unpaired",
    ),
    "simpo": Loss(
        losses.simpo_loss, lambda x: over_pairs(x, lambda c, r: F.softplus(0.5 - 2.0 * (c - r))), beta=2.0,
        simpo_gamma=0.5,
    ),
    **{
        f"gkd-{kind}-{beta}": Loss(
            losses.gkd_loss, lambda x, kind=kind, beta=beta: distilled(x, kind, beta), "teacher", "teacher_weight",
            beta=beta, direction="jsd" if kind != "tvd" else "tvd",
        )
        for kind, beta in (("jsd", 0.5), ("forward", 0.0), ("reverse", 1.0), ("tvd", 0.5))
    },
    "gkd-capped": Loss(
        losses.gkd_loss, lambda x: distilled(x, "jsd", 0.3, 1.7, (2.0, 3.0), (0.8, 1.3), 40), "teacher",
        "teacher_weight", beta=0.3, temperature=1.7, softcap=2.0, teacher_softcap=3.0, logit_scale=0.8,
        teacher_logit_scale=1.3, num_items_in_batch=40,
    ),
    **{
        f"gkd-listed-{kind}-{tail}": Loss(
            losses.gkd_loss, lambda x, kind=kind, tail=tail: distilled(x, kind, tail=tail), teacher_ids="@ids",
            teacher_log_probs="@listed", direction=kind, add_tail=tail,
        )
        for kind in ("forward", "reverse", "jsd", "tvd")
        for tail in (True, False)
    },
    "sft": Loss(losses.sft_loss, lambda x: -sums(x).sum() / items(x)),
    "sft-items": Loss(losses.sft_loss, lambda x: -sums(x).sum() / 40, num_items_in_batch=40),
}  # fmt: skip
