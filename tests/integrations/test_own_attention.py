"""Attention that asks for no attention function: its own forward runs, and its scores are not computed."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from patching import close
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from transformers import BlipTextConfig
from transformers.models.blip.modeling_blip_text import BlipTextSelfAttention

import foundry_kernels as fk
from foundry_kernels.integrations.adapters import deferred_scores
from foundry_kernels.integrations.adapters.own_attention import OwnAttention, deferred
from foundry_kernels.integrations.adapters.subclass import make_class

FORWARD = """
def forward(self, hidden_states, attention_mask=None, output_attentions=False):
    b, t, e = hidden_states.shape
    q, k, v = (layer(hidden_states).view(b, t, 4, 8).transpose(1, 2) for layer in (self.q, self.k, self.v))
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(8)
    if attention_mask is not None:
        scores = scores + attention_mask
    probs = nn.functional.softmax(scores, dim=-1)
    probs = self.dropout(probs)
    out = torch.matmul(probs, v).transpose(1, 2).reshape(b, t, e)
    return self.o(out), probs if output_attentions else None
"""
PRODUCT = "torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(8)"
MASK = "scores = scores + attention_mask"
SOFTMAX = "probs = nn.functional.softmax(scores, dim=-1)"
SUM = "torch.matmul(probs, v)"
FLAT = "q, k, v = (x.reshape(b * 4, t, 8) for x in (q, k, v)); scores = "
UNFLAT = "scores = (scores.view(b, 4, t, t) + attention_mask).view(b * 4, t, t)"
#: Replacements in the forward that leave it an attention.
SERVED: dict[str, tuple[tuple[str, str], ...]] = {
    "as it is": (),
    "operators": ((PRODUCT, "(q @ k.mT) * 8**-0.5"), (SUM, "(probs @ v)")),
    "methods": ((PRODUCT, "q.matmul(k.mT).mul(8**-0.5)"), (SUM, "probs.matmul(v)")),
    "flat": ((f"scores = {PRODUCT}", FLAT + "torch.bmm(q * 8**-0.5, k.transpose(1, 2))"), (MASK, UNFLAT),
             (SUM, "torch.bmm(probs, v).view(b, 4, t, 8)")),
    "flat, with a sum": ((f"scores = {PRODUCT}", FLAT + "torch.baddbmm(q.new_zeros(b * 4, t, t), q, k.mT, alpha=0.4)"),
                         (MASK, UNFLAT), (SUM, "torch.bmm(probs, v).view(b, 4, t, 8)")),
    "equations": ((PRODUCT, "torch.einsum('bhtd,bhsd->bhts', q, k) / 2"),
                  (SUM, "torch.einsum('bhts,bhsd->bhtd', probs, v)")),
    "other equations": ((PRODUCT, "torch.einsum('...td,...sd->...ts', q, k) / 2"),
                        (SUM, "torch.einsum('bhts,bhsd->tbhd', probs, v).permute(1, 2, 0, 3)")),
    "in place": ((MASK, "scores += attention_mask"), (PRODUCT, "torch.matmul(q, k.mT).mul_(0.3)")),
    "filled": ((MASK, "scores = scores.masked_fill(attention_mask < 0, -1e9)"),),
    "chosen": ((MASK, "scores = torch.where(attention_mask < 0, torch.full((), -1e9), scores)"),),
    "bounded from below": ((MASK, f"{MASK}; scores = torch.max(scores, torch.tensor(torch.finfo(scores.dtype).min))"),),
    "wide": ((SOFTMAX, "probs = torch.softmax(scores.float(), -1, torch.float32).type_as(scores)"),),
    "scaled after the mask": ((SOFTMAX, f"scores = 0.5 * scores; {SOFTMAX}"),),
    "moved": ((SOFTMAX, f"scores = self.moved[:, :t, :t] + scores; {SOFTMAX}"),),
    "a scale of a buffer": ((SOFTMAX, f"scores = scores * self.scale; {SOFTMAX}"),),
    "dropout of scores": ((SOFTMAX, f"scores = self.dropout(scores); {SOFTMAX}"),),
}  # fmt: skip
#: Replacements that make another one of it.
PLANTED = {
    "another axis": (SOFTMAX, "probs = nn.functional.softmax(scores, dim=-2)"),
    "a clamp": (SOFTMAX, f"scores = scores.clamp(-50, 50); {SOFTMAX}"),
    "a cap": (SOFTMAX, f"scores = 9 * torch.tanh(scores / 9); {SOFTMAX}"),
    "a mask that is no mask": (SOFTMAX, f"scores = scores.masked_fill(q.new_ones(t, t).tril() > 0, 0.5); {SOFTMAX}"),
    "a mask of which little is left": (
        SOFTMAX, f"scores = scores.masked_fill(hidden_states[:1, :, :1] > 0, -1e4) * 1e-3; {SOFTMAX}"
    ),
    "a scale by a parameter": (SOFTMAX, f"scores = scores * self.gain; {SOFTMAX}"),
    "a scale by head": (SOFTMAX, f"scores = scores * self.moved[:, :1, :1]; {SOFTMAX}"),
    "a negative scale": (SOFTMAX, f"scores = -0.5 * scores; {SOFTMAX}"),
    "weights that are masked": (SOFTMAX, f"{SOFTMAX}; probs = probs * (probs > 0.01)"),
    "weights that are moved": (SOFTMAX, f"{SOFTMAX}; probs = probs + self.moved[:, :t, :t]"),
    "sharper weights": (SOFTMAX, f"{SOFTMAX}; probs = probs / probs.sum(-2, keepdim=True)"),
    "no softmax over scores": (SOFTMAX, "probs = nn.functional.softmax(hidden_states, dim=-1); probs = scores"),
    "log": (SOFTMAX, "probs = nn.functional.log_softmax(scores, dim=-1)"),
    "one query seen by others": (SOFTMAX, f"scores = scores - scores.amax(-2, keepdim=True); {SOFTMAX}"),
    "values that are weights": (SUM, "(torch.matmul(probs, torch.matmul(probs, v)) * probs.mean())"),
    "transposed weights": (SUM, "torch.matmul(probs.transpose(-1, -2), v)"),
    "a view that is written to": (SOFTMAX, f"seen = scores[..., 0]; seen.add_(1.0); {SOFTMAX}"),
    "an alias that is written to": (SOFTMAX, f"same = scores.view(b, 4, t, t); same += q[..., :1]; {SOFTMAX}"),
    "weights as they are": ("probs if output_attentions else None", "probs"),
    "weights that are kept": (SUM, "torch.matmul(self.keep(probs), v)"),
    "other random numbers": (SUM, "torch.matmul(nn.functional.dropout(probs, 0.5, training=True), v)"),
}  # fmt: skip


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.dropout = nn.Dropout(0.0)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.moved = nn.Parameter(torch.randn(4, 1, 1) + torch.randn(4, 6, 6))
        self.scale: Tensor
        self.register_buffer("scale", torch.tensor(0.6))

    def keep(self, probs: Tensor) -> Tensor:
        self.kept = probs
        return probs


def made(*changes: tuple[str, str]) -> Any:
    source = FORWARD
    for before, after in changes:
        assert before in source
        source = source.replace(before, after)
    home: dict[str, Any] = {"torch": torch, "nn": nn, "math": math, "__name__": __name__}
    exec(source, home)
    torch.manual_seed(0)
    return type("Attention", (Attention,), {"forward": home["forward"], "__module__": __name__})()


def results(module: Any, run: Any = None, **options: Any) -> list[Tensor]:
    """Results and gradients without and with a mask."""
    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    hidden = torch.ones(6, 6).triu(1) * -1e5
    found: list[Tensor] = []
    for mask in (None, hidden.expand(2, 1, 6, 6)):
        torch.manual_seed(3)
        out = (module if run is None else run)(x, attention_mask=mask, **options)[0]
        leaves = [x, *module.parameters()]
        gradients = torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)
        found += [out.detach(), *(g for g in gradients if g is not None)]
    return found


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    largest = max(float(x.abs().max()) for x in theirs)
    return len(ours) == len(theirs) and all(
        float((a - b).abs().max()) <= 1e-5 * largest for a, b in zip(ours, theirs, strict=True)
    )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options of each call of `flash_attention`."""
    found: list[Any] = []

    def attention(*args: Any, **options: Any) -> Tensor:
        found.append(options)
        return fk.flash_attention(*args, **options)

    monkeypatch.setattr(deferred_scores, "flash_attention", attention)
    return found


