"""Mixed precision in every family: a patched model runs where transformers' own does, and is as close to float32."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from any_family import NAMED, WITHOUT_A_ROW, any_family
from patching import BUILDABLE, IDS, LABELS
from slow import rest_slow
from tiny_encoders import FAMILIES as ENCODERS
from tiny_encoders import tiny_batch, tiny_encoder
from torch import Tensor, nn

import foundry_kernels as fk
from foundry_kernels.integrations.adapters.tiny import tiny_config, tiny_model
from foundry_kernels.integrations.families import FAMILIES

LEFT = torch.ones_like(IDS)
LEFT[0, :4] = 0
LOW = torch.bfloat16
#: In one small model the errors of two runs that are equally exact differ by up to this.
LUCK = 3.0


def norms(model: Any) -> list[nn.Module]:
    return [m for m in model.modules() if "norm" in type(m).__name__.lower() and not list(m.children())]


def all_but_linear(model: Any) -> list[nn.Module]:
    """What PEFT's `prepare_model_for_kbit_training` makes float32."""
    layers = [m for m in model.modules() if not list(m.children()) and type(m) is not nn.Linear]
    return [*layers, model.get_output_embeddings()]


#: The dtype of the parameters, the modules that are float32 all the same, and whether autocast is on.
WAYS: dict[str, tuple[torch.dtype, Callable[[Any], list[nn.Module]] | None, bool]] = {
    "autocast": (torch.float32, None, True),
    "float32 norms": (LOW, norms, False),
    "float32 but for the layers": (LOW, all_but_linear, True),
}


Results = tuple[dict[str, Tensor], list[torch.dtype]]


def run(model: Any, autocast: bool, train: bool = True) -> Results:
    """The results of a step of training, of an evaluation, and of tokens one by one on a cache; and all dtypes."""
    ids, labels = IDS % model.config.vocab_size, torch.where(LABELS < 0, LABELS, LABELS % model.config.vocab_size)
    with torch.autocast("cpu", LOW) if autocast else contextlib.nullcontext():
        model.train(train).zero_grad()
        trained = model(ids, attention_mask=LEFT, labels=labels).loss
        trained.backward()
        model.eval()
        with torch.no_grad():
            out = model(ids, attention_mask=LEFT, labels=labels, output_hidden_states=True)
            cache = model(ids[:, :10], attention_mask=LEFT[:, :10], use_cache=True)
            steps = []
            for n in (10, 11):
                given = {"attention_mask": LEFT[:, : n + 1], "use_cache": True}
                steps.append(model(ids[:, n : n + 1], past_key_values=cache.past_key_values, **given).logits)
    results = {"logits": out.logits[LEFT.bool()], "on a cache": torch.cat(steps)}
    return results_of(model, results, [trained, out.loss, *steps, *out.hidden_states])


def run_encoder(family: str, model: Any, autocast: bool) -> Results:
    batch = {
        name: x.to(next(model.parameters()).dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in tiny_batch(family).items()
    }
    model.zero_grad()
    with torch.autocast("cpu", LOW) if autocast else contextlib.nullcontext():
        out = model(**batch)
        out.loss.backward()
    found = {name: x for name, x in out.items() if isinstance(x, Tensor) and name != "loss"}
    return results_of(model, found, [out.loss, *found.values()])


def results_of(model: Any, results: dict[str, Tensor], others: list[Tensor]) -> Results:
    """These and the gradients, each of its own size; and all dtypes."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    vectors = [g.float().flatten() / (float(g.float().norm()) or 1.0) for g in grads]
    results = {name: x.detach().float() for name, x in results.items()} | {"gradients": torch.cat(vectors)}
    return results, [x.dtype for x in (*others, *grads)]


def is_as_close(model: Any, way: str, run: Callable[[Any, bool], Results] = run) -> None:
    dtype, kept, autocast = WAYS[way]
    model.to(dtype)
    for module in () if kept is None else kept(model):
        module.float()
    exact, _ = run(copy.deepcopy(model).float(), False)
    theirs, their_dtypes = run(model, autocast)
    with fk.patch(model) as handle:
        assert handle.report().replaced
        ours, dtypes = run(model, autocast)
    assert dtypes == their_dtypes
    for name, expected in exact.items():
        error, usual = (float((found[name] - expected).norm()) for found in (ours, theirs))
        assert error <= LUCK * usual, f"{name}: {error:.1e}, theirs {usual:.1e}"


def cases(families: Iterable[str], ways: Iterable[str] = WAYS) -> list[Any]:
    """Every second family quickly, in one way. Norms that give float32 where their weight is are left out:
    transformers' own linear layers refuse that."""
    widened, found = {"t5", *(family for family in BUILDABLE if FAMILIES[family].norm == "llama")}, []
    for i, family in enumerate(families):
        its = [way for way in ways if way != "float32 norms" or family not in widened]
        marks = [() if i % (2 * len(its)) == 2 * j else pytest.mark.slow for j in range(len(its))]
        found += [pytest.param(family, way, marks=m) for way, m in zip(its, marks, strict=True)]
    return found


@pytest.mark.parametrize(("family", "way"), cases(BUILDABLE))
def test_every_family_of_the_table(family: str, way: str) -> None:
    # All experts, so that none comes and goes with the last bit.
    every = {"num_experts_per_tok": 4} if hasattr(tiny_config(family), "num_experts_per_tok") else {}
    is_as_close(tiny_model(family, **every), way)


@pytest.mark.parametrize("family", rest_slow([f for f in NAMED if f in WITHOUT_A_ROW], quick=3))
def test_families_without_a_row(family: str) -> None:
    """In evaluation mode: their dropout is not ours."""
    model = any_family(family)
    if model is None:
        pytest.skip("sizes do not suffice to build it in this release")
    is_as_close(model, "autocast", partial(run, train=False))


@pytest.mark.parametrize(("family", "way"), cases(ENCODERS, list(WAYS)[:2]))
def test_encoders(family: str, way: str) -> None:
    is_as_close(tiny_encoder(family), way, partial(run_encoder, family))
