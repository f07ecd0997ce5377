"""`fk.losses` and `fk.compat` against TRL's own: the loss methods of its trainers are called on small tensors, with
log-probabilities that TRL's functions compute from plain logits. Values, and gradients of hidden states and head."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.integrations.adapters.tiny import tiny_model
from foundry_kernels.integrations.trainers import trl_head
from foundry_kernels.losses import policy, preference

trl = pytest.importorskip("trl")

# ruff: noqa: E402
from trl.trainer import utils

B, T, D, V = 6, 9, 16, 37
GENERATOR = torch.Generator().manual_seed(0)
HIDDEN, WEIGHT = torch.randn(B, T, D, generator=GENERATOR), torch.randn(V, D, generator=GENERATOR) * 0.4
TOKENS = torch.randint(V, (B, T), generator=GENERATOR)
LENGTHS = torch.tensor([9, 4, 6, 1, 8, 5])
MASK = (torch.arange(T) < LENGTHS[:, None]).long()
TARGETS = TOKENS.masked_fill(MASK == 0, -100)
OLD, REFERENCE = (-3.5 + torch.randn(B, T, generator=GENERATOR) for _ in range(2))
ADVANTAGES = torch.tensor([1.0, -1.0, 0.4, 2.0, -0.3, -1.5])


def compare(ours: Callable[[Tensor, Tensor], Tensor], theirs: Callable[[Tensor, Tensor], Tensor]) -> None:
    """`ours` and `theirs` of hidden states and head: the loss and its gradients."""
    found = []
    for of in (ours, theirs):
        leaves = HIDDEN.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
        loss = of(*leaves)
        found.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    assert float(found[1][1].norm()) > 0
    for name, actual, expected in zip(("loss", "hidden", "weight"), *found, strict=True):
        atol = 1e-6 * max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


def log_probs_of(hidden: Tensor, weight: Tensor, temperature: float = 1.0) -> Tensor:
    return utils.selective_log_softmax(hidden @ weight.T, TOKENS, temperature)


class Accelerator(SimpleNamespace):
    """One process."""

    device, num_processes, sync_gradients = torch.device("cpu"), 1, True

    def gather(self, x: Any) -> Any:
        return x

    gather_for_metrics = gather

    def reduce(self, x: Tensor, reduction: str) -> Tensor:
        return x

    def pad_across_processes(self, x: Tensor, dim: int, pad_index: float) -> Tensor:
        return x


def trainer(**fields: Any) -> Any:
    """What stands for a trainer in a call of one of its methods."""
    common = {"accelerator": Accelerator(), "model": SimpleNamespace(training=True), "aux_loss_enabled": False}
    metrics: dict[str, Any] = {"train": defaultdict(list)}
    return SimpleNamespace(**common, _metrics=metrics, _total_train_tokens=0, _tp_size=1, **fields)


# --- functions of logits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("several", [False, True])
def test_functions_of_logits(several: bool) -> None:
    """TRL rounds to bfloat16 in between: there, ours are nearer to the results of float64 logits."""
    index = torch.randint(V, (B, T, 3) if several else (B, T), generator=GENERATOR)
    mask = MASK.unsqueeze(-1).expand(index.shape) if several else MASK
    for given in ({}, {"temperature": 0.7}, {"row_mask": mask}):
        exact = _of_logits(utils, torch.float64, index, given)
        ours, theirs = (_of_logits(module, torch.float32, index, given) for module in (fk.compat, utils))
        for actual, expected in zip(ours, theirs, strict=True):
            assert actual.dtype == expected.dtype
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        ours, theirs = (_of_logits(module, torch.bfloat16, index, given) for module in (fk.compat, utils))
        for actual, expected, e in zip(ours, theirs, exact, strict=True):
            assert actual.dtype == expected.dtype == torch.bfloat16
            assert 0 < (actual - e).norm() <= 1.02 * (expected - e).norm()


def _of_logits(module: Any, dtype: torch.dtype, index: Tensor, given: dict[str, Any]) -> tuple[Tensor, ...]:
    """The results of the two functions, and the gradient of the logits, which are bfloat16 numbers."""
    logits = (HIDDEN @ WEIGHT.T).bfloat16().to(dtype).requires_grad_()
    picked, entropy = module.selective_log_softmax(logits, index, **given), module.entropy_from_logits(logits, 4)
    loss = (picked.sum(-1) if picked.dim() == 3 else picked).sum() + (2 * entropy).sum()
    return picked.detach(), entropy.detach(), *torch.autograd.grad(loss, logits)


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
def test_the_handle_and_the_head_that_trl_adds(family: str) -> None:
    """Of a model with both, also with a soft cap and a scale; TRL's results begin with the second token."""
    changes = {"gemma2": {"final_logit_softcapping": 2.0}, "granite": {"logits_scaling": 4.0}}.get(family, {})
    model = tiny_model(family, **changes)
    ids = torch.randint(3, 128, (2, 12), generator=GENERATOR)
    labels = ids.clone()
    labels[:, 6:9] = model(ids).logits[:, 5:8].argmax(-1)
    labels[0, :5] = labels[1, 9:] = -100
    names = ("log_probs", *trl_head.RESULTS)
    with fk.patch(model) as handle:
        expected = handle.log_probs(ids, labels, return_entropy=True, temperature=0.8)
        utils.add_fused_lm_head(model, temperature=0.8, outputs=names)
        found = []
        for head in (nullcontext(), trl_head.head_in_trl("native")):
            with head:
                out = model(ids, labels=labels, fused_lm_head=True)
                assert isinstance(utils._ChunkedLogProbFunction, trl_head.Head) == (len(found) == 1)
            model.zero_grad()
            (out.loss + 0.1 * out.entropy.sum()).backward()
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            found.append({name: out[name] for name in names} | gradients)
        assert found[0]["is_top1"].any()
        for name, theirs in found[0].items():
            torch.testing.assert_close(found[1][name], theirs, rtol=1e-4, atol=1e-5, msg=name)
        for actual, name in zip(expected, names, strict=False):
            torch.testing.assert_close(actual[:, -11:], found[0][name][:, -11:], rtol=1e-5, atol=1e-5)
        assert all(map(torch.equal, handle.log_probs(ids, labels, return_entropy=True, temperature=0.8), expected))
        del model.forward  # TRL's, on the instance


