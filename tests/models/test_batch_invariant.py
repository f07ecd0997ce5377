"""`foundry_kernels.batch_invariant`: the switch, and whole models within it (operations: proof/test_invariance.py)."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bits import same
from built import needs_native
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.core import invariance
from foundry_kernels.models import ModelConfig, Transformer

# --- the switch -------------------------------------------------------------------------------------------------------


@needs_native
def test_the_switch_is_read_at_the_forward_call() -> None:
    """The backward pass outside of it is that of a batch-invariant call, also where it computes a layer again."""
    torch.manual_seed(0)
    x = torch.randn(2, 33, 24)
    for recompute in ("none", "product", "projections"):
        layers = torch.nn.Sequential(fk.nn.GatedMLP(24, 40, recompute=recompute), fk.nn.Attention(24, 4, 2))
        grads = []
        for within in (True, False):
            own = x.clone().requires_grad_()
            with fk.batch_invariant():
                loss = layers(own).square().sum()
                if within:
                    grads.append(torch.autograd.grad(loss, (own, *layers.parameters())))
            if not within:
                grads.append(torch.autograd.grad(loss, (own, *layers.parameters())))
        assert all(map(same, *grads)), recompute


@needs_native
def test_switches_nest_and_leave_nothing() -> None:
    own, x, weight = F.linear, torch.randn(3, 8), torch.randn(5, 8)
    outer = fk.batch_invariant()
    with fk.batch_invariant():
        assert F.linear is not own
    assert F.linear is not own
    assert same(F.linear(x, weight)[1:2], F.linear(x[1:2], weight))
    with pytest.raises(fk.BackendUnavailable, match="float32, bfloat16 and float16, not float64"):
        F.linear(x.double(), weight.double())
    with pytest.raises(ValueError, match=r"weight must be \[N, K\] with x's last dimension 8; got \(5, 7\)"):
        F.linear(x, weight[:, :7])
    assert F.linear(x.to("meta"), weight.to("meta")).shape == (3, 5)
    outer.undo()
    outer.undo()
    assert F.linear is own
    assert not invariance.on


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is (deprecated|not supported)")
def test_torchscript_is_left_alone() -> None:
    layer, x = torch.nn.Linear(8, 5), torch.randn(3, 8)
    expected = layer(x)
    with fk.batch_invariant():
        assert same(torch.jit.script(layer)(x), expected)

        def linear(x: Tensor, weight: Tensor) -> Tensor:
            return F.linear(x, weight)

        assert "aten::linear" in str(torch.jit.script(linear).graph)


@pytest.mark.slow
@needs_native
def test_compiled_code_follows_the_switch() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), fk.nn.Attention(16, 2))
    x = torch.randn(3, 20, 16)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    grads = {}
    torchs = compiled(x)
    for name, function in (("eager", model), ("compiled", compiled)):
        own = x.clone().requires_grad_()
        with fk.batch_invariant():
            y = function(own)
            assert same(function(x[1:2]), y[1:2])
        grads[name] = (y, *torch.autograd.grad(y.square().sum(), (own, *model.parameters())))
    assert all(map(same, *grads.values()))
    assert same(compiled(x), torchs)


# --- models -----------------------------------------------------------------------------------------------------------

SHAPE: dict[str, Any] = {"dim": 48, "n_layers": 2, "n_heads": 4, "vocab_size": 61, "max_seq_len": 96}
MODELS: dict[str, Any] = {
    "llama": lambda: ModelConfig(**SHAPE, n_kv_heads=2),
    "window": lambda: ModelConfig(**SHAPE, n_kv_heads=2, sliding_window=19, qk_norm=True),
    "gpt2": lambda: ModelConfig.gpt2(**SHAPE),
    "mixtral": lambda: ModelConfig.mixtral(**SHAPE, n_kv_heads=2, n_experts=4),
}


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_logits_of_a_model(name: str, dtype: torch.dtype) -> None:
    """Alone, in batches of 2 to 5, packed, padded, and through a cache: a prompt in chunks, then token after token."""
    torch.manual_seed(1)
    model = Transformer(MODELS[name]()).to(dtype).eval()
    tokens = torch.randint(0, 61, (5, 44))
    with torch.no_grad(), fk.batch_invariant():
        alone = [model(each[None]) for each in tokens]
        for batch in ([0, 1], [2, 0, 4], [3, 2, 1, 0], [4, 1, 2, 3, 0]):
            for logits, i in zip(model(tokens[batch]), batch, strict=True):
                assert same(logits, alone[i][0]), f"sequence {i} in {batch}"
        sizes = [44, 9, 30]
        packed = torch.cat([tokens[i, :n] for i, n in enumerate(sizes)])[None]
        cu_seqlens = torch.tensor([0, *accumulate(sizes)], dtype=torch.int32)
        for i, logits in enumerate(model(packed, cu_seqlens=cu_seqlens)[0].split(sizes)):
            assert same(logits, alone[i][0, : sizes[i]]), f"packed sequence {i}"
        padded = model(tokens[:3], lengths=torch.tensor(sizes))
        for i, n in enumerate(sizes):
            assert same(padded[i, :n], alone[i][0, :n]), f"padded sequence {i}"
        for batch in ([1], [2, 3, 4]):
            cache = model.make_cache(len(batch), 44)
            ends = [0, 20, 27, *range(28, 45)]
            parts = [model(tokens[batch, a:b], cache=cache) for a, b in pairwise(ends)]
            for logits, i in zip(torch.cat(parts, 1), batch, strict=True):
                assert same(logits, alone[i][0]), f"sequence {i} in {batch}, through a cache"


@needs_native
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_a_model(name: str) -> None:
    """Weights' gradients are the same for any number of threads, those of the embedded tokens alone and in a batch."""
    torch.manual_seed(2)
    model = Transformer(MODELS[name]()).train()
    tokens, kept = torch.randint(0, 61, (3, 40)), []
    model.tok_embeddings.register_forward_hook(lambda m, args, out: kept.append(out))

    def of_batch(batch: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        kept.clear()
        hidden_loss = model(tokens[batch]).float().logsumexp(-1).sum()
        parameters = [p for n, p in model.named_parameters() if "tok_embeddings" not in n]
        grad, *weights = torch.autograd.grad(hidden_loss, (kept[0], *parameters), allow_unused=True)
        return grad, tuple(w for w in weights if w is not None)

    before = torch.get_num_threads()
    try:
        with fk.batch_invariant():
            torch.set_num_threads(1)
            whole, weights = of_batch(slice(0, 3))
            for threads in (2, 3):
                torch.set_num_threads(threads)
                again, others = of_batch(slice(0, 3))
                assert same(again, whole)
                assert all(map(same, others, weights))
                for batch in ([1], [2, 0]):
                    assert same(of_batch(batch)[0], whole[batch]), batch
    finally:
        torch.set_num_threads(before)
