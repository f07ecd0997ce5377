"""Dropout in a model: of embeddings, of branches and of attention's weights."""

from __future__ import annotations

import pytest
import torch
from tiny_model import config, draw, make
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels import OPS, BackendUnavailable
from foundry_kernels.ops.flash_attention.options import AttentionOptions
from foundry_kernels.ops.flash_attention.reference import attention_with_dropout

KINDS = ("embedding_dropout", "residual_dropout", "attention_dropout")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gpt2", "falcon", "vaswani"])
def test_dropout_is_of_training_alone_and_repeats_with_its_seed(name, kind):
    model = make(config(name, **{kind: 0.5}))
    plain = make(config(name))(draw())

    def drawn(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return model(draw())

    assert torch.equal(model.eval()(draw()), plain)
    model.train()
    assert torch.equal(drawn(0), drawn(0))
    assert not torch.allclose(drawn(0), drawn(1))
    drawn(0).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_residual_dropout_drops_whole_elements_of_both_branches():
    """The stream with all but a part dropped is the embedding plus twice some elements of the branches."""
    block, following = make(config("no-bias", residual_dropout=0.5)).layers[:2].train()
    seen: list[Tensor] = []
    for part in (block.attention, block.feed_forward):
        part.register_forward_hook(lambda module, inputs, output: seen.append(output))
    stream = torch.randn(2, 5, 16)
    branch, after = block(None, stream)
    sums: list[Tensor] = []  # the second branch is dropped out where it is added: in the pass of the next norm
    following.attention_norm.register_forward_hook(lambda module, inputs, output: sums.append(output[1]))
    following(branch, after)
    for before, dropped in zip(seen, (after - stream, sums[0] - after), strict=True):
        kept = dropped.abs() > 1e-6
        assert 0.2 < kept.float().mean() < 0.8
        torch.testing.assert_close(dropped, 2.0 * before * kept, rtol=1e-4, atol=1e-5)


def test_each_block_drops_a_branch_once():
    """Nearly all is dropped, so the stream that reaches the last norm is nearly the embedding: a branch that was
    forgotten, the last one too, would be there whole."""
    torch.manual_seed(0)
    for name in ("no-bias", "gpt2", "falcon"):
        model = make(config(name, residual_dropout=1.0 - 2.0**-30)).train()
        streams: list[Tensor] = []
        model.norm.register_forward_hook(lambda module, inputs, output, seen=streams: seen.append(output[1]))
        model.tok_embeddings.register_forward_hook(lambda module, inputs, output, seen=streams: seen.append(output))
        model.layers[0].register_forward_pre_hook(lambda module, inputs, seen=streams: seen.append(inputs[1]))
        model(draw())
        _, first, last = streams
        assert torch.equal(first, last), name
        assert not torch.equal(model.eval()(draw()), model.train()(draw()))


def attend_with_dropout(q, k, v, dropout_p, *, window=(None, None), alibi_slopes=None):
    options = AttentionOptions(
        None, None, q.shape[2], k.shape[2], q.shape[3] ** -0.5, *window, None, alibi_slopes, None,
        bottom_right=True, deterministic=True, return_lse=False, return_stats=False,
    )  # fmt: skip
    return attention_with_dropout(q, k, v, options, dropout_p)


def test_attention_with_dropout_of_nothing_is_attention():
    q, k, v = torch.randn(2, 6, 4, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 5)
    for options in (
        {"window": (None, 0)},
        {"window": (2, 2)},
        {"window": (1, 0), "alibi_slopes": fk.nn.alibi_slopes(6)},
    ):
        torch.testing.assert_close(attend_with_dropout(q, k, v, 0.0, **options), fk.flash_attention(q, k, v, **options))
    # The heads that are kept whole: of one query and key, the value is kept and doubled, or gone.
    out = attend_with_dropout(torch.ones(1, 400, 1, 4), torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4), 0.5)
    assert set(out.unique().tolist()) == {0.0, 2.0}
    assert abs(out.mean().item() - 1.0) < 0.25  # five standard deviations


def test_attention_dropout_of_packed_sequences_sees_no_other():
    torch.manual_seed(0)
    attention = fk.nn.Attention(16, 4, 2, sliding_window=3, dropout=1e-9, rope=fk.nn.RotaryEmbedding(4))
    x, cu_seqlens = torch.randn(1, 9, 16), torch.tensor([0, 4, 9], dtype=torch.int32)
    packed = attention(x, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(packed, attention.eval()(x, cu_seqlens=cu_seqlens))
    with pytest.raises(ValueError, match="return_lse and return_stats need attention without dropout"):
        attention.train()(x, return_lse=True)


def test_a_named_kernel_has_no_attention_dropout():
    if (reason := OPS["flash_attention"].why_not("native", "cpu", torch.float32)) is not None:
        pytest.skip(reason)
    ops = {"flash_attention": "native"}
    model = make(config("gpt2", attention_dropout=0.1), ops)  # type: ignore[arg-type]
    with pytest.raises(BackendUnavailable, match=r"'native' has no dropout of attention's weights; got dropout=0\.1"):
        model(draw())
    assert torch.isfinite(model.eval()(draw())).all()
