r"""The loss over a vocabulary that is sharded over devices, each of which has some rows of the weight.

A device computes the logits of its own classes, in chunks of the tokens. No device has the logits of all classes. Of
each token it finds the maximum M and the sum S of exponentials below it, the target's own left out, and the target's
logit y where the class is its own. Two all-reduces, of one number a token and of two (three with label smoothing), give
all devices :math:`\ell = \mathrm{softplus}(M + \log S - y)`, which is exact for a confident token, and lse as :math:`y
+ \ell`. Statistics of the logits are more numbers of the second. Predictions take a third, of the class whose logit M
is. The backward pass makes the logits once more and needs no collective: the gradient of a device's rows is its own,
and that of hidden a partial sum, as DTensor has it.

Tokens may be sharded besides, along other dimensions of the mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from foundry_kernels.core.autocast import no_autocast
from foundry_kernels.core.autograd import apply
from foundry_kernels.core.inference import refuse_second_derivative
from foundry_kernels.ops._linear_loss.chunks import Gradients, Tokens, rows_of
from foundry_kernels.ops._linear_loss.problem import Inputs, Needs
from foundry_kernels.ops.cross_entropy.tokens import NO_CLASS


class Shards(NamedTuple):
    """This device's classes, `first` and those after it, among all, and the devices that have the others."""

    first: int
    n_classes: int
    group: Any

    def reduce(self, x: Tensor, how: str) -> Tensor:
        return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), how, self.group))


def vocabulary_dim(weight: Any) -> int | None:
    """The dimension of the mesh along which a DTensor `weight` is sharded by its classes, if there is just one."""
    found = [i for i, placement in enumerate(weight.placements) if type(placement) is Shard and placement.dim == 0]
    return found[0] if len(found) == 1 else None


def sharded_loss(
    loss: type[OwnClasses],
    hidden: Any,
    weight: Any,
    target: Any,
    bias: Any,
    low: Any,
    up: Any,
    class_weight: Any,
    options: Any,
) -> tuple[dict[str, Any], Any]:
    """The results that the options request, of each token, as DTensors, and `target` as one.

    Args:
        hidden: a DTensor; gathered along the dimension of the mesh that shards the classes, and nowhere else.
        weight: a DTensor of which `vocabulary_dim` is not None. bias, low, up, class_weight: DTensors, or None.
        target: a DTensor, or a tensor that is the same on all devices.
    """
    options.refuse_others(loss.supported, loss.name, "vocab-parallel")
    local = Local.of(hidden, weight, target, bias, low, up)
    if class_weight is not None:
        everywhere: list[Placement] = [Replicate()] * weight.device_mesh.ndim
        class_weight = class_weight.redistribute(weight.device_mesh, everywhere).to_local()
    found = apply(_VocabParallel, loss, *local.inputs, class_weight, options, local.shards)
    return {name: local.whole(x) for name, x in zip(options.results(), found, strict=True)}, local.target


