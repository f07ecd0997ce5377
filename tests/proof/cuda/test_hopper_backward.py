"""The backward kernels of csrc/cuda/hopper under the checker: right, the same bits in any order of events, bounded."""

from __future__ import annotations

from dataclasses import replace

import hopper_backward
import pytest
import torch
from hopper_backward import Case, Pass, error, is_right, make

CASES = {
    "pairs": Case(queries=320, keys=320, heads=2, group=2, right=0, batch=2),
    "pairs, 64 wide": Case(queries=640, keys=640, heads=2, group=2, right=0, dim=64, multiprocessors=6),
    "pairs, 192 wide": Case(queries=320, keys=320, group=2, right=0, dim=192, dim_v=128, multiprocessors=8),
    "pairs, 256 wide": Case(queries=320, keys=320, heads=2, group=2, right=0, dim=256, multiprocessors=8),
    "one pair at a time": Case(queries=600, keys=600, heads=1, right=0, multiprocessors=1),
    "pairs, heads split": Case(queries=400, keys=400, heads=4, group=4, right=0, splits=(2, 1)),
    "pairs, rows split": Case(queries=400, keys=400, heads=1, right=0, splits=(1, 3)),
    "pairs, 64 wide, both split": Case(queries=400, keys=400, group=2, right=0, dim=64, splits=(2, 2)),
    "pairs, 256 wide, both split": Case(queries=260, keys=260, group=2, right=0, dim=256, splits=(2, 2)),
    "D 40, heads split": Case(queries=150, keys=200, heads=4, group=2, dim=40, splits=(2, 1), batch=2),
    "D 192, Dv 128, rows split": Case(queries=140, keys=150, heads=1, dim=192, dim_v=128, splits=(1, 2)),
    "all, ends of tiles": Case(queries=140, keys=333, heads=1),
    "more keys": Case(queries=190, keys=450, heads=4, group=4, right=0),
    "rows without keys": Case(queries=450, keys=190, heads=1, right=0, batch=2),
    "keys without rows": Case(queries=190, keys=450, heads=1, right=0, bottom_right=False),
    "window": Case(queries=500, keys=500, heads=1, left=250, right=30),
    "window, 64 wide": Case(queries=500, keys=600, heads=1, left=100, right=0, dim=64),
    "window, 256 wide": Case(queries=200, keys=200, heads=1, left=70, right=20, dim=256),
    "D 40": Case(queries=300, keys=300, heads=1, dim=40, right=0),
    "D 96": Case(queries=150, keys=150, heads=1, dim=96, right=0),
    "D 192, Dv 128": Case(queries=150, keys=150, heads=1, dim=192, dim_v=128),
    "D 136, Dv 72, options": Case(queries=150, keys=170, dim=136, dim_v=72, softcap=2.0, alibi=True, right=0),
    "D 128, Dv 192": Case(queries=130, keys=150, heads=1, dim=128, dim_v=192),
    "D 64, Dv 104": Case(queries=150, keys=150, heads=1, dim=64, dim_v=104, dlse=True),
    "float16": Case(queries=150, keys=150, heads=1, dtype=torch.float16, right=0),
    "float16, 64 wide": Case(queries=150, keys=150, heads=1, dtype=torch.float16, dim=64),
    "soft cap and ALiBi": Case(queries=200, keys=200, softcap=2.0, alibi=True, dlse=True, right=0),
    "soft cap, 64 wide": Case(queries=200, keys=200, dim=64, softcap=2.0, left=90, right=0),
    "ALiBi, 256 wide": Case(queries=130, keys=150, heads=1, dim=256, alibi=True),
    "both, float16, 64 wide": Case(queries=200, keys=200, dtype=torch.float16, dim=64, softcap=2.0, alibi=True),
    "[B, T, H, D]": Case(queries=130, keys=200, heads=4, group=4, batch=2, token_first=True),
    "packed": Case(lengths_q=(100, 0, 70, 200, 3), lengths_k=(120, 50, 0, 200, 300), heads=2, group=2, right=0),
    "packed, 64 wide": Case(lengths_q=(100, 0, 170), lengths_k=(120, 50, 200), heads=1, dim=64, left=40, right=0),
    "packed, heads split": Case(
        lengths_q=(100, 0, 70, 200, 3), lengths_k=(120, 50, 0, 200, 300), group=2, right=0, softcap=2.0, splits=(2, 1)
    ),
    "packed, rows split": Case(lengths_q=(100, 0, 170), lengths_k=(120, 50, 200), heads=1, left=40, splits=(1, 3)),
    "packed, 192 wide": Case(
        lengths_q=(130, 0, 70), lengths_k=(120, 50, 200), group=2, dim=192, dim_v=128, right=0, dtype=torch.float16
    ),
    "packed, 256 wide": Case(lengths_q=(130, 0, 70), lengths_k=(120, 50, 90), heads=1, dim=256),
}


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_right(name: str, deterministic: bool) -> None:
    case = CASES[name]
    sequences = make(case)
    p = Pass(case, sequences, deterministic)
    assert p.taken
    r = p.run()
    assert r.report == ""
    assert is_right(case, sequences, r), [
        [error(*x) for x in zip(f, s.gradients, strict=True)] for f, s in zip(r.gradients, sequences, strict=True)
    ]
    for found, s in zip(r.delta, sequences, strict=True):
        assert error(found, s.delta) < 1e-6
    assert r.done.tolist() == expected_writers(case, p)


