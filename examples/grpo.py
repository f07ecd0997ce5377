"""Teach a small model to sort digits, first by a few examples and then by reward alone (GRPO), in a minute on a CPU.

python examples/grpo.py
python examples/grpo.py --beta 0.02 --loss-type grpo --updates 2
python examples/grpo.py --plot reward.png

A prompt is 2 to 5 digits and "=", as in 3 1 7 =; its answer is 1 3 7 and then STOP. An answer is rewarded by 1 if it is
right, and otherwise by half the share of its tokens that are. `Generator` samples several answers for each prompt, with
their log-probabilities; the advantage of an answer is its reward above the mean of those. Within `fk.batch_invariant`
the sampler's log-probabilities are the trainer's, bit by bit, which the script checks in each step.
"""

from __future__ import annotations

import argparse
import copy
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.models import Generator, ModelConfig, Transformer

EQUALS, STOP = 10, 11  # after the digits
LONGEST = 5
ROW = 2 * LONGEST + 2  # a prompt with "=", an answer with STOP


class Batch(NamedTuple):
    """Sampled rows, one for each answer; `tokens`, `targets` and `log_probs` are ``[B, ROW - 1]``."""

    tokens: Tensor
    targets: Tensor  # the token after each, -100 outside of the answer
    log_probs: Tensor  # of the targets, by the sampler
    rewards: Tensor  # [B]


def head_of(model: Transformer) -> Tensor:
    assert model.output is not None
    return model.output.weight


def prompts(count: int, generator: torch.Generator) -> list[list[int]]:
    lengths = torch.randint(2, LONGEST + 1, (count,), generator=generator).tolist()
    return [[*torch.randperm(10, generator=generator)[:n].tolist(), EQUALS] for n in lengths]


def answer(prompt: list[int]) -> list[int]:
    return [*sorted(prompt[:-1]), STOP]


def reward(prompt: list[int], said: list[int]) -> float:
    """1 for the answer; otherwise half the share of its tokens that are right."""
    right = answer(prompt)
    return 1.0 if said == right else sum(map(int.__eq__, said, right)) / max(len(right), len(said)) / 2


