"""What is timed, against what, and what it moves and computes."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.contract import Options, Peers, Sample, Tensors, Work
from foundry_kernels.ops.gated_delta_rule.cases import sequence_case, step_case
from foundry_kernels.testing import Case

#: (B, H_k, H_v, T, D), by device.
_SEQUENCES = {
    "cpu": ((1, 4, 8, 512, 128), (1, 4, 8, 2048, 128), (2, 4, 8, 2048, 128), (1, 8, 8, 2048, 64)),
    "cuda": ((2, 16, 32, 2048, 128), (1, 16, 32, 16384, 128), (2, 16, 32, 4096, 128), (8, 16, 16, 2048, 64)),
}
_STEPS = {"cpu": ((1, 4, 8, 128), (1, 16, 32, 128)), "cuda": ((1, 16, 32, 128), (64, 16, 32, 128))}
#: Tokens of which a result is checked: the reference takes one after another and keeps a state of each.
_CHECKED = 128

BENCH_QUICK = ("T=512 D=128-linear", "B=1 H=4.8 T=2048 D=128-linear", "B=2 H=16.32 T=2048 D=128-linear", "decode")


def _sequence(b: int, hk: int, hv: int, t: int, d: int, op: str, channels: bool = False) -> Case:
    options: dict[str, Any] = {"qk_l2norm": True, "layout": "swapped", "channels": channels}
    if op == "gated_linear_attention":
        options["beta"] = None
    name = f"B={b} H={hk}.{hv} T={t} D={d}{'-channels' * channels}-linear"
    return replace(sequence_case(b, (hk, hv), t, (d, d), **options), id=name)


def _step(b: int, hk: int, hv: int, d: int, channels: bool = False) -> Case:
    case = step_case(b, (hk, hv), (d, d), qk_l2norm=True, channels=channels)
    return replace(case, id=f"B={b} H={hk}.{hv} D={d}{'-channels' * channels}-decode")


def bench_cases(op: str, device: str) -> tuple[Case, ...]:
    """The last one has a decay for each dimension of a key, and the heads of Kimi Linear."""
    if op == "gated_delta_rule_step":
        return (*(_step(*shape) for shape in _STEPS[device]), _step(1, 32, 32, 128, channels=True))
    kimi = (1, 8, 8, 512, 128) if device == "cpu" else (1, 32, 32, 4096, 128)
    return (*(_sequence(*shape, op) for shape in _SEQUENCES[device]), _sequence(*kimi, op, channels=True))


def scaling_cases(op: str, device: str) -> dict[str, tuple[tuple[int, Case], ...]]:
    """Growing shapes: T is the tokens, B the sequences, D the width of a head."""
    if op != "gated_delta_rule":
        return {}
    hk, hv, tokens = (4, 8, range(9, 16)) if device == "cpu" else (16, 32, range(10, 17))
    return {
        "T": tuple((2**i, _sequence(1, hk, hv, 2**i, 128, op)) for i in tokens),
        "B": tuple((2**i, _sequence(2**i, hk, hv, 512, 128, op)) for i in range(4)),
        "D": tuple((2**i, _sequence(1, hk, hv, 512, 2**i, op)) for i in range(5, 9)),
    }


def parity_case(case: Case) -> Case:
    """`case` of one sequence of `_CHECKED` tokens."""
    v = case.args["v"]
    if v is None or len(v.shape) == 3 or v.shape[2] <= _CHECKED:
        return case
    args = {n: a and replace(a, shape=(1, a.shape[1], _CHECKED, *a.shape[3:])) for n, a in case.args.items()}
    return replace(case, id=f"{case.id}, of T={_CHECKED}", args=args)


def sample(case: Case) -> Sample | None:
    """The first tokens, which do not depend on those after them."""
    v = case.args["v"]
    if v is None or len(v.shape) == 3 or v.shape[2] <= _CHECKED:
        return None
    return Sample(torch.arange(_CHECKED), dict.fromkeys(("v", *(n for n in case.args if n != "v")), 2))


def workspace_bytes(case: Case) -> int:
    """The reference keeps about eight states of each token for the backward pass, in float64."""
    k, v = case.args["k"], case.args["v"]
    if k is None or v is None or len(v.shape) == 3:
        return 0
    return 8 * 8 * v.shape[0] * v.shape[1] * min(v.shape[2], _CHECKED) * k.shape[-1] * v.shape[-1]


def tokens_made(case: Case) -> int | None:
    v = case.args["v"]
    return v.shape[0] if v is not None and len(v.shape) == 3 else None


def bytes_moved(args: Tensors) -> Work:
    """The least that must be read and written: inputs and output, and with gradients these again and dout. A step
    reads and writes the state."""
    q, v, state = args["q"], args["v"], args.get("state")
    once = (2 * q.numel() + 2 * v.numel()) * v.element_size()
    if state is not None:
        return once + 2 * state.numel() * state.element_size(), 0
    return once, 2 * once


def flops(args: Tensors, options: Options) -> Work:
    """The operations of the recurrence, two per multiply-add: a token reads the state for its key and its query and
    adds to it. Gradients take twice as many."""
    q, v = args["q"], args["v"]
    products = 3 if "beta" in args else 2
    forward = 2 * products * v.numel() * q.shape[-1]
    return forward, 2 * forward


def peers(op: str, case: Case, device: str) -> Peers:
    """The functions of Hugging Face's transformers in plain PyTorch, on tensors of [B, T, H, D]."""
    if op == "gated_linear_attention":
        return {}
    g, q = case.given("g", "q")
    family = "qwen3_next" if len(g.shape) < len(q.shape) else "kimi_linear"
    try:
        model = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    except ImportError as error:
        return {"transformers": f"transformers has no {family} ({error})"}
    chunks, tokens = (
        next(f for n in names if (f := getattr(model, n, None)) is not None)
        for names in (
            ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"),
            ("torch_recurrent_gated_delta_rule", "recurrent_kimi_delta_attention"),
        )
    )
    chunks, tokens = (getattr(function, "__wrapped__", function) for function in (chunks, tokens))

    normalizes = bool(case.options.get("qk_l2norm"))

    def sequence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        rows = (x.transpose(1, 2) for x in (q, k, v, g, beta))
        out: Tensor = chunks(*rows, use_qk_l2norm_in_kernel=normalizes)[0]
        return out.transpose(1, 2)

    def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
        rows = (x.unsqueeze(1) for x in (q, k, v, g, beta))
        flags = {"output_final_state": True, "use_qk_l2norm_in_kernel": normalizes}
        out, after = tokens(*rows, initial_state=state, **flags)
        state.copy_(after)
        return out.squeeze(1)

    return {"transformers": step if op == "gated_delta_rule_step" else sequence}
