"""Sequences divided over two processes, and over four, against one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist
from processes import context, training
from processes.context import KERNELS, SHAPE, key
from processes.outcomes import near, outcome, same_training
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.distributed.pieces import plan
from foundry_kernels.distributed.zigzag import Place
from foundry_kernels.models import ModelConfig, Transformer
from foundry_kernels.ops.flash_attention import FLASH_ATTENTION, FLASH_ATTENTION_VARLEN
from foundry_kernels.testing.policy import Expected, Result

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")


@pytest.fixture(params=[2, pytest.param(4, marks=pytest.mark.slow)], ids=["two", "four"])
def divided(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = request.getfixturevalue("results" if request.param == 2 else "results_of_four")
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return training.train(training.make_model(), loss_of=context.loss_of_whole, lr=context.LR)


# --- pieces -----------------------------------------------------------------------------------------------------------

SIZE, CHUNK = 3, 8
LENGTH = 2 * SIZE * CHUNK


def seen_by_pieces(left: int | None, right: int | None, documents: tuple[int, ...] | None, relative: bool) -> Tensor:
    """How often each pair ``[process, T, T]`` is computed, from what kernels are told of each piece."""
    count = torch.zeros(SIZE, LENGTH, LENGTH, dtype=torch.int64)
    at = [torch.cat([torch.arange(CHUNK) + c * CHUNK for c in Place(r, SIZE).chunks]) for r in range(SIZE)]
    for rank in range(SIZE):
        for source, pieces in enumerate(plan(Place(rank, SIZE), CHUNK, left, right, documents, relative)):
            for piece in pieces:
                rows, cols = at[rank][slice(*piece.queries)], at[source][slice(*piece.keys)]
                ahead = torch.arange(len(cols)) - torch.arange(len(rows))[:, None]
                seen = (ahead >= -LENGTH) if piece.left is None else ahead >= -piece.left
                seen = seen if piece.right is None else seen & (ahead <= piece.right)
                if piece.cu_seqlens is not None:
                    bounds = torch.tensor(piece.cu_seqlens[1:])
                    inside = torch.searchsorted(bounds, torch.arange(len(rows)), right=True)
                    seen = seen & (inside[:, None] == inside)
                assert piece.left is None or piece.left >= 0
                assert piece.right is None or piece.right >= 0
                assert not relative or not piece.distance or piece.distance == int(rows[0] - cols[0])
                count[rank, rows[:, None], cols] += seen
    return count


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("documents", [None, (0, 5, 5, 8, 29, 47, 48), (0, 48)])
@pytest.mark.parametrize(
    "window", [(None, None), (None, 0), (None, 5), (0, 0), (3, 0), (9, 0), (11, 2), (20, 31), (None, 60), (4, None)]
)
def test_pieces_hold_each_pair_that_is_seen_once(window, documents, relative):
    left, right = window
    ahead = torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]
    expected = torch.ones_like(ahead, dtype=torch.bool) if left is None else ahead >= -left
    expected = expected if right is None else expected & (ahead <= right)
    if documents is not None:
        document = torch.searchsorted(torch.tensor(documents[1:]), torch.arange(LENGTH), right=True)
        expected = expected & (document[:, None] == document)
    count = seen_by_pieces(left, right, documents, relative)
    assert torch.equal(count.sum(0), expected.long())


def test_processes_have_as_much_to_compute_under_a_causal_mask():
    assert len(set(seen_by_pieces(None, 0, None, False).sum((1, 2)).tolist())) == 1


# --- ring attention ---------------------------------------------------------------------------------------------------


def test_ring_attention_is_as_exact_as_one_process(divided):
    """Outputs and gradients of every option, by the policy that kernels are held to."""
    found = outcome(divided, "ring")[0]
    for case, backend, dtype in KERNELS:
        op = FLASH_ATTENTION_VARLEN if "cu_seqlens_q" in case.args else FLASH_ATTENTION
        outputs, grads = found[key(case, backend, dtype)]
        result = Result(tuple(output.requires_grad_() for output in outputs), grads)
        Expected.of(op, case, dtype).hold(result, of_its_output=True)


def test_bytes_sent_and_memory_are_those_computed(divided):
    """Key-value heads go round, not query heads: n - 1 times forward, and backward, with n times their gradients in
    float32. What is kept and what is held at once has the size of a part; the scores of one would be ten times that."""
    b, h, hk, t, d, dv = SHAPE.values()
    for found in outcome(divided, "traffic"):
        n = found["size"]
        part, rows = 4 * b * hk * (t // n) * (d + dv), b * h * (t // n)
        (sent, messages, forward_peak), (sent_back, messages_back, backward_peak) = found["forward"], found["backward"]
        assert sent == {0: (n - 1) * part}
        assert sent_back == {0: (n - 1) * part, 1: n * part}
        assert (messages, messages_back) == (n - 1, 2 * n - 1)
        assert found["kept"] == 4 * rows * (d + dv) + part + 8 * rows  # q and out, k and v, lse
        numbers = 6 * 8 * rows  # of each row, in float64: lse and what combines it
        assert forward_peak <= 2 * part + 3 * 4 * rows * dv + numbers  # the sum, a piece's output, its share of the sum
        assert backward_peak <= 2 * part + (3 + 1) * part + 4 * rows * (2 * d + dv) + numbers  # dq, a piece's; dout
        assert backward_peak < 4 * rows * t / (4 if n == 2 else 1)


def test_dropout_drops_by_places_in_pieces(divided):
    for found in outcome(divided, "dropout"):
        for actual, expected in found:
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hybrid_alone() -> dict[str, Any]:
    loss_of = partial(context.loss_of_whole, given=context.documents)
    return training.train(context.make_hybrid(), loss_of=loss_of, lr=context.LR)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_training_equals_that_of_one_process(kind, results, alone):
    for result in outcome(results, f"context, {kind}"):
        same_training(result, alone)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "compiled", "dp", "tp"])
def test_training_of_four_equals_that_of_one_process(kind, results_of_four, alone):
    for result in outcome(results_of_four, f"context, {kind}"):
        same_training(result, alone)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_training_with_linear_attention_equals_that_of_one_process(kind, results, hybrid_alone):
    """Packed documents lie in several chunks. Under DDP, each layer is recomputed in the backward pass."""
    for result in outcome(results, f"context, {kind}, hybrid"):
        same_training(result, hybrid_alone)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "compiled"])
def test_training_of_four_with_linear_attention_equals_that_of_one_process(kind, results_of_four, hybrid_alone):
    for result in outcome(results_of_four, f"context, {kind}, hybrid"):
        same_training(result, hybrid_alone)


def test_models_with_other_choices_equal_one_process(divided):
    """Positions and masks are those of the whole sequence; logits, loss and every gradient."""
    for found in outcome(divided, "context, choices"):
        assert found.keys() == context.CHOICES.keys()
        for name, (actual, expected) in found.items():
            assert actual.keys() == expected.keys()
            for each, whole in expected.items():
                near(f"{name}: {each}", actual[each], whole)


def test_a_step_sends_rings_and_one_sum(results):
    """Two layers: keys and values forward, and with their gradients backward; two numbers of the loss."""
    assert outcome(results, "context, collectives") == [{"send": 8, "recv_": 8, "allreduce_": 1}] * 2


def test_what_linear_attention_sends_does_not_grow_with_the_length(results):
    """Two layers and two rows: of its two chunks a process sends the map of each state and three inputs of each
    channel, and it receives as many gradients. There is no ring."""
    heads, k_dim, v_dim, channels = 4, 8, 8, 2 * 2 * 8 + 4 * 8
    part = 2 * 2 * 2 * 4 * (heads * k_dim * (k_dim + v_dim) + 3 * channels)
    for found in outcome(results, "context, states"):
        assert found == {f"{n} tokens": ({"all-gather": part, "reduce-scatter": part}, 0) for n in (24, 48)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cp 4 to ddp 1", "fsdp 1 to cp 4"])
def test_a_checkpoint_of_four_processes_is_continued_by_one_and_the_other_way(name, results_of_four, resumed):
    # AdamW makes a whole step of a gradient that is nothing but rounding, which is another one in four processes:
    # 1.4e-5 was seen; two backends in one process differ by 4e-5.
    resumed(outcome(results_of_four, name)[0], weights_within=1e-4)


@pytest.mark.slow
def test_a_process_whose_neighbour_died_ends_with_an_error(tmp_path: Path):
    found = processes.run({"dying": context.dying}, tmp_path / "dying")["dying"]
    assert "exit codes [0, 7]" in found[1]
    [said] = found[0]
    assert "onnection" in said, said


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_parts_are_two_chunks_from_both_ends(mesh):
    tokens = torch.arange(24).view(2, 12)
    assert fk.distributed.shard_sequence(tokens, mesh["cp"]).tolist() == [[2, 3, 8, 9], [14, 15, 20, 21]]
    assert fk.distributed.sequence_positions(6, mesh["cp"]).tolist() == [1, 4]


def test_what_cannot_be_divided_is_refused_before_anything_is_sent(mesh):
    of, q, cp = fk.distributed, torch.zeros(1, 2, 4, 8), mesh["cp"]
    for call, message in (
        (lambda: of.shard_sequence(q, mesh), "mesh must have one dimension, that of context parallelism; got 2"),
        (lambda: of.ring_attention(q, q, q, 3), r"mesh must be a torch\.distributed\.device_mesh\.DeviceMesh; got int"),
        (lambda: of.shard_sequence(q, cp, 3), "a sequence over 3 processes must have a multiple of 6 tokens; got 8"),
        (lambda: of.gather_sequence(q[:, :1], cp), "x must have two chunks of tokens in dimension 1; got shape"),
        (lambda: of.ring_attention(q, *2 * (q[:, :, :2],), cp), "q and k must have as many tokens, two chunks of them"),
        (lambda: of.ring_attention(*3 * (q.expand(2, -1, -1, -1),), cp, cu_seqlens=torch.tensor([0, 12])), "one row"),
        (lambda: of.ring_attention(q, q, q, cp, cu_seqlens=torch.tensor([0, 4])), "and end at the 12 packed tokens"),
        (lambda: of.ring_attention(q, q, q, cp, sinks=torch.zeros(3)), r"sinks must have shape \(2,\)"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"positions": "relative"}, "positions=relative is not context parallel"),
        ({"context_dim": 8}, "context_dim is not context parallel"),
        ({"n_experts": 2, "load_balancing_coef": 0.1}, "load_balancing_coef or router_z_coef is not context parallel"),
    ],
    ids=["relative", "context", "experts"],
)
def test_models_that_look_at_all_tokens_elsewhere_are_refused(choice, message, mesh):
    with pytest.raises(ValueError, match=message):
        fk.distributed.context_parallel(Transformer(ModelConfig(8, 1, 2, vocab_size=8, **choice)), mesh["cp"])


def test_what_a_divided_model_is_called_with(mesh):
    def divided(**choice):
        config = ModelConfig(8, 1, 2, vocab_size=8, max_seq_len=8, **choice)
        return fk.distributed.context_parallel(Transformer(config), mesh["cp"])

    model, hybrid = divided(), divided(layer_types=("linear_attention",))
    attention, net = model.layers[0].attention, hybrid.layers[0].attention
    tokens, four = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64)
    no_cache = "cache must not be given to a context parallel model"
    for call, message in (
        (lambda: fk.distributed.context_parallel(torch.nn.Linear(2, 2), mesh["cp"]), "model must be a .*; got Linear"),
        (lambda: fk.distributed.context_parallel(model, mesh["cp"]), "model must not be context parallel yet"),
        (lambda: model(four[:, :3]), "tokens must be two chunks of a sequence; got 3 tokens"),
        (lambda: divided(positions="learned")(four), "tokens hold 12 positions; max_seq_len is 8"),
        (lambda: model(tokens, attn_mask=torch.ones(2, 2).bool()), "attn_mask must not be given to a context parallel"),
        (lambda: model.generate(tokens, 2), no_cache),
        (lambda: hybrid(tokens, cache=hybrid.make_cache(1)), no_cache),
        (lambda: hybrid(four), r"two chunks of at least linear_conv_size - 1 = 3 tokens, .* got chunks of 2"),
        (
            lambda: net(torch.zeros(1, 6, 8), state=net.make_state(1)),
            "state must be None if a sequence is sharded over",
        ),
        (
            lambda: attention(torch.zeros(1, 2, 8), return_stats=True),
            "return_stats must be False if a sequence is shar",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()