# --- GRPO -------------------------------------------------------------------------------------------------------------

RATIOS = torch.rand(B, T, generator=GENERATOR) + 0.5
ENTROPIES = torch.rand(B, T, generator=GENERATOR)
#: TRL's settings that are not the defaults of a case.
POLICY: dict[str, Any] = {
    "epsilon": 0.2, "epsilon_high": 0.2, "delta": None, "beta": 0.0, "importance_sampling_level": "token",
    "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "entropy_coef": 0.0,
    "use_bias_correction_kl": False,
    "gradient_accumulation_steps": 1, "items": None, "ratios": None, "old": OLD, "advantages": ADVANTAGES,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "plain": {}, "own": {"old": None}, "kl": {"beta": 0.04}, "two-sided": {"delta": 1.5, "epsilon": 0.1},
    "sequence": {"importance_sampling_level": "sequence", "beta": 0.1}, "each": {"advantages": OLD.flip(0)},
    "sequence-two-sided": {"importance_sampling_level": "sequence", "delta": 2.0},
    "unbiased": {"beta": 0.1, "use_bias_correction_kl": True}, "corrected": {"ratios": RATIOS},
    "entropy": {"top_entropy_quantile": 0.3, "entropy_coef": 0.2, "beta": 0.1},
    "off-policy": {"off_policy_mask_threshold": 0.1}, "accumulated": {"gradient_accumulation_steps": 4},
    "items": {"items": torch.tensor(80.0)},
}  # fmt: skip
TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")


