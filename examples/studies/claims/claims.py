"""The claims of tutorials, the results that test them, and the numbers for the explanations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from examples.studies.ablation.page import table
from examples.studies.ablation.tables import ATTENTION, DIRECTIONS
from examples.studies.claims import sums, tables
from examples.studies.claims.results import Results
from examples.studies.claims.studies import STUDIES
from examples.studies.claims.tables import MISSING

_, SDPA, OURS = ATTENTION
DTYPES = ("float32", "bfloat16")
Values = dict[str, str]


@dataclass(frozen=True)
class Claim:
    """One row of the page's first table and one of its sections; the explanation is in `why.md`, under the same key.

    Attributes:
        title: the section's title.
        says: the claim of tutorials.
        measured: the result for a table cell; names in braces are keys of `values`.
        body: the section's tables.
        values: numbers for `measured` and the explanation, by name.
    """

    title: str
    says: str
    measured: str
    body: Callable[[Results], str]
    values: Callable[[Results], Values]


# --- norms ------------------------------------------------------------------------------------------------------------


def _norm_values(results: Results) -> Values:
    found = {}
    for direction in DIRECTIONS:
        for dtype in DTYPES:
            case = f"{direction} {dtype}"
            for whose, pair in zip(("ours", "torch", "across"), tables.NORM_PAIRS, strict=True):
                found[_name(whose, direction, dtype)] = tables.norm_ratio(results, case, *pair)
    return found


def _name(*parts: object) -> str:
    return "_".join(str(part) for part in parts).replace("forward+backward", "both")


# --- attention --------------------------------------------------------------------------------------------------------


def _attention_values(results: Results) -> Values:
    return {
        _name(short, direction, dtype, heads): tables.attention_ratio(results, heads, f"{direction} {dtype}", name)
        for short, name in (("ours", OURS), ("sdpa", SDPA))
        for direction in DIRECTIONS
        for dtype in DTYPES
        for heads in (8, 16)
    }


def _memory_values(results: Results) -> Values:
    part = results.get("memory")
    found = {"budget": f"{part['sizes']['budget'] / 2**20:,.0f} MiB" if part else MISSING}
    for short, name in zip(("explicit", "sdpa", "ours"), ATTENTION, strict=True):
        for direction in ("forward", "forward+backward"):
            found[_name(short, direction)] = tables.longest(results, direction, name)
            of = (part or {}).get("cases", {}).get(direction, {}).get(name)
            exponent = None if of is None else of["exponent"]
            found[_name(short, direction, "exponent")] = MISSING if exponent is None else f"{exponent:.2f}"
    return found


# --- heads ------------------------------------------------------------------------------------------------------------


def _cache_values(results: Results) -> Values:
    cases = results.get("caches", {}).get("cases", {})
    found = {}
    for name in ("MHA", "GQA", "MQA"):
        row, first = cases.get(name), cases.get("MHA")
        found[f"{name}_bytes"] = MISSING if row is None else f"{row['cache_bytes'] / first['cache_bytes']:.1%}"
        for part in ("decode", "prefill", "decode_attention"):
            found[f"{name}_{part}"] = MISSING if row is None else f"{row[part]['ratio']:.2f}"
    return found


def _head_values(results: Results) -> Values:
    found = _cache_values(results)
    steps = results.get("steps_heads", {}).get("cases", {})
    labels = dict(zip(("MHA", "GQA", "MQA"), _labels("heads"), strict=True))
    for name, label in labels.items():
        found[f"{name}_step"] = f"{steps[label]['ratio']:.2f}" if label in steps else MISSING
    return found | _loss_values(results, "heads", labels)


# --- losses -----------------------------------------------------------------------------------------------------------


def _labels(key: str) -> list[str]:
    return list(STUDIES[key].variants)


def _loss_values(results: Results, key: str, names: dict[str, str], prefix: str = "") -> Values:
    """For each variant in `names`: its mean loss, and the difference to the first variant's."""
    of, trained = tables.losses(results, key), tables.losses(results, key, "trained_on")
    above = tables.changes(of)
    found = {}
    for name, label in names.items():
        found[f"{prefix}{name}_loss"] = tables.mean_loss(of, label)
        found[f"{prefix}{name}_above"] = tables.loss(above[label], sign=True) if label in above else MISSING
        found[f"{prefix}{name}_trained"] = tables.mean_loss(trained, label)
    apart = tables.spread(results, key)
    return found | {f"{prefix}spread": MISSING if apart is None else f"{apart:.3f}"}


