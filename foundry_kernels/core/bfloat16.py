"""Chooses how products of bfloat16 are made on this processor: by the instructions that it has for them, or of numbers
that are widened to float32 (`csrc/cpu/processor.h`).

What an instruction is called does not say whether it is fast: `vdpbf16ps` has twice the rate of float32 on one vendor's
processors and half of it on the other's. So the choice follows from the processor where its speed is known, and else
from a measurement. The bits of results depend on it: a measurement is made once, and its outcome is kept in the user's
cache. Where that cannot be written, nothing is measured and the instructions are used.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundry_kernels.core.cache_folder import cache_folder

#: Forces the choice: `WIDENED`, or the name of an instruction set of `INSTRUCTIONS`.
VARIABLE = "FOUNDRY_KERNELS_BFLOAT16"
WIDENED = "widened"

#: Sets with instructions for products of bfloat16, the best last, and whether it is by those of matrices.
INSTRUCTIONS = {"neon_bf16": False, "avx512_bf16": False, "amx_bf16": True}

AMD, INTEL = "AuthenticAMD", "GenuineIntel"
#: Of AMD's families: Zen 4 and 5.
FAST_FAMILIES = (0x19, 0x1A)
#: Of Intel's family 6 the models whose `vdpbf16ps` takes longer than the products in float32 in its place: measured on
#: 0xCF, and taken to be so on the others.
SLOW_MODELS = {0x8F: "Sapphire Rapids", 0xCF: "Emerald Rapids", 0xAD: "Granite Rapids", 0xAE: "Granite Rapids D"}
#: The first with the instruction, by model and steppings. It is taken to be fast there; none was measured.
COOPER_LAKE = (0x55, (10, 11))

#: A measurement says that instructions are slow where they take so many times as long.
MARGIN = 1.15
FORMAT = "foundry_kernels bfloat16, 1"

Seconds = Mapping[str, float]


@dataclass(frozen=True)
class Processor:
    """What CPUID says, and the best of our instruction sets that the processor has."""

    vendor: str
    family: int
    model: int
    stepping: int
    instruction_set: str

    def __str__(self) -> str:
        if not self.vendor:
            return self.instruction_set
        return f"{self.vendor} family {self.family} model {self.model} stepping {self.stepping}"


@dataclass(frozen=True)
class Choice:
    """By which instructions products are made; False where numbers are widened. And the reason, in words."""

    tiles: bool  # attention's by matrix instructions
    pairs: bool  # attention's and those of decoding, by dot products of pairs
    products: bool  # linear layers, grouped products, losses: oneDNN's
    why: str

    def __str__(self) -> str:
        attention = "by matrix instructions" if self.tiles else "by dot products" if self.pairs else WIDENED
        return f"attention {attention}, products {'by oneDNN' if self.products else WIDENED}: {self.why}"


def choose(
    processor: Processor, usable: tuple[str, ...], environment: Mapping[str, str], measure: Callable[[], Seconds]
) -> Choice:
    """Returns the choice for a processor. `usable` are the instruction sets that it has and that are compiled in.

    Raises:
        ValueError: `VARIABLE` names nothing that there is, or what the processor or the build lacks.
    """
    if asked := environment.get(VARIABLE, ""):
        return forced(asked, processor, usable)
    if processor.instruction_set not in INSTRUCTIONS:
        return Choice(False, False, False, f"{processor.instruction_set} has no instructions for products of it")
    fast = pairs_are_fast(processor)
    if INSTRUCTIONS[processor.instruction_set]:  # what those of matrices leave to pairs is little, and not measured
        return Choice(True, fast is not False, True, f"{processor} multiplies matrices")
    if fast is None:
        return measured(processor, measure)
    speed = "is fast" if fast else "is slower than its products of float32"
    return Choice(False, fast, fast, f"that of {processor} {speed}")


def forced(asked: str, processor: Processor, usable: tuple[str, ...]) -> Choice:
    """Returns the choice that `VARIABLE` asks for."""
    why = f"{VARIABLE}={asked}"
    if asked == WIDENED:
        return Choice(False, False, False, why)
    if asked not in INSTRUCTIONS:
        raise ValueError(f"{VARIABLE} must be {WIDENED} or one of {', '.join(INSTRUCTIONS)}; got {asked!r}")
    if asked not in usable:
        has = f"this processor ({processor}) has {processor.instruction_set}, and usable are {', '.join(usable)}"
        raise ValueError(f"{why} asks for instructions that there are not: {has}")
    return Choice(INSTRUCTIONS[asked], True, True, why)


def pairs_are_fast(processor: Processor) -> bool | None:
    """Returns whether dot products of pairs are faster than float32's; None where that is not known."""
    if processor.instruction_set == "neon_bf16":
        return True
    if processor.vendor == AMD:
        return True if processor.family in FAST_FAMILIES else None
    if processor.vendor == INTEL and processor.family == 6:
        model, steppings = COOPER_LAKE
        if processor.model == model and processor.stepping in steppings:
            return True
        return False if processor.model in SLOW_MODELS else None
    return None


def measured(processor: Processor, measure: Callable[[], Seconds]) -> Choice:
    """Returns what was measured on such a processor by this user, now if never before."""
    unknown = f"{processor} is not known"
    try:
        path = cache_folder() / f"bfloat16-{processor.vendor}-{_key(processor)}.json"
        with suppress(FileNotFoundError):
            return read(path)
        keep(path, lambda: {"format": FORMAT, "processor": str(processor), **_outcome(measure())})
        return read(path)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        return Choice(False, True, True, f"{unknown}, and no measurement can be kept ({error})")


def _key(processor: Processor) -> str:
    return f"{processor.family}-{processor.model}-{processor.stepping}-{processor.instruction_set}"


def _outcome(seconds: Seconds) -> dict[str, Any]:
    """Whether each kind of instructions is fast; one that is absent is not slow."""
    fast = {name: seconds[name] < MARGIN * seconds["float32"] for name in ("pairs", "products")}
    return {**fast, "seconds": dict(seconds)}


def read(path: Path) -> Choice:
    """Returns the choice that a file keeps.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, or of another version.
    """
    found: Any = json.loads(path.read_bytes())
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path} is no file of this package's")
    pairs, products = found.get("pairs"), found.get("products")
    if not isinstance(pairs, bool) or not isinstance(products, bool):
        raise ValueError(f"{path} is damaged")
    return Choice(False, pairs, products, f"measured, see {path}")


def keep(path: Path, measure: Callable[[], Mapping[str, Any]]) -> None:
    """Writes what is measured to a file unless there is one: of processes that measure at a time, the first one's
    outcome is that of all.

    Raises:
        OSError: it cannot be written; nothing was measured then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, new = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(measure(), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(new, path)  # whole or not at all, and never over another
    finally:
        os.unlink(new)
