"""`fk.losses.gkd_loss` against TRL's own: GKD by logits, the divergence of two heads, and that of a server's
log-probabilities. Values, gradients of hidden states and head, and the entropy that TRL logs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import foundry_kernels as fk
from tests.integrations.libraries.test_trl_losses import (
    GENERATOR,
    HIDDEN,
    MASK,
    TARGETS,
    TOKENS,
    WEIGHT,
    B,
    T,
    V,
    compare,
    trainer,
)

pytest.importorskip("trl")

E, K = 24, 5
TEACHER, HEAD = torch.randn(B, T, E, generator=GENERATOR), torch.randn(V, E, generator=GENERATOR) * 0.3
BIAS, TEACHER_BIAS = torch.randn(2, V, generator=GENERATOR)
betas = pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])


@betas
@pytest.mark.parametrize("items", [None, torch.tensor(80.0)], ids=["own", "all"])
def test_gkd(beta: float, items: Tensor | None) -> None:
    gkd = pytest.importorskip("trl.experimental.gkd")

    def theirs(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = hidden @ weight.T, TEACHER @ HEAD.T
        return gkd.GKDTrainer.generalized_jsd_loss(*logits, TARGETS, beta, 1.7, num_items_in_batch=items)

    given: dict[str, Any] = {"beta": beta, "temperature": 1.7, "num_items_in_batch": items}
    compare(lambda hidden, weight: fk.losses.gkd_loss(hidden, weight, TARGETS, TEACHER, HEAD, **given), theirs)
    compare(lambda h, weight: fk.losses.distill.gkd(h @ weight.T, TEACHER @ HEAD.T, MASK, **given), theirs)


@betas
@pytest.mark.parametrize("caps", [(None, None), (2.0, 3.0), (None, 1.5)], ids=str)
def test_two_heads(beta: float, caps: tuple[float | None, float | None]) -> None:
    """Of other widths, each with its bias, scale and soft cap."""
    module = pytest.importorskip("trl.trainer.distillation_trainer")
    found: dict[str, Tensor] = {}

    def theirs(hidden: Tensor, weight: Tensor) -> Tensor:
        loss, entropy, n = module._chunked_divergence_loss(
            hidden, TEACHER, weight, HEAD, MASK, beta, None, BIAS, TEACHER_BIAS, 0.7, 1.3, *caps, 1.7
        )
        found["theirs"] = entropy / n
        return loss

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        loss, _, found["ours"] = fk.losses.gkd_loss(
            hidden, weight, TARGETS, TEACHER, HEAD, beta=beta, temperature=1.7, bias=BIAS, logit_scale=0.7,
            softcap=caps[0], teacher_bias=TEACHER_BIAS, teacher_logit_scale=1.3, teacher_softcap=caps[1],
            return_metrics=True,
        )  # fmt: skip
        return loss

    compare(ours, theirs)
    torch.testing.assert_close(found["ours"], found["theirs"])


@betas
@pytest.mark.parametrize("tail", [True, False])
def test_a_server(beta: float, tail: bool) -> None:
    """TRL compares the teacher's K best tokens in the forward direction, and in the others its best one and the one
    that was sampled."""
    server = pytest.importorskip("trl.experimental.server_distillation").ServerDistillationTrainer
    of_teacher = (TEACHER @ HEAD.T).log_softmax(-1)
    best, ids = of_teacher.topk(K)
    sampled, of_sampled = TOKENS.unsqueeze(-1), of_teacher.gather(-1, TOKENS.unsqueeze(-1))
    if beta == 0.0:
        best[0, :3, 2:] = -torch.inf  # which a server fills up with
        listed = ids, best
    elif beta == 1.0:
        listed = sampled, of_sampled
    else:
        listed = torch.cat([ids[..., :1], sampled], -1), torch.cat([best[..., :1], of_sampled], -1)
    stand_in = trainer(beta=beta, loss_add_tail=tail, _reduce_divergence_loss=server._reduce_divergence_loss)

    def theirs(hidden: Tensor, weight: Tensor) -> Tensor:
        log_q = (hidden @ weight.T / 1.7).log_softmax(-1)
        if beta == 0.0:
            result = {"topk_logprobs": best, "topk_token_ids": ids}
            return server._compute_server_forward_kl_loss(stand_in, result, log_q, TARGETS)
        return server._compute_sparse_top_1_divergence_loss(
            stand_in, log_q, ids[..., 0], best[..., 0], TOKENS, of_sampled.squeeze(-1), TARGETS
        )

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        return fk.losses.gkd_loss(
            hidden, weight, TARGETS, teacher_ids=listed[0], teacher_log_probs=listed[1], add_tail=tail, beta=beta,
            temperature=1.7,
        )  # fmt: skip

    if beta == 1.0 and not tail:  # of one class all have the same distribution
        assert ours(HIDDEN, WEIGHT) == theirs(HIDDEN, WEIGHT) == 0.0
    else:
        compare(ours, theirs)