def _all_losses(*keys_and_names: tuple[str, str, tuple[str, ...]]) -> Callable[[Results], Values]:
    """The values of several studies. Each has a prefix and the names of its variants in order."""

    def values(results: Results) -> Values:
        found: Values = {}
        for key, prefix, names in keys_and_names:
            found |= _loss_values(results, key, dict(zip(names, _labels(key), strict=True)), prefix)
        return found

    return values


def _dropout_values(results: Results) -> Values:
    names, best = ("none", "drop"), tables.best(results, "dropout_often")
    found = _all_losses(("dropout_once", "once_", names), ("dropout_often", "often_", names))(results)
    labels = zip(names, _labels("dropout_often"), strict=True)
    return found | {f"often_{name}_best": tables.mean_loss(best, label) for name, label in labels}


def _init_values(results: Results) -> Values:
    """Also Xavier's standard deviation for a square matrix, with the study's width and with a large model's."""
    found = _all_losses(("init_shallow", "shallow_", DRAWN), ("init_deep", "deep_", DRAWN))(results)
    settings = results.get("studies", {}).get("init_deep", {}).get("settings")
    width = settings["dim"] if settings else None
    return found | {
        "width": MISSING if width is None else str(width),
        "xavier_std": MISSING if width is None else f"{width**-0.5:.3f}",
        "xavier_std_4096": f"{4096**-0.5:.3f}",
    }


def _studies(*keys: str) -> Callable[[Results], str]:
    return lambda results: "\n\n".join(tables.study(results, key) for key in keys)


PLACED = ("pre_warm", "pre_cold", "post_warm", "post_cold", "post_slow")
DRAWN = ("normal", "xavier", "depth_scaled")
ACTIVATIONS = ("gelu", "relu", "silu", "glu", "reglu", "geglu", "swiglu")


def _parts_values(results: Results) -> Values:
    shares = sums.shares(sums.LLAMA)
    return {
        "small": f"{sums.SMALL.n_parameters:,}",
        "counted": str(sums.COUNTED_WIDTH),
        "width": str(sums.SMALL.ffn_width),
        **{name.split()[0].replace("-", "_"): f"{share:.1%}" for name, share in shares.items()},
    }


def _every(kind: str, heads: int) -> str:
    """Names of all cases of a comparison, in the order of the page."""
    return "; ".join(
        f"{dtype} " + " / ".join(f"{{{_name(kind, direction, dtype, heads)}}}" for direction in DIRECTIONS)
        for dtype in DTYPES
    )


