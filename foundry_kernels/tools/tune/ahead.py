"""`python -m foundry_kernels tune --arch 90`: compiles the launch configs that `tune` would measure, for a GPU that is
not present."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

from foundry_kernels._triton import tuning
from foundry_kernels._triton.tuning import Choice
from foundry_kernels._triton.tuning_file import LaunchConfig, describe
from foundry_kernels.core.registry import OpSpec
from foundry_kernels.tools.inspect import aot


def print_configs(ops: Iterable[OpSpec], arch: int, refuse: Callable[[str], NoReturn]) -> int:
    """Prints the cost of each launch config, or why it does not fit. Returns 1 if a built-in config does not fit."""
    if arch not in aot.GPUS:
        refuse(f"--arch must be one of {', '.join(map(str, aot.GPUS))}; got {arch}")
    if (reason := aot.why_not()) is not None:
        refuse(reason)
    bad = fit = dropped = 0
    known: set[tuple[str, str]] = set()
    for op in ops:
        with tuning.watched() as seen:
            _launches(op, arch)
        for choice in seen.values():
            if len(choice.configs) < 2 or (choice.kernel, choice.key) in known:
                continue
            known.add((choice.kernel, choice.key))
            print(f"{choice.kernel}, {choice.key}")
            for i, (config, launches) in enumerate(launches_by_config(op, choice, arch)):
                problems, cost = compiled(launches, arch)
                fit, dropped = fit + (not problems), dropped + bool(problems)
                bad += bool(problems) and i == 0
                verdict = f"dropped: {'; '.join(problems)}" if problems else cost
                print(f"  {'built in' if i == 0 else '        '}  {describe(config)}: {verdict}", flush=True)
    print(f"\ncompute capability {arch / 10}: {fit} configs fit, {dropped} do not; only a GPU can rank them")
    return 1 if bad else 0


def _launches(op: OpSpec, arch: int) -> list[aot.Launch]:
    return aot.record(op, arch, everything=False, timed_alone=True)


def launches_by_config(op: OpSpec, choice: Choice, arch: int) -> Iterator[tuple[LaunchConfig, list[aot.Launch]]]:
    """Yields each config with the launches that only happen if this config is forced. They are compared with those of
    the first config, and the first config's with those of the second."""

    def launches(config: LaunchConfig) -> list[aot.Launch]:
        with tuning.forced(choice.kernel, choice.key, config):
            return _launches(op, arch)

    first = launches(choice.configs[0])
    for i, config in enumerate(choice.configs):
        here, there = (launches(config), first) if i else (first, launches(choice.configs[1]))
        yield (
            config,
            [launch for launch in here if tuning.asked_as(launch.name) == choice.kernel and launch not in there],
        )


def compiled(launches: list[aot.Launch], arch: int) -> tuple[list[str], str]:
    """The problems of launches on such a GPU, and their cost."""
    problems: dict[str, None] = {}
    shown: dict[str, None] = {}
    gpu = aot.GPUS[arch]
    for launch in launches:
        try:
            cost = aot.compile_for(launch, arch)
        except Exception as error:  # the compiler fails on some tiles
            problems[f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"] = None
            continue
        problems.update(dict.fromkeys(cost.problems(gpu)))
        shown[f"{cost.registers} registers, {cost.shared} B shared, {cost.occupancy(gpu):.0%} occupancy"] = None
    return list(problems), " | ".join(shown) or "the same as another config"
