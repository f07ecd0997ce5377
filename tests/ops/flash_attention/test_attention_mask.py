"""AttentionMask: its tiles and bits say what the dense mask says."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_inputs import inputs
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels import AttentionMask
from foundry_kernels.ops.flash_attention import attention_mask
from foundry_kernels.ops.flash_attention.case_makers import blocks, bool_mask

B, H, T, S = 2, 3, 150, 200


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def drawn(*shape: int) -> Tensor:
    return blocks(torch.Generator().manual_seed(0), shape)


SHAPES = ((T, S), (B, 1, T, S), (1, H, T, S), (B, H, T, S), (S,), (B, 1, 1, S), (H, T, 1), (B, H, 1, 1), ())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_of_a_dense_mask(shape: tuple[int, ...]) -> None:
    mask = drawn(*shape) if len(shape) > 1 else torch.rand(shape) < 0.5
    whole = mask.expand(B, H, T, S)
    assert torch.equal(AttentionMask(mask).dense(T, S).expand(B, H, T, S), whole)
    turned = mask.mT.contiguous().mT if mask.dim() > 1 else mask
    assert torch.equal(AttentionMask(turned).dense(T, S).expand(B, H, T, S), whole)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 128])
def test_which_tiles_are_empty_and_full(size: int) -> None:
    """A tile that only its part inside of the tensor fills is full."""
    n = -(-size // 64)
    ones, zeros = torch.ones(2, size, dtype=torch.bool), torch.zeros(2, size, dtype=torch.bool)
    assert AttentionMask(ones).at(2, size).tiles.tolist() == [[[[1] * n]]]
    assert AttentionMask(zeros).at(2, size).tiles.tolist() == [[[[0] * n]]]
    ones[0, 0], zeros[1, size - 1] = False, True
    assert AttentionMask(ones).at(2, size).tiles.flatten().tolist() == [2] + [1] * (n - 1)
    assert AttentionMask(zeros).at(2, size).tiles.flatten().tolist() == [0] * (n - 1) + [2]


def test_bits_are_kept_of_mixed_tiles_alone() -> None:
    mask = AttentionMask.from_function(causal, None, None, 1024, 1024, "cpu")
    tiles, bits = mask.at(1024, 1024)
    assert bits.shape == (2 + 16, 64)
    assert (tiles == 0).sum() == (tiles == 1).sum() == 16 * 15 / 2
    assert "120 are empty and 120 full" in repr(mask)


def test_in_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = drawn(B, H, T, S)
    whole = AttentionMask(mask).dense()
    monkeypatch.setattr(attention_mask, "_AT_ONCE", 1)
    assert torch.equal(AttentionMask(mask).dense(), whole)
    assert torch.equal(whole, mask)


def test_documents() -> None:
    cu_seqlens = torch.tensor([0, 3, 100, 100, 260, 300], dtype=torch.int32)
    document = torch.arange(5).repeat_interleave(cu_seqlens.diff())
    mask = AttentionMask.documents(cu_seqlens)
    assert mask.shape == (1, 1, 300, 300)
    assert torch.equal(mask.dense()[0, 0], document[:, None] == document)


@pytest.mark.parametrize("lengths", [[0, 65], [200, 64], [199, 1], [1000, 128]], ids=str)
def test_prefix(lengths: list[int]) -> None:
    mask = AttentionMask.prefix(torch.tensor(lengths))
    assert mask.shape == (2, 1, None, None)
    expected = (torch.arange(S) < torch.tensor(lengths)[:, None])[:, None, None].expand(2, 1, T, S)
    assert torch.equal(mask.dense(T, S), expected)
    tiles = mask.at(T, S).tiles
    assert tiles.shape == (2, 1, 1, 4)
    full = [[bool(expected[b, 0, 0, j : j + 64].all()) for j in range(0, S, 64)] for b in range(2)]
    assert (tiles[:, 0, 0] == 1).tolist() == full


@pytest.mark.parametrize("op", ["and", "or"])
def test_combined(op: str) -> None:
    a, b = drawn(B, 1, T, S), bool_mask(torch.Generator().manual_seed(1), (H, T, S))
    dense = [a, b[None], (torch.arange(S) < torch.tensor([[70], [200]]))[:, None, None]]
    masks = [AttentionMask(a), AttentionMask(b), AttentionMask.prefix(torch.tensor([70, 200]))]
    for i, j in ((0, 1), (1, 0), (0, 2), (2, 1), (0, 0), (2, 2)):
        found = masks[i] & masks[j] if op == "and" else masks[i] | masks[j]
        expected = dense[i] & dense[j] if op == "and" else dense[i] | dense[j]
        assert torch.equal(found.dense(T, S).expand(B, H, T, S), expected.expand(B, H, T, S)), (i, j)
    nothing = AttentionMask(a) & AttentionMask(~a)
    everything = AttentionMask(a) | AttentionMask(~a)
    assert not nothing.at(T, S).tiles.any()
    assert everything.dense().all()


def test_a_prefix_language_model() -> None:
    mask = AttentionMask.prefix(torch.tensor([5, 90])) | AttentionMask.from_function(causal, None, None, T, T, "cpu")
    i, j = torch.arange(T)[:, None], torch.arange(T)
    assert mask.shape == (2, 1, T, T)
    assert torch.equal(mask.dense()[:, 0], (j < torch.tensor([5, 90])[:, None, None]) | (i >= j))


def test_a_function_of_batch_and_head() -> None:
    mask = AttentionMask.from_function(lambda b, h, i, j: (i + h) % (b + 2) == j % (b + 2), B, H, T, S, "cpu")
    b, h, i, j = (torch.arange(n).view([-1 if d == k else 1 for k in range(4)]) for d, n in enumerate((B, H, T, S)))
    assert torch.equal(mask.dense(), (i + h) % (b + 2) == j % (b + 2))


def test_it_is_made_once() -> None:
    mask = AttentionMask.prefix(torch.tensor([3, 70]))
    assert mask.at(T, S).tiles is mask.at(T, S).tiles
    again = pickle.loads(pickle.dumps(mask))
    assert torch.equal(again.dense(T, S), mask.dense(T, S))
    assert mask.to("cpu") is mask
    assert mask.to("meta").device.type == "meta"


def test_it_is_what_the_dense_mask_is() -> None:
    q, k, v = inputs(70, 90)
    mask = drawn(2, 1, 70, 90)
    found = fk.flash_attention(q, k, v, attn_mask=AttentionMask(mask), backend="reference")
    assert torch.equal(found, fk.flash_attention(q, k, v, attn_mask=mask, backend="reference"))


MASK, OTHER = AttentionMask(drawn(4, 4)), AttentionMask(drawn(5, 4))
FALLING, NOT_ZERO = torch.tensor([0, 5, 2]), torch.tensor([1, 2])
BAD: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    (TypeError, "mask must be a torch.Tensor; got list", lambda: AttentionMask([True])),  # type: ignore[arg-type]
    (TypeError, "mask must be bool, a bias is passed as it is; got", lambda: AttentionMask(torch.ones(2))),
    (ValueError, r"mask must broadcast to \[B, H, T, S\]", lambda: AttentionMask(torch.ones(1, 1, 1, 1, 1).bool())),
    (TypeError, "lengths must be int32 or int64", lambda: AttentionMask.prefix(torch.ones(2))),
    (ValueError, r"lengths must be \[B\]", lambda: AttentionMask.prefix(torch.ones(2, 2).int())),
    (ValueError, "cu_seqlens must start at 0, never decrease", lambda: AttentionMask.documents(NOT_ZERO)),
    (ValueError, "cu_seqlens must start at 0, never decrease and", lambda: AttentionMask.documents(FALLING)),
    (ValueError, "T must be >= 1", lambda: AttentionMask.from_function(causal, None, None, 0, 4)),
    (TypeError, "B must be an int", lambda: AttentionMask.from_function(causal, 1.0, None, 4, 4)),  # type: ignore[arg-type]
    (TypeError, "fn must return a bool", lambda: AttentionMask.from_function(lambda b, h, i, j: i, None, None, 4, 4)),
    (ValueError, "masks must have the same T; got 4 and 5", lambda: MASK & OTHER),
    (ValueError, "masks must be on one device", lambda: MASK | MASK.to("meta")),
    (TypeError, "unsupported operand", lambda: MASK & drawn(4, 4)),  # type: ignore[operator]
    (ValueError, "n_queries and n_keys must be given", lambda: AttentionMask.prefix(torch.tensor([4])).dense()),
]


@pytest.mark.parametrize(("error", "message", "call"), BAD, ids=[message for _, message, _ in BAD])
def test_bad_input(error: type[Exception], message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=message):
        call()