CLAIMS: dict[str, Claim] = {
    "norms": Claim(
        "RMSNorm is faster than LayerNorm",
        "1.9x, or 1.8x, at width 4096",
        "fk.layer_norm / fk.rms_norm, forward: float32 {ours_forward_float32}, bfloat16 {ours_forward_bfloat16}; with "
        "the backward pass {ours_both_float32}, {ours_both_bfloat16}. PyTorch's own two, forward: "
        "{torch_forward_float32}, {torch_forward_bfloat16}",
        tables.norms,
        _norm_values,
    ),
    "attention": Claim(
        "Flash attention is faster than attention with its matrix",
        "3.6x, 3.4x or 3.9x at T = 2048",
        f"fk.flash_attention, forward / backward alone / both, H=8: {_every('ours', 8)}. SDPA: {_every('sdpa', 8)}",
        lambda results: "\n\n".join(tables.attention(results, heads) for heads in (8, 16)),
        _attention_values,
    ),
    "memory": Claim(
        "Attention without its matrix takes longer sequences",
        "memory grows with T instead of T², so sequences can be several times as long",
        "longest T in {budget}, forward: explicit {explicit_forward}, SDPA {sdpa_forward}, fk {ours_forward}; with the "
        "backward pass {explicit_both}, {sdpa_both}, {ours_both}",
        tables.memory,
        _memory_values,
    ),
    "caches": Claim(
        "Shared heads shrink the key-value cache",
        "100 %, 33 % and 8 % with MHA, GQA (a third of 12 heads) and MQA",
        "bytes allocated: {MHA_bytes}, {GQA_bytes}, {MQA_bytes}; time a token: {MHA_decode}, {GQA_decode}, "
        "{MQA_decode} of MHA's",
        tables.caches,
        _cache_values,
    ),
    "heads": Claim(
        "GQA and MQA are as good as MHA, and faster",
        "nearly MHA's quality at MQA's speed",
        "loss above MHA's at equal parameters: GQA {GQA_above}, MQA {MQA_above} (seeds differ by up to {spread}); a "
        "step of training takes {GQA_step} and {MQA_step} of MHA's time, a generated token {GQA_decode} and "
        "{MQA_decode}",
        lambda results: f"{tables.study(results, 'heads')}\n\n{tables.steps(results, 'heads')}",
        _head_values,
    ),
    "placement": Claim(
        "Pre-norm trains without warm-up, post-norm does not",
        "post-norm needs warm-up, and fails in deep models",
        "held-out loss with and without warm-up, few layers: pre-norm {shallow_pre_warm_loss}, "
        "{shallow_pre_cold_loss}, post-norm {shallow_post_warm_loss}, {shallow_post_cold_loss}; 24 layers: pre-norm "
        "{deep_pre_warm_loss}, {deep_pre_cold_loss}, post-norm {deep_post_warm_loss}, {deep_post_cold_loss}; "
        "24 layers from Xavier's initial weights: pre-norm {xavier_pre_warm_loss}, {xavier_pre_cold_loss}, post-norm "
        "{xavier_post_warm_loss}, {xavier_post_cold_loss}",
        _studies("placement_shallow", "placement_deep", "placement_xavier"),
        _all_losses(
            ("placement_shallow", "shallow_", PLACED),
            ("placement_deep", "deep_", PLACED),
            ("placement_xavier", "xavier_", PLACED[:4]),
        ),
    ),
    "activations": Claim(
        "Gated activations are better at equal parameters",
        "SwiGLU, then the other gated units, then GELU, then ReLU",
        "loss above GELU's: ReLU {relu_above}, SiLU {silu_above}, GLU {glu_above}, ReGLU {reglu_above}, GEGLU "
        "{geglu_above}, SwiGLU {swiglu_above} (seeds differ by up to {spread})",
        lambda results: f"{tables.study(results, 'activations')}\n\n{tables.steps(results, 'activations')}",
        _all_losses(("activations", "", ACTIVATIONS)),
    ),
    "dropout": Claim(
        "Dropout of 0.1 makes a model generalize",
        "0.1 everywhere, as in GPT-2",
        "loss above that without dropout: {once_drop_above} in a single pass, {often_drop_above} in many passes over "
        "little text (seeds differ by up to {once_spread} and {often_spread})",
        _studies("dropout_once", "dropout_often"),
        _dropout_values,
    ),
    "init": Claim(
        "Initial weights matter",
        "N(0, 0.02) with GPT-2's scaling by depth; or Xavier",
        "loss above that of N(0, 0.02), few layers: Xavier {shallow_xavier_above}, depth-scaled "
        "{shallow_depth_scaled_above}; 24 layers: {deep_xavier_above}, {deep_depth_scaled_above} (seeds differ by up "
        "to {shallow_spread} and {deep_spread})",
        _studies("init_shallow", "init_deep"),
        _init_values,
    ),
    "sums": Claim(
        "How many parameters a model has",
        "2.08 M for a model of width 256; a third of a LLaMA is attention, two thirds feed-forward",
        "{small}; {attention} and {feed_forward}, and {embedding} embedding and head",
        lambda results: table(["claimed", "it comes to", "how it is counted"], sums.rows()),
        _parts_values,
    ),
}
