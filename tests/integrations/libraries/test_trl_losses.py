"""`fk.losses` and `fk.compat` against TRL's own: the loss methods of its trainers are called on small tensors, with
log-probabilities that TRL's functions compute from plain logits. Values, and gradients of hidden states and head."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.integrations.adapters.tiny import tiny_model

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
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


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
    labels[0, :5] = labels[1, 9:] = -100
    with fk.patch(model) as handle:
        expected = handle.log_probs(ids, labels, return_entropy=True, temperature=0.8)
        utils.add_fused_lm_head(model, temperature=0.8, outputs=("log_probs", "entropy"))
        out = model(ids, labels=labels, fused_lm_head=True)
        for actual, theirs in zip(expected, (out.log_probs, out.entropy), strict=True):
            torch.testing.assert_close(actual[:, -11:], theirs[:, -11:], rtol=1e-5, atol=1e-5)
        assert all(map(torch.equal, handle.log_probs(ids, labels, return_entropy=True, temperature=0.8), expected))
        del model.forward  # TRL's, on the instance


# --- GRPO -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"old": None},
        {"beta": 0.04},
        {"delta": 1.5, "epsilon": 0.1, "epsilon_high": 0.28},
        {"level": "sequence", "beta": 0.1},
        {"level": "sequence", "delta": 2.0},
        {"advantages": OLD.flip(0)},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_grpo(loss_type: str, options: dict[str, Any]) -> None:
    beta, old, level = options.get("beta", 0.0), options.get("old", OLD), options.get("level", "token")
    epsilon, high = options.get("epsilon", 0.2), options.get("epsilon_high", 0.2)
    given = options.get("advantages", ADVANTAGES)

    def theirs(hidden: Tensor, weight: Tensor) -> Tensor:
        log_p = log_probs_of(hidden, weight)
        stand_in = trainer(
            args=SimpleNamespace(use_bias_correction_kl=False, delta=options.get("delta"), steps_per_generation=1),
            _get_per_token_logps_and_entropies=lambda *args, **kwargs: (log_p, torch.zeros_like(log_p), None),
            top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level=level, beta=beta,
            loss_type=loss_type, epsilon_low=epsilon, epsilon_high=high, use_vllm=False, max_completion_length=12,
            current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False,
        )  # fmt: skip
        inputs = {
            "prompt_ids": TOKENS[:, :2], "prompt_mask": MASK[:, :2], "completion_ids": TOKENS, "completion_mask": MASK,
            "advantages": given, "old_per_token_logps": old, "ref_per_token_logps": REFERENCE,
            "num_items_in_batch": MASK.sum(),
        }  # fmt: skip
        return trl.GRPOTrainer._compute_loss(stand_in, None, inputs)

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        return fk.losses.grpo_loss(
            hidden, weight, TARGETS, given, old_per_token_logps=old, ref_per_token_logps=REFERENCE, beta=beta,
            epsilon=epsilon, epsilon_high=high, delta=options.get("delta"), loss_type=loss_type,
            importance_sampling_level=level, max_completion_length=12,
        )  # fmt: skip

    compare(ours, theirs)


def test_grpo_over_the_tokens_of_several_batches() -> None:
    """`num_items_in_batch`, and a temperature."""
    items = torch.tensor(80.0)
    compare(
        lambda hidden, weight: fk.losses.grpo_loss(
            hidden, weight, TARGETS, ADVANTAGES, old_per_token_logps=OLD, num_items_in_batch=items, logit_scale=1 / 0.7
        ),
        lambda hidden, weight: _dapo(log_probs_of(hidden, weight, 0.7), items),
    )


def _dapo(log_p: Tensor, items: Tensor) -> Tensor:
    stand_in = trainer(
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (log_p, torch.zeros_like(log_p), None),
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level="token", beta=0.0,
        loss_type="dapo", epsilon_low=0.2, epsilon_high=0.2, use_vllm=False, max_completion_length=12,
        current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False,
    )  # fmt: skip
    inputs = {
        "prompt_ids": TOKENS[:, :2], "prompt_mask": MASK[:, :2], "completion_ids": TOKENS, "completion_mask": MASK,
        "advantages": ADVANTAGES, "old_per_token_logps": OLD, "num_items_in_batch": items,
    }  # fmt: skip
    return trl.GRPOTrainer._compute_loss(stand_in, None, inputs)


# --- preferences ------------------------------------------------------------------------------------------------------

REF_SUMS = (REFERENCE * MASK).sum(-1)


def outputs_of(log_p: Tensor) -> Any:
    """What TRL's head returns besides log-probabilities goes into metrics alone."""
    return SimpleNamespace(
        log_probs=log_p * MASK, entropy=log_p, mean_logits=log_p, is_top1=MASK.bool(), log_sum_sq_probs=log_p
    )


