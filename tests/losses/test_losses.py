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
from loss_formulas import GRPO, LENGTHS, LOSSES, B, D, Inputs, T, V, inputs
from slow import rest_slow
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels import losses
from foundry_kernels.losses import distill, policy, preference, sft

FORMS = {
    losses.grpo_loss: policy.grpo, losses.ppo_policy_loss: policy.ppo_policy, losses.sft_loss: sft.sft,
    **{getattr(losses, f"{name}_loss"): getattr(preference, name) for name in ("cpo", "dpo", "kto", "orpo", "simpo")},
}  # fmt: skip
every_loss = pytest.mark.parametrize("name", LOSSES)


def test_every_loss_is_asked() -> None:
    assert {loss.function for loss in LOSSES.values()} == {
        getattr(losses, name) for name in losses.__all__ if name.endswith("_loss")
    }
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
@pytest.mark.parametrize("dtype", rest_slow([torch.float64, torch.float32]), ids=str)
def test_loss_and_gradients(name: str, dtype: torch.dtype) -> None:
    loss = LOSSES[name]
    for lengths in LENGTHS:
        x = inputs(lengths)
        found, exact = of(loss, x, dtype), of(loss.plain, x, torch.float64)
        assert_close(found, exact, 1e-5 if dtype == torch.float32 else 1e-11)
        if lengths == LENGTHS[0]:
            assert all(e.any() for e in exact)
        elif not any(lengths) and "nll_target" not in loss.options:
            assert not any(gradient.any() for gradient in found[1:])


@every_loss
@pytest.mark.parametrize("value", rest_slow([math.nan, math.inf, -math.inf]))
def test_what_does_not_count_changes_no_bit(name: str, value: float) -> None:
    """Hidden states, log-probabilities and advantages of ignored tokens, and what belongs to sequences without any."""
    for lengths in LENGTHS:
        x = inputs(lengths)
        ignored, expected = x["target"] == -100, of(LOSSES[name], x, torch.float32)
        if "nll_target" in LOSSES[name].options:
            ignored &= x["nll"] == -100
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
        for value, rows in ((0.0, B), (-200.0, B), (-math.inf, 1)):
            for sign in (torch.clone, torch.zeros_like):
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
    [
        f
        for name in losses.__all__
        if name.endswith("_loss") and "num_items_in_batch" in inspect.signature(f := getattr(losses, name)).parameters
    ],
)
def test_a_count_of_nothing(function: Callable[..., Tensor], count: Any) -> None:
    """0 where no token counts. Where one does, the count is wrong, and the loss says so."""
    loss = next(each for each in LOSSES.values() if each.function is function)
    given: dict[str, Any] = {"num_items_in_batch": count} | ({"loss_type": "dapo"} if function is GRPO else {})
    found = of(lambda x: loss(x, **given), inputs(LENGTHS[-1]), torch.float32)
    assert not any(each.any() for each in found)
    assert of(lambda x: loss(x, **given), inputs(), torch.float32)[0].isinf()


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.function in FORMS])
def test_from_log_probabilities(name: str) -> None:
    """The same loss of log-probabilities and a mask, and what it reports."""
    loss, x = LOSSES[name], inputs()
    reported = loss(x, return_metrics=True)
    assert not any(value.requires_grad or value.shape for value in reported[1:] if value is not None)
    target = torch.where(x["target"] == -100, x["nll"], x["target"]) if "nll_target" in loss.options else x["target"]
    log_probs, entropies = fk.linear_log_probs(x["hidden"], x["weight"], target, return_entropy=True)
    given = {"entropies": entropies, "return_metrics": True}
    if "nll_target" in loss.options:
        given |= {"nll_mask": x["nll"] != -100}
    found = FORMS[loss.function](
        log_probs, (x["target"] != -100).int(), *(x[n] for n in loss.names),
        **{k: v for k, v in (loss.given(x) | given).items() if k != "nll_target"},
    )  # fmt: skip
    torch.testing.assert_close(tuple(found), tuple(reported), rtol=0, atol=0)
    assert torch.equal(loss(x), found[0])


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.function is losses.gkd_loss])
def test_distillation_from_logits(name: str) -> None:
    """The same loss of logits or log-probabilities and a mask, and what it reports."""
    loss, x = LOSSES[name], inputs()
    reported = loss(x, return_metrics=True)
    assert not any(value.requires_grad or value.shape for value in reported[1:])
    of_student, of_teacher, given = x["hidden"] @ x["weight"].t(), x["teacher"] @ x["teacher_weight"].t(), loss.given(x)
    for name, y in (("", of_student), ("teacher_", of_teacher)):
        y *= given.pop(f"{name}logit_scale", 1.0)
        if (cap := given.pop(f"{name}softcap", None)) is not None:
            y.copy_(cap * torch.tanh(y / cap))
    whole = of_student
    if "teacher_ids" in given:
        ids, of_teacher, tail = (given.pop(n) for n in ("teacher_ids", "teacher_log_probs", "add_tail"))
        of_student = of_student.log_softmax(-1).gather(-1, ids)
        if tail:
            of_student, of_teacher = losses.with_tail(of_student), losses.with_tail(of_teacher)
    mask = x["target"] != -100
    found = distill.gkd(of_student, of_teacher, mask, return_metrics=True, **given)
    torch.testing.assert_close(found[:2], reported[:2])
    log_q = (whole / given.get("temperature", 1.0)).log_softmax(-1)
    torch.testing.assert_close(reported.entropy, -(log_q.exp() * log_q).sum(-1)[mask].mean())
    if "teacher_ids" not in loss.options:
        torch.testing.assert_close(found.entropy, reported.entropy)