def grpo_of_trl(log_p: Tensor, loss_type: str, given: dict[str, Any]) -> tuple[Tensor, dict[str, list[float]]]:
    args = SimpleNamespace(
        delta=given["delta"], use_bias_correction_kl=given["use_bias_correction_kl"],
        steps_per_generation=given["gradient_accumulation_steps"], sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
        vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
    )  # fmt: skip
    stand_in = trainer(
        args=args, _get_per_token_logps_and_entropies=lambda *_, **__: (log_p, ENTROPIES, None), loss_type=loss_type,
        epsilon_low=given["epsilon"], use_vllm=given["ratios"] is not None, vllm_importance_sampling_correction=True,
        max_completion_length=12, current_gradient_accumulation_steps=given["gradient_accumulation_steps"],
        _entropy_bonus_enabled=given["entropy_coef"] != 0.0, use_adaptive_entropy=False,
        **{k: given[k] for k in ("top_entropy_quantile", "off_policy_mask_threshold", "importance_sampling_level",
                                 "beta", "epsilon_high", "entropy_coef")},
    )  # fmt: skip
    for name in ("get_high_entropy_mask", "get_off_policy_mask", "get_gamma_weights"):
        method = getattr(trl.GRPOTrainer, name)
        setattr(stand_in, name, partial(method, stand_in) if name == "get_high_entropy_mask" else method)
    inputs = {
        "prompt_ids": TOKENS[:, :2], "prompt_mask": MASK[:, :2], "completion_ids": TOKENS, "completion_mask": MASK,
        "advantages": given["advantages"], "old_per_token_logps": given["old"], "ref_per_token_logps": REFERENCE,
        "num_items_in_batch": MASK.sum() if given["items"] is None else given["items"],
    }  # fmt: skip
    if given["ratios"] is not None:
        inputs["importance_sampling_ratio"] = given["ratios"] * MASK
    return trl.GRPOTrainer._compute_loss(stand_in, None, inputs), stand_in._metrics["train"]


@pytest.mark.parametrize("loss_type", TYPES)
@pytest.mark.parametrize("case", CASES)
def test_grpo(loss_type: str, case: str) -> None:
    """Of log-probabilities, with the metrics; and of hidden states, where no entropies are asked for."""
    given = POLICY | CASES[case] | ({"epsilon_high": 1.5} if loss_type == "cispo" else {})
    if loss_type == "vespo":
        given["importance_sampling_level"] = "token"  # which it is whatever is asked for
    if loss_type in ("cispo", "sapo", "vespo"):
        given["delta"] = None  # which they do not read
    if loss_type == "vespo" and given["ratios"] is not None:
        pytest.skip("TRL adds the logarithm of a padding token's weight, 0, to its sequence's")
    names = ("epsilon", "epsilon_high", "delta", "beta", "importance_sampling_level", "top_entropy_quantile",
             "off_policy_mask_threshold", "entropy_coef", "gradient_accumulation_steps")  # fmt: skip
    options = {name: given[name] for name in names} | {
        "old_per_token_logps": given["old"], "ref_per_token_logps": REFERENCE, "loss_type": loss_type,
        "kl_estimator": "unbiased" if given["use_bias_correction_kl"] else "k3", "max_completion_length": 12,
        "num_items_in_batch": given["items"], "importance_sampling_ratio": given["ratios"],
    }  # fmt: skip
    leaves, reported = [log_probs_of(HIDDEN, WEIGHT).requires_grad_() for _ in range(2)], None
    theirs, logged = grpo_of_trl(leaves[0], loss_type, given)
    reported = policy.grpo(leaves[1], MASK, given["advantages"], entropies=ENTROPIES, return_metrics=True, **options)
    torch.testing.assert_close(reported.loss, theirs)
    gradients = [torch.autograd.grad(loss, leaf)[0] for loss, leaf in zip((theirs, reported.loss), leaves, strict=True)]
    torch.testing.assert_close(gradients[1], gradients[0] * MASK, rtol=1e-5, atol=1e-7)
    pairs = {
        f"clip_ratio/{n}": f"clip_ratio_{n}" for n in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")
    }
    pairs |= {"kl": "kl", "entropy": "entropy", "cispo_clip_ratio": "clip_ratio_high_mean"}
    for key, name in pairs.items():
        if logged.get(key):
            assert float(getattr(reported, name)) == pytest.approx(logged[key][0], rel=1e-5, abs=1e-7), key
    if not given["entropy_coef"] and given["top_entropy_quantile"] == 1.0:
        compare(
            lambda hidden, weight: fk.losses.grpo_loss(hidden, weight, TARGETS, given["advantages"], **options),
            lambda hidden, weight: grpo_of_trl(log_probs_of(hidden, weight), loss_type, given)[0],
        )


