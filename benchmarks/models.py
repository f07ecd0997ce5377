"""Comparisons of whole models: a Llama-style model on the reference and on this package's kernels, each also compiled;
a Hugging Face model unpatched, patched, and patched by Liger. In generation, both have a cache. In serving, prompts of
many lengths run one after the other, or with continuous batching."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import foundry_kernels as fk
from benchmarks import isa, liger
from benchmarks.calls import unavailable
from benchmarks.measure import Prepare
from benchmarks.suite import DEVICE, SEARCH, needs_too_much
from benchmarks.tables import FROZEN
from foundry_kernels.core.registry import short_dtype
from foundry_kernels.models import Generator, ModelConfig, PagedKVCache, Transformer, generate

_OWN = ("reference", "reference, compiled", "reference, max-autotune", "ours", "ours, compiled")
_PATCHED = ("patched by ours", "patched by ours, compiled", "patched by Liger")
#: The rows of each family; the first one is the baseline.
FAMILIES = {
    "transformer": _OWN,
    "hugging-face": ("Hugging Face", "Hugging Face, compiled", *_PATCHED),
    "training": ("Hugging Face", _PATCHED[0], _PATCHED[2], "Hugging Face, compiled", _PATCHED[1]),
    "lora": ("PEFT", "patched by ours", "patched by Liger", FROZEN),
    "generation": (*_OWN, "Hugging Face, static cache", "Hugging Face, static cache, compiled"),
    "serving": ("one after the other", "continuous batching"),
}
#: Rows that take too long to compile for the quick set, except for training.
_FULL = (
    *("reference, max-autotune", "Hugging Face, compiled", "patched by ours, compiled"),
    "Hugging Face, static cache, compiled",
)
_TRAINING = ("forward", "forward+backward", "step")
TASKS = {
    "transformer": _TRAINING,
    "hugging-face": _TRAINING,
    "training": ("step",),
    "lora": ("step",),
    "generation": ("decode",),
    "serving": ("requests",),
}

#: By device and name; the first is for the quick set. "1b" has the shape of Llama-3.2-1B with a smaller vocabulary.
SIZES: dict[str, dict[str, ModelConfig]] = {
    "cpu": {
        "small": ModelConfig(512, 2, 8, 2, 4096, 1024, hidden_dim=1408, norm_eps=1e-5),
        "medium": ModelConfig(768, 6, 12, 4, 8192, 2048, hidden_dim=2048, norm_eps=1e-5),
    },
    "cuda": {
        "1b": ModelConfig(2048, 16, 32, 8, 32000, 8192, hidden_dim=8192, norm_eps=1e-5),
        "small": ModelConfig(512, 2, 8, 2, 4096, 1024, hidden_dim=1408, norm_eps=1e-5),
    },
}
#: Training on a GPU: the shape of Llama-3.2-1B, and the number of sequences. Each model is measured alone.
_STEPS = {"llama-1b": ModelConfig(2048, 16, 32, 8, 128256, 8192, hidden_dim=8192, norm_eps=1e-5)}
_SEQUENCES = 2
#: Generation: 3 and 100 million parameters.
_GENERATION = {
    "3m": ModelConfig(256, 4, 8, 4, 1024, 1024, hidden_dim=688, norm_eps=1e-5),
    "100m": ModelConfig(768, 12, 12, 4, 16384, 2048, hidden_dim=2048, norm_eps=1e-5),
}
#: A size for testing only that a model runs.
TINY = "tiny"
_TINY = ModelConfig(64, 1, 4, 2, 128, 256, hidden_dim=128, norm_eps=1e-5)
_TOKENS = {TINY: 96, "small": 512, "medium": 1024, "1b": 4096, "llama-1b": 4096, "3m": 64, "100m": 64}
_PROMPT, _NEW = 64, 32
#: Serving: lengths of the prompts, in order of arrival; each gets `_SERVED` new tokens.
REQUESTS = (8, 512, 39, 478, 72, 445, 106, 411, 140, 377, 174, 344, 208, 310, 241, 276)
_SERVED = 96
#: The largest relative difference of losses for equal models.
_SAME_LOSS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class ModelGroup:
    """Models of one shape and dtype for one task."""

    family: str
    size: str
    task: str
    dtype: torch.dtype
    compiled: bool = True
    full: bool = False

    @property
    def id(self) -> str:
        return f"model-{self.family}-{self.size}-{self.task}-{short_dtype(self.dtype)}"

    @property
    def names(self) -> tuple[str, ...]:
        left_out = () if self.full or self.alone else _FULL
        return tuple(n for n in FAMILIES[self.family] if n not in left_out and (self.compiled or "compiled" not in n))

    @property
    def config(self) -> ModelConfig:
        return _TINY if self.size == TINY else (SIZES[DEVICE] | _GENERATION | _STEPS)[self.size]

    @property
    def alone(self) -> bool:
        """Whether each model is created and measured alone, because with their optimisers they do not fit a GPU
        together."""
        return self.family == "training" or (self.family == "lora" and DEVICE != "cpu")

    @property
    def sequences(self) -> int:
        return _SEQUENCES if self.alone else 1

    @property
    def tokens(self) -> int:
        """Tokens that a run reads or, in decoding and serving, generates."""
        if self.task == "requests":
            return _SERVED * len(REQUESTS)
        return _NEW if self.task == "decode" else self.sequences * _TOKENS[self.size]

    @property
    def generates(self) -> bool:
        return self.task in ("decode", "requests")


def model_groups(full: bool) -> list[ModelGroup]:
    """The quick set has the first size in one dtype. In generation on a CPU it omits compiled rows, which take long to
    compile. Serving on a CPU only has the first size: with the second one, prompts one after the other take minutes."""
    dtypes = [torch.float32, torch.bfloat16] if full and DEVICE == "cpu" else []
    dtypes = dtypes or [torch.float32 if DEVICE == "cpu" else torch.bfloat16]
    groups = []
    for family, tasks in TASKS.items():
        if family == "training" and DEVICE == "cpu":  # a step takes minutes
            continue
        own = {"training": _STEPS, "generation": _GENERATION, "serving": _GENERATION}
        own |= {"lora": _STEPS} if DEVICE != "cpu" else {}
        sizes = list(own.get(family, SIZES[DEVICE]))
        compiled = full or DEVICE != "cpu" or family != "generation"
        all_sizes = full and (family != "serving" or DEVICE != "cpu")
        for size in sizes if all_sizes else sizes[:1]:
            groups += [ModelGroup(family, size, task, dtype, compiled, full) for dtype in dtypes for task in tasks]
    return groups


class ModelContenders:
    """Like `calls.Contenders`, for models. All start from the same weights, and a model with another loss than the
    first one is `wrong`."""

    def __init__(self, group: ModelGroup, names: tuple[str, ...] | None = None) -> None:
        self.group = group
        self.prepare: dict[str, Prepare] = {}
        self.why_not: dict[str, str] = {}
        self.wrong: dict[str, str] = {}
        #: Losses of the first step or before it; none for generation.
        self.losses: dict[str, float] = {}
        torch.compiler.reset()
        generator = torch.Generator().manual_seed(0)
        shape = (group.sequences, _TOKENS[group.size] + (0 if group.alone else 1))
        batch = torch.randint(0, group.config.vocab_size, shape, generator=generator).to(DEVICE)
        weights: dict[str, Tensor] | None = None
        expected: float | None = None
        tokens: Tensor | None = None  # generated by the first
        for name in group.names if names is None else names:
            problem = _too_large(group, name)
            if problem is not None:
                self.why_not[name] = problem
                continue
            try:
                torch.manual_seed(0)
                model = _make(group, name)
                if isinstance(model, str):
                    self.why_not[name] = model
                    continue
                plain = getattr(model, "_orig_mod", model)
                if (
                    weights is None and not group.alone and group.family != "lora"
                ):  # which has the seed's, by other names
                    weights = {k: v.clone() for k, v in plain.state_dict().items()}
                if weights is not None:
                    plain.load_state_dict(_for(plain, weights))
                prepare = _prepare(group, name, model, batch)
                # Without gradients, it would be compiled again.
                loss = None if group.generates or group.alone else _loss_without_gradient(model, batch)
                made: Any = prepare()()
                loss = float(made) if isinstance(made, Tensor) and group.alone else loss
            except Exception as error:
                self.why_not[name] = unavailable(error, ours=name == "ours")
                continue
            self.prepare[name] = prepare
            if group.generates and group.dtype == torch.float32:
                generated = torch.cat(list(made))  # from this package's `generate` or Hugging Face's
                tokens = generated if tokens is None else tokens
                if not torch.equal(generated, tokens):
                    self.wrong[name] = "its tokens are not those of the first"
            if loss is None:
                continue
            self.losses[name] = loss
            expected = loss if expected is None else expected
            if (problem := other_loss(group, loss, expected)) is not None:
                self.wrong[name] = problem


def other_loss(group: ModelGroup, loss: float, expected: float) -> str | None:
    """Returns how a loss differs from the first model's, `expected`, or None."""
    same = abs(loss - expected) <= _SAME_LOSS[group.dtype] * abs(expected)
    return None if same else f"its loss is {loss:.5f}, that of the first {expected:.5f}"