#: A batch of TRL: a column for a prompt before the targets, which the first of them follows.
INPUTS = {
    "input_ids": torch.nn.functional.pad(TOKENS, (1, 0)),
    "attention_mask": torch.nn.functional.pad(MASK, (1, 0), value=1),
    "completion_mask": torch.nn.functional.pad(MASK, (1, 0)),
}


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo", "hinge"])
@pytest.mark.parametrize("reference", [True, False])
def test_dpo(loss_type: str, reference: bool) -> None:
    sums = REF_SUMS if reference else torch.zeros(B)
    ours_ref = sums / LENGTHS if loss_type == "ipo" else sums

    def theirs(hidden: Tensor, weight: Tensor) -> Tensor:
        stand_in = trainer(
            ld_alpha=None, precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=[loss_type],
            loss_weights=[1.0], beta=0.3, use_weighting=False,
        )  # fmt: skip
        chosen, rejected = sums.chunk(2)
        inputs = INPUTS | {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        log_p = log_probs_of(hidden, weight)
        return trl.DPOTrainer._compute_loss(stand_in, lambda **_: outputs_of(log_p), inputs, False)

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        ref = ours_ref if reference else None
        return fk.losses.dpo_loss(hidden, weight, TARGETS, ref, beta=0.3, loss_type=loss_type)

    compare(ours, theirs)


@pytest.mark.parametrize("kl", [0.0, 0.8])
def test_kto(kl: float) -> None:
    desirable = torch.tensor([True, False, False, True, True, False])

    def theirs(hidden: Tensor, weight: Tensor) -> Tensor:
        stand_in = trainer(
            precompute_ref_logps=True, calculate_KL=True, loss_type="kto", beta=0.2, desirable_weight=1.3,
            undesirable_weight=0.7, _compute_kl_logps=lambda model, batch: torch.full((B,), kl),
        )  # fmt: skip
        inputs = INPUTS | {"label": desirable, "ref_logps": REF_SUMS, "ref_KL_logps": torch.zeros(B)}
        log_p = log_probs_of(hidden, weight)
        return trl.KTOTrainer._compute_loss(stand_in, lambda **_: outputs_of(log_p), inputs, False)

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        return fk.losses.kto_loss(
            hidden, weight, TARGETS, desirable, REF_SUMS, kl=kl, beta=0.2, desirable_weight=1.3, undesirable_weight=0.7
        )

    compare(ours, theirs)


def _likelihood(log_p: Tensor) -> Tensor:
    """The chosen tokens' mean negative log-likelihood, which TRL's ORPO and CPO take from the model's loss."""
    half = slice(0, B // 2)
    return -(log_p * MASK)[half].sum() / MASK[half].sum()


def test_orpo() -> None:
    orpo = pytest.importorskip("trl.experimental.orpo")

    def theirs(hidden: Tensor, weight: Tensor) -> Tensor:
        log_p = log_probs_of(hidden, weight)
        means = (log_p * MASK).sum(-1) / MASK.sum(-1)
        losses = orpo.ORPOTrainer.odds_ratio_loss(trainer(beta=0.3), *means.chunk(2))[0]
        return _likelihood(log_p) - losses.mean()

    compare(lambda hidden, weight: fk.losses.orpo_loss(hidden, weight, TARGETS, beta=0.3), theirs)


@pytest.mark.parametrize("kind", ["cpo", "simpo"])
def test_cpo_and_simpo(kind: str) -> None:
    cpo = pytest.importorskip("trl.experimental.cpo")
    simpo = kind == "simpo"
    stand_in = trainer(
        alpha=0.0, beta=0.4, label_smoothing=0.0, loss_type="simpo" if simpo else "sigmoid", simpo_gamma=0.5
    )

    def theirs(hidden: Tensor, weight: Tensor) -> Tensor:
        log_p = log_probs_of(hidden, weight)
        each = (log_p * MASK).sum(-1) / (MASK.sum(-1) if simpo else 1.0)
        loss = cpo.CPOTrainer.cpo_loss(stand_in, *each.chunk(2))[0].mean()
        return loss if simpo else loss + 0.7 * _likelihood(log_p)

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        if simpo:
            return fk.losses.simpo_loss(hidden, weight, TARGETS, beta=0.4, simpo_gamma=0.5)
        return fk.losses.cpo_loss(hidden, weight, TARGETS, beta=0.4, cpo_alpha=0.7)

    compare(ours, theirs)