def test_who_answers() -> None:
    """A share of the steps has the student's answers, the same in each process that draws from the same seed."""
    draws = [
        [
            losses.on_policy_batch("data", lambda _: "student", lmbda=lmbda, sample_teacher=teacher, generator=g)
            for _ in range(400)
        ]
        for lmbda, teacher in ((0.0, None), (0.3, None), (0.3, lambda _: "teacher"), (1.0, None))
        for g in [torch.Generator().manual_seed(0)]
    ]
    assert [len({*found}) for found in draws] == [1, 2, 2, 1]
    assert draws[0][0] == "data"
    assert draws[3][0] == "student"
    assert draws[1] == [each.replace("teacher", "data") for each in draws[2]]
    assert 0.25 < draws[1].count("student") / 400 < 0.35
    with pytest.raises(ValueError, match=r"lmbda must be in 0 \.\. 1"):
        losses.on_policy_batch("data", lambda _: "student", lmbda=1.5)


@every_loss
def test_no_sequences(name: str) -> None:
    x = {key: value if key.endswith("weight") else value[:0] for key, value in inputs().items()}
    assert not any(each.any() for each in of(LOSSES[name], x, torch.float32))


@pytest.mark.parametrize(
    ("function", "changes", "message"),
    [
        (losses.grpo_loss, {"loss_type": "pg"}, "loss_type must be one of grpo, bnpo"),
        (losses.grpo_loss, {"loss_type": "dr_grpo"}, "'dr_grpo' needs max_completion_length"),
        (losses.grpo_loss, {"beta": 0.1}, "beta=0.1 needs ref_per_token_logps"),
        (losses.grpo_loss, {"advantages": torch.zeros(3)}, "advantages must have shape"),
        (losses.grpo_loss, {"old_per_token_logps": torch.zeros(B, 2)}, "old_per_token_logps must have"),
        (losses.grpo_loss, {"importance_sampling_level": "word"}, "importance_sampling_level must be one"),
        (losses.grpo_loss, {"epsilon": -0.1}, "epsilon must"),
        (losses.grpo_loss, {"hidden": torch.zeros(T, D), "target": torch.zeros(T).long()}, r"hidden must be \[B, T, D"),
        (losses.grpo_loss, {"loss_type": "cispo"}, "'cispo' needs epsilon_high"),
        (losses.grpo_loss, {"loss_type": "cispo", "epsilon_high": 0.0}, "epsilon_high must be"),
        (losses.grpo_loss, {"loss_type": "sapo", "delta": 2.0}, "'sapo' has no delta"),
        (losses.grpo_loss, {"off_policy_mask_threshold": math.nan}, "off_policy_mask_threshold must"),
        (losses.grpo_loss, {"vespo_k_pos": math.nan}, "vespo_k_pos must"),
        (losses.grpo_loss, {"loss_type": "gmpo", "importance_sampling_level": "sequence"}, "'gmpo' needs"),
        (losses.grpo_loss, {"top_entropy_quantile": 0.0}, "top_entropy_quantile must be in 0 .. 1"),
        (losses.grpo_loss, {"importance_sampling_ratio": torch.zeros(B)}, "importance_sampling_ratio must"),
        (losses.grpo_loss, {"kl_estimator": "k4"}, "kl_estimator must be one of k1, k2, k3, unbiased"),
        (losses.dpo_loss, {"loss_type": "exo_pair", "ref_logps": None}, "needs a label_smoothing"),
        (losses.dpo_loss, {"loss_type": ("ipo", "sigmoid"), "ref_logps": torch.zeros(B)}, "need ref_logps of"),
        (losses.dpo_loss, {"loss_type": ("ipo", "sigmoid"), "loss_weights": [1.0], "ref_logps": None},
         "loss_weights must hold a number for each of 2 loss types; got 1"),
        (losses.dpo_loss, {"label_smoothing": 0.1, "loss_type": "hinge", "ref_logps": None},
         "label_smoothing needs one of the loss types"),
        (losses.cpo_loss, {"loss_type": "dpo"}, "loss_type must be one of sigmoid, hinge, ipo, simpo"),
        (losses.orpo_loss, {"nll_target": torch.zeros(B, 2).long()}, "nll_target must have shape"),
        (losses.dpo_loss, {"ref_logps": None, "betta": 0.1}, "unexpected keyword argument 'betta'"),
        (losses.dpo_loss, {"loss_type": "kto", "ref_logps": None}, "loss_type must be one of sigmoid"),
        (losses.dpo_loss, {"ref_logps": torch.zeros(3)}, "ref_logps must have shape"),
        (losses.dpo_loss, {"ref_logps": None, "beta": 0.0}, "beta must"),
        (losses.simpo_loss, {"hidden": torch.zeros(3, T, D), "target": torch.zeros(3, T).long()},
         "hidden must hold as many rejected sequences as chosen ones before them; got 3"),
        (losses.kto_loss, {"desirable": torch.ones(B), "ref_logps": torch.zeros(B)}, "desirable must be"),
        (losses.grpo_loss, {"loss_type": "dr_grpo", "max_completion_length": 0}, "max_completion_length must be >= 1"),
        *(
            (function, {"num_items_in_batch": count}, f"num_items_in_batch must be {message}")
            for function in (losses.grpo_loss, losses.sft_loss)
            for count, message in ((-1, "finite and >= 0; got -1"), (torch.ones(2), "one number"))
        ),
    ],
)  # fmt: skip
def test_bad_input(function: Callable[..., Tensor], changes: dict[str, Any], message: str) -> None:
    x = inputs()
    given: dict[str, Any] = {n: x[n] for n in ("hidden", "weight", "target")}
    if function is losses.grpo_loss:
        given["advantages"] = x["advantages"]
    error = TypeError if message.startswith(("unexpected keyword", "desirable")) else ValueError
    with pytest.raises(error, match=message):
        function(**(given | changes))