def _too_large(group: ModelGroup, name: str) -> str | None:
    """Returns why the model does not fit the remaining memory, or None. It needs memory for weights, gradients, the
    optimiser's moments, activations, the float32 logits, and the scores of attention that stores its matrix."""
    config, tokens = group.config, group.sequences * _TOKENS[group.size]
    trains = group.task in ("forward+backward", "step")
    layer = config.dim * (2 * config.dim + 2 * config.kv_heads * config.head_width + 3 * config.ffn_width)
    parameters = config.n_layers * layer + 2 * config.vocab_size * config.dim
    needed = (4 if trains else 1) * parameters * group.dtype.itemsize + 12 * tokens * config.vocab_size
    kept = config.n_layers if trains else 1
    needed += kept * tokens * (20 * config.dim + 4 * config.ffn_width) * group.dtype.itemsize
    if "reference" in name or DEVICE == "cpu":
        needed += kept * config.n_heads * tokens**2 // group.sequences * (4 + 2 * group.dtype.itemsize)
    return needs_too_much(needed)


def _make(group: ModelGroup, name: str) -> nn.Module | Any:
    """Returns the model, or the reason why there is none."""
    if isa.current.lacks_products(group.dtype.itemsize, True):
        return isa.no_products()
    if group.family in ("hugging-face", "training", "lora") or name.startswith("Hugging Face"):
        return _hugging_face(group, name)
    backend = "auto" if name.startswith("ours") or group.family == "serving" else "reference"
    model = Transformer(group.config, backend, device=DEVICE, dtype=group.dtype)
    return model if group.generates else _compile(model, name)


