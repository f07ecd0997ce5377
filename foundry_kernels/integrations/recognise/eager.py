"""The eager attention of a family that has no SDPA: whether it computes what `flash_attention` does.

It is run on small random tensors in float64 and compared with the formula. Its code may do nothing that no argument
tells, and the attention that calls it must not read the weights, which kernels do not have.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
import textwrap
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.integrations.adapters.base import names_of, split_names

#: What its code may use.
WORDS = split_names(
    "torch nn functional F matmul transpose size softmax dropout contiguous training float32 to dtype repeat_kv shape "
    "num_key_value_groups head_dim tanh reshape expand cat max values sinks float type logsumexp view sigmoid "
    "unsqueeze"
)


@functools.cache
def why_other(eager: Any, attention: Any) -> str | None:
    """Returns the reason why the function `eager` may do something else than this package for a class of attention;
    None if it is known to do the same."""
    other = sorted(names_of(eager.__code__) - WORDS)
    if other:
        return f"its eager attention uses {', '.join(other)}"
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(attention.forward)))
        tree = ast.parse(source)
    except (OSError, TypeError, SyntaxError):
        return "its forward has no source to read"
    told = _keywords(tree)
    if told is None:
        return "its forward reads the weights"
    taken = set(inspect.signature(eager).parameters)
    sinks = "sinks" in names_of(eager.__code__)
    if sinks != ("s_aux=self.sinks" in re.sub(r"\s", "", source)):
        return "it gives its sinks in a way of its own"
    if ignored := sorted({"softcap", "position_bias", "alibi_slopes", "scaling"} & told - taken):
        return f"its eager attention ignores {', '.join(ignored)}"
    options = sorted({"softcap", "position_bias"} & taken)
    return None if _same(eager, sinks, options) else "its eager attention computes something else"


def _keywords(tree: ast.Module) -> set[str] | None:
    """Returns the keywords of the call of the attention function; None where its weights are read."""
    told: set[str] = set()
    weights: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and len(node.value.args) >= 4:
            target = node.targets[0]
            own = isinstance(node.value.args[0], ast.Name) and node.value.args[0].id == "self"
            if own and isinstance(target, ast.Tuple) and isinstance(target.elts[-1], ast.Name):
                weights.add(target.elts[-1].id)
                told |= {k.arg for k in node.value.keywords if k.arg}
    if not weights:
        return None
    results = [r.value for r in ast.walk(tree) if isinstance(r, ast.Return)]
    returned = {id(n) for value in results for n in (value.elts if isinstance(value, ast.Tuple) else [value])}
    for node in ast.walk(tree):
        read = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in weights
        if read and id(node) not in returned:
            return None
    return told


def _same(eager: Any, sinks: bool, options: list[str]) -> bool:
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64, device="cpu")

    groups = 2 if "num_key_value_groups" in names_of(eager.__code__) else 1
    module = SimpleNamespace(training=False, num_key_value_groups=groups, head_dim=8, sinks=random(4))
    hidden = torch.where(random(2, 1, 3, 5) > 0.7, float("-inf"), 0.0).double()
    hidden[..., 0] = 0.0
    values = {"softcap": 2.0, "position_bias": random(2, 4, 3, 5)}
    for used in itertools.chain.from_iterable(itertools.combinations(options, n) for n in range(len(options) + 1)):
        given = {name: values[name] for name in used}
        for mask in (None, hidden):
            q, k, v = random(2, 4, 3, 8), random(2, 4 // groups, 5, 8), random(2, 4 // groups, 5, 8)
            try:
                with torch.no_grad(), torch.autocast("cpu", enabled=False):
                    out = eager(module, q, k, v, mask, scaling=0.3, dropout=0.0, **given)[0]
            except Exception:  # whatever it makes of tensors that it was not made for
                return False
            wanted = _formula(q, k, v, mask, module.sinks if sinks else None, **given)
            if out.shape != wanted.shape or not bool(((out - wanted).abs() < 1e-5).all()):
                return False
    return True


def _formula(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, softcap: Any = None,
    position_bias: Any = None,
) -> Tensor:  # fmt: skip
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(2, 3) * 0.3
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores if position_bias is None else scores + position_bias
    scores = scores if mask is None else scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2)
