"""What each operation refuses: a table for every public function. What no operation takes is in
tests/proof/test_refusals.py, and numbers in test_numbers.py."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.ops.decode_linear import decode_linear
from foundry_kernels.ops.rope import RopeScaling, rope_table

Row = tuple[dict[str, Any], type[Exception], str]


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def longs(*numbers: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(numbers, dtype=dtype)


def learned(*shape: int) -> Tensor:
    return zeros(*shape).requires_grad_()


#: Arguments that an operation takes, which the rows below change.
HIDDEN = {"hidden": zeros(6, 8), "weight": zeros(11, 8)}
TARGET = {"target": zeros(6, dtype=torch.int64)}
TEACHER = {"teacher_hidden": zeros(6, 12), "teacher_weight": zeros(11, 12)}
LISTED = {"teacher_ids": torch.arange(12).view(6, 2) % 11, "teacher_log_probs": zeros(6, 2)}
ROTATED = {"q": zeros(2, 4, 5, 12), "k": zeros(2, 3, 5, 12), "cos": zeros(5, 6), "sin": zeros(5, 6)}
RULE = {
    "q": zeros(2, 2, 7, 16), "k": zeros(2, 2, 7, 16), "v": zeros(2, 4, 7, 24), "g": zeros(2, 4, 7),
    "beta": zeros(2, 4, 7), "initial_state": zeros(2, 4, 16, 24),
}  # fmt: skip
STEP = {
    "q": zeros(2, 2, 16), "k": zeros(2, 2, 16), "v": zeros(2, 4, 100), "g": zeros(2, 4), "beta": zeros(2, 4),
    "state": zeros(2, 4, 16, 100),
}  # fmt: skip
CONV = {"x": zeros(2, 5, 6), "weight": zeros(6, 4), "bias": zeros(6)}
CONV_STEP = {"x": zeros(2, 6), "state": zeros(2, 6, 4), "weight": zeros(6, 4), "bias": zeros(6)}
GIVEN: dict[Any, dict[str, Any]] = {
    fk.rms_norm: {"x": zeros(2, 3, 8), "weight": zeros(8)},
    fk.layer_norm: {"x": zeros(2, 3, 8), "weight": zeros(8)},
    fk.add_rms_norm: {"x": zeros(2, 3, 8), "residual": zeros(2, 3, 8)},
    fk.gated_rms_norm: {"x": zeros(2, 3, 8), "gate": zeros(2, 3, 8), "weight": zeros(8)},
    fk.swiglu: {"gate": zeros(2, 4)},
    fk.glu: {"gate": zeros(2, 4)},
    fk.cross_entropy: {"logits": zeros(6, 11)} | TARGET,
    fk.linear_cross_entropy: HIDDEN | TARGET,
    fk.log_probs: {"logits": zeros(6, 11)} | TARGET,
    fk.linear_log_probs: HIDDEN | TARGET,
    fk.kl_div: {"logits": zeros(6, 11), "teacher_logits": zeros(6, 11)},
    fk.linear_kl_div: HIDDEN | TEACHER,
    fk.rope: ROTATED,
    fk.qk_norm_rope: ROTATED | {"q_weight": zeros(12), "k_weight": zeros(12)},
    fk.gated_delta_rule: RULE,
    fk.gated_delta_rule_step: STEP,
    fk.short_conv1d: CONV,
    fk.short_conv1d_step: CONV_STEP,
    fk.grouped_mm: {"x": zeros(10, 4), "weight": zeros(2, 4, 3), "offs": longs(4, 10, dtype=torch.int32)},
    fk.combine_experts: {
        "x": zeros(5, 6), "weights": zeros(3, 2), "slots": torch.tensor([[2, 0], [-1, 4], [1, -1]])
    },
    decode_linear: {"x": zeros(2, 4), "weight": zeros(3, 4)},
    rope_table: {"rotary_dim": 8, "max_positions": 4},
    RopeScaling: {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096},
}  # fmt: skip

LOSSES: list[Row] = [
    ({"target": zeros(5, dtype=torch.int64)}, ValueError, "target must have shape"),
    ({"target": zeros(6, dtype=torch.bool)}, TypeError, "target must be int32 or int64; got torch.bool"),
]
CLASSES: list[Row] = [
    ({"target": zeros(6, 11)}, TypeError, "target must be class indices.*probabilities of classes.*not supported"),
    ({"label_smoothing": 1.5}, ValueError, r"label_smoothing must be in 0 \.\. 1; got 1.5"),
]
LINEAR: list[Row] = [
    ({"hidden": zeros(6, 0)}, ValueError, "hidden must have a last dimension of at least 1"),
    ({"weight": zeros(0, 8)}, ValueError, r"weight must be \[V, D\] with V at least 1"),
    ({"weight": zeros(11, 8).half()}, ValueError, "weight must have hidden's dtype"),
    ({"bias": zeros(3)}, ValueError, "bias must have shape"),
    ({"chunk_size": 0}, ValueError, "chunk_size must be >= 1; got 0"),
]
SCALED: list[Row] = [
    ({"logit_scale": 0.0}, ValueError, "logit_scale must not be 0"),
    ({"target": torch.full((6,), 11)}, IndexError, r"target must be in 0 \.\. 10 or ignore_index -100; got 11"),
]
DIVERGENCES: list[Row] = [
    *(({"temperature": t}, ValueError, f"temperature must be finite and > 0; got {t}") for t in (0.0, -1.0, math.nan)),
    ({"beta": 1.5}, ValueError, r"beta must be in 0 \.\. 1; got 1.5"),
    ({"beta": -0.1}, ValueError, "beta must be finite and >= 0; got -0.1"),
    *LOSSES,
]
ROTATIONS: list[Row] = [
    ({"q": zeros(2, 5, 12)}, ValueError, "q must be .B, H, T, D."),
    ({"k": zeros(5, 12)}, ValueError, "k must be .B, Hk, T, D."),
    ({"k": zeros(2, 3, 5, 12).bfloat16()}, ValueError, "k must have q's dtype"),
    *(({"k": zeros(*s)}, ValueError, "k must be .*with q's") for s in ((2, 3, 6, 12), (2, 3, 5, 14), (3, 3, 5, 12))),
    *(({"cos": zeros(*s)}, ValueError, "cos must be .P, R/2. or") for s in ((6,), (2, 1, 5, 6))),
    ({"sin": zeros(5, 5)}, ValueError, "sin must have cos's shape"),
    ({"sin": zeros(5, 6).bfloat16()}, ValueError, "sin must have cos's dtype"),
    ({"cos": zeros(5, 6).double(), "sin": zeros(5, 6).double()}, TypeError, "float64 only where q is"),
    *(({"cos": zeros(5, n), "sin": zeros(5, n)}, ValueError, "R/2 of 1 to D/2") for n in (7, 0)),
    *(({"q": zeros(2, 4, 5, n), "k": zeros(2, 3, 5, n)}, ValueError, "R/2 of 1 to D/2") for n in (0, 1)),
    ({"cos": zeros(4, 6), "sin": zeros(4, 6)}, ValueError, "a row for each of 5 positions"),
    *(({"cos": zeros(*s), "sin": zeros(*s)}, ValueError, "cos must be .*with .2, 5.") for s in ((3, 5, 6), (2, 6, 6))),
    *(({name: learned(5, 6)}, ValueError, "take no gradient") for name in ("cos", "sin")),
    ({"positions": zeros(5)}, TypeError, "positions must be int32 or int64"),
    *(
        ({"positions": zeros(*s, dtype=torch.int64)}, ValueError, "positions must be .T. = .5,. or")
        for s in ((6,), (3, 5))
    ),
    (
        {"cos": zeros(2, 5, 6), "sin": zeros(2, 5, 6), "positions": torch.arange(5)},
        ValueError,
        "positions must be None",
    ),
]
#: Of documents in one row.
ONE = {name: x[:1] for name, x in RULE.items() if name != "initial_state"} | {"initial_state": None}

REFUSED: dict[Any, list[Row]] = {
    fk.rms_norm: [
        ({"x": zeros(2, 0)}, ValueError, "x must have a last dimension of at least 1"),
        ({"weight": zeros(1, 8)}, ValueError, r"x must end in normalized_shape \(1, 8\); got shape \(2, 3, 8\)"),
        ({"weight": None, "normalized_shape": (2, 8)}, ValueError, r"x must end in .* \(2, 8\)"),
        ({"weight": None, "normalized_shape": ()}, ValueError, r"x must end in .* \(\)"),
        ({"normalized_shape": (3, 8)}, ValueError, r"weight must have shape \(3, 8\) \(normalized_shape\); got \(8,\)"),
    ],
    fk.layer_norm: [
        ({"x": zeros(2, 0)}, ValueError, "x must have a last dimension of at least 1"),
    ],
    fk.add_rms_norm: [({"x": zeros(2, 0), "residual": zeros(2, 0)}, ValueError, "x must have a last dimension")],
    fk.swiglu: [
        ({"gate": zeros(2, 5)}, ValueError, "gate must be .*2N.*up is None; got shape .2, 5."),
        ({"up": zeros(2, 4).bfloat16()}, ValueError, "up must have gate's dtype"),
        ({"interleaved": True, "up": zeros(2, 4)}, ValueError, "interleaved is for a packed gate.*up must be None"),
        ({"interleaved": True, "gate": zeros(2, 5)}, ValueError, "gate must be .*2N.*got shape .2, 5."),
    ],
    fk.glu: [({"gate": zeros(2, 7)}, ValueError, r"gate must be \[..., 2N\] where up is None")],
    fk.cross_entropy: [
        *LOSSES,
        *CLASSES,
        ({"logits": zeros(6, 0)}, ValueError, "logits must have a last dimension of at least 1; got shape .6, 0."),
        ({"weight": learned(11)}, ValueError, "weight must not require a gradient"),
        ({"weight": zeros(2)}, ValueError, "weight must have shape .11,. .a value for each class.; got .2,."),
    ],
    fk.linear_cross_entropy: [
        *LOSSES,
        *CLASSES,
        *LINEAR,
        ({"class_weight": zeros(3)}, ValueError, "class_weight must have shape"),
        ({"class_weight": learned(11)}, ValueError, "class_weight must not require"),
    ],
    fk.log_probs: [*LOSSES, *SCALED],
    fk.linear_log_probs: [
        *LOSSES,
        *SCALED,
        *LINEAR,
        ({"chunk_size": "tiles", "batch_invariant": True}, ValueError, "chunk_size must be a number of tokens or None"),
    ],
    fk.kl_div: [
        *DIVERGENCES,
        ({"teacher_logits": zeros(6, 12)}, ValueError, "teacher_logits must have shape"),
        ({"teacher_logits": zeros(6, 11).double()}, ValueError, "teacher_logits must be float64 if and only if"),
    ],
    fk.linear_kl_div: [
        *DIVERGENCES,
        *LINEAR,
        ({"teacher_bias": zeros(7)}, ValueError, "teacher_bias must have shape"),
        ({"teacher_weight": zeros(12, 12)}, ValueError, "weight has 11 classes and teacher_weight has 12"),
        ({"teacher_weight": zeros(11, 9)}, ValueError, "teacher_weight must have shape"),
        ({"teacher_weight": zeros(11, 12).bfloat16()}, ValueError, "teacher_weight must have teacher_hidden's"),
        ({"teacher_hidden": zeros(5, 12)}, ValueError, "teacher_hidden must be"),
        ({"teacher_hidden": zeros(6, 12).double()}, ValueError, "teacher_hidden must be float64 if and only if"),
        *(({name: None}, ValueError, f"{name} is None") for name in ("teacher_hidden", "teacher_weight")),
        ({"teacher_logits": zeros(6, 11)}, ValueError, "teacher_logits must be given alone"),
        (LISTED, ValueError, "teacher_ids and teacher_log_probs must be given alone.*teacher_hidden, teacher_weight"),
        *(
            (dict.fromkeys(TEACHER) | LISTED | {name: value}, error, message)
            for name, value, error, message in (
                ("teacher_log_probs", None, ValueError, "teacher_log_probs is None"),
                ("teacher_log_probs", zeros(6, 3), ValueError, "teacher_log_probs must have shape"),
                ("teacher_ids", zeros(6, 2), TypeError, "teacher_ids must be int32 or int64"),
                ("teacher_ids", longs(*range(6)), ValueError, r"teacher_ids must be \[..., k\]"),
                ("teacher_ids", torch.full((6, 2), 11), IndexError, "teacher_ids must be in 0 .. 10; got 11"),
                ("teacher_softcap", 3.0, ValueError, "teacher_softcap are of teacher_hidden"),
                ("add_tail", 1, TypeError, "add_tail must be a bool"),
            )
        ),
        ({"softcap": -1.0}, ValueError, "softcap must be finite and > 0"),
        ({"teacher_softcap": math.inf}, ValueError, "teacher_softcap must be finite and > 0"),
        (dict.fromkeys(TEACHER) | {"teacher_logits": zeros(6, 12)}, ValueError, "teacher_logits must have shape"),
        ({"chunk_size": "tiles"}, TypeError, "chunk_size must be an int"),
    ],
    fk.rope: ROTATIONS,
    fk.qk_norm_rope: [
        *ROTATIONS,
        (
            {name: x[..., :0] for name, x in ROTATED.items()} | {"q_weight": None, "k_weight": None},
            ValueError,
            "q must have a last dimension of at least 2, for it is normalised",
        ),
        *(
            ({name: None, "weight_offset": 1.0}, ValueError, f"weight_offset needs weights.*{name}=None")
            for name in ("q_weight", "k_weight")
        ),
    ],
    fk.gated_rms_norm: [
        ({"gate": zeros(2, 3, 7)}, ValueError, "gate must have shape"),
        ({"gate": zeros(2, 3, 8).bfloat16()}, ValueError, "gate must have x's dtype"),
        ({"weight": zeros(7)}, ValueError, "weight must have shape"),
        ({"weight": zeros(8).double()}, TypeError, "weight may be float64 only where x is"),
        ({"activation": "gelu"}, ValueError, "activation must be one of silu, sigmoid; got 'gelu'"),
        ({"eps": -1.0}, ValueError, "eps must be"),
        ({"x": zeros(1, 8193), "gate": zeros(1, 8193), "weight": None}, ValueError, "x must have a last dimension of"),
    ],
    fk.gated_delta_rule: [
        ({"A_log": zeros(3)}, ValueError, "A_log must have shape"),
        ({"A_log": zeros(4).half()}, TypeError, "A_log must be float32"),
        ({"A_log": zeros(4), "g": None}, ValueError, "g must be given with A_log"),
        ({"dt_bias": zeros(4)}, ValueError, "A_log must be given with dt_bias"),
        ({"A_log": zeros(4), "dt_bias": zeros(4, 16)}, ValueError, "dt_bias must have shape"),
        ({"g": zeros(2, 4, 7, 16), "A_log": zeros(4), "dt_bias": zeros(4)}, ValueError, r"dt_bias must .*H_v, D_k"),
        ({"beta": None, "beta_limit": 1.0}, ValueError, "beta must be given with beta_limit"),
        ({"beta_limit": 0.0}, ValueError, "beta_limit must be"),
        ({"k": zeros(2, 2, 7, 15)}, ValueError, "k must have shape"),
        ({"k": zeros(2, 2, 7, 16).bfloat16()}, ValueError, "k must have q's dtype"),
        ({"v": zeros(2, 3, 7, 24)}, ValueError, "v must have a multiple of q's 2 heads; got 3"),
        ({"v": zeros(2, 4, 6, 24)}, ValueError, r"v must be \[B, H_v, T, D_v\]"),
        ({"v": zeros(2, 4, 7, 513)}, ValueError, "v must have a head dimension of 1 to 512; got 513"),
        ({"g": zeros(2, 4, 7, 15)}, ValueError, "g must have shape .*dimension of a key"),
        ({"g": zeros(2, 4, 6)}, ValueError, "g must have shape .*one number for each head"),
        ({"g": zeros(2, 4, 7).bfloat16()}, TypeError, "g must be float32"),
        ({"initial_state": zeros(1, 4, 16, 24)}, ValueError, "initial_state must have shape"),
        ({"initial_state": zeros(2, 4, 16, 24).double()}, TypeError, "initial_state must be torch.float32"),
        ({"scale": 0.0}, ValueError, "scale must be"),
        ({"chunk_size": 48}, ValueError, "chunk_size must be None or one of 16, 32, 64, 128; got 48"),
        ({"cu_seqlens": longs(0, 7)}, ValueError, "q, k and v must have a batch of 1 with cu_seqlens; got 2"),
        *(
            (ONE | {"cu_seqlens": ends}, error, "cu_seqlens must")
            for ends, error in (
                (longs(1, 7), ValueError), (longs(0, 6), ValueError), (longs(0, 5, 3, 7), ValueError),
                (zeros(2), TypeError), (longs(), ValueError),
            )
        ),
    ],
    fk.gated_delta_rule_step: [
        ({"A_log": zeros(3)}, ValueError, "A_log must have shape"),
        ({"A_log": zeros(4), "dt_bias": zeros(4, 16)}, ValueError, "dt_bias must have shape"),
        ({"beta_limit": -1.0}, ValueError, "beta_limit must be"),
        ({"k": zeros(2, 2, 15)}, ValueError, "k must have shape"),
        ({"k": zeros(2, 2, 16).half()}, ValueError, "k must have q's dtype"),
        ({"q": zeros(2, 3, 16), "k": zeros(2, 3, 16)}, ValueError, "multiple of q's 3 heads"),
        ({"v": zeros(2, 4, 513), "state": zeros(2, 4, 16, 513)}, ValueError, "head dimension of 1"),
        ({"g": zeros(2, 3)}, ValueError, "g must have shape"),
        ({"g": zeros(2, 4, 15)}, ValueError, "g must have shape .*dimension of a key"),
        ({"beta": zeros(2, 4).half()}, TypeError, "beta must be float32"),
        ({"state": zeros(2, 4, 16, 99)}, ValueError, "state must have shape"),
        ({"state": zeros(2, 4, 16, 100).bfloat16()}, TypeError, "state must be torch.float32"),
        ({"state": zeros(2, 4, 100, 16).mT}, ValueError, "state must be contiguous in its last two dimensions"),
        ({"state": zeros(2, 1, 16, 100).expand(2, 4, 16, 100)}, ValueError, "state must be contiguous"),
        ({"scale": -1.0}, ValueError, "scale must be"),
    ],
    fk.short_conv1d: [
        ({"x": zeros(5, 6)}, ValueError, r"x must be \[B, T, C\]; got shape \(5, 6\)"),
        ({"weight": zeros(5, 4)}, ValueError, r"weight must be \[C, W\] with x's 6 channels and W in 1 .. 8; got"),
        ({"weight": zeros(6, 9)}, ValueError, r"W in 1 .. 8; got shape \(6, 9\)"),
        ({"weight": zeros(6, 1, 4)}, ValueError, r"weight must be \[C, W\]; got shape \(6, 1, 4\)"),
        ({"cu_seqlens": longs(0, 5)}, ValueError, r"x must be \[1, T, C\] with cu_seqlens, .*; got \(2, 5, 6\)"),
        *(
            ({"x": zeros(1, 5, 6), "cu_seqlens": longs(*ends)}, ValueError, message)
            for ends, message in (
                ((0, 2, 4), r"cu_seqlens must start at 0, .* end at T = 5; got \[0, 2, 4"),
                ((0, 7, 5), r"never decrease .* got \[0, 7, 5\]"),
                ((), r"cu_seqlens must be \[N \+ 1\], starting with 0"),
            )
        ),
        ({"x": zeros(1, 5, 6), "cu_seqlens": zeros(2)}, TypeError, "cu_seqlens must be int32 or int64"),
        ({"initial_state": zeros(2, 6, 4)}, ValueError, r"initial_state must have shape \(2, 6, 3\).*got \(2, 6, 4\)"),
        ({"initial_state": zeros(2, 6, 3).half()}, ValueError, "initial_state must have x's dtype torch.float32"),
        ({"residual": zeros(2, 5, 1)}, ValueError, "residual must have shape"),
        ({"residual": zeros(2, 5, 6).half()}, ValueError, "residual must have x's dtype"),
    ],
    fk.short_conv1d_step: [
        ({"x": zeros(2, 1, 6)}, ValueError, r"x must be \[B, C\]; got shape \(2, 1, 6\)"),
        ({"weight": zeros(6, 9)}, ValueError, "weight must be"),
        ({"weight": zeros(5, 4)}, ValueError, "weight must be"),
        ({"bias": zeros(5)}, ValueError, "bias must have shape"),
        ({"state": zeros(2, 6, 2)}, ValueError, r"state must be \[\*\(2, 6\), S\], S at least 3; got shape \(2, 6, 2"),
        ({"state": zeros(1, 6, 3)}, ValueError, r"got shape \(1, 6, 3\)"),
        ({"state": zeros(2, 6, 4).half()}, ValueError, "state must have x's dtype"),
        ({"residual": zeros(2, 5)}, ValueError, "residual must have shape"),
        ({"residual": zeros(2, 6).half()}, ValueError, "residual must have x's dtype"),
    ],
    fk.grouped_mm: [
        ({"x": zeros(4)}, ValueError, r"x must be \[M, K\]; got shape \(4,\)"),
        ({"weight": zeros(4, 3)}, ValueError, r"weight must be \[E, K, N\]; got shape \(4, 3\)"),
        ({"weight": zeros(0, 4, 3)}, ValueError, "weight must hold at least one matrix"),
        ({"weight": zeros(2, 5, 3)}, ValueError, r"weight must have shape \(2, 4, 3\)"),
        ({"offs": longs(4, 10)}, TypeError, "offs must be int32; got torch.int64"),
        *(
            ({"offs": longs(*ends, dtype=torch.int32)}, ValueError, message)
            for ends, message in (
                ((10,), r"offs must have shape \(2,\)"),
                ((4, 11), r"offs must never decrease and lie in 0 .. 10.* got 11 for group 1"),
                ((6, 4), "got 4 for group 1, after 6"),
                ((-1, 4), "got -1 for group 0"),
            )
        ),
    ],
    fk.combine_experts: [
        ({"x": zeros(5)}, ValueError, r"x must be \[M, D\]; got shape \(5,\)"),
        ({"slots": longs(2, 0)}, ValueError, r"slots must be \[T, k\]; got shape \(2,\)"),
        ({"slots": zeros(3, 0, dtype=torch.int64)}, ValueError, "with k at least 1"),
        ({"slots": torch.tensor([[3, 1], [0, 5], [2, 0]])}, IndexError, r"-1 or a row of x, 0 \.\. 4; got 5"),
        ({"slots": torch.tensor([[1, -1], [-2, 3], [0, 1]])}, IndexError, "got -2"),
        ({"weights": zeros(3, 3)}, ValueError, r"weights must have shape \(3, 2\)"),
        ({"weights": zeros(3, 2).bfloat16()}, TypeError, "weights must be float32 or of x's dtype"),
    ],
    decode_linear: [
        ({"x": zeros(3, 3, 4)}, ValueError, r"x must have at most 8 rows; got shape \(3, 3, 4\)"),
        ({"weight": zeros(4)}, ValueError, r"weight must be \[N, K\]; got shape \(4,\)"),
        ({"weight2": zeros(4, 3)}, ValueError, r"weight2 must be \[N, K\] with x's last dimension 4; got \(4, 3\)"),
        ({"weight3": zeros(3, 4).half()}, ValueError, r"weight3 must have x's dtype torch\.float32; got"),
        ({"weight4": zeros(3, 4, device="meta")}, ValueError, "weight4 must be on x's device cpu; got meta"),
    ],
    rope_table: [
        *(({"rotary_dim": n}, ValueError, f"rotary_dim must be even and >= 2; got {n}") for n in (7, 0)),
        ({"rotary_dim": 8.0}, TypeError, "rotary_dim must be an int"),
        ({"max_positions": -1}, ValueError, "max_positions must be >= 0; got -1"),
        ({"base": 1.0}, ValueError, "base must be > 1"),
        ({"base": math.inf}, ValueError, "base must be finite"),
        ({"scaling": {"rope_type": "linear", "factor": 2.0}}, TypeError, "scaling must be a RopeScaling"),
    ],
    RopeScaling: [
        ({"rope_type": "ntk"}, ValueError, "rope_type must be one of"),
        ({"factor": 0.5}, ValueError, "factor must be >= 1"),
        ({"factor": None}, ValueError, "factor must be given"),
        ({"factor": math.nan}, ValueError, "factor must be finite"),
        *(({"factor": x}, TypeError, "factor must be a float") for x in ("2", True)),
        *(
            ({"rope_type": kind, "original_max_position_embeddings": None}, ValueError, "embeddings must be given")
            for kind in ("dynamic", "yarn")
        ),
        ({"rope_type": "linear", "beta_fast": 32}, ValueError, "has no meaning"),
        ({"rope_type": "llama3", "high_freq_factor": 4.0}, ValueError, "low_freq_factor must be given"),
        ({"rope_type": "llama3", "low_freq_factor": 4.0, "high_freq_factor": 4.0}, ValueError, "less than high"),
        ({"beta_fast": 1.0}, ValueError, "beta_slow must be less than beta_fast"),
        ({"attention_factor": 0.0}, ValueError, "attention_factor must be finite and > 0"),
        ({"mscale": -1.0}, ValueError, "mscale must be finite and >= 0"),
        ({"truncate": 1}, TypeError, "truncate must be a bool"),
        ({"original_max_position_embeddings": 4096.0}, TypeError, "must be an int"),
        ({"original_max_position_embeddings": 0}, ValueError, "must be finite and > 0"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("function", "changes", "error", "message"),
    [
        pytest.param(function, *row, id=f"{function.__name__}-{i}-{'-'.join(row[0])}")
        for function, rows in REFUSED.items()
        for i, row in enumerate(rows)
    ],
)
def test_what_is_refused(function: Any, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    given = GIVEN[function] | changes
    state = given["state"].clone() if "state" in given else None
    with pytest.raises(error, match=message):
        function(**given)
    assert state is None or torch.equal(given["state"], state)


DROPPING = [op for op in fk.OPS.values() if "dropout_p" in inspect.signature(op.public).parameters]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        *(({"dropout_p": p}, ValueError, rf"dropout_p must be in \[0, 1\); got {p}") for p in (-0.1, 1.0, math.nan)),
        ({"dropout_seed": 0.5}, TypeError, "dropout_seed must be an int; got float"),
        ({"dropout_seed": -1}, ValueError, "dropout_seed must be >= 0; got -1"),
        ({"dropout_seed": 2**63}, ValueError, r"dropout_seed must be below 2\^63"),
        ({"dropout_seed": torch.tensor(1.0)}, TypeError, "dropout_seed must be int64.*torch.float32"),
        ({"dropout_seed": longs(1, 1)}, ValueError, r"dropout_seed must hold one number; got .*\(2,\)"),
        ({"dropout_seed": zeros(dtype=torch.int64, device="meta")}, ValueError, "must be on .*'s device cpu; got meta"),
    ],
    ids=str,
)
def test_dropout(options: dict[str, Any], error: type[Exception], message: str) -> None:
    for op in DROPPING:
        case = next(c for c in op.cases.CASES[op.name] if c.options.get("dropout_p"))
        with pytest.raises(error, match=message):
            op.public(**case.make(torch.float32), **{**case.options, **options})


def test_tables_that_require_a_gradient_serve_where_none_is_taken() -> None:
    with torch.no_grad():
        fk.rope(**ROTATED | {name: learned(5, 6) for name in ("cos", "sin")})
