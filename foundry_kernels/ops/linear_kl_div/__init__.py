r"""Distillation from hidden states: the divergence between the distributions of a teacher's and a student's head,
without storing the logits of either.

A chunk of tokens has its logits computed for both sides at a time. One kernel makes from them the divergences and, over
the student's logits, their gradient; two matmuls then make the gradients of the student's hidden states and weight. See
:func:`foundry_kernels.kl_div` for the formulas and :func:`foundry_kernels.linear_cross_entropy` for chunks.

A server returns neither hidden states nor all logits: it lists k classes of each token with their log-probabilities.
With a set K of these classes, the divergence is that of the distributions over K and one bucket for all other
classes,

.. math:: \left(p_j\right)_{j \in K}, \; 1 - \sum_{i \in K} p_i \qquad \text{and} \qquad
   \left(q_j\right)_{j \in K}, \; 1 - \sum_{i \in K} q_i,

which is at most the divergence of the whole distributions and with K of all classes equal to it; or without the bucket
that of :math:`p_j / \sum_{i \in K} p_i` and :math:`q_j / \sum_{i \in K} q_i`. All directions are defined for both.
The student's bucket is summed from the other classes' own exponentials, so it is accurate where it is small.

Agarwal et al., "On-Policy Distillation of Language Models", 2024, arXiv:2306.13649 (GKD); Hsu et al., "Liger Kernel",
2024, arXiv:2410.10989 (its fused linear JSD).
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack, overload

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from foundry_kernels.core import invariance
from foundry_kernels.core.checks import (
    check_bool,
    check_device,
    check_dtype,
    check_int,
    check_integer,
    check_number,
    check_positive,
    check_shape,
    constants,
)
from foundry_kernels.core.registry import is_dtensor, resolve
from foundry_kernels.ops import kl_div as of_logits
from foundry_kernels.ops._linear_loss.checks import check_linear, check_pair, is_vocab_sharded, strategy, under_autocast
from foundry_kernels.ops._register import register_op
from foundry_kernels.ops.linear_kl_div import reference
from foundry_kernels.ops.linear_kl_div.options import LinearKlDivOptions
from foundry_kernels.ops.linear_kl_div.teacher import Teacher


class Options(TypedDict, total=False):
    """The keyword arguments except those that select the results."""

    teacher_logits: Tensor | None
    teacher_ids: Tensor | None
    teacher_log_probs: Tensor | None
    add_tail: bool
    bias: Tensor | None
    low: Tensor | None
    up: Tensor | None
    logit_scale: float
    softcap: float | None
    teacher_bias: Tensor | None
    teacher_logit_scale: float
    teacher_softcap: float | None
    target: Tensor | None
    temperature: float
    direction: str
    beta: float
    ignore_index: int
    reduction: str
    chunk_size: int | None
    batch_invariant: bool
    backend: str


@overload
def linear_kl_div(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor | None = None, teacher_weight: Tensor | None = None, *,
    return_entropy: Literal[False] = False, **options: Unpack[Options],
) -> Tensor: ...  # fmt: skip
@overload
def linear_kl_div(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor | None = None, teacher_weight: Tensor | None = None, *,
    return_entropy: bool, **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def linear_kl_div(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor | None = None,
    teacher_weight: Tensor | None = None,
    *,
    teacher_logits: Tensor | None = None,
    teacher_ids: Tensor | None = None,
    teacher_log_probs: Tensor | None = None,
    add_tail: bool = True,
    bias: Tensor | None = None,
    low: Tensor | None = None,
    up: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    teacher_bias: Tensor | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    target: Tensor | None = None,
    temperature: float = 1.0,
    direction: str = "forward",
    beta: float = 0.5,
    ignore_index: int = -100,
    reduction: str = "mean",
    return_entropy: bool = False,
    chunk_size: int | None = None,
    batch_invariant: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """``kl_div(hidden @ weight.T + bias, teacher_hidden @ teacher_weight.T + teacher_bias)``, without storing logits.

    Args:
        hidden: ``[..., D]`` of the student: float32, bfloat16, float16 or float64, any strides, D at least 1.
        weight: ``[V, D]``, of hidden's dtype and device; V at least 1. It may be tied to the embedding.
        teacher_hidden: ``[..., E]``, with hidden's tokens, on its device. E need not be D, and the dtype need not be
            hidden's, unless one of them is float64.
        teacher_weight: ``[V, E]``, of teacher_hidden's dtype: the vocabularies are the same.
        teacher_logits: ``[..., V]``, in place of the teacher's hidden states and weight, scaled and capped.
        teacher_ids, teacher_log_probs: ``[..., k]``, in place of them too: int32 or int64 classes and the teacher's
            log-probabilities, at the temperature of the loss. An entry with minus infinity is none, and a class that is
            listed twice counts once; so rows with fewer than k classes can be filled up, and the token that was sampled
            can be added.
        add_tail: whether the classes that are not listed form a bucket. The teacher's has a probability of at least
            1e-7.
        bias, teacher_bias: ``[V]``, of the dtype of their side, or None.
        low, up: of a student's head with an adapter, as for :func:`foundry_kernels.linear_cross_entropy`.
        logit_scale, softcap, teacher_logit_scale, teacher_softcap: of each model's logits, as for
            :func:`foundry_kernels.linear_cross_entropy`: a factor, then ``c * tanh(logits / c)``. The temperature
            divides what they leave.
        target, ignore_index: which tokens count, as for the other losses: those whose target is not `ignore_index`, or
            all without a `target`. No other target is read.
        temperature, direction, beta, reduction: as for :func:`foundry_kernels.kl_div`. `beta` is the teacher's share,
            as in TRL's GKD and Liger's JSD.
        chunk_size: the number of tokens whose logits exist at a time. None chooses (see `Memory`).
        return_entropy: also return the entropy of the student's distribution at the temperature, of each token, in
            nats. It has no gradient.
        batch_invariant: as for :func:`foundry_kernels.linear_cross_entropy`.
        backend: "auto", "reference" (which computes all logits at once), "triton" or "native" (on the CPU).

    Returns:
        ``[...]`` for reduction "none", else a scalar; float32 (float64 for float64 inputs). At least 0; 0, with
        gradients of 0, if no token counts. With `return_entropy` a tuple of this and the entropy ``[...]``.

    Raises:
        As :func:`foundry_kernels.kl_div`; ValueError also if a tensor does not fit, the vocabularies differ,
            `chunk_size` is below 1, a weight is sharded by its classes, or the teacher is given twice or not at all.
            IndexError: on the CPU, a listed class is out of range; on a GPU the token's results are NaN.

    Gradients go to hidden, weight, bias, low and up. All tensors of the teacher are constants: they get no gradient,
    whether they require one or not. Under autocast the tensors of both sides, except teacher_logits, low and up, are
    first cast to its dtype, as in a linear layer. There is no second derivative. Results have the same bits in each
    run; matmuls are PyTorch's own, so another number of threads may give other bits.

    With reduction "mean" or "sum" the forward pass also computes the gradients, which the backward pass multiplies by
    the loss's own: four matmuls in all, one for the teacher and three for the student (one less without teacher_hidden,
    and two in all without gradients). So compute a loss that needs no backward pass within `torch.no_grad()`. With
    "none" each token's loss has its own gradient: the backward pass computes both logits again, in six matmuls in all,
    as keeping them would take the memory that this operation saves.

    Memory is that of :func:`foundry_kernels.linear_cross_entropy` in chunks, and the teacher's logits of one chunk. On
    a GPU chunks are as large as both logits fit into a 32nd of its memory. There are no blocks of classes. DTensors:
    tokens may be sharded over devices, the classes may not.
    """
    if (
        chunk_size is low is up is teacher_ids is teacher_log_probs is None
        and batch_invariant is invariance.on is return_entropy is False
        and add_tail is True
        and not is_dynamo_compiling()
        and (
            direct := LINEAR_KL_DIV.direct(
                backend, hidden, weight, teacher_hidden, teacher_weight, teacher_logits, bias, teacher_bias, target,
                temperature, direction, beta, ignore_index, reduction, logit_scale, softcap, teacher_logit_scale,
                teacher_softcap,
            )
        )
        is not None
    ):  # fmt: skip
        return direct
    hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias = under_autocast(
        hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias
    )
    logit_scale, softcap, teacher_logit_scale, teacher_softcap = constants(
        logit_scale, softcap, teacher_logit_scale, teacher_softcap
    )
    check_linear(hidden, weight, bias, logit_scale, None)
    check_pair(hidden, weight, low, up)
    check_number("teacher_logit_scale", teacher_logit_scale)
    for name, cap in (("softcap", softcap), ("teacher_softcap", teacher_softcap)):
        if cap is not None:
            check_positive(name, cap)
    teacher = Teacher(teacher_hidden, teacher_weight, teacher_bias, teacher_logits, teacher_ids, teacher_log_probs)
    check_teacher(teacher, hidden, weight)
    if teacher_hidden is None and not (teacher_logit_scale == 1.0 and teacher_softcap is None):
        raise ValueError("teacher_logit_scale and teacher_softcap are of teacher_hidden and teacher_weight alone")
    check_bool("add_tail", add_tail)
    check_bool("return_entropy", return_entropy)
    of_options = of_logits.make_options(target, temperature, direction, beta, ignore_index, reduction)
    if chunk_size is not None:
        check_int("chunk_size", chunk_size, minimum=1)
    _, batch_invariant = strategy(None, batch_invariant)
    target = of_logits.check_target("hidden", hidden, target)
    for name, x in (("weight", weight), ("teacher_weight", teacher_weight), ("bias", bias)):
        if x is not None and is_vocab_sharded(x):
            raise ValueError(
                f"{name} must not be sharded by its classes: linear_kl_div needs all of them on each device"
            )
    reduces = reduction != "none" and is_dtensor(hidden)  # torch reduces over devices
    options = LinearKlDivOptions(
        of_options.ignore_index, of_options.temperature, of_options.direction, of_options.beta,
        "none" if reduces else reduction, logit_scale, softcap, teacher_logit_scale, teacher_softcap, add_tail,
        chunk_size, batch_invariant, return_entropy,
    )  # fmt: skip
    function = resolve(LINEAR_KL_DIV, backend, hidden)
    found = function(hidden, weight, target, bias, low, up, *teacher.detached(), options)
    each: Tensor = found["loss"]
    if reduces:
        each = of_logits.reduced(each, target, options.ignore_index, reduction)
    return (each, found["entropy"]) if return_entropy else each


def check_teacher(teacher: Teacher, hidden: Tensor, weight: Tensor) -> None:
    """Checks that the teacher is given once, for the student's tokens and classes."""
    tokens, n_classes = tuple(hidden.shape[:-1]), weight.shape[0]
    given: dict[str, Any] = {f"teacher_{name}": x for name, x in teacher._asdict().items() if x is not None}
    forms = ("teacher_logits",), ("teacher_ids", "teacher_log_probs"), ("teacher_hidden", "teacher_weight")
    names = next((form for form in forms if given.keys() & {*form}), forms[-1])
    if missing := [name for name in names if name not in given]:
        raise ValueError(
            "a teacher needs teacher_hidden and teacher_weight, or teacher_logits, or teacher_ids and "
            f"teacher_log_probs; {missing[0]} is None"
        )
    if names != forms[-1] and (others := ", ".join(sorted(given.keys() - {*names}))):
        raise ValueError(
            f"{' and '.join(names)} must be given alone: they replace the teacher's head; got {others} too"
        )
    for name, x in given.items():
        if name != "teacher_ids":
            of_logits.check_teacher(name, x, "hidden", hidden)
    if teacher.ids is not None and teacher.log_probs is not None:
        check_integer("teacher_ids", teacher.ids)
        check_device("teacher_ids", teacher.ids, "hidden", hidden)
        k = teacher.ids.shape[-1] if teacher.ids.dim() else 0
        if k == 0 or tuple(teacher.ids.shape[:-1]) != tokens:
            raise ValueError(
                f"teacher_ids must be [..., k] with the tokens {tokens} of hidden and k at least 1; "
                f"got shape {tuple(teacher.ids.shape)}"
            )
        check_shape("teacher_log_probs", teacher.log_probs, (*tokens, k), "one for each of teacher_ids")
        return
    if teacher.logits is not None:
        check_shape("teacher_logits", teacher.logits, (*tokens, n_classes), "hidden's tokens and weight's classes")
        return
    of_teacher, head = given["teacher_hidden"], given["teacher_weight"]
    width = of_teacher.shape[-1] if of_teacher.dim() else 0
    if width == 0 or tuple(of_teacher.shape[:-1]) != tokens:
        raise ValueError(
            f"teacher_hidden must be [..., E] with the tokens {tokens} of hidden and E at least 1; "
            f"got shape {tuple(of_teacher.shape)}"
        )
    if head.dim() == 2 and head.shape[0] != n_classes:
        raise ValueError(
            f"weight and teacher_weight must have the same vocabulary; weight has {n_classes} classes and "
            f"teacher_weight has {head.shape[0]}"
        )
    check_shape("teacher_weight", head, (n_classes, width), "the last dimension is teacher_hidden's")
    check_dtype("teacher_weight", head, "teacher_hidden", of_teacher)
    if teacher.bias is not None:
        check_shape("teacher_bias", teacher.bias, (n_classes,), "a value for each class")
        check_dtype("teacher_bias", teacher.bias, "teacher_hidden", of_teacher)


LINEAR_KL_DIV = register_op(linear_kl_div, reference.linear_kl_div, native_devices=("cpu",))
