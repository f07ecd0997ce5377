"""Which calls "auto" gives to the kernels for compute capability 9.0."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from cuda_on_cpu.build import ROOT, load_plain
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import foundry_kernels as fk
from foundry_kernels.core import extension, registry
from foundry_kernels.core.registry import override
from foundry_kernels.nn._backend import serving
from foundry_kernels.ops.flash_attention import FLASH_ATTENTION, FLASH_ATTENTION_VARLEN, hopper, passes
from foundry_kernels.ops.flash_attention.checks import dense_options
from foundry_kernels.ops.flash_attention.options import AttentionOptions

BF16 = torch.bfloat16


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The backends that calls on an H100 went to, with an extension that has its kernels. No GPU is needed: tensors are
    fake."""
    calls: list[str] = []

    def record(name: str) -> Any:
        def attend(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
            calls.append(name)
            return q

        return attend

    monkeypatch.setattr(extension, "HAS_HOPPER", True)
    monkeypatch.setattr(hopper, "_is_hopper", lambda device: True)
    with ExitStack() as stack:
        for op in (FLASH_ATTENTION, FLASH_ATTENTION_VARLEN):
            for name in ("reference", "triton", "native"):
                on = None if name == "reference" else ("cuda",)
                stack.enter_context(override(op, name, fn=record(name), devices=on, missing=None))
        stack.enter_context(FakeTensorMode())
        yield calls


def heads(tokens: int = 256, width: int = 64, n_heads: int = 4, dtype: torch.dtype = BF16) -> Tensor:
    """[2, H, T, D] of [2, T, H, D] in memory."""
    return torch.empty(2, tokens, n_heads, width, dtype=dtype, device="cuda").transpose(1, 2)


def attend(q: Tensor | None = None, k: Tensor | None = None, v: Tensor | None = None, **options: Any) -> None:
    q = heads() if q is None else q
    k = heads(q.shape[2], q.shape[3], dtype=q.dtype) if k is None else k
    fk.flash_attention(q, k, k if v is None else v, **options)


def slopes() -> Tensor:
    return torch.empty(4, device="cuda")


TAKEN: dict[str, Any] = {
    "plain": dict,
    "causal": lambda: {"causal": True},
    "float16": lambda: {"q": heads(dtype=torch.float16)},
    "widths": lambda: {"q": heads(width=200), "k": heads(width=200), "v": heads(width=72)},
    "grouped": lambda: {"k": heads(n_heads=2), "v": heads(n_heads=2)},
    "lse": lambda: {"return_lse": True},
    "options": lambda: {"softcap": 30.0, "alibi_slopes": slopes(), "sinks": slopes(), "window": (100, 0)},
    "any order": lambda: {"deterministic": False},
    "few queries, batch-invariant": lambda: {"q": heads(1), "k": heads(), "batch_invariant": True},
    "rows with gaps": lambda: {"q": heads(width=128).narrow(3, 0, 64), "k": heads()},
    "columns far apart": lambda: {"q": torch.empty(2, 4, 64, 256, dtype=BF16, device="cuda").transpose(2, 3)},
}


@pytest.mark.parametrize("name", TAKEN)
def test_taken(chosen: list[str], name: str) -> None:
    attend(**TAKEN[name]())
    assert chosen == ["native"]


LEFT: dict[str, Any] = {
    "float32": lambda: {"q": heads(dtype=torch.float32)},
    "width": lambda: {"q": heads(width=68)},
    "wide": lambda: {"q": heads(width=264)},
    "wide values": lambda: {"v": heads(width=512)},
    "few queries": lambda: {"q": heads(95), "k": heads()},
    "few tiles, many keys": lambda: {"q": heads(n_heads=4), "k": heads(1100)},
    "no keys": lambda: {"k": heads(0)},
    "mask": lambda: {"attn_mask": torch.empty(1, 1, 256, 256, dtype=torch.bool, device="cuda")},
    "bias": lambda: {"attn_mask": torch.empty(1, 1, 256, 256, dtype=BF16, device="cuda")},
    "dropout": lambda: {"dropout_p": 0.1, "dropout_seed": torch.empty((), dtype=torch.int64, device="cuda")},
    "statistics": lambda: {"return_stats": True},
    "rows at 8 bytes": lambda: {"q": heads(width=68).narrow(3, 0, 64), "k": heads()},
    "an offset of 8 bytes": lambda: {"v": heads(width=72).narrow(3, 4, 64)},
    "one row for all": lambda: {"k": heads(n_heads=1).expand(2, 4, 256, 64)},
}


@pytest.mark.parametrize("name", LEFT)
def test_left_to_the_usual_order(chosen: list[str], name: str) -> None:
    attend(**LEFT[name]())
    assert chosen == ["triton"]


#: Heads of all sequences, queries of each or of all packed ones, the longest's, its keys, the width; whether these
#: kernels are faster.
SHAPES = {
    "training": ((64, 4096, 4096, 4096, 128), True),
    "tensor parallel, four heads": ((4, 8192, 8192, 8192, 128), True),
    "one head, 8,192 tokens": ((1, 8192, 8192, 8192, 128), True),
    "one head, 4,096 tokens": ((1, 4096, 4096, 4096, 128), False),
    "one short sequence": ((8, 256, 256, 256, 64), True),
    "packed": ((8, 8192, 4096, 4096, 128), True),
    "packed, none long": ((32, 8192, 60, 60, 128), False),
    "a prompt's part over long keys": ((32, 128, 128, 32768, 128), False),
    "a larger part": ((32, 512, 512, 32768, 128), True),
    "half a tile": ((64, 64, 64, 4096, 128), True),
    "less than half": ((64, 63, 63, 4096, 128), False),
    "the same of tiles of 192": ((64, 95, 95, 4096, 64), False),
    "decoding": ((2048, 1, 1, 4096, 128), False),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_choice_by_shape(name: str) -> None:
    shape, faster = SHAPES[name]
    assert hopper.is_faster(*shape) is faster


def test_the_extension_chooses_alike() -> None:
    source = ROOT / "csrc" / "cuda" / "hopper" / "choice.h"
    text = (
        source.read_text()
        + """
extern "C" int is_faster(long long heads, long long queries, long long longest, long long keys, int width) {
  return foundry::hopper_choice::forward_is_faster({heads, 1, queries, longest, keys, width});
}"""
    )
    compiled = load_plain(source, text).is_faster
    numbers = (1, 8, 33), (1, 63, 64, 95, 96, 500, 3000), (1000, 1024, 1025, 9000), (8, 64, 72, 256)
    answers = []
    for heads, queries, keys, width in itertools.product(*numbers):
        for longest in {queries, queries // 2}:
            shape = (heads, queries, longest, keys, width)
            answers.append(hopper.is_faster(*shape))
            assert bool(compiled(*shape)) == answers[-1], shape
    assert {True, False} == set(answers)


def test_packed(chosen: list[str]) -> None:
    q = torch.empty(300, 4, 64, dtype=BF16, device="cuda")
    starts = torch.empty(3, dtype=torch.int32, device="cuda")
    for longest in (200, 95):
        fk.flash_attention_varlen(q, q, q, starts, starts, longest, longest, causal=True)
    pages = torch.empty(8, 16, 4, 64, dtype=BF16, device="cuda")
    table, used = (torch.empty(size, dtype=torch.int32, device="cuda") for size in ((2, 8), (2,)))
    fk.flash_attention_varlen(q, pages, pages, starts, None, 200, 128, block_table=table, seqused_k=used)
    assert chosen == ["native", "triton", "triton"]


def test_other_gpus_and_extensions_keep_their_order(chosen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "HAS_HOPPER", False)
    attend()
    monkeypatch.setattr(extension, "HAS_HOPPER", True)
    monkeypatch.setattr(hopper, "_is_hopper", lambda device: False)
    attend()
    assert chosen == ["triton", "triton"]


@pytest.mark.parametrize(("capability", "taken"), [(80, False), (89, False), (90, True), (100, False)])
def test_compute_capability_90_exactly(monkeypatch: pytest.MonkeyPatch, capability: int, taken: bool) -> None:
    monkeypatch.setattr(hopper, "capability", lambda device: capability)
    assert hopper._is_hopper(torch.device("cuda", 0)) is taken


def test_who_names_a_backend_gets_it(chosen: list[str]) -> None:
    for backend in ("reference", "triton", "native"):
        attend(backend=backend)
    assert chosen == ["reference", "triton", "native"]


def test_a_measured_order_goes_first(chosen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {"cuda": {("flash_attention", "bfloat16"): ("triton", "native")}}
    monkeypatch.setattr(registry, "_MEASURED_ORDER", measured)
    FLASH_ATTENTION.choose()
    attend()
    attend(heads(dtype=torch.float16))
    assert chosen == ["triton", "native"]


def test_the_passes_alone_are_given_alike(chosen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What computes attention in parts, or under PyTorch's own functions."""
    q, few = heads(), heads(1)
    options = dense_options(q, q, causal=True)
    assert passes.serving("auto", q, q, q, options) == "native"
    assert passes.serving("triton", q, q, q, options) == "triton"
    assert passes.serving("auto", few, q, q, options) == "triton"
    monkeypatch.setattr(extension, "HAS_HOPPER", False)
    assert passes.serving("auto", q, q, q, options) == "triton"


def test_reports_name_the_backend_of_most_calls(chosen: list[str]) -> None:
    backends = {"flash_attention": "auto", "flash_attention_varlen": "triton"}
    assert serving(backends, "cuda", BF16) == {"flash_attention": "native", "flash_attention_varlen": "triton"}
    assert serving(backends, "cuda", torch.float32)["flash_attention"] == "triton"
    assert serving({"flash_attention": "auto"}, "cpu", BF16) == {"flash_attention": "reference"}


def test_the_choice_is_traced() -> None:
    """One graph for all lengths that go one way, without a break; the lengths are guarded on."""

    def which(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options = dense_options(q, k, causal=True)
        return q + 1 if hopper.takes(q, k, v, options) else q - 1

    torch._dynamo.reset()
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(which, fullgraph=True, dynamic=True, backend=count)
    for tokens, expected in ((200, 1.0), (300, 1.0), (128, 1.0), (64, -1.0), (65, -1.0)):
        x = torch.zeros(2, tokens, 4, 64, dtype=BF16).transpose(1, 2)
        assert compiled(x, x, x).unique().tolist() == [expected]
    assert len(graphs) == 2
