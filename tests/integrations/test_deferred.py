"""Any forward with a head and a loss: what it does with its logits, patched and as it is."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from patching import close
from slow import rest_slow
from table import Allocations
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import foundry_kernels as fk
from foundry_kernels.integrations.adapters import deferral, deferred
from foundry_kernels.integrations.adapters.causal_lm import NO_LOGITS

V = 41
IDS = torch.randint(0, V, (2, 6), generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(0, V, (2, 6), generator=torch.Generator().manual_seed(1))
TARGETS[0, :2] = -100


class Body(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, 16)
        self.body = nn.Linear(16, 16)
        self.lm_head = nn.Linear(16, V, bias=bias)

    def states(self, ids: Tensor) -> Tensor:
        return self.body(self.embed(ids)).tanh()


def model_of(loss: Callable[..., Any], bias: bool = False) -> Any:
    """Returns a language model. loss: what its forward does with the hidden states, to return logits and loss."""

    def forward(self: Any, ids: Tensor, targets: Tensor | None = None) -> Any:
        return loss(self, self.states(ids), targets)

    torch.manual_seed(0)
    return type("Model", (Body,), {"forward": forward})(bias)


class Plain(Body):
    """One that can be pickled."""

    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        logits = self.lm_head(self.states(ids))
        return logits, flat(logits, targets)


def flat(logits: Any, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), **options)


def nano_gpt(self: Any, h: Tensor, y: Tensor) -> Any:
    logits = self.lm_head(h)
    return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1), ignore_index=-100)


def shifted(self: Any, h: Tensor, y: Tensor) -> Any:
    logits = self.lm_head(h).float()
    before, after = logits[..., :-1, :].contiguous(), y[..., 1:].contiguous()
    return logits, nn.CrossEntropyLoss()(before.view(-1, V), after.view(-1))


def in_order(*steps: Callable[[Any], Any]) -> Callable[..., Any]:
    """The loss of logits that go through these steps."""

    def loss(self: Any, h: Tensor, y: Tensor) -> Any:
        logits = self.lm_head(h)
        for step in steps:
            logits = step(logits)
        return logits, flat(logits, y)

    return loss


def with_options(**options: Any) -> Callable[..., Any]:
    def loss(self: Any, h: Tensor, y: Tensor) -> Any:
        logits = self.lm_head(h)
        found = flat(logits, y, **options)
        return logits, found.sum() if found.dim() else found

    return loss


def unmasked(self: Any, h: Tensor, y: Tensor) -> Any:
    logits = self.lm_head(h)
    kept = y != -100
    return logits, F.cross_entropy(logits[kept], y[kept])


def of_each_row(self: Any, h: Tensor, y: Tensor) -> Any:
    logits = self.lm_head(h)
    return logits, sum(F.cross_entropy(logits[i, 2:], y[i, 2:]) for i in range(len(logits)))


#: Forwards whose loss needs no logits.
FUSED: dict[str, Callable[..., Any]] = {
    "nano_gpt": nano_gpt,
    "shifted": shifted,
    "scale": in_order(lambda x: x * 2.5),
    "scale_first": in_order(lambda x: 0.25 * x),
    "divided": in_order(lambda x: x / 4),
    "cap": in_order(lambda x: x / 0.5, torch.tanh, lambda x: x * 0.5),
    "cap_and_scale": in_order(lambda x: x * 3 / 2.0, lambda x: x.tanh(), lambda x: 2.0 * x, lambda x: x.float()),
    "cast": in_order(lambda x: x.to(torch.float32), lambda x: x.to(x.device), lambda x: x.to(dtype=torch.float32)),
    "flattened": in_order(lambda x: x.flatten(0, 1)),
    "reshaped": in_order(lambda x: x.reshape(3, -1, V), lambda x: torch.reshape(x, (12, V))),
    "bias": in_order(lambda x: x + torch.linspace(-1, 1, V)[None]),
    "unmasked": unmasked,
    "of_each_row": of_each_row,
    "options": with_options(weight=torch.linspace(0.5, 2.0, V), label_smoothing=0.1, ignore_index=-100),
    "sum": with_options(reduction="sum"),
    "each": with_options(reduction="none"),
}  # fmt: skip


def used_twice(self: Any, h: Tensor, y: Tensor) -> Any:
    logits = self.lm_head(h)
    return logits, flat(logits, y) + 1e-3 * logits.logsumexp(-1).square().mean()


def used_before(self: Any, h: Tensor, y: Tensor) -> Any:
    logits = self.lm_head(h)
    z = 1e-3 * logits.logsumexp(-1).square().mean()
    return logits, flat(logits * 2, y) + z


def written(self: Any, h: Tensor, y: Tensor) -> Any:
    logits = self.lm_head(h)
    view, copied = logits[:, 1:], logits * 2
    logits[:, :, 3] = -5.0  # which the view sees, and the copy does not
    return logits, flat(view.contiguous(), y[:, 1:]) + flat(copied, y)


def no_gradient(self: Any, h: Tensor, y: Tensor) -> Any:
    logits = self.lm_head(h)
    with torch.no_grad():
        weights = (logits * 2).softmax(-1)
        right = (logits.argmax(-1) == y).float().mean()
        flat(logits, y)
    return logits, (logits * weights).sum() + right


def of_classes_first(self: Any, h: Tensor, y: Tensor) -> Any:
    logits = self.lm_head(h)
    return logits, F.cross_entropy(logits.transpose(1, 2), y)


def as_probabilities(self: Any, h: Tensor, y: Tensor) -> Any:
    logits = self.lm_head(h)
    return logits, F.cross_entropy(logits.view(-1, V), torch.eye(V)[y.clamp_min(0)].view(-1, V))


def loss_of_others(self: Any, h: Tensor, y: Tensor) -> Any:
    return self.lm_head(h) * 2, F.cross_entropy(h.flatten(0, 1), y.flatten() % 16)


def of_the_last(self: Any, h: Tensor, y: Tensor) -> Any:
    logits = self.lm_head(h[:, -1:])
    return logits, flat(logits, y[:, -1:])


#: Forwards that need their logits.
COMPUTED: dict[str, Callable[..., Any]] = {
    "dropout": in_order(lambda x: F.dropout(x, 0.0)),
    "clamp": in_order(lambda x: x.clamp(-0.1, 0.1)),
    "scaled_in_place": in_order(lambda x: x.mul_(0.5)),
    "in_place": in_order(lambda x: x.__imul__(0.5)),
    "by_a_tensor": in_order(lambda x: x * torch.linspace(0.1, 1, V)),
    "after_the_cap": in_order(torch.tanh, lambda x: x + torch.linspace(-1, 1, V)),
    "negative_cap": in_order(torch.tanh, lambda x: x * -2.0),
    "twice_capped": in_order(torch.tanh, torch.tanh),
    "bias_of_a_scale": in_order(lambda x: x * 2, lambda x: x + torch.linspace(-1, 1, V)),
    "fewer_classes": in_order(lambda x: torch.cat([x[..., : V - 1], x[..., -1:]], -1)),
    "other_views": in_order(lambda x: x.view(2, 6 * V), lambda x: x.view(2, 6, V)),
    "new_dimensions": in_order(lambda x: x[..., None], lambda x: x.squeeze(-1)),
    "doubles": in_order(lambda x: x.double()),
    "in_a_list": in_order(lambda x: torch.stack([x, x]).mean(0)),
    "used_before": used_before,
    "written": written,
    "no_gradient": no_gradient,
    "of_classes_first": of_classes_first,
    "as_probabilities": as_probabilities,
    "loss_of_others": loss_of_others,
}


def step(model: Any) -> tuple[Any, Tensor, Tensor]:
    model.zero_grad()
    logits, loss = model.train()(IDS, TARGETS)
    loss.backward()
    return (
        logits,
        loss.detach(),
        torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()]),
    )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The losses that were computed without logits."""
    found: list[Any] = []
    own = deferred.linear_cross_entropy
    monkeypatch.setattr(deferred, "linear_cross_entropy", lambda **given: (found.append(given), own(**given))[1])
    return found


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", [*FUSED, *COMPUTED])
def test_forwards(name: str, bias: bool, calls: list[Any]) -> None:
    """Loss, gradients and logits are those of the model as it is; the logits are None only where a loss took them."""
    model = model_of((FUSED | COMPUTED)[name], bias=bias)
    logits, loss, gradients = step(model)
    with fk.patch(model) as handle:
        [entry] = [e for e in handle.report().replaced if e.name == ""]
        assert (entry.ops, entry.reason) == (("linear_cross_entropy",), NO_LOGITS)
        found, ours, patched = step(model)
    assert close(ours, loss)
    assert ours.dtype == loss.dtype
    assert float((patched - gradients).norm()) <= 1e-5 * float(gradients.norm())
    if name in FUSED:
        assert found is None
        assert calls
    else:
        assert type(found) is Tensor
        assert torch.equal(found, logits)
        assert not calls
    assert "_foundry_class" not in vars(type(model))


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(inside: bool, calls: list[Any]) -> None:
    """Of the head, whatever the autocast of the loss."""

    def loss(self: Any, h: Tensor, y: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            logits = self.lm_head(h.float())
        assert logits.dtype == (torch.bfloat16 if inside else torch.float32)
        return logits, flat(logits, y)

    model = model_of(loss)
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        _, expected, gradients = step(model)
        with fk.patch(model):
            logits, ours, patched = step(model)
    assert logits is None
    assert len(calls) == 1
    assert ours.dtype == expected.dtype
    assert abs(float(ours - expected)) <= 1e-2
    assert float((patched - gradients).norm()) <= 2e-2 * float(gradients.norm())


def test_a_loss_and_another_use_after_it() -> None:
    """The logits are made when they are used, and returned."""
    model = model_of(used_twice)
    logits, loss, gradients = step(model)
    with fk.patch(model):
        found, ours, patched = step(model)
    assert close(ours, loss)
    assert torch.equal(found, logits)
    assert close(patched, gradients)


def test_no_tensor_is_as_large_as_the_logits() -> None:
    model = model_of(shifted).train()
    ids = torch.randint(0, V, (32, 64))
    largest = []
    for on in (True, False):
        handle = fk.patch(model, return_logits=not on)
        with Allocations() as made:
            model(ids, ids)[1].backward()
        largest.append(made.largest)
        handle.undo()
    assert largest[0] < ids.numel() * V <= largest[1]


def test_other_results_than_tuples() -> None:
    @dataclasses.dataclass
    class Output:
        loss: Tensor
        logits: Any
        hidden: Tensor

    for make in (Output, dict):

        def loss(self: Any, h: Tensor, y: Tensor, make: Any = make) -> Any:
            logits = self.lm_head(h)
            return make(loss=flat(logits, y), logits=logits, hidden=h)

        model = model_of(loss).train()
        with fk.patch(model):
            out = model(IDS, TARGETS)
        found = out if isinstance(out, dict) else vars(out)
        assert type(out) is make
        assert found["logits"] is None
        assert found["hidden"].shape == (2, 6, 16)


def test_log_probs_of_a_model_of_ones_own() -> None:
    """Whatever its arguments are called; in both modes, by the loss's branch, which returns all logits."""
    model = model_of(FUSED["cap"])
    labels = IDS.masked_fill(TARGETS < 0, -100)
    for training in (True, False):
        model.train(training)
        log_p = model(IDS, TARGETS)[0].log_softmax(-1)[:, :-1]
        expected = log_p.gather(-1, labels[:, 1:, None].clamp_min(0))[..., 0].masked_fill(labels[:, 1:] < 0, 0.0)
        with fk.patch(model) as handle:
            found = handle.log_probs(IDS, labels)
        assert close(found[:, 1:], expected)
        assert not found[:, 0].any()
    with fk.patch(model_of(of_the_last)) as handle, pytest.raises(ValueError, match="no logits for each of labels"):
        handle.log_probs(IDS, labels)


# Nothing is left behind ----------------------------------------------------------------------------------------------


def test_an_error_in_the_forward_leaves_nothing_behind() -> None:
    def loss(self: Any, h: Tensor, y: Tensor) -> Any:
        logits = self.lm_head(h)
        if y is None:
            raise KeyError("no targets")
        return logits, flat(logits, y)

    model = model_of(loss).train()
    with fk.patch(model):
        with pytest.raises(KeyError, match="no targets"):
            model(IDS)
        assert deferral.current() is None
        assert model.lm_head is model._modules["lm_head"]
        assert type(model.lm_head(torch.ones(1, 16))) is Tensor
        assert model(IDS, TARGETS)[0] is None


def test_what_is_deferred_is_freed_without_the_garbage_collector() -> None:
    alive: list[Any] = []

    def loss(self: Any, h: Tensor, y: Tensor) -> Any:
        import weakref

        logits = self.lm_head(h)
        alive.append(weakref.ref(logits))
        return logits, flat(logits, y)

    model = model_of(loss).train()
    gc.disable()
    try:
        with fk.patch(model):
            model(IDS, TARGETS)
        assert alive[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("whole", [False, True], ids=["head", "model"])
def test_gradient_checkpointing(reentrant: bool, whole: bool, calls: list[Any]) -> None:
    """A part of the forward that is computed again, outside of the call, calls its head both times."""

    def part(self: Any, h: Tensor, y: Tensor) -> Any:
        return flat(self.lm_head(h), y)

    def loss(self: Any, h: Tensor, y: Tensor) -> Any:
        found = part(self, h, y) if whole else checkpoint(part, self, h, y, use_reentrant=reentrant)
        return None, found

    model = model_of(loss)

    def run() -> Tensor:
        model.zero_grad()
        model.train()
        start = torch.zeros((), requires_grad=True)
        call = lambda x: model(IDS, TARGETS)[1] + x  # noqa: E731
        (checkpoint(call, start, use_reentrant=reentrant) if whole else call(start)).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    expected = run()
    with fk.patch(model):
        assert close(run(), expected)
    assert len(calls) == (2 if whole else 0)


def test_hooks_on_the_way_to_a_head_see_logits(calls: list[Any]) -> None:
    model = model_of(nano_gpt).train()
    with fk.patch(model):
        seen: list[Any] = []
        hook = model.lm_head.register_forward_hook(lambda module, inputs, logits: seen.append(logits))
        assert type(model(IDS, TARGETS)[0]) is Tensor
        assert type(seen[0]) is Tensor
        hook.remove()
        assert not calls
        assert model(IDS, TARGETS)[0] is None


def test_threads_and_copies() -> None:
    """Each thread has its own call; a replica, a copy and an unpickled model have heads of their own."""
    model = Plain(bias=True).train()
    with fk.patch(model):
        replica: Any = model._replicate_for_data_parallel()
        replica.lm_head = copy.deepcopy(model.lm_head)
        for other in (replica, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert other(IDS, TARGETS)[0] is None
        expected, found = model(IDS, TARGETS)[1], []

        def run() -> None:
            found.extend(model(IDS, TARGETS)[1] for _ in range(8))

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 32
        assert all(torch.equal(x, expected) for x in found)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * 2


def test_functions_of_autograd() -> None:
    """Such a function takes what stands for logits for no tensor: their gradient would be lost."""
    model = model_of(in_order(lambda x: Double.apply(x + 0 * x)))  # computed before
    gradients = step(model)[2]
    with fk.patch(model):
        assert close(step(model)[2], gradients)
    with fk.patch(model_of(in_order(Double.apply))) as handle, pytest.raises(RuntimeError, match="return_logits=True"):
        step(handle._model)


# What is left ---------------------------------------------------------------------------------------------------------


class Elsewhere(nn.Module):
    """Its loss is computed by who calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(V, 8), nn.Linear(8, V)

    def forward(self, ids: Tensor) -> Any:
        return self.lm_head(self.embed(ids))


class Applies(Elsewhere):
    def forward(self, ids: Tensor) -> Any:
        return F.cross_entropy(Double.apply(super().forward(ids)).flatten(0, 1), ids.flatten())


class Classifier(Elsewhere):
    """Its head has other outputs than there are tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Any:
        return F.cross_entropy(super().forward(ids).mean(1), ids[:, 0] % 3)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Elsewhere, None), (Classifier, None), (Applies, "its loss stays, with the logits: its forward calls apply, of")],
)
def test_models_that_are_left(kind: type[nn.Module], reason: str | None) -> None:
    report = fk.patch(kind().train()).report()
    assert not report.replaced
    assert len(report.left) == (reason is not None)
    assert all(str(entry.reason).startswith(str(reason)) for entry in report.left)


# torch.compile -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", rest_slow(["cap_and_scale", *(n for n in FUSED if n != "cap_and_scale"), *COMPUTED]))
def test_compiled(name: str) -> None:
    """Into as few graphs as without a patch."""
    if name in ("unmasked", "written", "in_place"):
        pytest.skip("not one graph without a patch")
    model = model_of((FUSED | COMPUTED)[name]).train()
    expected = step(model)
    with fk.patch(model):
        torch.compiler.reset()
        counters.clear()
        found = step(torch.compile(model, backend="aot_eager", fullgraph=True))
    assert close(found[1], expected[1])
    assert close(found[2], expected[2])
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1
