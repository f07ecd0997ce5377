"""The model: names of weights, checkpoints, refusals, backends. Its mathematics is in test_model_family.py."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny_model import TINY, draw, make
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foundry_kernels import OPS
from foundry_kernels.models import Transformer
from foundry_kernels.testing import compare

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
#: The operations that a model of the default choices, LLaMA's, calls.
OPERATIONS = (
    "rms_norm", "add_rms_norm", "rope", "swiglu", "flash_attention", "cross_entropy", "linear_cross_entropy"
)  # fmt: skip


def test_names_and_shapes_are_metas():
    expected = {"tok_embeddings.weight": (11, 16), "norm.weight": (16,), "output.weight": (11, 16)}
    for n in range(2):
        expected |= {
            f"layers.{n}.attention_norm.weight": (16,),
            f"layers.{n}.attention.wq.weight": (16, 16),
            f"layers.{n}.attention.wk.weight": (8, 16),
            f"layers.{n}.attention.wv.weight": (8, 16),
            f"layers.{n}.attention.wo.weight": (16, 16),
            f"layers.{n}.ffn_norm.weight": (16,),
            f"layers.{n}.feed_forward.w1.weight": (48, 16),
            f"layers.{n}.feed_forward.w2.weight": (16, 48),
            f"layers.{n}.feed_forward.w3.weight": (48, 16),
        }
    assert {name: tuple(t.shape) for name, t in Transformer(TINY).state_dict().items()} == expected


def test_last_only_and_int32():
    model, tokens = make(), draw()
    last = model(tokens, last_only=True)
    assert last.shape == (3, 1, 11)
    torch.testing.assert_close(last, model(tokens.int())[:, -1:])


def test_checkpoint_with_what_meta_stores_besides():
    model = make()
    state = model.state_dict()
    Transformer(TINY, "reference").load_state_dict(state | {"rope.freqs": torch.zeros(2)})
    tied = make(dataclasses.replace(TINY, tie_embeddings=True))
    assert "output.weight" not in tied.state_dict()
    embeddings = tied.state_dict()["tok_embeddings.weight"]
    tied.load_state_dict(tied.state_dict() | {"output.weight": embeddings.clone()})
    with pytest.raises(RuntimeError, match=r"output\.weight"):
        tied.load_state_dict(tied.state_dict() | {"output.weight": embeddings + 1})


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m([[1]]), TypeError, "tokens must be a torch.Tensor; got list"),
        (lambda m: m(draw().float()), TypeError, "tokens must be int32 or int64"),
        (lambda m: m(draw()[0]), ValueError, r"tokens must be \[B, T\]; got shape \(7,\)"),
        (lambda m: m(draw()[:, :0]), ValueError, "tokens must hold at least one position"),
        (lambda m: m(draw() + 5), ValueError, r"tokens must be in 0 .. 10; got 15"),
        (lambda m: m(draw() - 11), ValueError, r"tokens must be in 0 .. 10; got -11"),
        (lambda m: m(draw().to("meta")), ValueError, "tokens must be on the model's device cpu; got meta"),
        (lambda m: m(draw(), draw()[:, 1:]), ValueError, r"targets must have tokens' shape \(3, 7\)"),
        (lambda m: m(draw(), draw().float()), TypeError, "targets must be int32 or int64"),
        (lambda m: m(draw(), draw() + 5), ValueError, r"targets must be in 0 .. 10; got 15"),
        (lambda m: m(draw(), draw(), last_only=True), ValueError, "targets need the logits of all positions"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_model_refuses_before_it_computes(call, error, message, monkeypatch):
    model = make()
    monkeypatch.setattr(model.tok_embeddings, "forward", lambda *_: pytest.fail("the model began to compute"))
    with pytest.raises(error, match=message):
        call(model)


# --- backends ---------------------------------------------------------------------------------------------------------


def test_repr_and_serving_name_the_backends():
    assert "backend='reference'" in repr(make())
    model = Transformer(TINY, {"rms_norm": "native"})
    assert model.backends == dict.fromkeys(OPERATIONS, "auto") | {"rms_norm": "native"}
    assert model.layers[0].ffn_norm.backends["rms_norm"] == "native"
    assert model.layers[0].attention.rope.backends == {"rope": "auto"}
    assert set(model.serving("cpu", torch.float64)) == set(OPERATIONS)
    assert "auto" not in model.serving().values()


def gradients(model: Transformer, tokens: Tensor) -> dict[str, Tensor]:
    logits, loss = model(tokens, tokens.roll(-1, 1), return_logits=True)
    loss.backward()
    return {"logits": logits, "loss": loss} | {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:backend .* has no kernel yet")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["native", "triton", "auto"])
def test_backend_equals_reference(backend, device):
    model = make(TINY, backend).to(device)
    for op, name in model.serving().items():
        if (reason := OPS[op].why_not(name, device, torch.float32)) is not None:
            pytest.skip(f"{op}: {reason}")
    tokens = draw().to(device)
    actual = gradients(model, tokens)
    reference = gradients(make().to(device), tokens)
    oracle = gradients(make().double().to(device), tokens)
    for name, tensor in actual.items():
        compare(name, tensor, reference[name], oracle[name], 0.0)


@pytest.mark.filterwarnings("ignore:backend .* has no kernel yet")
@pytest.mark.parametrize("backend", ["native", "triton"])
def test_rotation_gate_and_norm_are_one_launch_each_in_a_block(backend):
    """No transposition, no chunk, no repetition around them: the kernels take the tensors as they lie."""
    ops = {name: backend if OPS[name].why_not(backend, "cpu", torch.float32) is None else "auto" for name in OPERATIONS}
    if ops["rope"] == "auto":
        pytest.skip(str(OPS["rope"].why_not(backend, "cpu", torch.float32)))
    model, launched, shuffled = make(backend=ops), [], []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func._schema.name.split("::")[1]
            if func.namespace == "foundry_kernels":
                launched.append(name.removeprefix("triton_"))
            elif name in ("cat", "chunk", "split", "clone", "copy_", "repeat_interleave"):
                shuffled.append(name)
            return func(*args, **(kwargs or {}))

    with Count(), torch.no_grad():
        model(draw())
    per_block = [name for name in launched if "attention" not in name]
    assert sum("rope" in name for name in per_block) == TINY.n_layers
    assert sum("glu" in name for name in per_block) == TINY.n_layers
    assert sum("norm" in name for name in per_block) == 2 * TINY.n_layers + 1
    if ops["flash_attention"] == backend:
        assert not shuffled
