"""All scenarios of two processes by name, and additional ones of four."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

from processes import context, example, experts, operators, patched, states, training
from processes.example import Resume
from processes.training import Train

TRAINING: dict[str, Callable[..., Any]] = {
    "ddp": Train("ddp"),
    "fsdp": Train("fsdp"),
    "tp": Train("tp"),
    "ddp, accumulated": Train("ddp", parts=2),
    "fsdp, accumulated": Train("fsdp", parts=2),
    "loss parallel": training.loss_parallel,
    "tp, log_probs": Train("tp", loss_of=training.loss_of_log_probs),
}
MORE_TRAINING: dict[str, Callable[..., Any]] = {
    "tp, accumulated": Train("tp", parts=2),
    "ddp, log_probs": Train("ddp", loss_of=training.loss_of_log_probs),
    "fsdp, log_probs": Train("fsdp", loss_of=training.loss_of_log_probs),
}
PATCHED = {"patched, tp": patched.Sharded("tp")}
MORE_PATCHED = {f"patched, {kind}": patched.Sharded(kind) for kind in ("ddp", "fsdp")}
RESUMING = {"fsdp 2 to 1": Resume(("fsdp", 2), ("fsdp", 1))}
MORE_RESUMING = {
    "ddp 1 to tp 2": Resume(("ddp", 1), ("tp", 2)),
    "cp 2 to ddp 1": Resume(("cp", 2), ("ddp", 1)),
}
OTHERS = {
    "rules": operators.rules,
    "mixtures": operators.mixtures,
    "norm": operators.norm_collectives,
    "attention": operators.attention,
    "loss": operators.losses,
    "vocabulary": operators.vocabulary,
    "step": training.step_collectives,
    "low precision": training.low_precision,
    "choices": training.choices,
    "refusals": example.refusals,
    "norms of heads": training.norms_of_heads,
    "mixtures of experts": experts.mixtures,
    "experts": experts.trained,
}
#: Those of slow tests. Three compile for long, of which the last follows losses on a mesh that is equal to its own.
SLOW = {
    "compiled": operators.compiled,  # first: nothing of the package has been imported then
    **MORE_TRAINING,
    **(MORE_PATCHED if importlib.util.find_spec("transformers") is not None else {}),
    **MORE_RESUMING,
    "more rules": functools.partial(operators.rules, most=6),
    "vocabulary": operators.vocabulary,
    "compiled vocabulary": operators.compiled_vocabulary,
}
CONTEXT: dict[str, Callable[..., Any]] = {
    "ring": context.ring,
    "traffic": context.traffic,
    "dropout": context.dropout,
    "context, ddp": context.Train("ddp"),
    "context, fsdp": context.Train("fsdp"),
    "context, choices": context.choices,
    "context, ddp, hybrid": context.Train("ddp", hybrid=True),
    "context, fsdp, hybrid": context.Train("fsdp", hybrid=True),
    "context, states": context.state_traffic,
    "context, collectives": context.collectives,
    "linear attention": states.linear_attention,
}
OF_FOUR = {
    **{
        name: CONTEXT[name]
        for name in ("ring", "traffic", "dropout", "context, fsdp", "context, choices", "linear attention")
    },
    "context, compiled": context.Train("compiled"),
    "context, fsdp, hybrid": context.Train("fsdp", hybrid=True),
    "context, compiled, hybrid": context.Train("compiled", hybrid=True),
    "context, dp": context.with_data_parallelism,
    "context, tp": context.with_tensor_parallelism,
    **{name: OTHERS[name] for name in ("norms of heads", "mixtures of experts", "experts")},
    "cp 4 to ddp 1": Resume(("cp", 4), ("ddp", 1)),
    "fsdp 1 to cp 4": Resume(("fsdp", 1), ("cp", 4)),
}


def of_two() -> dict[str, Callable[..., Any]]:
    found = TRAINING | RESUMING | CONTEXT | OTHERS
    if importlib.util.find_spec("transformers") is not None:
        found |= PATCHED | {"patched vocabulary": patched.vocabulary, "log_probs": patched.log_probs}
        if importlib.util.find_spec("transformers.distributed.tensor_parallel") is not None:
            found |= {"own plan": patched.own_plan}
    return found
