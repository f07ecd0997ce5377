"""Speed of the variants, measured in turns, and their memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Prepare, interleaved, median_ratio, release
from examples.studies.ablation.machine import machine
from examples.studies.ablation.memory import peak_bytes
from examples.studies.ablation.settings import DTYPES, Settings, load, save
from examples.training.optimizer import make_optimizer
from foundry_kernels.models import KVCache, ModelConfig, Transformer

#: By name: a function that prepares a run, and the number of units in the run.
Contenders = Mapping[str, tuple[Prepare, int]]

SECONDS = 60.0  # for the steps of all variants; generation has a third of it
NEW_TOKENS = 32  # generated in a timed run


def measure(folder: Path, settings: Settings, configs: dict[str, ModelConfig]) -> None:
    """Measures the parts (a step, generated tokens, memory) that are missing in `speed.json`."""
    path = folder / "speed.json"
    kept: dict[str, Any] = load(path) or {}
    kept = begin(kept, {"settings": asdict(settings), "machine": machine(settings.device)})
    parts = {"step": (steps, SECONDS), "token": (tokens, SECONDS / 3.0)}
    for part, (prepare_all, limit) in parts.items():
        if not kept.get(part, {}).keys() >= configs.keys():  # a new variant needs all others in turn
            kept[part] = timed(prepare_all(settings, configs), limit)
            save(path, kept)
            release()
        print(f"{part}: " + ", ".join(f"{n} {r['ms']:.2f} ms" for n, r in kept[part].items()), flush=True)
    memory = kept.setdefault("memory", {})
    for name, config in configs.items():
        if name not in memory:
            cache = Transformer(config).make_cache(1)
            peak = peak_bytes(OneStep(config, settings), whole=True, device=settings.device)
            memory[name] = {"peak_bytes": peak, "cache_bytes_a_token": allocated(cache) // cache.max_len}
            save(path, kept)
    print("memory: " + ", ".join(f"{n} {r['peak_bytes'] / 2**20:.0f} MiB" for n, r in memory.items()), flush=True)


def allocated(cache: KVCache) -> int:
    """Bytes of the tensors of keys and values."""
    return sum(t.numel() * t.element_size() for t in (*cache.k, *cache.v))


def begin(kept: dict[str, Any], context: dict[str, Any]) -> dict[str, Any]:
    """Earlier measurements, if their `context` differs only in the date."""
    same = all(_dateless(kept.get(key)) == _dateless(value) for key, value in context.items())
    if kept and not same:
        print("measured before with other settings or another machine; measured again", flush=True)
    return (kept if same else {}) | context


def _dateless(context: Any) -> Any:
    return {k: v for k, v in context.items() if k != "date"} if isinstance(context, dict) else context


def timed(contenders: Contenders, seconds: float, rounds: int = 15) -> dict[str, Any]:
    """Returns for each contender the median milliseconds per unit, and the median over rounds of the ratio to the first
    one's time."""
    times = interleaved({name: prepare for name, (prepare, _) in contenders.items()}, seconds, rounds)
    base = times[next(iter(times))]
    return {
        name: {"ms": 1e3 * statistics.median(taken) / contenders[name][1], "ratio": median_ratio(taken, base),
               "rounds": len(taken)}
        for name, taken in times.items()
    }  # fmt: skip


def steps(settings: Settings, configs: dict[str, ModelConfig]) -> Contenders:
    return {name: (ready(OneStep(config, settings)()), 1) for name, config in configs.items()}


def ready(run: Callable[[], object]) -> Prepare:
    """Prepares nothing."""
    return lambda: run


def tokens(settings: Settings, configs: dict[str, ModelConfig]) -> Contenders:
    """One token at a time after half a context, in float32."""
    prompt = _tokens(1, settings.seq_len // 2, settings.device)
    new = max(1, min(NEW_TOKENS, settings.seq_len // 2))
    return {
        name: (Decoding(Transformer(config).to(settings.device), prompt, new), new) for name, config in configs.items()
    }


@dataclass(frozen=True)
class OneStep:
    """A training step of a model with its optimizer."""

    config: ModelConfig
    settings: Settings

    def __call__(self) -> Callable[[], object]:
        device = self.settings.device
        model, dtype = Transformer(self.config).to(device), DTYPES[self.settings.dtype]
        optimizer = make_optimizer(model, self.settings.lr)
        batch = _tokens(self.settings.batch, self.settings.seq_len, device)

        def step() -> None:
            with torch.autocast(device, dtype, enabled=dtype != torch.float32):
                loss = model(batch, batch)[1]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step


class Decoding:
    """Decodes `new` tokens, one by one, after a prompt in the cache."""

    def __init__(self, model: Transformer, prompt: torch.Tensor, new: int) -> None:
        self.model, self.length, self.new = model.eval(), prompt.shape[1], new
        self.cache = model.make_cache(1, self.length + new)
        with torch.no_grad():
            model(prompt, cache=self.cache, last_only=True)
        self.token = prompt[:, :1]

    def __call__(self) -> Callable[[], object]:
        self.cache.length = self.length
        return self.run

    @torch.no_grad()
    def run(self) -> None:
        for _ in range(self.new):
            self.model(self.token, cache=self.cache, last_only=True)


def _tokens(rows: int, length: int, device: str) -> torch.Tensor:
    return torch.randint(256, (rows, length), generator=torch.Generator().manual_seed(0)).to(device)