def test_grpo_at_a_temperature() -> None:
    compare(
        lambda hidden, weight: fk.losses.grpo_loss(
            hidden, weight, TARGETS, ADVANTAGES, old_per_token_logps=OLD, logit_scale=1 / 0.7
        ),
        lambda hidden, weight: grpo_of_trl(log_probs_of(hidden, weight, 0.7), "dapo", POLICY)[0],
    )


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_gmpo(beta: float) -> None:
    gmpo = pytest.importorskip("trl.experimental.gmpo")

    def theirs(hidden: Tensor, weight: Tensor) -> Tensor:
        log_p = log_probs_of(hidden, weight)
        stand_in = trainer(
            _get_per_token_logps_and_entropies=lambda *_, **__: (log_p, ENTROPIES, None), top_entropy_quantile=1.0,
            beta=beta, epsilon_low=0.4, epsilon_high=0.3, current_gradient_accumulation_steps=1,
        )  # fmt: skip
        inputs = {
            "prompt_ids": TOKENS[:, :2], "prompt_mask": MASK[:, :2], "completion_ids": TOKENS, "completion_mask": MASK,
            "advantages": ADVANTAGES, "old_per_token_logps": OLD, "ref_per_token_logps": REFERENCE,
        }  # fmt: skip
        return gmpo.GMPOTrainer._compute_loss(stand_in, None, inputs)

    compare(
        lambda hidden, weight: fk.losses.grpo_loss(
            hidden, weight, TARGETS, ADVANTAGES, old_per_token_logps=OLD, ref_per_token_logps=REFERENCE, beta=beta,
            loss_type="gmpo", epsilon=0.4, epsilon_high=0.3,
        ),
        theirs,
    )  # fmt: skip


def test_rloo() -> None:
    old = (OLD * MASK).sum(1)

    def theirs(hidden: Tensor, weight: Tensor) -> Tensor:
        log_p = log_probs_of(hidden, weight)
        stand_in = trainer(
            _get_per_token_logps_and_entropies=lambda *_, **__: (log_p, ENTROPIES, None), epsilon_low=0.2,
            epsilon_high=0.3,
        )  # fmt: skip
        inputs = {
            "prompt_ids": TOKENS[:, :2], "prompt_mask": MASK[:, :2], "completion_ids": TOKENS, "completion_mask": MASK,
            "advantages": ADVANTAGES, "old_logps": old,
        }  # fmt: skip
        return trl.RLOOTrainer._compute_loss(stand_in, None, inputs)

    compare(
        lambda hidden, weight: fk.losses.grpo_loss(
            hidden, weight, TARGETS, ADVANTAGES, old_per_token_logps=OLD, loss_type="rloo", epsilon_high=0.3
        ),
        theirs,
    )


# --- preferences ------------------------------------------------------------------------------------------------------

REF_SUMS = (REFERENCE * MASK).sum(-1)


def outputs_of(log_p: Tensor) -> Any:
    """What TRL's head returns besides log-probabilities goes into metrics alone."""
    return SimpleNamespace(
        log_probs=log_p * MASK, entropy=ENTROPIES, mean_logits=log_p, is_top1=MASK.bool(), log_sum_sq_probs=log_p
    )


