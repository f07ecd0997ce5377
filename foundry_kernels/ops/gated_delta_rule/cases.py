"""Sample inputs, which the parity suite enumerates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.contract import Options, Saved, Scales, Tensors
from foundry_kernels.ops.flash_attention.bench import CuSeqlens
from foundry_kernels.ops.gated_delta_rule import reference
from foundry_kernels.ops.gated_delta_rule.checks import MAX_HEAD_DIM
from foundry_kernels.ops.gated_delta_rule.options import DeltaRuleOptions
from foundry_kernels.ops.gated_delta_rule.reference import L2NORM_EPS
from foundry_kernels.testing import Arg, Case, Values, normal


@dataclass(frozen=True)
class Between:
    """Independent values between two numbers, and some of them other numbers."""

    low: float
    high: float
    others: tuple[float, ...] = ()

    def __call__(self, g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
        x = torch.rand(shape, generator=g, dtype=torch.float64) * (self.high - self.low) + self.low
        for other in self.others:
            x = torch.where(torch.rand(shape, generator=g, dtype=torch.float64) < 0.2, other, x)
        return x


DECAYS, STEPS = Between(-0.6, 0.0), Between(0.0, 1.0)


def sequence_case(
    batch: int,
    heads: tuple[int, int],
    tokens: int | tuple[int, ...],
    dims: tuple[int, int] = (16, 16),
    note: str = "",
    *,
    g: Values | None = DECAYS,
    channels: bool = False,
    beta: Values | None = STEPS,
    k: Values | None = None,
    q: Values | None = None,
    v: Values | None = None,
    layout: str = "contiguous",
    rows_layout: str = "contiguous",
    wide_rows: bool = True,
    gates: str = "",
    state: bool = False,
    state_layout: str = "contiguous",
    index: torch.dtype = torch.int32,
    frozen: str = "",
    cotangent: str = "contiguous",
    interpreted: bool = True,
    **options: Any,
) -> Case:
    """heads: (H_k, H_v); tokens: T, or the lengths of packed documents; dims: (D_k, D_v); rows: g and beta; frozen:
    letters of the inputs without gradient;
    gates: "A", and "b" with a bias; channels: g has a decay for each dimension of a key. Keys have a
    length of about 1 if `k` is not given, as after a norm."""
    (hk, hv), (dk, dv) = heads, dims
    packed = isinstance(tokens, tuple)
    t = sum(tokens) if isinstance(tokens, tuple) else tokens
    args: dict[str, Arg | None] = {
        "q": Arg((batch, hk, t, dk), layout, q or normal(), grad="q" not in frozen),
        "k": Arg((batch, hk, t, dk), layout, k or normal(dk**-0.5), grad="k" not in frozen),
        "v": Arg((batch, hv, t, dv), layout, v or normal(), grad="v" not in frozen),
    }
    for name, values in (("g", g), ("beta", beta)):
        if values is not None:
            shape = (batch, hv, t, dk) if channels and name == "g" else (batch, hv, t)
            args[name] = Arg(shape, rows_layout, values, grad=name[0] not in frozen, wide=wide_rows)
    args |= _gates(gates, hv, dk if channels else None, wide_rows, "a" not in frozen)
    if state:
        n = len(tokens) if isinstance(tokens, tuple) else batch
        args["initial_state"] = Arg((n, hv, dk, dv), state_layout, grad="s" not in frozen, wide=True)
    if isinstance(tokens, tuple):
        args["cu_seqlens"] = Arg((len(tokens) + 1,), values=CuSeqlens(tokens), dtype=index, grad=False)
    lengths = "+".join(map(str, tokens)) if isinstance(tokens, tuple) else str(tokens)
    id = f"{batch}x{hk}.{hv}x{lengths}x{dk}.{dv}" + "-packed" * packed + ("-" + note if note else "")
    return Case(id, args, options, cotangent, interpreted)


def _gates(gates: str, heads: int, channels: int | None, wide: bool, grad: bool = False) -> dict[str, Arg | None]:
    args: dict[str, Arg | None] = {}
    if "A" in gates:
        args["A_log"] = Arg((heads,), values=Between(-2.0, 1.0), grad=grad, wide=wide)
    if "b" in gates:
        args["dt_bias"] = Arg((heads, channels) if channels else (heads,), grad=grad, wide=wide)
    return args


_FINAL: dict[str, Any] = {"return_final_state": True}


def _sequences(delta: bool) -> tuple[Case, ...]:
    """What both the delta rule and linear attention are tried on."""

    def case(*args: Any, **kw: Any) -> Case:
        made = sequence_case(*args, **kw)
        return made if delta else replace(made, args={n: a for n, a in made.args.items() if n != "beta"})

    return (
        case(1, (1, 1), 3, (2, 2), "tiny", state=True, **_FINAL),  # for finite differences
        *(case(1, (1, 2), t, note="lengths", **_FINAL) for t in (1, 2, 15, 16, 17, 63, 64, 65, 130)),
        *(case(1, (1, 1), 21, d) for d in ((1, 1), (7, 7), (7, 20), (40, 7), (64, 64), (128, 128), (64, 128))),
        case(1, (1, 1), 19, (256, 256), "wide", state=True, **_FINAL),
        case(2, (1, 2), 19, (8, 300), "two-parts", layout="swapped", qk_l2norm=True, state=True, **_FINAL),
        case(1, (2, 2), (5, 0, 20), (16, 512), "two-parts", wide_rows=False, state=True, **_FINAL),
        case(1, (1, 1), 9, (8, 257), "two-parts-frozen", frozen="kvb"),
        replace(case(1, (1, 2), 150, (128, 64), "long", state=True, **_FINAL), interpreted=False),
        case(2, (2, 4), 20, note="group-2", state=True, **_FINAL),
        case(2, (1, 3), 20, (16, 8), "group-3"),
        case(2, (2, 2), 37, note="l2norm", k=normal(), qk_l2norm=True, state=True, **_FINAL),
        case(1, (1, 2), 37, note="l2norm-group", k=normal(9.0), qk_l2norm=True),
        case(1, (2, 2), 37, note="no-decay", g=None, **_FINAL),
        case(1, (2, 2), 37, note="g-0", g=normal(0.0), **_FINAL),
        case(1, (2, 2), 70, note="g-strong", g=Between(-0.3, 0.0, (-50.0,)), state=True, **_FINAL),
        case(1, (2, 2), 70, note="g-all-strong", g=Between(-60.0, -40.0), state=True, **_FINAL),
        case(1, (2, 2), 70, note="g-mild", g=Between(-1e-3, 0.0), state=True, **_FINAL),
        case(1, (2, 2), 37, note="g-positive", g=Between(-0.1, 0.05), state=True, **_FINAL),
        case(1, (2, 2), 37, note="scale", scale=1.7, q=normal(3.0)),
        case(2, (2, 2), 37, note="state-only", state=True),
        case(2, (2, 2), 37, note="final-only", **_FINAL),
        case(1, (2, 2), 37, note="rows-of-its-dtype", wide_rows=False, state=True, **_FINAL),
        case(1, (1, 2), 70, note="chunk-16", chunk_size=16, state=True, **_FINAL),
        case(1, (1, 2), 70, note="chunk-32", chunk_size=32, state=True, **_FINAL),
        case(1, (1, 2), 70, note="chunk-64", chunk_size=64, state=True, **_FINAL),
        case(1, (1, 1), 140, note="chunk-128", chunk_size=128, state=True, **_FINAL),
        *(
            case(2, (2, 4), 18, note=x, layout=x, rows_layout=x, cotangent=x, state=True, state_layout=x, **_FINAL)
            for x in ("swapped", "sliced", "offset", "expanded", "strided")
        ),
        *(
            case(1, (1, 2), 33, note=f"frozen-{x}", frozen=x, state=True, **_FINAL)
            for x in (("q", "k", "v", "g", "b", "s", "qk", "kvgbs") if delta else ("q", "k", "v", "g", "s", "vgs"))
        ),
        case(1, (1, 2), 33, note="frozen-all-but-g", frozen="qkvbs", state=True, **_FINAL),
        case(1, (1, 2), (5, 0, 40, 1, 17)),
        case(1, (2, 2), (5, 0, 40, 1, 17, 0), note="final", state=True, **_FINAL),
        case(1, (1, 2), (64, 3), note="int64", index=torch.int64, **_FINAL),
        case(1, (2, 2), (1, 1, 1), note="tokens", state=True, layout="swapped", **_FINAL),
        case(1, (1, 2), (20, 33), note="l2norm", qk_l2norm=True, chunk_size=16, state=True, **_FINAL),
        case(1, (1, 1), (0, 0), note="empty-documents", state=True, **_FINAL),
        case(2, (1, 2), 0, note="no-tokens", state=True, **_FINAL),
        case(0, (1, 2), 9, note="no-batch", **_FINAL),
    )


def _channels(delta: bool) -> tuple[Case, ...]:
    """A decay for each dimension of a key."""

    def case(*args: Any, **kw: Any) -> Case:
        made = sequence_case(*args, channels=True, **kw)
        made = replace(made, id=f"{made.id}-channels")
        return made if delta else replace(made, args={n: a for n, a in made.args.items() if n != "beta"})

    both: dict[str, Any] = {"state": True, **_FINAL}
    return (
        case(1, (1, 1), 3, (2, 2), "tiny", **both),  # for finite differences
        *(case(1, (1, 2), t, note="lengths", **_FINAL) for t in (1, 15, 16, 17, 33, 64, 65)),
        *(case(1, (1, 1), 21, d) for d in ((1, 1), (7, 20), (40, 7), (128, 128))),
        case(1, (1, 1), 19, (256, 256), "wide", **both),
        case(1, (1, 2), (12, 9), (8, 300), "two-parts", **both),
        replace(case(1, (1, 2), 150, (128, 64), "long", **both), interpreted=False),
        case(2, (2, 4), 20, note="group-2", **both),
        case(2, (2, 2), 37, note="l2norm", k=normal(), qk_l2norm=True, **both),
        case(1, (1, 2), 37, note="l2norm-group", k=normal(9.0), qk_l2norm=True),
        case(1, (2, 2), 70, note="g-strong", g=Between(-0.3, 0.0, (-50.0,)), **both),
        case(1, (2, 2), 70, note="g-all-strong", g=Between(-60.0, -40.0), **both),
        case(1, (2, 2), 70, note="g-mild", g=Between(-1e-3, 0.0), **both),
        case(1, (2, 2), 70, note="g-all", g=Between(-1e-4, 0.0, (-0.1, -1.0, -5.0, -50.0)), **both),
        case(1, (2, 2), 37, note="g-positive", g=Between(-0.1, 0.05), **both),
        case(1, (2, 2), 37, note="scale-no-state", scale=1.7, q=normal(3.0)),
        case(1, (2, 2), 37, note="rows-of-its-dtype", wide_rows=False, **both),
        *(case(1, (1, 1), 70 + c // 2, note=f"chunk-{c}", chunk_size=c, **both) for c in (16, 32, 64, 128)),
        *(
            case(2, (2, 4), 18, note=x, layout=x, rows_layout=x, cotangent=x, state_layout=x, **both)
            for x in ("swapped", "sliced", "offset", "expanded", "strided")
        ),
        *(case(1, (1, 2), 33, note=f"frozen-{x}", frozen=x, **both) for x in ("g", "qk", "qkvbs")),
        case(1, (2, 2), (5, 0, 40, 1, 17, 0), note="final", **both),
        case(1, (1, 2), (20, 33), note="l2norm", qk_l2norm=True, chunk_size=16, **both),
        case(2, (1, 2), 0, note="no-tokens", **both),
    )


def _gated(delta: bool) -> tuple[Case, ...]:
    """Gates in the kernel, whose inputs are g and, with a limit, beta."""

    def case(*args: Any, note: str = "", **kw: Any) -> Case:
        both: dict[str, Any] = {"g": normal(), "beta": normal(2.0), "state": True, **_FINAL} | kw
        if delta:
            both["beta_limit"] = 2.0 if "2" in note else 1.0
        both["note"] = "gates" + ("-" + note if note else "")
        made = sequence_case(*args, **both)
        return made if delta else replace(made, args={n: a for n, a in made.args.items() if n != "beta"})

    return tuple(
        replace(made, id=made.id + "-channels" * channels)
        for channels in (False, True)
        for made in (
            case(1, (1, 1), 3, (2, 2), gates="Ab", channels=channels),  # for finite differences
            case(2, (2, 4), 37, gates="Ab", channels=channels),
            case(1, (1, 2), 9, (8, 300), note="two-parts", gates="Ab", channels=channels),
            case(1, (1, 2), 70, (16, 40), note="large-2", gates="Ab", g=normal(30.0), channels=channels),
            case(2, (2, 2), 37, note="no-bias", gates="A", wide_rows=False, channels=channels),
            case(1, (1, 2), (5, 0, 40, 17), gates="Ab", qk_l2norm=True, channels=channels),
            case(1, (1, 2), 33, note="frozen", frozen="ga", gates="Ab", channels=channels),
            case(2, (1, 2), 0, note="no-tokens", gates="Ab", channels=channels),
        )
    )


_SEQUENCES = (
    *_sequences(True),
    *_channels(True),
    *_gated(True),
    sequence_case(1, (2, 2), 37, note="beta-limit", beta=normal(3.0), beta_limit=1.0, state=True, **_FINAL),
    sequence_case(1, (2, 2), 37, note="no-beta", beta=None, state=True, **_FINAL),
    sequence_case(1, (2, 2), 37, note="delta-rule", g=None, state=True, **_FINAL),
    sequence_case(1, (2, 2), 37, note="neither", g=None, beta=None),
    sequence_case(1, (2, 2), 70, note="beta-0-1-2", beta=Between(0.0, 1.0, (0.0, 1.0, 2.0)), state=True, **_FINAL),
    sequence_case(1, (2, 2), 70, note="beta-2", beta=Between(1.9, 2.0), k=normal(), qk_l2norm=True, **_FINAL),
    sequence_case(1, (2, 2), 70, note="beta-0", beta=normal(0.0), state=True, **_FINAL),
    sequence_case(1, (2, 2), 37, note="beta-negative", beta=Between(-0.5, 0.0), state=True, **_FINAL),
    sequence_case(1, (1, 1), 20, note="large-keys", k=normal(0.75), **_FINAL),
    sequence_case(1, (1, 1), 70, note="large-keys-small-steps", k=normal(4.0), beta=Between(0.0, 0.005), **_FINAL),
    sequence_case(1, (1, 1), 40, note="equal-keys", k=normal(0.0, 0.25), beta=Between(0.9, 1.0), **_FINAL),
)


def step_case(
    batch: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    note: str = "",
    *,
    g: Values | None = DECAYS,
    channels: bool = False,
    beta: Values | None = STEPS,
    layout: str = "contiguous",
    state_layout: str = "contiguous",
    wide_rows: bool = True,
    gates: str = "",
    **options: Any,
) -> Case:
    (hk, hv), (dk, dv) = heads, dims
    args: dict[str, Arg | None] = {
        "q": Arg((batch, hk, dk), layout, grad=False),
        "k": Arg((batch, hk, dk), layout, normal(dk**-0.5), grad=False),
        "v": Arg((batch, hv, dv), layout, grad=False),
        "g": None if g is None else Arg((batch, hv, dk)[: 2 + channels], values=g, grad=False, wide=wide_rows),
        "beta": None if beta is None else Arg((batch, hv), values=beta, grad=False, wide=wide_rows),
        "state": Arg((batch, hv, dk, dv), state_layout, grad=False, wide=True),
    }
    args |= _gates(gates, hv, dk if channels else None, wide_rows)
    return Case(f"{batch}x{hk}.{hv}x{dk}.{dv}" + ("-" + note if note else ""), args, options)


_STEPS = (
    *(step_case(2, (1, 2), d) for d in ((1, 1), (7, 7), (16, 16), (40, 20), (20, 40), (64, 64), (128, 128))),
    *(step_case(1, (1, 1), d) for d in ((256, 256), (256, 512), (16, 500))),
    step_case(1, (16, 32), (128, 128), "qwen3-next", qk_l2norm=True),
    step_case(3, (2, 6), (16, 33), "group-3", qk_l2norm=True, scale=0.5),
    step_case(2, (2, 2), (16, 16), "no-decay", g=None),
    step_case(2, (2, 2), (16, 16), "no-beta", beta=None),
    step_case(2, (2, 2), (16, 16), "neither", g=None, beta=None),
    step_case(2, (2, 2), (16, 16), "rows-of-its-dtype", wide_rows=False),
    step_case(2, (2, 2), (16, 16), "strong", g=Between(-60.0, -40.0), beta=Between(0.0, 2.0, (0.0, 2.0))),
    *(step_case(2, (2, 4), (16, 24), x, layout=x) for x in ("swapped", "sliced", "offset", "expanded", "strided")),
    step_case(2, (2, 4), (16, 24), "state-offset", state_layout="offset"),
    step_case(0, (2, 4), (16, 24), "no-batch"),
    *(step_case(2, (1, 2), d, "channels", channels=True) for d in ((1, 1), (7, 20), (40, 7), (128, 128))),
    step_case(2, (2, 2), (16, 16), "channels-rows-of-its-dtype", channels=True, wide_rows=False, qk_l2norm=True),
    *(
        step_case(
            2,
            (1, 2),
            (20, 24),
            f"gates{'-channels' * c}{'-narrow' * (not wide)}",
            channels=c,
            g=normal(3.0),
            beta=normal(),
            gates="Ab",
            beta_limit=1.0 + c,
            wide_rows=wide,
            qk_l2norm=True,
        )
        for c in (False, True)
        for wide in (False, True)
    ),
    step_case(2, (2, 2), (16, 16), "gates-no-bias", g=normal(), gates="A"),
    step_case(2, (2, 2), (16, 16), "channels-strong", channels=True, g=Between(-60.0, -40.0, (-1e-4, -1.0))),
)

CASES: dict[str, tuple[Case, ...]] = {
    "gated_delta_rule": _SEQUENCES,
    "gated_linear_attention": (*_sequences(False), *_channels(False), *_gated(False)),
    "gated_delta_rule_step": _STEPS,
}

MUTATED = {"gated_delta_rule_step": ("state",)}


def _states(args: Tensors, options: Options) -> int:
    """A matrix for each head and each chunk, of 16 tokens at least: its state, or its triangle's inverse."""
    v, k, ends = args["v"], args["k"], args.get("cu_seqlens")
    chunks = v.shape[2] // 16 + (1 if ends is None else ends.shape[0])
    return v.shape[0] * v.shape[1] * chunks * max(k.shape[3] * v.shape[3], 32 * 32)