@pytest.mark.parametrize("what", SERVED)
def test_attention_of_any_form(what: str, calls: list[Any]) -> None:
    module = made(*SERVED[what])
    theirs = results(module)
    handle = fk.patch(module)
    assert [e.ops for e in handle.report().replaced] == [("flash_attention",)]
    calls.clear()
    assert same(results(module), theirs)
    assert len(calls) == 2
    module.dropout.p = 0.5
    module(torch.randn(2, 6, 32))
    assert calls[2:] == [] if what == "dropout of scores" else calls[2]["dropout_p"] == 0.5
    module.dropout.p = 0.0
    module.scale.fill_(0.2)
    again = results(module)
    handle.undo()
    assert same(again, results(module))


@pytest.mark.parametrize("what", PLANTED)
def test_what_is_nearly_attention(what: str) -> None:
    """It is left. Were it not, it would compute what it did."""
    module = made(PLANTED[what])
    theirs = results(module)
    report = fk.patch(module, ops=["flash_attention"]).report()
    assert not report.replaced
    assert len(report.left) == 1
    assert same(results(module), theirs)
    for by_mode in (False, True):
        row = OwnAttention(by_mode=by_mode)
        cls: Any = make_class(type(module), row)

        def run(*args: Any, row: Any = row, cls: Any = cls, **kwargs: Any) -> Any:
            run = deferred_scores.Run("reference")
            return deferred(module, cls._foundry_computing, row, run, args, kwargs)

        module.__class__, module._foundry = cls, type("State", (), {"backends": {}})()
        ours = results(module, run)
        module.__class__ = cls._foundry_original
        assert same(ours, theirs) or what == "other random numbers", what


