"""fk.compat.flex_attention and its switch, with PyTorch's own BlockMask, against eager attention in float64."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
from attention_loops import BACKENDS, draw, over_backends
from score_functions import EXAMPLES, Sizes, eager, whole
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, create_mask

import foundry_kernels as fk
from foundry_kernels.compat import flex_attention, flex_mask, flex_switch, use_flex_attention

SIZES = Sizes(2, 4, 150, 150)
MASKED = [name for name, example in EXAMPLES.items() if example.mask is not None]


def inputs(sizes: Sizes = SIZES, kv_heads: int = 2) -> list[Tensor]:
    shapes = [(sizes.batch, heads, n, 16) for heads, n in ((sizes.heads, sizes.queries), *[(kv_heads, sizes.keys)] * 2)]
    return [draw(*shape, seed=i, dtype=torch.float32).requires_grad_() for i, shape in enumerate(shapes)]


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx <= q_idx


def agrees(block_mask: BlockMask, seen: Tensor, sizes: Sizes = SIZES) -> None:
    """The mask is `seen`, and is made once."""
    asked = (*sizes,)
    found = flex_mask.attention_mask(block_mask, asked)
    if found is None:
        assert seen.all()
    else:
        assert torch.equal(found.dense().expand(*asked), seen.expand(*asked))
    assert flex_mask.attention_mask(block_mask, asked) is found


@pytest.mark.parametrize("block", [128, 64, (16, 48), (100, 37), (256, 1 << 12)])
@pytest.mark.parametrize("name", MASKED)
def test_masks_of_blocks_of_any_size(name: str, block: Any) -> None:
    example = EXAMPLES[name]
    assert example.mask is not None
    fn = example.mask(example.captured(SIZES))
    made = create_block_mask(fn, 2, 4, 150, 150, device="cpu", BLOCK_SIZE=block)
    agrees(made, whole(fn, sizes=SIZES))


def test_blocks_decide_before_the_function() -> None:
    """A block that is not listed is hidden and a full one is seen, whatever the function says."""
    counts, full_counts = (torch.tensor(n, dtype=torch.int32).view(1, 1, 2) for n in ([1, 2], [1, 0]))
    indices, full_indices = (torch.tensor(n, dtype=torch.int32).view(1, 1, 2, 2) for n in ([0, 7, 1, 0], [1, 9, 9, 9]))

    def fn(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx % 3 == kv_idx % 2

    made = BlockMask.from_kv_blocks(counts, indices, full_counts, full_indices, 75, fn, (150, 150))
    seen = whole(fn, sizes=SIZES)[:1, :1].clone()
    seen[:, :, :75, 75:] = True
    agrees(made, seen)
    assert torch.equal(flex_mask.attention_mask(made, (*SIZES,)).dense(), seen)  # type: ignore[union-attr]
    nothing = BlockMask.from_kv_blocks(torch.full_like(counts, 2), indices % 2, BLOCK_SIZE=75, seq_lengths=(150, 150))
    nothing.kv_indices.copy_(torch.tensor([0, 1]).expand(1, 1, 2, 2))
    agrees(nothing, torch.ones(1, 1, 1, 1, dtype=torch.bool))
    assert flex_mask.attention_mask(nothing, (*SIZES,)) is None


def test_a_function_of_sequence_and_head_with_blocks_for_all() -> None:
    limit = torch.arange(8).view(2, 4) * 19

    def fn(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx < limit[b][h]  # one place after the other

    counts = torch.full((1, 1, 2), 2, dtype=torch.int32)
    made = BlockMask.from_kv_blocks(counts, torch.tensor([[[[0, 1], [1, 0]]]]).int(), None, None, 128, fn, (150, 150))
    agrees(made, torch.arange(150) < limit[:, :, None, None])
    of_all = create_block_mask(causal, None, None, 150, 150, device="cpu")
    assert flex_mask.attention_mask(of_all, (*SIZES,)).shape[:2] == (1, 1)  # type: ignore[union-attr]


def test_cut_and_sliced_masks() -> None:
    length = torch.tensor([40, 90])
    fn = EXAMPLES["prefix_lm"].mask({"length": length})  # type: ignore[misc]
    made = create_block_mask(fn, 2, None, 200, 200, device="cpu", BLOCK_SIZE=32)
    agrees(made._adjust(150, 100), create_mask(fn, 2, 1, 150, 100, device="cpu"), Sizes(2, 4, 150, 100))
    part = made[1:2]
    with pytest.raises(ValueError, match="block_mask must have a mask_mod; that of a slice must be set"):
        flex_mask.attention_mask(part, (1, 4, 200, 200))
    part.mask_mod = lambda b, h, q, k: fn(b + 1, h, q, k)
    agrees(part, create_mask(fn, 2, 1, 200, 200, device="cpu")[1:], Sizes(1, 4, 200, 200))


def test_a_mask_is_kept_as_long_as_its_block_mask_and_made_again_when_a_tensor_changes() -> None:
    kept = len(flex_mask._MADE)
    document = torch.arange(150) // 50
    made = create_block_mask(lambda b, h, q, k: document[q] == document[k], None, None, 150, 150, device="cpu")
    agrees(made, document[:, None] == document)
    document[:] = torch.arange(150) // 75
    agrees(made, document[:, None] == document)  # all blocks are listed
    with torch.inference_mode():
        made.mask_mod = causal
        agrees(made, create_mask(causal, 1, 1, 150, 150, device="cpu"))
    assert len(flex_mask._MADE) == kept + 1
    del made
    gc.collect()
    assert len(flex_mask._MADE) == kept


@over_backends
@pytest.mark.parametrize("gqa", [False, True])
def test_results_and_gradients(backend: str, gqa: bool) -> None:
    given = inputs(kv_heads=2 if gqa else 4)
    block_mask = create_block_mask(lambda b, h, q, k: (k <= q) & (q != 3), None, None, 150, 150, device="cpu")
    out, aux = flex_attention(
        *given, block_mask=block_mask, scale=-0.5, enable_gqa=gqa, return_aux=AuxRequest(True, True), backend=backend
    )  # fmt: skip
    wide = [x.detach().double().requires_grad_() for x in given]
    seen = create_mask(lambda b, h, q, k: (k <= q) & (q != 3), 1, 1, 150, 150, device="cpu")
    expected, lse = eager(*wide, seen=seen, scale=-0.5)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(aux.lse.double(), lse, rtol=1e-5, atol=2e-6)
    assert torch.equal(aux.lse[:, :, 3], torch.full((2, 4), -math.inf))
    scores = -0.5 * wide[0] @ wide[1].repeat_interleave(2 if gqa else 1, 1).mT
    top = scores.masked_fill(~seen, -math.inf).amax(-1)
    torch.testing.assert_close(aux.max_scores.double(), top, rtol=1e-5, atol=2e-6)
    finite = torch.arange(150) != 3
    found = torch.autograd.grad(out.square().sum() + aux.lse[:, :, finite].sum(), given)
    exact = torch.autograd.grad(expected.square().sum() + lse[:, :, finite].sum(), wide)
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-4, atol=2e-5)
    assert torch.equal(flex_attention(*given, None, block_mask, -0.5, gqa, True, {}, backend=backend)[1], aux.lse)


@pytest.mark.parametrize("name", EXAMPLES)
def test_score_functions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its mask as blocks: the results of PyTorch's own eager function, and the gradients of a float64 form."""
    from torch.nn.attention import flex_attention as module

    monkeypatch.setattr(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    example, sizes = EXAMPLES[name], Sizes(2, 4, 36, 36)
    given, captured = inputs(sizes), example.captured(sizes)
    trained = [*given, *(captured[n] for n in example.trained)]
    score_mod = None if example.score is None else example.score(captured)
    block_mask = None
    if example.mask is not None:
        block_mask = create_block_mask(example.mask(captured), 2, 4, 36, 36, device="cpu", BLOCK_SIZE=(16, 8))
    out = flex_attention(*given, score_mod, block_mask, enable_gqa=True)
    with torch.no_grad():
        bare = [x.detach() for x in given]
        theirs = flex_switch.TORCHS(*bare, example.score_mod(captured), enable_gqa=True)
    torch.testing.assert_close(out, theirs, rtol=1e-4, atol=1e-5)
    wide = [x.detach().double().requires_grad_() for x in given]
    exact = example.captured(sizes, torch.float64)
    expected = eager(*wide, example.score_mod(exact))[0]
    found = torch.autograd.grad(out.square().sum(), trained)
    right = torch.autograd.grad(expected.square().sum(), [*wide, *(exact[n] for n in example.trained)])
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-4, atol=2e-5)


