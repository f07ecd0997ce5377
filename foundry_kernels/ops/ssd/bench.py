"""What is timed, against what, and what it moves and computes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.contract import Options, Peers, Sample, Tensors, Work
from foundry_kernels.ops.ssd.cases import sequence_case, step_case
from foundry_kernels.testing import Case

#: (B, G, H, T, P, N), by device: heads of Mamba-2 and Granite 4, of Nemotron-H, and of Falcon-H1.
_SEQUENCES = {
    "cpu": ((1, 1, 24, 512, 64, 128), (1, 1, 24, 2048, 64, 128), (1, 8, 32, 1024, 64, 128), (1, 1, 24, 1024, 64, 256)),
    "cuda": ((2, 1, 80, 2048, 64, 128), (2, 8, 128, 4096, 64, 128), (2, 1, 48, 4096, 64, 256)),
}
_STEPS = {"cpu": ((1, 1, 24, 64, 128), (1, 8, 128, 64, 128)), "cuda": ((1, 8, 128, 64, 128), (64, 8, 128, 64, 128))}
#: Tokens of which a result is checked: the reference takes one after another and keeps a state of each.
_CHECKED = 128

BENCH_QUICK = ("T=512 P=64 N=128-mamba", "T=2048 P=64 N=128-mamba", "decode")


def _sequence(b: int, g: int, h: int, t: int, p: int, n: int) -> Case:
    return replace(sequence_case(b, (g, h), t, (p, n)), id=f"B={b} H={g}.{h} T={t} P={p} N={n}-mamba")


def _step(b: int, g: int, h: int, p: int, n: int) -> Case:
    return replace(step_case(b, (g, h), (p, n)), id=f"B={b} H={g}.{h} P={p} N={n}-decode")


def bench_cases(op: str, device: str) -> tuple[Case, ...]:
    if op == "ssd_step":
        return tuple(_step(*shape) for shape in _STEPS[device])
    return tuple(_sequence(*shape) for shape in _SEQUENCES[device])


def scaling_cases(op: str, device: str) -> dict[str, tuple[tuple[int, Case], ...]]:
    """Growing shapes: T is the tokens, B the sequences."""
    if op != "ssd":
        return {}
    h, tokens = (24, range(9, 14)) if device == "cpu" else (80, range(10, 17))
    return {
        "T": tuple((2**i, _sequence(1, 1, h, 2**i, 64, 128)) for i in tokens),
        "B": tuple((2**i, _sequence(2**i, 1, h, 512, 64, 128)) for i in range(4)),
    }


def _long(case: Case) -> bool:
    x = case.args["x"]
    return x is not None and len(x.shape) == 4 and x.shape[1] > _CHECKED


def parity_case(case: Case) -> Case:
    """`case` of one sequence of `_CHECKED` tokens."""
    if not _long(case):
        return case
    args = {
        n: replace(a, shape=(1, _CHECKED, *a.shape[2:])) if a is not None and len(a.shape) > 2 else a
        for n, a in case.args.items()
    }
    return replace(case, id=f"{case.id}, of T={_CHECKED}", args=args)


def sample(case: Case) -> Sample | None:
    """The first tokens, which do not depend on those after them."""
    return Sample(torch.arange(_CHECKED), dict.fromkeys(("x", "dt", "B", "C"), 1)) if _long(case) else None


def workspace_bytes(case: Case) -> int:
    """The reference keeps about eight states of each token for the backward pass, in float64."""
    x, B = case.args["x"], case.args["B"]
    if x is None or B is None or len(x.shape) == 3:
        return 0
    return 8 * 8 * x.shape[0] * min(x.shape[1], _CHECKED) * x.shape[2] * x.shape[3] * B.shape[-1]


def peer_bytes(case: Case, name: str) -> int:
    """transformers' form has a number for each pair of tokens of a chunk and state entry, or nearly so."""
    x, B = case.given("x", "B")
    return 0 if len(x.shape) == 3 else 32 * x.shape[0] * x.shape[1] * x.shape[2] * (256 + B.shape[-1])


def tokens_made(case: Case) -> int | None:
    x = case.args["x"]
    return x.shape[0] if x is not None and len(x.shape) == 3 else None


def bytes_moved(args: Tensors) -> Work:
    """The least that must be read and written: inputs and output, and with gradients these again and dy. A step reads
    and writes the state."""
    x, B, state = args["x"], args["B"], args.get("state")
    once = (2 * x.numel() + 2 * B.numel()) * x.element_size()
    if state is not None:
        return once + 2 * state.numel() * state.element_size(), 0
    return once, 2 * once


def flops(args: Tensors, options: Options) -> Work:
    """The operations of the recurrence, two per multiply-add: a token adds to the state and reads it. Gradients take
    twice as many."""
    x, B = args["x"], args["B"]
    forward = 4 * x.numel() * B.shape[-1]
    return forward, 2 * forward


def peers(op: str, case: Case, device: str) -> Peers:
    """The functions of Hugging Face's transformers in plain PyTorch, and mamba_ssm's Triton kernels."""
    found = {"transformers": _transformers(), "mamba_ssm": _mamba_ssm(device)}
    made = _step_of if op == "ssd_step" else _sequence_of
    return {name: each if isinstance(each, str) else made(*each, case) for name, each in found.items()}


#: The scan and the step of a package; or the reason why it is not available.
_Functions = tuple[Callable[..., Any], Callable[..., Any]] | str


def _transformers() -> _Functions:
    try:
        model = importlib.import_module("transformers.models.mamba2.modeling_mamba2")
        functions = model.mamba2_chunk_scan, model.mamba2_selective_state_update
    except (ImportError, AttributeError) as error:
        return f"transformers has no function of Mamba-2's scan ({error})"
    scan, update = (getattr(function, "__wrapped__", function) for function in functions)
    return scan, update


def _mamba_ssm(device: str) -> _Functions:
    if device != "cuda":
        return "mamba_ssm has no kernels for the CPU"
    try:
        combined = importlib.import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
        update = importlib.import_module("mamba_ssm.ops.triton.selective_state_update").selective_state_update
    except ImportError as error:
        return f"mamba_ssm is not installed ({error})"
    return combined, update


def _sequence_of(scan: Callable[..., Any], update: Callable[..., Any], case: Case) -> Callable[..., Any]:
    """Chunks of 256 tokens are the usual ones."""

    def sequence(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **given: Any) -> Tensor:
        result: Tensor = scan(x, dt, A, B, C, 256, **given, **case.options)
        return result.to(x.dtype)

    return sequence


def _step_of(scan: Callable[..., Any], update: Callable[..., Any], case: Case) -> Callable[..., Any]:
    def step(
        state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, **given: Any
    ) -> Tensor:
        width, state_width = state.shape[2:]
        rows = dt[..., None].expand(-1, -1, width), A[:, None, None].expand(-1, width, state_width)
        of_heads, bias = D[:, None].expand(-1, width), dt_bias[:, None].expand(-1, width)
        result: Tensor = update(state, x, *rows, B, C, of_heads, dt_bias=bias, **given, **case.options)
        return result

    return step
