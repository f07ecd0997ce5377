"""Every family of the table: a patched model computes what the model computed before."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.integrations.adapters.table import LLAMA_LIKE
from foundry_kernels.integrations.adapters.tiny import tiny_model
from foundry_kernels.testing import MAX_FACTOR, RMS_FACTOR

TOLERANCE = 1e-5  # of float32 results, relative to the largest value; of a gradient, in norm
#: Steps of up to 2 amplify rounding: from float64, transformers' own gradients differ by 2e-5, the kernels' by 3e-5.
AMPLIFIED = {"olmo_hybrid": 5.0}

IDS = torch.randint(3, 128, (3, 12), generator=torch.Generator().manual_seed(0))
NONE = torch.ones_like(IDS)
LEFT, PADDED = NONE.clone(), NONE.clone()
LEFT[0, :4] = LEFT[1, :1] = 0
# Before and behind; without padding, test_releases.py has all families.
PADDED[0, :4] = PADDED[1, 8:] = PADDED[2, 3:] = 0

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "qwen3_next", "qwen3_5_moe")
every_family = pytest.mark.parametrize("family", LLAMA_LIKE)


def close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    scale = float(expected.abs().max())
    assert float((actual - expected).abs().max()) <= TOLERANCE * scale


def step(model: Any, mask: Tensor | None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits of the tokens, loss, and the gradient of every parameter.

    What a model computes at padding is arbitrary, so the first token after it, which it predicts, has no label.
    """
    labels = IDS
    if mask is not None:
        before = torch.nn.functional.pad(mask, (1, 0), value=1)[:, :-1]
        labels = IDS.masked_fill((mask == 0) | (before == 0), -100)
    model.zero_grad()
    out = model(IDS, attention_mask=mask, labels=labels)
    out.loss.backward()
    logits = out.logits if mask is None else out.logits[mask.bool()]
    return logits.detach(), out.loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@every_family
def test_logits_loss_and_gradients(family: str) -> None:
    model = tiny_model(family)
    logits, loss, grads = step(model, PADDED)
    assert len(grads) > 10
    with fk.patch(model) as handle:
        assert len(handle.report().replaced) >= 7
        patched_logits, patched_loss, patched_grads = step(model, PADDED)
    close(patched_logits, logits)
    close(patched_loss, loss)
    assert patched_grads.keys() == grads.keys()
    largest = max(float(g.norm()) for g in grads.values())
    for name, grad in grads.items():
        error, norm = float((patched_grads[name] - grad).norm()), float(grad.norm())
        assert error <= AMPLIFIED.get(family, 1.0) * TOLERANCE * max(norm, 1e-2 * largest), (
            f"{name}: {error:.1e} of {norm:.1e}"
        )


def test_bfloat16_is_no_farther_from_float32() -> None:
    """Errors against the float32 run, patched over unpatched, as the tolerance policy has it.

    What a single small model rounds to is luck: the ratio of two runs that are equally exact lies anywhere between 0.6
    and 1.7. So no family may be beyond the policy's largest factor, and all together not beyond that of its means.
    """
    ratios: dict[tuple[str, str], list[float]] = {}
    for family in LLAMA_LIKE:
        routing = {"num_experts_per_tok": 4} if family in MIXTURES else {}  # all: no expert comes and goes
        for seed in range(2):
            model = tiny_model(family, dtype=torch.bfloat16, seed=seed, **routing)
            exact = step(tiny_model(family, dtype=torch.bfloat16, seed=seed, **routing).float(), LEFT)
            plain = errors(step(model, LEFT), exact)
            with fk.patch(model):
                ours = errors(step(model, LEFT), exact)
            for what in plain:
                ratios.setdefault((family, what), []).append(ours[what] / plain[what])
    for what in ("logits", "gradients"):
        means = {family: mean(ratios[family, what]) for family in LLAMA_LIKE}
        assert max(means.values()) <= MAX_FACTOR, f"{what}: {means}"
        assert mean(list(means.values())) <= RMS_FACTOR, f"{what}: {means}"


def errors(
    run: tuple[Tensor, Tensor, dict[str, Tensor]], exact: tuple[Tensor, Tensor, dict[str, Tensor]]
) -> dict[str, float]:
    """Root-mean-square errors; of the gradients of all parameters, each in units of its own size."""
    differences = [(run[2][n].float() - g).flatten() / (float(g.norm()) or 1.0) for n, g in exact[2].items()]
    return {"logits": rms(run[0].float() - exact[0]), "gradients": rms(torch.cat(differences))}


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def mean(ratios: list[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


@every_family
def test_generation(family: str) -> None:
    """Left-padded prompts, longer than the window where there is one; the cache is longer than what it holds. With one
    that grows, test_releases.py has it."""
    model = tiny_model(family)

    def generate() -> tuple[Tensor, Tensor]:
        out = model.generate(
            IDS,
            attention_mask=LEFT,
            max_new_tokens=5,
            do_sample=False,
            eos_token_id=None,
            cache_implementation="static",
            output_logits=True,
            return_dict_in_generate=True,
        )
        return out.sequences, torch.stack(out.logits)

    tokens, logits = generate()
    with fk.patch(model):
        patched_tokens, patched_logits = generate()
    assert torch.equal(patched_tokens, tokens)
    close(patched_logits, logits)


@every_family
def test_prefill_in_chunks(family: str) -> None:
    """Several queries on a cache: the last query must be aligned with the last key."""
    model = tiny_model(family)

    def chunks() -> Tensor:
        with torch.no_grad():
            first = model(IDS[:, :5], attention_mask=LEFT[:, :5], use_cache=True)
            second = model(IDS[:, 5:], attention_mask=LEFT, past_key_values=first.past_key_values)
        return torch.cat([first.logits, second.logits], 1)[LEFT.bool()]

    expected = chunks()
    with fk.patch(model):
        close(chunks(), expected)