def test_inputs_that_are_changed() -> None:
    module = made((SOFTMAX, f"q.mul_(2.0); {SOFTMAX}"))
    (left,) = fk.patch(module).report().left
    assert "in place" in str(left.reason)


@pytest.mark.parametrize("what", ["as it is", "operators"])
def test_few_scores_are_computed(what: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    module = made(*SERVED[what])
    theirs = results(module)
    fk.patch(module)
    calls.clear()
    monkeypatch.setitem(deferred_scores.FEWEST, "cpu", 1 << 16)
    assert all(map(torch.equal, results(module), theirs))
    assert not calls
    module(torch.randn(2, 128, 32))
    assert len(calls) == 1


def test_weights_that_are_asked_for(calls: list[Any]) -> None:
    module = made()
    x = torch.randn(2, 6, 32)
    theirs = module(x, None, True)[1]
    with fk.patch(module):
        calls.clear()
        for asked in ({"output_attentions": True}, {"attention_mask": None, "output_attentions": True}):
            assert torch.equal(module(x, **asked)[1], theirs)
        assert torch.equal(module(x, None, True)[1], theirs)
        assert not calls
        assert module(x)[1] is None


def test_copies_checkpoints_and_modes(calls: list[Any]) -> None:
    module: Any = BlipTextSelfAttention(BlipTextConfig(hidden_size=32, num_attention_heads=4), False, 0).eval()
    x = torch.randn(2, 6, 32, requires_grad=True)
    expected = module(x)[0]
    (grad,) = torch.autograd.grad(expected.sum(), x)
    handle = fk.patch(module)
    for each in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        calls.clear()
        out, weights = each(x)
        assert close(out, expected)
        assert (len(calls), weights) == (1, None)
    for reentrant in (False, True):
        out = checkpoint(lambda y: module(y)[0], x, use_reentrant=reentrant)
        assert close(torch.autograd.grad(out.sum(), x)[0], grad) if not reentrant else close(out, expected)
    with torch.inference_mode():
        assert close(module(x)[0], expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = module(x)[0]
    handle.undo()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = module(x)[0]
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert bool((ours - expected).norm() <= 1.1 * (theirs - expected).norm())
    assert torch.equal(module(x)[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["as it is", "operators"])
def test_compiled_it_is_its_own(what: str, calls: list[Any]) -> None:
    module = made(*SERVED[what])
    theirs = results(module)
    fk.patch(module)
    counters.clear()
    calls.clear()
    torch.compiler.reset()
    assert same(results(module, torch.compile(module, fullgraph=True, backend="aot_eager")), theirs)
    assert not calls
    assert not counters["graph_break"]