def _parts(args: Tensors, options: Options) -> int:
    """Values that are too wide for one call run in two, each of which makes a gradient of what both share."""
    v = args["v"]
    return max(x.numel() for x in args.values() if x is not None) if v.shape[3] > MAX_HEAD_DIM else 0


SAVED = dict.fromkeys(("gated_delta_rule", "gated_linear_attention"), Saved(more=_states, made=_parts))


#: A size whose rounding is below the smallest normal number of float32.
_TINY = 1e-32


def scales(args: Tensors, options: Options, cotangents: tuple[Tensor, ...]) -> Scales:
    """Size of the terms that a gradient sums (float64 inputs).

    Of a query or key that is divided by its length, the gradient loses its part along it, which may be nearly all: its
    size is that of the gradient before. The gradient of g is a sum over the state: its size is the root of the sum of
    squares, also without the correction, which may cancel nearly all of the state. (Linear attention is taken for the
    delta rule without beta, whose terms are of the same size.)
    """
    (q, k, v), g, beta = (args[n] for n in "qkv"), args.get("g"), args.get("beta")
    tiny = dict.fromkeys((*args, "output 0", "output 1"), _TINY)
    if "state" in args or v.numel() == 0 or not (g is not None or options.get("qk_l2norm")):
        return tiny
    rate, bias, limit = args.get("A_log"), args.get("dt_bias"), options.get("beta_limit")
    if g is not None and rate is not None:
        raw = g if bias is None else g + bias.unsqueeze(1)
    g, beta = reference.opened(g, beta, rate, bias, limit, q.dtype, tokens=True)
    state, factors = args.get("initial_state"), {}
    if options.get("qk_l2norm"):
        factors = {n: torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS) for n, x in (("q", q), ("k", k))}
        q, k = q * factors["q"], k * factors["k"]
    leaves = {"q": q.requires_grad_(), "k": k.requires_grad_()}
    if g is not None:
        channels, g_values = g.dim() == 4, g
        g = g if channels else g[..., None].expand(*g.shape, q.shape[-1])
        g = leaves["g"] = g[..., None].repeat(1, 1, 1, 1, v.shape[-1]).requires_grad_()
    scale = options.get("scale") or q.shape[-1] ** -0.5
    final = bool(options.get("return_final_state"))
    found = {}
    for delta in (True, False):
        call = DeltaRuleOptions(args.get("cu_seqlens"), scale, False, delta, None, None, final)
        outputs = reference.gated_delta_rule(q, k, v, g, beta, state, None, None, call)
        results = [x for x in outputs if x is not None]
        grads = dict(zip(leaves, torch.autograd.grad(results, list(leaves.values()), cotangents), strict=True))
        if delta:
            found = {n: float((grads[n] * by).abs().max()) for n, by in factors.items()}
        if g is not None:
            sizes = grads["g"].square().sum((-1,) if channels else (-1, -2)).sqrt()
            own = {"g": sizes}
            if rate is not None and sizes.numel():  # through the gate, and summed over tokens: errors of g's gradient
                shape, size = (-1, *[1] * (sizes.dim() - 2)), sizes.max()  # have the size of the largest one
                own["g"] = size * rate.exp().view(shape) * raw.sigmoid()
                rest = [d for d in range(sizes.dim()) if d != 1]
                own["A_log"] = (size * g_values).square().sum(rest).sqrt()
                own["dt_bias"] = own["g"].square().sum((0, 2)).sqrt()
            for name, size in own.items():
                found[name] = max(found.get(name, 0.0), float(size.max()) if size.numel() else 0.0)
    return {**tiny, **{name: size for name, size in found.items() if name in args}}