#: A batch of TRL: a column for a prompt before the targets, which the first of them follows.
INPUTS = {
    "input_ids": torch.nn.functional.pad(TOKENS, (1, 0)),
    "attention_mask": torch.nn.functional.pad(MASK, (1, 0), value=1),
    "completion_mask": torch.nn.functional.pad(MASK, (1, 0)),
}
DPO_CASES: dict[str, dict[str, Any]] = {
    **{name: {"loss_type": name} for name in preference.DPO_TYPES},
    **{f"f-{name}": {"f_divergence_type": name} for name in ("forward_kl", "js_divergence", "alpha_divergence")},
    "f-hinge": {"loss_type": "hinge", "f_divergence_type": "js_divergence"},
    "f-ipo": {"loss_type": "ipo", "f_divergence_type": "js_divergence"},
    "ld": {"ld_alpha": 0.4}, "ld-ipo": {"ld_alpha": 0.4, "loss_type": "ipo"},
    "rpo": {"loss_type": ("sigmoid", "sft"), "loss_weights": (1.0, 0.5)},
    "mpo": {"loss_type": ("sigmoid", "bco_pair", "sft"), "loss_weights": (0.8, 0.2, 1.0)},
    "mixed": {"loss_type": ("ipo", "hinge", "sigmoid_norm"), "loss_weights": (0.8, 0.2, 1.0)},
}  # fmt: skip


@pytest.mark.parametrize("case", DPO_CASES)
@pytest.mark.parametrize("reference", [True, False])
def test_dpo(case: str, reference: bool) -> None:
    """Of hidden states, and the metrics of log-probabilities."""
    given = {"loss_type": "sigmoid", "loss_weights": None, "f_divergence_type": "reverse_kl", "ld_alpha": None}
    given |= DPO_CASES[case]
    types = [given["loss_type"]] if isinstance(given["loss_type"], str) else list(given["loss_type"])
    smoothing = 0.1 if {*types} & {*preference.SMOOTHED} - {"sigmoid"} else 0.0  # TRL's "sigmoid" has none
    options = given | {"beta": 0.3, "label_smoothing": smoothing, "f_alpha_divergence_coef": 0.7}
    each = REFERENCE if reference else torch.zeros(B, T)
    sums = (each * MASK).sum(-1)
    if given["ld_alpha"] is not None:  # TRL computes it only with its own reference model
        sums = (each * MASK * _of_tail(given["ld_alpha"])).sum(-1)
    ref = each if given["ld_alpha"] is not None or "mixed" in case or "ipo" in case or "norm" in case else sums
    logged = {}

    def theirs(hidden: Tensor, weight: Tensor) -> Tensor:
        stand_in = trainer(
            precompute_ref_logps=True, loss_types=types, beta=0.3, use_weighting=False, label_smoothing=smoothing,
            loss_weights=[1.0] * len(types) if given["loss_weights"] is None else list(given["loss_weights"]),
            args=SimpleNamespace(discopop_tau=0.05), f_alpha_divergence_coef=0.7,
            **{k: given[k] for k in ("ld_alpha", "f_divergence_type")},
        )  # fmt: skip
        chosen, rejected = sums.chunk(2)
        inputs = INPUTS | {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        log_p = log_probs_of(hidden, weight)
        loss = trl.DPOTrainer._compute_loss(stand_in, lambda **_: outputs_of(log_p), inputs, False)
        logged.update(stand_in._metrics["train"])
        return loss

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        return fk.losses.dpo_loss(hidden, weight, TARGETS, ref if reference else None, **options)

    compare(ours, theirs)
    log_p = log_probs_of(HIDDEN, WEIGHT)
    found = preference.dpo(log_p, MASK, ref if reference else None, entropies=ENTROPIES, return_metrics=True, **options)
    for key in ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen",
                "logps/rejected", "entropy"):  # fmt: skip
        assert float(getattr(found, key.replace("/", "_"))) == pytest.approx(logged[key][0], rel=1e-5), key


def _of_tail(alpha: float) -> Tensor:
    shared = torch.minimum(*LENGTHS.chunk(2)).repeat(2)[:, None]
    return torch.where(torch.arange(T) < shared, 1.0, alpha)


