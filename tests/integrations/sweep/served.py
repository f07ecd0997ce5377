"""How much of transformers' generative classes `patch` serves.

`python tests/integrations/sweep/served.py` prints it, with what is left and why; `--write` puts it into the page.

A tiny model of each class is patched. Counted are modules by what their class's name says, whether this package knows
the class or not:

- norms: "Norm" in its name, no modules within; torch's own too, but not BatchNorm, GroupNorm and InstanceNorm;
- MLPs and experts: a name that ends in one of `PRODUCTS`, with layers or weights of its own, none of which is another
  one; not those whose activation no kernel has (of them the report says so);
- attention: "Attention" in its name, with layers of its own, none of which is another attention; served if its
  attention function is replaced, or its rule of linear attention;
- rotations: attention whose forward names a rotary function; served if it rotates by this package's operation;
- loss: the class itself; served if its loss is one of this package's.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from models import generative, tiny
from torch import nn

import foundry_kernels as fk
from foundry_kernels.integrations.adapters.base import names_of

KINDS = ("norms", "MLPs and experts", "attention", "rotations", "loss")
PRODUCTS = re.compile(r"(MLP|Mlp|FeedForward|FFN|Ffn|Experts|Intermediate|ActDense)$")
OTHER_NORMS = re.compile(r"Batch|Group|Instance|Weight|ParametrizedNorm")
NO_KERNEL = re.compile("which no (gated )?kernel has")
LOSSES = {"linear_cross_entropy", "cross_entropy"}
ATTENTION = {"flash_attention", "gated_delta_rule"}
ROTATIONS = {"rope", "qk_norm_rope"}

#: The families that are named, by the beginning of their classes' names.
NAMED = (
    "Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Gemma4", "Gemma3n", "DeepseekV2", "DeepseekV3", "Llama4",
    "Glm4Moe", "Glm4v", "Glm4vMoe", "Ministral", "Ministral3", "Mistral3", "Mllama", "Granite", "GraniteMoeHybrid",
    "FalconH1", "Lfm2", "Nemotron", "Exaone4", "HunYuanDenseV1", "HunYuanMoEV1", "Ernie4_5", "Ernie4_5_Moe", "Olmoe",
    "Cohere", "Cohere2", "KimiLinear",
)  # fmt: skip


@dataclass
class Coverage:
    """Of one class: of each kind the modules that are served, and all; the classes of those that are not."""

    served: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    left: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def count(self, kind: str, cls: str, served: bool, reason: str) -> None:
        self.found[kind] += 1
        self.served[kind] += served
        if not served:
            self.left[kind, cls, reason] += 1

    def text(self, kind: str) -> str:
        return f"{self.served[kind]}/{self.found[kind]}" if self.found[kind] else "-"


def kinds_of(module: nn.Module) -> list[str]:
    """The kinds that a module is of, before it is patched."""
    name, children = type(module).__name__, [*module.children()]
    if "Norm" in name and not children and not OTHER_NORMS.search(name):
        return ["norms"]
    inner = any(PRODUCTS.search(type(c).__name__) for c in module.modules() if c is not module)
    if PRODUCTS.search(name) and not inner and (children or [*module.parameters(recurse=False)]):
        return ["MLPs and experts"]
    if "Attention" in name and children and not any("Attention" in type(c).__name__ for c in children):
        return ["attention", "rotations"] if rotates(module) else ["attention"]
    return []


def rotates(attention: nn.Module) -> bool:
    code = inspect.unwrap(type(attention).forward).__code__
    return any("rotary" in name or re.match("apply_.*rope", name) for name in names_of(code))


def coverage_of(model: Any) -> Coverage:
    kinds = {name: (type(module).__name__, kinds_of(module)) for name, module in model.named_modules()}
    result = Coverage()
    with fk.patch(model) as handle:
        report = handle.report()
    ops = {entry.name: set(entry.ops) for entry in report.replaced}
    reasons = {entry.name: entry.reason or "" for entry in (*report.replaced, *report.left)}
    for name, (cls, found) in kinds.items():
        mine, reason = ops.get(name, set()), reasons.get(name, "not in the report")
        for kind in found:
            if kind == "MLPs and experts" and NO_KERNEL.search(reason):
                continue
            wanted = {"attention": ATTENTION, "rotations": ROTATIONS}.get(kind)
            result.count(kind, cls, bool(mine & wanted if wanted else mine), reason)
    result.count("loss", type(model).__name__, bool(ops.get("", set()) & LOSSES), reasons.get("", "not in the report"))
    return result


def all_of_them(names: list[str] | None = None) -> dict[str, Coverage]:
    return {name: coverage_of(tiny(name)) for name in names or generative()}


def table(found: dict[str, Coverage]) -> str:
    """Two tables in Markdown: all classes by kind, and those of the families that are named."""
    lines = ["| | served | of | share | some | all | of |", "| --- |" + " ---: |" * 6]
    for kind in KINDS:
        mine = [c for c in found.values() if c.found[kind]]
        served, total = sum(c.served[kind] for c in mine), sum(c.found[kind] for c in mine)
        some = sum(c.served[kind] > 0 for c in mine)
        whole = sum(c.served[kind] == c.found[kind] for c in mine)
        lines.append(f"| {kind} | {served} | {total} | {100 * served / total:.0f} % | {some} | {whole} | {len(mine)} |")
    lines += ["", "| class | " + " | ".join(KINDS) + " |", "| --- |" + " --- |" * len(KINDS)]
    ends = ("ForCausalLM", "ForConditionalGeneration")
    for name, c in found.items():
        if name.endswith(ends) and name.removesuffix(ends[0]).removesuffix(ends[1]) in NAMED:
            lines.append(f"| {name} | " + " | ".join(c.text(kind) for kind in KINDS) + " |")
    return "\n".join(lines)


BEGIN, END = "<!-- coverage -->", "<!-- end of coverage -->"
PAGE = Path(__file__).parents[3] / "benchmarks" / "results" / "served.md"


def section(found: dict[str, Coverage]) -> str:
    """What is between the marks of the page."""
    return f"\nOf the {len(found)} generative classes of transformers {transformers.__version__}:\n\n{table(found)}\n"


def main() -> None:
    found = all_of_them()
    if "--write" in sys.argv:
        before, _, after = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + section(found) + END + after.partition(END)[2])
        return
    print(section(found))
    left = sum((c.left for c in found.values()), Counter())
    for kind in KINDS:
        print(f"\n{kind}, left")
        for (of, cls, reason), n in left.most_common():
            if of == kind:
                print(f"  {n:>4} {cls}: {reason}")


if __name__ == "__main__":
    main()