def compiled_cases(op: str) -> tuple[tuple[Case, torch.dtype], ...]:
    """What `inspect` compiles without --all: heads of Qwen3-Next and narrower ones, dense and packed."""
    if op == "gated_delta_rule_step":
        step = step_case(2, (2, 4), (128, 128), qk_l2norm=True)
        channels = step_case(2, (2, 2), (128, 128), "channels", channels=True, qk_l2norm=True)
        return (step, torch.bfloat16), (step, torch.float32), (channels, torch.bfloat16)
    packed: dict[str, Any] = {"qk_l2norm": True, "state": True, **_FINAL}
    kinds = (
        (sequence_case(1, (2, 4), 128, (128, 128), wide_rows=False), torch.bfloat16),
        (sequence_case(1, (2, 4), (100, 28), (128, 128), **packed), torch.bfloat16),
        (sequence_case(1, (2, 4), (100, 28), (64, 64), **packed), torch.bfloat16),
        (sequence_case(1, (2, 4), 128, (64, 64)), torch.float32),
        (sequence_case(1, (2, 4), (100, 28), (128, 128), **packed), torch.float32),
        (sequence_case(1, (2, 2), 128, (128, 128), "channels", channels=True), torch.bfloat16),
        (sequence_case(1, (2, 4), (100, 28), (128, 128), "channels", channels=True, **packed), torch.bfloat16),
        (sequence_case(1, (2, 2), (100, 28), (128, 128), "channels", channels=True, **packed), torch.float32),
    )
    if op == "gated_delta_rule":
        return kinds
    return tuple(
        (replace(case, args={n: a for n, a in case.args.items() if n != "beta"}), dtype) for case, dtype in kinds
    )