@pytest.mark.parametrize("kl", [0.0, 0.8])
@pytest.mark.parametrize("loss_type", preference.KTO_TYPES)
def test_kto(kl: float, loss_type: str) -> None:
    desirable = torch.tensor([True, False, False, True, True, False])

    def theirs(hidden: Tensor, weight: Tensor) -> Tensor:
        stand_in = trainer(
            precompute_ref_logps=True, calculate_KL=True, loss_type=loss_type, beta=0.2, desirable_weight=1.3,
            undesirable_weight=0.7, _compute_kl_logps=lambda model, batch: torch.full((B,), kl),
        )  # fmt: skip
        inputs = INPUTS | {"label": desirable, "ref_logps": REF_SUMS, "ref_KL_logps": torch.zeros(B)}
        log_p = log_probs_of(hidden, weight)
        return trl.KTOTrainer._compute_loss(stand_in, lambda **_: outputs_of(log_p), inputs, False)

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        return fk.losses.kto_loss(
            hidden, weight, TARGETS, desirable, REF_SUMS, kl=kl, beta=0.2, desirable_weight=1.3, undesirable_weight=0.7,
            loss_type=loss_type,
        )  # fmt: skip

    compare(ours, theirs)


def _likelihood(log_p: Tensor, mask: Tensor = MASK) -> Tensor:
    """The chosen tokens' mean negative log-likelihood, which TRL's ORPO and CPO take from the model's loss."""
    half = slice(0, B // 2)
    return -(log_p * mask)[half].sum() / mask[half].sum()


@pytest.mark.parametrize("whole", [False, True])
def test_orpo(whole: bool) -> None:
    """With the likelihood of the answers, and of all tokens."""
    orpo = pytest.importorskip("trl.experimental.orpo")

    def theirs(hidden: Tensor, weight: Tensor) -> Tensor:
        log_p = log_probs_of(hidden, weight)
        means = (log_p * MASK).sum(-1) / MASK.sum(-1)
        losses = orpo.ORPOTrainer.odds_ratio_loss(trainer(beta=0.3), *means.chunk(2))[0]
        return _likelihood(log_p, torch.ones_like(MASK) if whole else MASK) - losses.mean()

    of_likelihood = {"nll_target": TOKENS} if whole else {}
    compare(lambda h, weight: fk.losses.orpo_loss(h, weight, TARGETS, beta=0.3, **of_likelihood), theirs)


@pytest.mark.parametrize("kind", preference.CPO_TYPES)
@pytest.mark.parametrize("alpha", [0.0, 0.05])
def test_cpo_and_simpo(kind: str, alpha: float) -> None:
    cpo = pytest.importorskip("trl.experimental.cpo")
    smoothing = 0.1 if kind in ("sigmoid", "simpo") else 0.0
    stand_in = trainer(alpha=alpha, beta=0.4, label_smoothing=smoothing, loss_type=kind, simpo_gamma=0.5)
    metrics = {}

    def theirs(hidden: Tensor, weight: Tensor) -> Tensor:
        log_p = log_probs_of(hidden, weight)
        each = (log_p * MASK).sum(-1) / (MASK.sum(-1) if kind in ("ipo", "simpo") else 1.0)
        losses, chosen, rejected = cpo.CPOTrainer.cpo_loss(stand_in, *each.chunk(2))
        metrics.update(rewards_chosen=chosen.mean(), rewards_margins=(chosen - rejected).mean())
        return losses.mean() + 0.7 * _likelihood(log_p)

    given = {"beta": 0.4, "loss_type": kind, "label_smoothing": smoothing, "cpo_alpha": 0.7, "alpha": alpha}
    compare(lambda hidden, weight: fk.losses.cpo_loss(hidden, weight, TARGETS, **given), theirs)
    found = preference.cpo(log_probs_of(HIDDEN, WEIGHT), MASK, return_metrics=True, **given)
    for name, value in metrics.items():
        torch.testing.assert_close(getattr(found, name), value, rtol=1e-5, atol=1e-6)
    if kind == "simpo":
        simple = fk.losses.simpo_loss(HIDDEN, WEIGHT, TARGETS, **{k: v for k, v in given.items() if k != "loss_type"})
        assert torch.equal(simple, fk.losses.cpo_loss(HIDDEN, WEIGHT, TARGETS, **given))
