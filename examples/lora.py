"""Fine-tune a Llama on a text with LoRA, or with QLoRA, with PEFT alone and with these kernels under it.

    python examples/lora.py
    python examples/lora.py --text notes.txt --bits 4 --rank 32
    python examples/lora.py --model meta-llama/Llama-3.2-1B --text notes.txt --out runs/adapter

It prints the losses of both, tokens a second, the peak of a GPU's memory, and what a step saves for its backward pass,
by part of the model. The adapter in `--out` is PEFT's own: `PeftModel.from_pretrained(model, "runs/adapter")`. Without
`--model` it makes a small model, whose tokens are bytes. It needs `peft`, and `bitsandbytes` for `--bits`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import foundry_kernels as fk


def make_model(options: argparse.Namespace, device: str) -> Any:
    """The frozen model, quantised if asked, with adapters on all of its linear layers."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    torch.manual_seed(0)
    folder = options.model
    if folder is None:
        folder = options.out / "base"
        small = LlamaConfig(
            vocab_size=256, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, pad_token_id=0,
        )  # fmt: skip
        made: Any = LlamaForCausalLM(small)
        made.to(torch.bfloat16).save_pretrained(folder)
    quantised = None
    if options.bits == 4:
        quantised = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
    elif options.bits == 8:
        quantised = BitsAndBytesConfig(load_in_8bit=True)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=quantised, device_map=device
    )
    if quantised is not None:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    torch.manual_seed(0)
    adapters = LoraConfig(
        r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return get_peft_model(model, adapters).train()


@contextmanager
def saved_by_part(model: nn.Module, found: dict[str, int]) -> Iterator[None]:
    """Counts the bytes that autograd saves in this block, by the part of the model that is running, without weights."""
    seen = {p.untyped_storage().data_ptr() for p in model.parameters()}
    running = ["loss"]

    def part(module: nn.Module) -> str:
        name = type(module).__name__
        return next((p for p in ("Attention", "MLP", "Norm") if name.endswith(p)), running[-1])

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            kept.append(x)  # so that no other tensor gets this memory
            found[running[-1]] = found.get(running[-1], 0) + storage.nbytes()
        return x

    def enter(module: nn.Module, _: Any) -> None:
        running.append(part(module))

    def leave(*_: Any) -> None:
        running.pop()

    kept: list[Tensor] = []
    handles = [
        hooks.register_module_forward_pre_hook(enter),
        hooks.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            yield
    finally:
        for handle in handles:
            handle.remove()


def train(model: Any, batches: Tensor, device: str) -> tuple[list[float], float, float, dict[str, int]]:
    """The losses, tokens a second, the peak of the GPU's memory in MiB, and the bytes that a step saves, by part."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    parts: dict[str, int] = {}
    with saved_by_part(model, parts):
        model(batches[0], labels=batches[0])
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, start = [], time.perf_counter()
    for i, batch in enumerate(batches):
        loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if i == 0:  # which compiles and allocates
            start = time.perf_counter()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else 0.0
    return losses, (len(batches) - 1) * batches[0].numel() / max(seconds, 1e-9), peak, parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint's name or folder")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="a file to train on")
    parser.add_argument("--bits", type=int, choices=(4, 8), help="quantise the model by bitsandbytes (QLoRA)")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=4, help="of a batch")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--out", type=Path, default=Path("runs/lora"), help="the folder of the adapter")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.model is None:
        tokens = torch.tensor(list(options.text.read_bytes()))
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        tokens = torch.tensor(tokenizer(options.text.read_text())["input_ids"])
    torch.manual_seed(0)
    starts = torch.randint(max(len(tokens) - options.length, 1), (options.steps, options.rows))
    batches = torch.stack([torch.stack([tokens[s : s + options.length] for s in row]) for row in starts]).to(device)

    results = {}
    for name in ("PEFT", "patched"):
        model = make_model(options, device)
        if name == "patched":
            print(fk.patch(model).report())
        results[name] = train(model, batches, device)
    model.save_pretrained(options.out)

    print(f"\n{'step':>4}" + "".join(f"  {name:>9}" for name in results))
    for i in range(0, options.steps, max(options.steps // 5, 1)):
        print(f"{i:>4}" + "".join(f"  {losses[i]:9.4f}" for losses, *_ in results.values()))
    for i, title in ((1, "tokens/s"), *(((2, "peak MiB"),) if device == "cuda" else ())):
        print(f"{title:<10}" + "".join(f"{found[i]:>10.0f} {name}" for name, found in results.items()))
    print("\nsaved for the backward pass of a step, MiB")
    largest = max(size for *_, parts in results.values() for size in parts.values())
    for part in sorted({part for *_, parts in results.values() for part in parts}):
        for name, (*_, parts) in results.items():
            size = parts.get(part, 0)
            print(f"  {part:<9} {name:<7} {size / 2**20:8.2f} {'#' * round(40 * size / largest)}")
    print("adapter:", options.out)


if __name__ == "__main__":
    main()