def _compile(model: nn.Module, name: str) -> Any:
    if "max-autotune" in name:
        return torch.compile(model, mode=SEARCH)
    return torch.compile(model) if "compiled" in name else model


def _hugging_face(group: ModelGroup, name: str) -> nn.Module | str:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        return f"transformers does not import ({error}); pip install transformers"
    if name == "patched by Liger" and (reason := liger.why_not(DEVICE)) is not None:
        return reason
    c = group.config
    config = transformers.LlamaConfig(
        hidden_size=c.dim,
        num_hidden_layers=c.n_layers,
        num_attention_heads=c.n_heads,
        num_key_value_heads=c.kv_heads,
        intermediate_size=c.ffn_width,
        vocab_size=c.vocab_size,
        max_position_embeddings=c.max_seq_len,
        use_cache=group.family == "generation",
        attn_implementation="sdpa",
        tie_word_embeddings=group.alone,
        rms_norm_eps=c.norm_eps,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device(DEVICE):
        model: nn.Module = transformers.LlamaForCausalLM(config).to(dtype=group.dtype)
    if name == FROZEN:
        frozen: Any = model.requires_grad_(False)
        frozen.get_input_embeddings().register_forward_hook(lambda *call: call[-1].requires_grad_())
    elif group.family == "lora":
        try:
            peft = importlib.import_module("peft")
        except ImportError as error:
            return f"peft does not import ({error}); pip install peft"
        model = peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    if name.startswith("patched by ours"):
        fk.patch(model)
    elif name == "patched by Liger":
        _patch_by_liger(model)
    return model if group.generates else _compile(model, name)


#: This package's (Meta's) names of weights, and those of Hugging Face's Llama. With `rope_interleaved` False, their
#: values are the same.
_NAMES = (
    "tok_embeddings:model.embed_tokens output:lm_head layers:model.layers norm:model.norm attention:self_attn "
    "attention_norm:input_layernorm ffn_norm:post_attention_layernorm wq:q_proj wk:k_proj wv:v_proj wo:o_proj "
    "feed_forward:mlp w1:gate_proj w2:down_proj w3:up_proj"
)
_HUGGING_FACE = dict(pair.split(":") for pair in _NAMES.split())


def _for(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the first model's weights under this model's names."""
    if weights.keys() == model.state_dict().keys():
        return weights
    return {".".join(_HUGGING_FACE.get(part, part) for part in name.split(".")): w for name, w in weights.items()}


def _patch_by_liger(model: nn.Module) -> None:
    """Liger also replaces functions of the module of the model's class, for all models of the process. Here they are
    replaced only while this model runs."""
    home = vars(importlib.import_module(type(model).__module__))
    before = dict(home)
    importlib.import_module("liger_kernel.transformers")._apply_liger_kernel_to_instance(model=model)
    exchanged = {k: v for k, v in home.items() if before.get(k) is not v}
    home.update({k: before[k] for k in exchanged if k in before})
    inner = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        home.update(exchanged)
        try:
            return inner(*args, **kwargs)
        finally:
            home.update({k: before[k] for k in exchanged if k in before})

    model.forward = forward


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Returns the loss of the next token; transformers' models shift the labels."""
    plain = getattr(model, "_orig_mod", model)
    if isinstance(plain, Transformer):
        return model(batch[:, :-1], batch[:, 1:])[1]
    return model(input_ids=batch, labels=batch).loss


@torch.no_grad()
def _loss_without_gradient(model: nn.Module, batch: Tensor) -> float:
    return float(_loss(model, batch))


def _serve(group: ModelGroup, name: str, model: Transformer) -> Prepare:
    """All requests exist at the beginning. A pass over a batch reads up to 512 prompt tokens."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, group.config.vocab_size, (n,), generator=generator) for n in REQUESTS]
    page = 16
    cache = PagedKVCache(
        group.config, sum(-(-(n + _SERVED) // page) for n in REQUESTS), page, device=DEVICE, dtype=group.dtype
    )

    def together() -> list[Tensor]:
        serving = Generator(model, cache=cache, max_batch=len(prompts), chunk_size=512)
        numbers = [serving.add(prompt, _SERVED) for prompt in prompts]
        found = serving.run()
        return [found[number] for number in numbers]

    def alone() -> list[Tensor]:
        return [generate(model, [prompt], _SERVED)[0] for prompt in prompts]

    return lambda: together if name == "continuous batching" else alone


def _prepare(group: ModelGroup, name: str, model: Any, batch: Tensor) -> Prepare:
    if group.task == "requests":
        return _serve(group, name, model)
    if group.task == "decode":
        prompt = batch[:, :_PROMPT]
        if not isinstance(model, Transformer):
            options: dict[str, Any] = {"do_sample": False, "cache_implementation": "static"}
            options["attention_mask"] = torch.ones_like(prompt)
            if "compiled" in name:  # as transformers does on a GPU
                options["compile_config"] = importlib.import_module("transformers").CompileConfig(mode="default")
                options["compile_config"]._compile_all_devices = True
            return lambda: lambda: model.generate(prompt, max_new_tokens=_NEW, **options)
        how: Any = {"mode": SEARCH} if "max-autotune" in name else "compiled" in name
        return lambda: lambda: generate(model, prompt, _NEW, compile=how)
    if group.task == "forward":
        return lambda: torch.no_grad()(lambda: _loss(model, batch))

    def both() -> Tensor:
        loss = _loss(model, batch)
        loss.backward()
        return loss.detach()

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True) if group.task == "step" and trained else None

    def run() -> Tensor:
        loss = both()
        if optimizer is not None:
            optimizer.step()
        return loss

    def prepare() -> Callable[[], object]:
        model.zero_grad(set_to_none=True)
        return run

    return prepare
