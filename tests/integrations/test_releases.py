"""Any release of transformers: what is known runs, what is not is left with the reason.

CI runs this file and test_packing.py on the oldest release that is supported and on the newest (`make test-releases`).
"""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

import pytest
import torch
from patching import BUILDABLE, IDS, close, logits
from torch import Tensor, nn

import foundry_kernels as fk
from foundry_kernels.integrations.adapters.attention import ATTENTION_ARGUMENTS
from foundry_kernels.integrations.adapters.table import PATCHED, TABLE
from foundry_kernels.integrations.adapters.tiny import tiny_model
from foundry_kernels.integrations.attention.functions import OF_OTHERS
from foundry_kernels.integrations.release import OLDEST, check_release

OPS = ("rms_norm", "layer_norm", "swiglu", "geglu", "bias_gelu", "rope", "qk_norm_rope", "flash_attention",
       "grouped_mm", "linear_cross_entropy", "cross_entropy")  # fmt: skip
LEFT = torch.ones_like(IDS)
LEFT[0, :4] = 0


@pytest.mark.parametrize("family", BUILDABLE)
def test_it_computes_what_the_eager_model_computes(family: str) -> None:
    """Logits, a continuation, and gradients with checkpointing."""
    model = tiny_model(family, attn_implementation="eager")
    plain, patched = [], []
    for found in (plain, patched):
        if found is patched:
            report = fk.patch(model, ops=OPS).report()
            assert any("flash_attention" in entry.ops for entry in report.replaced), report
        found.append(logits(model, attention_mask=LEFT)[LEFT.bool()])
        tokens = model.generate(IDS, attention_mask=LEFT, max_new_tokens=3, do_sample=False, eos_token_id=None)
        found.append(tokens.float())
        model.train().gradient_checkpointing_enable()
        model.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        model.eval()
    for ours, theirs in zip(patched, plain, strict=True):
        assert close(ours, theirs)


def test_families_are_missing_in_the_oldest_releases_alone() -> None:
    import transformers

    release = tuple(map(int, transformers.__version__.split(".")[:2]))
    assert release < (5, 8) or BUILDABLE == PATCHED


@pytest.mark.parametrize(
    ("version", "known"), [("4.57.6", False), ("5.3.0", False), ("5.4.0", True), ("6.0.dev0", True)]
)
def test_releases_that_are_too_old_are_refused(version: str, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if known:
        check_release(version)
        return
    monkeypatch.setattr("transformers.__version__", version)
    needed = ".".join(map(str, OLDEST))
    with pytest.raises(ImportError, match=rf"needs transformers {needed} or newer; found {version}$"):
        fk.patch(tiny_model("llama"))
    fk.patch(nn.Sequential(nn.RMSNorm(4)))  # which is none of transformers


@pytest.mark.parametrize("end", ["Attention", "MLP", "RMSNorm"])
def test_a_class_of_the_next_release_is_left(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose forward takes an argument by a name that no release had until now."""
    model = tiny_model("llama")
    expected = logits(model)
    home = sys.modules[type(model).__module__]
    kind = getattr(home, "Llama" + end)
    taken = [name for name in inspect.signature(kind.forward).parameters if name not in ("self", "kwargs")]
    name = "attention_mask" if "attention_mask" in taken else taken[0]
    theirs = inspect.unwrap(kind.forward)

    def forward(self: nn.Module, *args: Any, unheard_of: Any = None, **kwargs: Any) -> Any:
        return theirs(self, *args, **kwargs)

    forward.__signature__ = inspect.signature(theirs).replace(  # type: ignore[attr-defined]
        parameters=[
            p.replace(name="unheard_of") if p.name == name else p for p in inspect.signature(theirs).parameters.values()
        ]
    )
    monkeypatch.setattr(kind, "forward", forward)
    handle = fk.patch(model)
    left = {entry.module_class: entry.reason for entry in handle.report().left}
    if end in ("MLP", "RMSNorm"):  # which have no row
        assert str(left["Llama" + end]).startswith("no adapter for this class: its forward uses ")
    else:
        assert left["Llama" + end] == "its forward takes unheard_of: another version of it than this package knows"
    assert close(logits(model), expected)
    model(IDS, labels=IDS, use_cache=True).loss.backward()


def test_an_attention_function_of_the_next_release_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    home = sys.modules[type(model).__module__]
    theirs = home.eager_attention_forward

    def eager(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, unheard_of: Any
    ) -> Any:
        return theirs(module, query, key, value, attention_mask, 1.0)

    monkeypatch.setattr(home, "eager_attention_forward", eager)
    [reason] = {e.reason for e in fk.patch(model).report().left if e.module_class == "LlamaAttention"}
    assert reason == "its attention function takes unheard_of, which this package does not know"


def test_arguments_of_attention_functions_are_known_or_refused() -> None:
    """Those of transformers' own, by name: a new one is to be supported or to be listed."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ours = ATTENTION_ARGUMENTS | OF_OTHERS | {"alibi_slopes", "args"}
    packing = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    for name, function in ALL_ATTENTION_FUNCTIONS.items():
        if "foundry" not in name and "paged" not in name:
            assert inspect.signature(function).parameters.keys() <= ours | packing, name


def test_every_row_names_the_arguments_of_a_forward_that_it_replaces() -> None:
    """Else one that takes something new would be replaced all the same."""
    for (home, name), adapter in TABLE.items():
        if isinstance(adapter, str) or not home.startswith("transformers"):
            continue
        original = getattr(importlib.import_module(home), name, None)  # some are missing in the oldest releases
        if original is not None and "forward" in adapter.members(original):
            assert adapter.arguments, name
