"""Random score functions, and one for each function of torch that they may use."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import torch

TABLE = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
_FLOATS = torch.randn(3, 4, 7, dtype=torch.float64)
INTEGERS = torch.randint(-4, 9, (5, 6))


class RandomFunction:
    """A random expression; the same choices each time that it is evaluated."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        self.inputs, self.rng = (score, b, h, q, k), random.Random(self.seed)
        return self.float(4) + 0.5 * score

    def float(self, depth: int) -> Any:
        r = self.rng
        if depth == 0:
            return r.choice([lambda: self.inputs[0], lambda: r.uniform(-2, 2), lambda: self.int(0) * 0.25])()
        one = partial(self.float, depth - 1)
        return r.choice([
            lambda: one() + one(), lambda: one() - one(), lambda: one() * one(), lambda: one() / (abs_(one()) + 0.5),
            lambda: torch.tanh(scalar(one())), lambda: torch.sigmoid(scalar(one())), lambda: torch.sin(scalar(one())),
            lambda: torch.cos(scalar(one())), lambda: torch.exp(-abs_(one())), lambda: torch.log(abs_(one()) + 0.5),
            lambda: torch.sqrt(abs_(one()) + 0.1), lambda: torch.rsqrt(abs_(one()) + 0.1),
            lambda: torch.exp2(torch.clamp(scalar(one()), -3.0, 3.0)), lambda: torch.log2(abs_(one()) + 0.5),
            lambda: (abs_(one()) + 0.5) ** r.choice([0.5, 1.5, 2, 3, -1]), lambda: torch.square(scalar(one())) * 0.1,
            lambda: torch.where(self.bool(depth - 1), one(), one()),
            lambda: torch.minimum(scalar(one()), scalar(one())), lambda: torch.maximum(scalar(one()), scalar(one())),
            lambda: torch.floor(scalar(one())) * 0.5,
            lambda: torch.clamp(scalar(one()), -0.7, 0.9), lambda: -one(),
            lambda: _FLOATS[self.int(0) % 3, self.int(0) % 4, self.int(depth - 1) % 7],
            lambda: self.int(depth - 1) * 0.125, lambda: scalar(one()).detach() * one(),
        ])()  # fmt: skip

    def int(self, depth: int) -> Any:
        r = self.rng
        if depth == 0:
            return r.choice(self.inputs[1:])
        one = partial(self.int, depth - 1)
        return r.choice([
            lambda: one() + one(), lambda: one() - one(), lambda: one() * r.randint(-3, 3), lambda: abs(one()),
            lambda: one() // r.choice([-3, 2, 5]), lambda: one() % r.choice([-3, 2, 5]), lambda: -one(),
            lambda: torch.where(self.bool(depth - 1), one(), one()), lambda: torch.minimum(one(), one()),
            lambda: torch.clamp(one(), min=-3, max=6), lambda: INTEGERS[one() % 5, one() % 6], lambda: one() & 7,
            lambda: torch.floor(torch.clamp(scalar(self.float(depth - 1)), -5.0, 5.0)).to(torch.int64),
        ])()  # fmt: skip

    def bool(self, depth: int) -> Any:
        r = self.rng
        if depth == 0:
            return r.choice([lambda: self.int(0) >= self.int(0), lambda: scalar(self.float(0)) < 0.25])()
        one = partial(self.bool, depth - 1)
        return r.choice([
            lambda: one() & one(), lambda: one() | one(), lambda: ~one(), lambda: one() ^ one(),
            lambda: scalar(self.float(depth - 1)) > 0.1, lambda: scalar(self.int(depth - 1)) == self.int(depth - 1),
            lambda: scalar(self.int(depth - 1)) != 2, lambda: torch.logical_and(one(), one()),
        ])()  # fmt: skip


def scalar(x: Any) -> Any:
    """A tensor in place of a number, which functions of torch do not take."""
    return torch.tensor(x, dtype=torch.float64) if isinstance(x, float) else x


def abs_(x: Any) -> Any:
    return torch.abs(scalar(x))


#: By name, of the score, the query and the key.
FUNCTIONS = {
    "ceil": lambda s, q, k: torch.ceil(s) + torch.trunc(1.5 * s),
    "round down": lambda s, q, k: s // 0.7 + s % 0.7 + (-7 // (k + 1)) + (7 % (k + 1)),
    "div": lambda s, q, k: torch.div(q - k, 3, rounding_mode="trunc") + torch.div(s, 0.3, rounding_mode="trunc"),
    "floor_divide": lambda s, q, k: torch.floor_divide(q - k, 3) + torch.remainder(q - k, 3) + s / (k + 1),
    "reflected": lambda s, q, k: 1 - s + 2 / (k + 1) + 2.0**k + (3 ^ k) + (1 & q) + (4 | q) + 3**s,
    "casts": lambda s, q, k: s.to(torch.int64) + (s > 0).float() + q.double() * s.bool() + (q > k).int() + q.type_as(s),
    "clamps": lambda s, q, k: s.clamp_min(0.1) + s.clip(max=0.2) + torch.clamp(q, k, 5) + torch.nn.functional.relu(s),
    "filled": lambda s, q, k: (
        s.masked_fill(q > k, 2.5) + torch.zeros_like(s) + s.new_tensor(0.5) + torch.full_like(q, 3)
    ),
    "compared": lambda s, q, k: torch.where((q != k) & (s <= 0.5) & torch.gt(s, -1.0) & ~torch.eq(q, 3), s, 1 - s),
    "logical": lambda s, q, k: torch.where(torch.logical_or(q > k, k == 2), s, torch.logical_not(q).to(s.dtype)),
    "softplus": lambda s, q, k: torch.nn.functional.softplus(40 * s) + torch.nn.functional.logsigmoid(40 * s),
    "silu": lambda s, q, k: torch.nn.functional.silu(s) + torch.special.expit(s) + s.sigmoid() + s.reciprocal(),
    "powers": lambda s, q, k: torch.pow(s, 5) + s.square() + abs(s) ** 0.5 + abs(s) ** -0.5 + abs(s) ** 2.7 + q**3,
    "shifts": lambda s, q, k: s + (q << 2) + (k >> 1),
    "method": lambda s, q, k: s.where(q > k, s.exp()).add(s, alpha=2).mul(s).sub(q).div(3).abs().neg(),
    "is": lambda s, q, k: torch.where(torch.isnan(s / (s - s)) | torch.isinf(1 / (s - s)), s, 0.0),
    "rows": lambda s, q, k: TABLE[0][q % 3] + TABLE[..., :][1, k % 3] + TABLE[k % 2, :][-1] + TABLE.t()[q % 3, 1],
    "embedding": lambda s, q, k: torch.nn.functional.embedding(q % 2, TABLE)[k % 3],
    "numbers": lambda s, q, k: s * TABLE[0, 0] + TABLE[0, 1] - torch.tensor(2.0) * s + TABLE.sum() - s,
}