def padded(rows: list[list[int]], begins: list[int]) -> tuple[Tensor, Tensor]:
    """Tokens and targets of rows whose answers begin at `begins`."""
    whole = torch.full((len(rows), ROW), -100)
    for row, tokens in zip(whole, rows, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    inside = torch.arange(1, ROW) >= torch.tensor(begins)[:, None]
    return whole[:, :-1].clamp_min(0), whole[:, 1:].masked_fill(~inside, -100)


def sample(model: Transformer, asked: list[list[int]], group: int, generator: torch.Generator) -> Batch:
    """`group` answers for each prompt."""
    serving = Generator(model, n_pages=2 * len(asked) * group, page_size=8, max_batch=len(asked) * group)
    options: dict[str, Any] = {"temperature": 1.0, "stop_token": STOP, "generator": generator, "return_log_probs": True}
    numbers = [serving.add(prompt, LONGEST + 1, **options) for prompt in asked for _ in range(group)]
    found = serving.run()
    rows = [found[number].tolist() for number in numbers]
    begins = [len(prompt) for prompt in asked for _ in range(group)]
    tokens, targets = padded(rows, begins)
    log_probs = torch.zeros(targets.shape)
    log_probs[targets != -100] = torch.cat([serving.log_probs(number) for number in numbers])
    rewards = [reward(row[:begin], row[begin:]) for row, begin in zip(rows, begins, strict=True)]
    return Batch(tokens, targets, log_probs, torch.tensor(rewards))


def learn_examples(model: Transformer, steps: int, generator: torch.Generator) -> None:
    """Supervised fine-tuning: enough that some samples are right."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        asked = prompts(64, generator)
        tokens, targets = padded([prompt + answer(prompt) for prompt in asked], list(map(len, asked)))
        fk.losses.sft_loss(model(tokens, return_hidden=True), head_of(model), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def learn_rewards(model: Transformer, options: argparse.Namespace, generator: torch.Generator) -> list[float]:
    """GRPO. Returns the mean reward of each step's samples."""
    reference = copy.deepcopy(model).requires_grad_(False) if options.beta else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    means: list[float] = []
    for step in range(options.steps):
        batch = sample(model, prompts(options.prompts, generator), options.group, generator)
        of_reference = None if reference is None else reference.log_probs(batch.tokens, batch.targets)
        with torch.no_grad():  # the trainer's own numbers, and what corrects for a sampler that has others
            old = model.log_probs(batch.tokens, batch.targets)
        correction = fk.losses.sampling_correction(old, batch.log_probs, batch.targets != -100)
        for _ in range(options.updates):
            loss = fk.losses.grpo_loss(
                model(batch.tokens, return_hidden=True),
                head_of(model),
                batch.targets,
                fk.losses.group_advantages(batch.rewards, options.group),
                old_per_token_logps=old,
                ref_per_token_logps=of_reference,
                importance_sampling_ratio=correction.ratio,
                beta=options.beta,
                epsilon_high=5.0 if options.loss_type == "cispo" else 0.28,
                loss_type=options.loss_type,
                max_completion_length=LONGEST + 1,
            )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        means.append(batch.rewards.mean().item())
        if step % max(options.steps // 10, 1) == 0 or step == options.steps - 1:
            right = (batch.rewards == 1.0).float().mean().item()
            apart = correction.logp_difference_max
            print(
                f"step {step:>3}  reward {means[-1]:.3f}  right {right:.0%}  sampler and trainer differ by {apart:.1e}",
                flush=True,
            )
    return means


def share_right(model: Transformer, generator: torch.Generator) -> float:
    """The fraction of new prompts whose most likely answer is right."""
    asked = prompts(256, generator)
    found = model.generate(asked, LONGEST + 1, stop_token=STOP)
    return sum(row[len(p) :].tolist() == answer(p) for p, row in zip(asked, found, strict=True)) / len(asked)


def draw(means: list[float], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    smooth = [sum(means[max(n - 9, 0) : n + 1]) / min(n + 1, 10) for n in range(len(means))]
    axes.plot(means, color="tab:blue", alpha=0.3, label="of a step")
    axes.plot(smooth, color="tab:blue", label="mean of ten")
    axes.set(xlabel="step of GRPO", ylabel="reward", ylim=(None, 1.0), title="Sorting digits, by GRPO")
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=10, help="steps on examples, before the rewards")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--prompts", type=int, default=32, help="of a step")
    parser.add_argument("--group", type=int, default=8, help="answers for each prompt")
    parser.add_argument("--updates", type=int, default=1, help="of the weights for each step's samples")
    parser.add_argument("--beta", type=float, default=0.0, help="the factor of the KL penalty")
    parser.add_argument("--loss-type", default="dapo", choices=[*fk.losses.policy.LOSS_TYPES])
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-variant", action="store_true", help="leave fk.batch_invariant out")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the reward")
    options = parser.parse_args()
    if options.plot:
        import matplotlib  # noqa: F401  (before the training, if it is missing)

    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    model = Transformer(ModelConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=12, max_seq_len=ROW))
    began = time.perf_counter()
    with nullcontext() if options.batch_variant else fk.batch_invariant():
        learn_examples(model, options.examples, generator)
        before = share_right(model, generator)
        means = learn_rewards(model, options, generator)
        after = share_right(model, generator)
    print(f"{before:.0%} of new prompts were answered right after the examples, {after:.0%} after the rewards")
    print(f"{time.perf_counter() - began:.0f} seconds")
    if options.plot:
        draw(means, options.plot)
        print(f"the reward: {options.plot}")


if __name__ == "__main__":
    main()