def test_one_batch_of_keys_for_all_queries() -> None:
    q, k, v = inputs(Sizes(3, 2, 9, 9))
    out = flex_attention(q, k[:1], v[:1])
    torch.testing.assert_close(out, flex_attention(q, k[:1].expand(3, -1, -1, -1), v[:1].expand(3, -1, -1, -1)))
    assert flex_attention(q, k, v, return_aux=AuxRequest())[1] == (None, None)


def test_bad_input() -> None:
    q, k, v = inputs()
    made = create_block_mask(causal, 2, 4, 150, 150, device="cpu")
    integers = create_block_mask(causal, None, None, 150, 150, device="cpu")
    integers.mask_mod = lambda b, h, q, k: q - k
    alone = [x[:1] for x in (q, k, v)]
    bad: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("block_mask must be a BlockMask or None; got Tensor", (q, q, q, None, torch.ones(1)), {}),
        (r"block_mask must be that of 150 queries and 9 keys; got one of \(150, 150\): make",
         (q, q[:, :, :9], q[:, :, :9]), {"block_mask": made}),
        (r"block_mask must have B=1 or 1 and H=4 or 1; got \(2, 4\)", (*alone, None, made), {"enable_gqa": True}),
        ("block_mask's mask_mod must return a bool tensor; got torch.int", (q, q, q, None, integers), {}),
        ("key must have query's 4 heads unless enable_gqa=True; got 2", (q, k, v), {}),
        (r"query must be \[B, H, T, D\]", (q[0], k, v), {}),
        ("return_lse must be False with return_aux", (q, q, q), {"return_lse": True, "return_aux": AuxRequest()}),
        ("return_aux must be an AuxRequest or None; got bool", (q, q, q), {"return_aux": True}),
        ("kernel_options must be a dict or None; got list", (q, q, q), {"kernel_options": []}),
    ]  # fmt: skip
    for message, given, options in bad:
        with pytest.raises((TypeError, ValueError), match=message):
            flex_attention(*given, **options)
    with pytest.raises(ValueError, match="backend must be one of"):
        use_flex_attention("flash")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the module's name and an imported one, compiled or not; what stays PyTorch's; and that nothing is left."""
    from torch.nn.attention import flex_attention as module

    q, k, v = inputs(Sizes(1, 2, 9, 9))
    made = create_block_mask(lambda b, h, q, k: (k <= q) | (k == b + 3), 1, None, 9, 9, device="cpu", BLOCK_SIZE=(2, 5))
    expected = flex_attention(q, k, v, block_mask=made)
    served: list[str] = []
    ours = flex_switch.flex_attention
    monkeypatch.setattr(flex_switch, "flex_attention", lambda *a, **k: (served.append(k["backend"]), ours(*a, **k))[1])
    globals()["imported"] = module.flex_attention
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        module.flex_attention(q, k, v)
    for backend in BACKENDS:
        with use_flex_attention(backend):
            assert globals()["imported"] is module.flex_attention is flex_switch.routed
            torch.testing.assert_close(module.flex_attention(q, k, v, block_mask=made), expected)
            assert served == [backend]
            served.clear()
            module.flex_attention(q.detach(), k.detach(), torch.ones(1, 2, 9, 513))
            assert not served
    with use_flex_attention():
        monkeypatch.undo()
        compiled = torch.compile(module.flex_attention, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(q, k, v, block_mask=made), expected)
        score_mod = EXAMPLES["mla_rope"].score(EXAMPLES["mla_rope"].captured(Sizes(1, 2, 9, 9)))  # type: ignore[misc]
        torch.testing.assert_close(compiled(q, k, v, score_mod), flex_attention(q, k, v, score_mod))
    assert globals()["imported"] is module.flex_attention is flex_switch.TORCHS
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        flex_switch.routed(q, k, v)


@pytest.mark.slow  # transformers has PyTorch compile what makes its mask
def test_a_model_of_transformers() -> None:
    """Its "flex_attention" trains on a CPU while the switch is on, and a patched model does as well without it."""
    pytest.importorskip("transformers")
    from foundry_kernels.integrations.adapters.tiny import tiny_model

    tokens = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(0))
    padding = torch.ones_like(tokens)
    padding[0, 5:] = 0

    def loss_and_gradients(model: Any, **kwargs: Any) -> list[Tensor]:
        model.zero_grad()
        loss = model(tokens, labels=tokens.where(padding == 1, -100), attention_mask=padding, **kwargs).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    model = tiny_model("llama").train()
    model.set_attn_implementation("eager")
    expected = loss_and_gradients(model)
    model.set_attn_implementation("flex_attention")
    with use_flex_attention():
        torch.testing.assert_close(loss_and_gradients(model), expected, rtol=2e-4, atol=2e-5)
        with fk.patch(model, ops=["rms_norm", "swiglu", "rope"]):
            torch.testing.assert_close(loss_and_gradients(model), expected, rtol=2e-4, atol=2e-5)
    with fk.patch(model):
        torch.testing.assert_close(loss_and_gradients(model), expected, rtol=2e-4, atol=2e-5)
    assert model.config._attn_implementation == "flex_attention"