def test_forms_refuse_what_is_not_log_probabilities() -> None:
    log_probs, mask = torch.zeros(B, T), torch.ones(B, T)
    for given, message in (
        ((log_probs[0], mask[0]), r"log_probs must be floating point \[B, T\]"),
        ((log_probs, mask[:, 1:]), "mask must have shape"),
        ((log_probs.long(), mask), "log_probs must be floating point"),
    ):
        with pytest.raises(ValueError, match=message):
            sft.sft(*given)
    with pytest.raises(ValueError, match="need entropies"):
        policy.grpo(log_probs, mask, torch.zeros(B), entropy_coef=0.1)


def test_advantages_of_groups() -> None:
    rewards = torch.tensor([1.0, 2.0, 6.0, math.nan, 5.0, 4.0, 7.0, 7.0, 7.0])
    rest = rewards[[0, 1, 2, 4, 5, 6, 7, 8]]
    s = torch.std
    expected = {
        ("grpo", "none"): [-2, -1, 3, 0, 0.5, -0.5, 0, 0, 0],
        ("grpo", "group"): [*(x / (s(rewards[:3]) + 1e-4) for x in (-2, -1, 3)), 0,
                            *(x / (s(rewards[4:6]) + 1e-4) for x in (0.5, -0.5)), 0, 0, 0],
        ("grpo", "batch"): [x / (s(rest) + 1e-4) for x in (-2, -1, 3, 0, 0.5, -0.5, 0, 0, 0)],
        ("rloo", "none"): [-3, -1.5, 4.5, 0, 1, -1, 0, 0, 0],
        ("reinforce_plus_plus", "none"): [0 if x.isnan() else (x - rest.mean()) / (s(rest) + 1e-4) for x in rewards],
    }  # fmt: skip
    for (kind, scale), values in expected.items():
        found = losses.group_advantages(rewards, 3, kind=kind, scale_rewards=scale)
        torch.testing.assert_close(found, torch.tensor([float(x) for x in values]))
    assert losses.group_advantages(rewards[:3].double(), 3).dtype == torch.float64
    for given, message in (({"rewards": rewards[:4]}, "a multiple of 3"), ({"kind": "mean"}, "kind must be one of")):
        with pytest.raises(ValueError, match=message):
            losses.group_advantages(**{"rewards": rewards, "num_generations": 3, **given})


def test_correction_of_a_sampler() -> None:
    """Ratios 2, 1 (unknown), 1/4 and, of the second sequence, 8 and what does not count."""
    difference = torch.tensor([[2.0, math.nan, 0.25], [8.0, math.nan, math.nan]]).log()
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    expected = {
        "token_truncate": [[2.0, 1.0, 0.5], [3.0, 1.0, 1.0]], "token_mask": [[2.0, 1.0, 0.0], [0.0, 1.0, 1.0]],
        "sequence_truncate": [[0.5], [3.0]], "sequence_mask": [[0.5], [0.0]],
    }  # fmt: skip
    for mode, ratio in expected.items():
        found = losses.sampling_correction(difference, torch.zeros(2, 3), mask, mode=mode, clip_min=0.5)
        torch.testing.assert_close(found.ratio, torch.tensor(ratio))
        some = found.ratio if mode.startswith("sequence") else found.ratio[mask.bool()]
        torch.testing.assert_close(found[1:4], (some.min(), some.mean(), some.max()))
        torch.testing.assert_close(found.logp_difference_max, torch.tensor(8.0).log())
        torch.testing.assert_close(found.logp_difference_mean, torch.tensor([2.0, 4.0, 8.0]).log().mean())
    none = losses.sampling_correction(difference, torch.zeros(2, 3), torch.zeros(2, 3))
    assert not any(value.any() for value in none[1:])