def expected_writers(case: Case, p: Pass) -> list[list[int]]:
    """What the launch that makes dq waits for: of each share and sequence, the writers of all blocks."""
    plan = p.plan()
    blocks = []
    for _, s in case.lengths:
        tiles = (s + 127) // 128
        columns = 2 if case.width == 256 else 1
        in_order = p.deterministic or case.width > 128
        blocks.append(((tiles + 1) // 2 if plan.pairs else tiles) * columns * (2 if in_order else 8))
    return [blocks] * (case.heads // case.group * plan.head_splits * plan.row_splits)


@pytest.mark.parametrize(
    "name", ["pairs", "pairs, 64 wide", "pairs, 192 wide", "pairs, 256 wide, both split", "window", "packed"]
)
def test_the_same_bits_in_any_order(name: str) -> None:
    case = replace(CASES[name], multiprocessors=8)
    sequences = make(case)
    results = [Pass(case, sequences).run(seed) for seed in range(4)]
    assert [r.report for r in results] == [""] * 4
    for r in results[1:]:
        for n in range(len(sequences)):
            assert all(torch.equal(*x) for x in zip(r.bits(n), results[0].bits(n), strict=True))


def test_packed_sequences_with_the_most_queries_come_first() -> None:
    case = CASES["packed, rows split"]
    places = Pass(case, make(case)).run().places
    order = sorted(range(3), key=lambda n: -case.lengths_q[n])
    expected = [[n, tile] for n in order for tile in range((case.lengths_k[n] + 127) // 128)]
    assert places == expected + [[-1, 0]] * (len(places) - len(expected))


@pytest.mark.parametrize(("dim", "dim_v"), [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_neighbours_reach_nothing(dim: int, dim_v: int) -> None:
    """A packed sequence has the same bits beside others as beside NaN and infinity, and as by itself."""
    case = Case(
        lengths_q=(70, 150, 90), lengths_k=(200, 100, 90), group=2, dim=dim, dim_v=dim_v, right=0, batch_invariant=True
    )
    sequences = make(case)
    alone = Pass(replace(case, lengths_q=(150,), lengths_k=(100,)), sequences[1:2]).run().bits(0)
    beside = Pass(case, sequences).run()
    for s in (sequences[0], sequences[2]):
        for x, value in (
            (s.q, torch.nan),
            (s.k, torch.inf),
            (s.v, torch.nan),
            (s.out, torch.nan),
            (s.dout, -torch.inf),
        ):
            x.fill_(value)
    poisoned = Pass(case, sequences).run()
    assert beside.report == poisoned.report == ""
    for r in (beside, poisoned):
        assert all(torch.equal(*x) for x in zip(r.bits(1), alone, strict=True))


@pytest.mark.parametrize("name", ["window", "pairs"])
def test_a_batch_changes_no_bits(name: str) -> None:
    case = replace(CASES[name], batch=3, batch_invariant=True)
    sequences = make(case)
    all_of_them = Pass(case, sequences).run()
    for n, s in enumerate(sequences):
        alone = Pass(replace(case, batch=1), [s]).run()
        assert all(torch.equal(*x) for x in zip(alone.bits(0), all_of_them.bits(n), strict=True))


def test_what_is_not_taken() -> None:
    case = Case(queries=128, keys=128, heads=1)
    assert Pass(case, make(case)).taken
    short = replace(case, queries=31)
    assert not Pass(short, make(short)).taken
    short = replace(short, batch_invariant=True)
    assert Pass(short, make(short)).taken
    for changes in ({"scale": -1.0}, {"scale": 0.0}, {"head_dim": 100}, {"head_dim_v": 12}, {"head_dim": 264}):
        p = Pass(case, make(case))
        for field, value in changes.items():
            setattr(p.call, field, value)
        assert not p.taken, changes
    for i in range(8):  # a stride of no whole chunk, an address likewise
        for change in ("stride", "address"):
            p = Pass(case, make(case))
            pointers, at = (p.call.inputs, i) if i < 5 else (p.call.outputs, i - 5)
            if change == "stride":
                p.call.strides[i][2] = 132
            else:
                pointers[at] = pointers[at] + 8
            assert not p.taken, (i, change)
    for i in range(3):  # no gradient is wanted of one of them
        p = Pass(case, make(case))
        p.call.outputs[i] = None
        assert not p.taken


#: Shapes of an H100's 132 multiprocessors by name: B, H, Hk, T, S and width, then pairs, splits of heads and of rows,
#: and blocks.
SHAPES = {
    "pretraining": ((8, 32, 8, 4096, 4096, 128), (1, 1, 1, 1024)),
    "one sequence of 2,048": ((1, 32, 8, 2048, 2048, 128), (1, 2, 1, 128)),
    "one of 4,096": ((1, 32, 8, 4096, 4096, 128), (1, 1, 1, 128)),
    "one of 32,768, which one head fills": ((1, 32, 8, 32768, 32768, 128), (1, 1, 1, 1024)),
    "tensor parallel, two key-value heads": ((1, 8, 2, 4096, 4096, 128), (1, 4, 1, 128)),
    "tensor parallel, one": ((1, 4, 1, 8192, 8192, 128), (1, 4, 1, 128)),
    "tensor parallel, one of 2,048": ((1, 4, 1, 2048, 2048, 128), (1, 4, 4, 128)),
    "one head": ((1, 1, 1, 8192, 8192, 128), (1, 1, 4, 128)),
    "no groups": ((1, 8, 8, 2048, 2048, 64), (1, 1, 2, 128)),
    "heads of 256": ((1, 16, 4, 2048, 2048, 256), (1, 2, 1, 128)),
    "not causal": ((1, 8, 2, 4096, 4097, 128), (0, 2, 1, 132)),
    "short": ((1, 8, 8, 256, 256, 128), (1, 1, 1, 8)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_blocks_fill_the_gpu(name: str) -> None:
    (batch, heads, kv_heads, queries, keys, dim), expected = SHAPES[name]
    p = Pass(Case(queries=128, keys=128, heads=1, dim=dim), make(Case(queries=128, keys=128, heads=1, dim=dim)))
    p.call.sequences, p.call.heads, p.call.group = batch, heads, heads // kv_heads
    p.call.queries, p.call.keys, p.call.right = queries, keys, 0 if queries == keys else hopper_backward.FAR
    assert p.plan()[:4] == expected
    p.call.batch_invariant = True
    assert p.plan()[1:3] == (1, 1)


#: What is changed, and into what.
MISTAKES = {
    "the stride of panels of dO and Q": ("matrix(rows, S::kQueryPanel)", "matrix(rows, kSwizzleBytes)"),
    "no fence before dS^T is read": (
        "        fence_proxy_async();\n        __syncwarp();\n",
        "        __syncwarp();\n",
    ),
    "Q and dO released early": (
        "        wgmma_wait<1>();  // dv and dk have",
        "        wgmma_wait<2>();  // dv and dk have",
    ),
    "a wrong phase of dS^T": ("8 * buffer, (count / 2 & 1) ^ 1)", "8 * buffer, count / 2 & 1)"),
    "dS^T of the other warpgroup not waited for": (
        "        if (begun) mbarrier_wait(base + S::kScoresFull + 8 * before, ((count - 1) / 2) & 1);\n",
        "",
    ),
    "a turn skipped": ("    wait_until(work.turns + piece, turn);\n", ""),
    "a turn passed on early": ("    bulk_wait();\n", ""),
    "dq's buffer released early": ("    bulk_wait_read();\n", ""),
    "bytes announced": ("at_once * S::kQueryPanel + (last", "at_once * S::kQueryPanel - 16 + (last"),
    "K released for the second part": ("      arrive(S::kKeysFree);\n", ""),
    "the last query seen": (
        "const int to = part_word(part, kUpper) + shift;",
        "const int to = part_word(part, kUpper) + shift + 1;",
    ),
    "whole tiles": ("to / kQueries);", "to / kQueries + 1);"),
    "second halves in the sums of the first": (
        "walk.part != part_words(words, 0)\n                           ?",
        "false ?",
    ),
    "second halves left out": ("if (work.pairs && work.in_order && tile", "if (false && tile"),
    "tiles of queries of another share": ("(row_share + step - lowest % step) % step;", "row_share;"),
    "a share left out": ("for (int i = 0; i < work.splits; ++i)", "for (int i = 1; i < work.splits; ++i)"),
    "parts of the other warpgroup": ("(consumer * S::kPanels + column_block * 2)", "(column_block * 2)"),
    "a turn that begins as anything": ("work.done[i] = 0;", "if (i < work.counters - 1) work.done[i] = 0;"),
    "places of equally long sequences": ("(h.q_len == own.q_len && other < n)", "false"),
}


EQUAL = Case(lengths_q=(60, 60), lengths_k=(150, 100), heads=2, group=2, splits=(2, 1))


def is_found(old: str, new: str) -> bool:
    library = hopper_backward.load(hopper_backward.broken(old, new))
    for case in (CASES["pairs"], CASES["window"], CASES["pairs, rows split"], EQUAL):
        sequences = make(case)
        p = Pass(case, sequences)
        if not all(is_right(case, sequences, p.run(seed, library)) for seed in range(3)):
            return True
    return False


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistakes_are_found(name: str) -> None:
    assert is_found(*MISTAKES[name])


#: In what only the kernel of 192 columns has.
MISTAKES_OF_192 = {
    "the last columns from the first warpgroup's keys": ("2 * S::kKeyPanel + own_keys();", "2 * S::kKeyPanel;"),
    "the last columns of one warpgroup alone": ("if (piece == 2)", "if (false)"),
    "the last columns added to the first": ("(first ? 0 : 2)", "0"),
    "a turn passed on before the last columns": ("if (S::kTold && last)", "if (S::kTold && first)"),
    "dO as far apart as Q": ("base + S::kDout + stage * S::kDoutBytes", "base + S::kDout + stage * S::kQueryBytes"),
    "dO's panels cleared as many as Q's": ("consumer == 0 ? S::kPanels : S::kPanelsV;", "S::kPanels;"),
}


@pytest.mark.parametrize("name", list(MISTAKES_OF_192))
def test_mistakes_of_192_are_found(name: str) -> None:
    library = hopper_backward.load(hopper_backward.broken(*MISTAKES_OF_192[name], width=192))
    for case in (replace(CASES["pairs, 192 wide"], queries=300, keys=300), CASES["packed, 192 wide"]):
        sequences = make(case)
        p = Pass(case, sequences)
        if not all(is_right(case, sequences, p.run(seed, library)) for seed in range(3)):
            return
    raise AssertionError("the mistake was not noticed")


def test_no_mistake_is_found_where_there_is_none() -> None:
    assert not is_found("wgmma_wait<0>();\n      settle(dq);", "wgmma_wait<0>();\n      settle(dq);")