class Local(NamedTuple):
    """The inputs of a call on this device; and the tokens' target as a DTensor."""

    inputs: Inputs
    target: Any
    shards: Shards

    @classmethod
    def of(cls, hidden: Any, weight: Any, target: Any, bias: Any, low: Any = None, up: Any = None) -> Local:
        """See the arguments of `sharded_loss`."""
        mesh, dim = weight.device_mesh, vocabulary_dim(weight)
        assert dim is not None  # or the caller takes another path
        if not isinstance(target, DTensor):
            target = DTensor.from_local(target, mesh, [Replicate()] * mesh.ndim, run_check=False)
        tokens: list[Placement] = [
            p if i != dim and type(p) is Shard and p.dim < target.ndim else Replicate()
            for i, p in enumerate(hidden.placements)
        ]
        rows: list[Placement] = [Shard(0) if i == dim else Replicate() for i in range(mesh.ndim)]
        summed: list[Placement] = [
            Shard(0) if i == dim else Partial() if p.is_shard() else p for i, p in enumerate(tokens)
        ]

        def local(x: Any, placements: list[Placement], gradient: list[Placement]) -> Any:
            return None if x is None else x.redistribute(mesh, placements).to_local(grad_placements=gradient)

        target = target.redistribute(mesh, tokens)
        partial: list[Placement] = [Partial() if i == dim else p for i, p in enumerate(tokens)]
        per_device = -(-weight.shape[0] // mesh.size(dim))
        first = min(mesh.get_local_rank(dim) * per_device, weight.shape[0])
        of_tokens, of_classes = (tokens, partial), (rows, summed)
        inputs = Inputs(
            local(hidden, *of_tokens), local(weight, *of_classes), target.to_local(), local(bias, *of_classes),
            local(low, *of_tokens), local(up, *of_classes),
        )  # fmt: skip
        return cls(inputs, target, Shards(first, weight.shape[0], (mesh, dim)))

    def whole(self, x: Tensor) -> DTensor:
        """A result of this device's tokens as a DTensor."""
        mesh, strides = self.target.device_mesh, torch.empty(self.target.shape, device="meta").stride()
        where = self.target.placements
        return DTensor.from_local(x, mesh, where, run_check=False, shape=self.target.shape, stride=strides)


def on_mesh_of(hidden: Any, results: Any) -> Any:
    """Returns DTensors on the mesh of `hidden`, as the object that it is. AOTAutograd finds the mesh of an output by
    its identity, and DTensor's cache answers with any that is equal, of a call before."""
    if isinstance(results, dict):
        return {name: on_mesh_of(hidden, x) for name, x in results.items()}
    if isinstance(results, tuple):
        return tuple(on_mesh_of(hidden, x) for x in results)
    if not isinstance(results, DTensor):
        return results
    mesh, where = hidden.device_mesh, results.placements
    shape, stride = results.shape, results.stride()
    return DTensor.from_local(results.to_local(), mesh, where, run_check=False, shape=shape, stride=stride)


class _VocabParallel(torch.autograd.Function):
    """The requested results from the tensors of one device, and their gradients."""

    @staticmethod
    def forward(
        ctx: Any, loss: type[OwnClasses], hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None,
        low: Tensor | None, up: Tensor | None, class_weight: Tensor | None, options: Any, shards: Shards,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        inputs = Inputs(hidden, weight, target, bias, low, up)
        with no_autocast(hidden):
            own = loss(inputs, class_weight, options, shards)
            found, saved = own.forward()
        ctx.loss, ctx.names, ctx.options, ctx.shards = loss, options.results(), options, shards
        ctx.save_for_backward(*inputs, class_weight, *saved)
        _, need_dhidden, need_dweight, _, need_dbias, need_dlow, need_dup, *_ = ctx.needs_input_grad
        ctx.needs = Needs(need_dhidden, need_dweight, need_dbias, need_dlow, need_dup)
        others = {name: 0.0 if found[name].is_floating_point() else NO_CLASS for name in ctx.names}
        outputs = {name: own.tokens.whole(found[name], other).view(target.shape) for name, other in others.items()}
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[x for name, x in outputs.items() if name not in loss.differentiable])
        return tuple(outputs.values())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        refuse_second_derivative(ctx.loss.name)
        inputs = Inputs(*ctx.saved_tensors[: len(Inputs._fields)])
        class_weight, *saved = ctx.saved_tensors[len(inputs) :]
        with no_autocast(inputs.hidden):
            own = ctx.loss(inputs, class_weight, ctx.options, ctx.shards)
            given = zip(ctx.names, gradients, strict=True)
            of_kept = {name: None if d is None else own.tokens.of_kept(d) for name, d in given}
            found = own.gradients(of_kept, saved, ctx.needs).of(inputs, rounded=True)
        dhidden, dweight, *others = (g if n else None for g, n in zip(found, ctx.needs, strict=True))
        return None, dhidden, dweight, None, *others, None, None, None


class OwnClasses:
    """The tokens of a call and what a device knows of its own classes. A loss has a subclass."""

    #: The operation; the fields of its options that this strategy supports, in their order (the reduction is left to
    #: the caller); and the results that have a gradient.
    name: str
    supported: tuple[str, ...]
    differentiable: tuple[str, ...]

    def forward(self) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
        """The results of the tokens by name, and what `of_rows` needs besides gradients."""
        raise NotImplementedError

    def of_rows(self, given: dict[str, Tensor | None], *saved: Tensor) -> Callable[[slice, Tensor], Tensor]:
        """A function that makes the gradient of some tokens' logits from these logits, which it may overwrite.
        given: the gradients of results by name; they may be missing or None."""
        raise NotImplementedError

    def __init__(self, inputs: Inputs, class_weight: Tensor | None, options: Any, shards: Shards) -> None:
        cpu = inputs.hidden.device.type == "cpu"
        self.tokens = Tokens(inputs, options, cpu)
        self.options, self.shards = options, shards
        target = self.tokens.target
        self.counts = target != options.ignore_index
        known = (target >= 0) & (target < shards.n_classes)
        self.unknown = self.counts & ~known
        if cpu and not torch.compiler.is_compiling() and bool(self.unknown.any()):
            raise IndexError(
                f"target must be in 0 .. {shards.n_classes - 1} or ignore_index {options.ignore_index}; "
                f"got {int(target[self.unknown][0])}"
            )
        target = torch.where(known, target, 0).long()
        here = target - shards.first
        n_own = inputs.weight.shape[0]
        self.mine = (here >= 0) & (here < n_own)
        self.column = here.clamp(0, max(n_own - 1, 0)).unsqueeze(1)
        dtype = self.tokens.dtype
        self.weights = None if class_weight is None else class_weight.to(dtype)
        self.of_target = self.counts.to(dtype) if self.weights is None else self.weights[target] * self.counts
        #: Each token's class of the largest logit, which `statistics` finds if asked.
        self.predicted = target.new_empty(0, dtype=torch.int64)
        #: Whether each token's target has the largest logit, the mean of its logits, and the logarithm of the sum of
        #: its squared probabilities; likewise.
        self.of_logits: tuple[Tensor, ...] = ()
        self.sum_of_weights = shards.n_classes if self.weights is None else self.weights.sum()

    def own_weights(self) -> Tensor | float:
        """Returns the weights of this device's classes."""
        first, n = self.shards.first, self.tokens.weight.shape[0]
        return 1.0 if self.weights is None else self.weights[first : first + n]

    def logits(self, part: slice) -> Tensor:
        """Returns the logits of this device's classes, capped, in the dtype of the arithmetic; they may be written
        to."""
        y = self.tokens.logits(part).to(self.tokens.dtype)
        cap = self.options.softcap
        return y if cap is None else y.div_(cap).tanh_().mul_(cap)

    def statistics(
        self, smooth: bool = False, entropy: bool = False, predict: bool = False, stats: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The target's logit and its negative log-likelihood of each token; and with `smooth` the sum over the classes
        of their weight times theirs, or with `entropy` that of their probability times theirs. With `predict`,
        `predicted` is set too, and with `stats` `of_logits`."""
        n, dtype = self.tokens.target.numel(), self.tokens.dtype
        empty = self.tokens.x.new_empty(n, dtype=dtype)
        largest = torch.full_like(empty, -torch.inf)
        total, at_target, below, logits, squares = (torch.zeros_like(empty) for _ in range(5))
        best = self.predicted.new_zeros(n) if predict or stats else None
        weights = self.own_weights()
        for part in self.tokens.chunks() if self.tokens.weight.shape[0] else ():
            y, (m, s, t, b) = self.logits(part), (rows_of(x, part) for x in (largest, total, at_target, below))
            column, mine = rows_of(self.column, part), rows_of(self.mine, part)
            own = y.gather(1, column).squeeze(1)
            t.copy_(torch.where(mine, own, 0.0))
            if stats:
                rows_of(logits, part).copy_(y.sum(1))
            if smooth:
                torch.amax(y, 1, out=m)
                b.copy_(((m.unsqueeze(1) - y) * weights).sum(1))
                below_all = m.clone()
            y.scatter_(1, column, torch.where(mine, -torch.inf, own).unsqueeze(1))
            torch.amax(y, 1, out=m)
            if best is not None:
                rows_of(best, part).copy_(y.argmax(1))
            finite = torch.where(m == -torch.inf, 0.0, m)
            y.sub_(finite.unsqueeze(1))
            if entropy:
                b.copy_((y.exp() * y.masked_fill(y == -torch.inf, 0.0)).sum(1))
            s.copy_(y.exp_().sum(1))
            if stats:
                rows_of(squares, part).copy_(y.square_().sum(1))
            if smooth:  # below the same maximum as the sum, which leaves the target out
                b.add_((finite - below_all) * self._sum(weights))
        maximum = self.shards.reduce(largest, "max")
        target = self.tokens.target.long()
        if best is not None:  # of equal logits the first class, as in `torch.argmax`
            best = torch.where(largest == maximum, best + self.shards.first, self.shards.n_classes)
            earlier = (best < target).to(dtype)  # whether this device's is before the target
            best = self.shards.reduce(best, "min") if predict else None
        finite = torch.where(maximum == -torch.inf, 0.0, maximum)
        shift = torch.where(largest == -torch.inf, 0.0, largest)
        scale = (largest - finite).exp()
        numbers = [total * scale, at_target]
        if entropy:
            numbers.append((below + (shift - finite) * total) * scale)
        if smooth:
            numbers.append(below + (finite - shift) * self._sum(weights))
        if stats:
            numbers += [logits, squares * scale.square(), earlier]
        total, y, *rest = self.shards.reduce(torch.stack(numbers), "sum").unbind(0)
        if best is not None:
            is_target = (y > maximum) | ((y == maximum) & (target < best))
            best = torch.where(is_target, target, best)
            self.predicted = best.masked_fill(self.unknown | ~self.counts, NO_CLASS)
        nll = torch.nn.functional.softplus(total.log() + (finite - y), threshold=50.0)
        if stats:
            right = (y > maximum) | ((y == maximum) & (rest.pop() == 0.0))
            squares = torch.logaddexp(rest.pop().log() + 2.0 * (finite - y - nll), -2.0 * nll)
            self.of_logits = right.to(dtype), rest.pop() / self.shards.n_classes, squares
        if entropy:  # of the other classes, from the distances to their largest logit, and of the target
            above = y + nll - finite
            others = torch.where(total == 0.0, 0.0, (-above).exp() * (above * total - rest[0]))
            return y, nll, others + (-nll).exp() * nll.masked_fill(nll == torch.inf, 0.0)
        return y, nll, rest[0] + (y - finite + nll) * self.sum_of_weights if smooth else None

    def _sum(self, weights: Tensor | float) -> Tensor | float:
        return self.tokens.weight.shape[0] * weights if isinstance(weights, float) else weights.sum()

    def gradients(self, given: dict[str, Tensor | None], saved: list[Tensor], needs: Needs) -> Gradients:
        """The gradients of this device's inputs."""
        tokens, softcap = self.tokens, self.options.softcap
        found, dlogits = Gradients(tokens, needs), self.of_rows(given, *saved)
        for part in tokens.chunks() if tokens.weight.shape[0] else ():
            logits = self.logits(part)
            slope = None if softcap is None else 1.0 - (logits / softcap).square()
            d = dlogits(part, logits)
            found.add(part, (d if slope is None else d.mul_(slope)).to(tokens.x.dtype))
        if needs.hidden and not tokens.weight.shape[0]:
            found.dx.zero_()
        return found
