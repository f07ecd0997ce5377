"""What tests/core/test_launch.py runs in a process of its own, where kernels are not interpreted: that a launch from
a kept plan is the one that Triton would make."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from launch_recorder import Recorder
from slow import rest_slow
from stub_gpu import stub_gpu
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

import foundry_kernels as fk
from foundry_kernels._triton import devices, plans, rows, tuning
from foundry_kernels._triton import launch as launches
from foundry_kernels._triton.launch import Plan, launch
from foundry_kernels.core.registry import OpSpec
from foundry_kernels.testing import Case, call, lay_out
from foundry_kernels.tools import tune
from foundry_kernels.tools.check import small_cases
from foundry_kernels.tools.inspect import aot
from foundry_kernels.tools.tune import ahead, measuring

pytest_plugins = ["launch_recorder"]

#: A setting that Triton has since 3.9.
CASTS = "fpsan_homomorphic_casts"
_FIRST = {op.package: op for op in reversed(fk.OPS.values())}  # of those with the same kernels
OPS = [
    pytest.param(op, id=op.name, marks=() if _FIRST[op.package] is op else pytest.mark.slow)
    for op in fk.OPS.values()
    if op.impl("triton")
]


@triton.jit
def toy_kernel(x_ptr, w_ptr, y_ptr, n, stride, factor, FLAG: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    tl.store(y_ptr + cols, tl.load(x_ptr + cols * stride, mask=cols < n) * factor, mask=cols < n)


def plan(n: int = 16, stride: int = 32, factor: Any = 0.5, **changes: Any) -> Plan:
    return Plan((3,), (n, stride, factor), {"FLAG": True, "BLOCK": 16, "num_warps": 4} | changes)


def draw(*shape: int, dtype: torch.dtype = torch.float32, offset: int = 0) -> Tensor:
    return torch.zeros(offset + 64, dtype=dtype)[offset : offset + 16].view(shape or (16,))


def by_triton(p: Plan, *tensors: Any) -> None:
    toy_kernel[p.grid](*tensors, *p.numbers, **p.constants)


def same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Two calls of a compiled kernel: Triton gives it hooks that do nothing, and metadata for them."""
    return all(
        x is y or (not isinstance(x, Tensor) and x == y) for x, y in zip(a[:6] + a[9:], b[:6] + b[9:], strict=True)
    )


# --- one kernel -------------------------------------------------------------------------------------------------------


def test_equal_arguments_are_launched_directly(gpu: Recorder, runs: list[str]) -> None:
    p, tensors = plan(), (draw(), draw(), draw())
    launch(toy_kernel, p, *tensors)
    assert runs == ["toy_kernel"]
    launch(toy_kernel, p, *tensors)
    launch(toy_kernel, p, draw(), draw(), draw())  # others of the same kind
    assert runs == ["toy_kernel"]
    first, second, _ = gpu.take()
    assert same(first, second)
    assert second[:4] == (3, 1, 1, 100)
    assert second[9:] == (*tensors, 16, 32, 0.5, True, 16)


CHANGES: dict[str, tuple[Any, Any, Any]] = {
    "unaligned": (draw(offset=1), draw(), draw()),
    "unaligned result": (draw(), draw(), draw(offset=3)),
    "another dtype": (draw(dtype=torch.float16), draw(), draw()),
    "of equal size": (draw(), draw(dtype=torch.int32), draw()),
    "None": (draw(), None, draw()),
    "None and unaligned": (draw(offset=2), None, draw()),
    "a float": (draw(), 1.0, draw()),
    "an int": (draw(), 7, draw()),
    "the int 1": (draw(), 1, draw()),
    "a large int": (draw(), 2**40, draw()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_triton_tells_apart_is_launched_by_triton_first(name: str, gpu: Recorder, runs: list[str]) -> None:
    """The plan is one: all that differs is where the tensors go."""
    p, plain, changed = plan(), (draw(), draw(), draw()), CHANGES[name]
    launch(toy_kernel, p, *plain)
    launch(toy_kernel, p, *changed)
    assert len(runs) == 2
    for tensors in (changed, plain, changed, plain):
        launch(toy_kernel, p, *tensors)
    assert len(runs) == 2
    by_triton(p, *plain)
    by_triton(p, *changed)
    *made, expected, expected_changed = gpu.take()
    assert expected[4] != expected_changed[4]
    e, c = expected, expected_changed
    for launched, by in zip(made, [e, c, c, e, c, e], strict=True):
        assert same(launched, by)


@pytest.mark.parametrize(
    "changes",
    [
        {"n": 17},
        {"n": 1},
        {"n": 2**31},
        {"stride": 1},
        {"stride": 31},
        {"factor": 1},
        {"FLAG": False},
        {"num_warps": 8},
    ],
    ids=str,
)
def test_other_numbers_are_another_plan(changes: dict[str, Any], gpu: Recorder, runs: list[str]) -> None:
    tensors, plans = (draw(), draw(), draw()), (plan(), plan(**changes))
    for p in plans * 2:
        launch(toy_kernel, p, *tensors)
    assert len(runs) == 2
    for p in plans:
        by_triton(p, *tensors)
    made = gpu.take()
    assert all(same(a, b) for a, b in zip(made[:4], made[4:] * 2, strict=True))
    assert made[0][4] != made[1][4]


@pytest.mark.parametrize("extension", [True, False])
def test_keys_are_as_fine_as_tritons(extension: bool, gpu: Recorder) -> None:
    """Over all combinations: where our key of the tensors is the same, so is Triton's."""
    if extension and launches._pointers is launches._no_pointers:
        return  # there is none
    p, found = plan(), {}
    several = [None, *(draw(dtype=t, offset=o) for t in (torch.float32, torch.float16, torch.int64) for o in (0, 1, 2))]
    for x in several[1:]:
        for w in several:
            tensors = x, w, draw()
            by_triton(p, *tensors)
            pointers = launches._pointers if extension else partial(launches._pointers_in_python, toy_kernel, 0)
            ours, taken = pointers(tensors)
            assert all(a is b for a, b in zip(taken, tensors, strict=True))  # on a CPU they are themselves
            found.setdefault(ours, set()).add(gpu.take()[0][4])
    assert len(found) > 20
    assert all(len(kernels) == 1 for kernels in found.values())


def test_a_kernel_of_each_device(gpu: Recorder, runs: list[str]) -> None:
    """On the stream of the moment."""
    p, tensors = plan(), (draw(), draw(), draw())
    for device, stream in ((0, 100), (1, 100), (0, 200), (1, 300)):
        gpu.device, gpu.stream = device, stream
        launch(toy_kernel, p, *tensors)
    made = gpu.take()
    assert [m[3] for m in made] == [100, 1100, 200, 1300]
    assert [m[4][1] for m in made] == [0, 1, 0, 1]
    assert len(runs) == 2


@pytest.mark.parametrize(("set_to", "fused"), [(None, True), ("1", True), ("0", False)])
def test_fused_multiply_adds_are_asked_for(
    set_to: str | None, fused: bool, gpu: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not left to Triton's default, which changes; but to the user's variable."""
    monkeypatch.delenv("TRITON_DEFAULT_FP_FUSION", raising=False)
    if set_to is not None:
        monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", set_to)
    launch(JITFunction(toy_kernel.fn), plan(), draw(), draw(), draw())
    assert f"'enable_fp_fusion': {fused}" in gpu.take()[0][4][-1]


def test_threads(gpu: Recorder) -> None:
    """Plans and kinds of tensors mixed, from an empty cache: every launch is of the kernel that Triton would take."""
    plans = [plan(n=n, num_warps=w) for n in (1, 16, 17) for w in (4, 8)]
    kinds = list(CHANGES.values())
    wrong, start = [], threading.Barrier(8)
    expected = {}
    for i, p in enumerate(plans):
        for j, tensors in enumerate(kinds):
            by_triton(p, *tensors)
            expected[i, j] = gpu.take()[0]

    def work(seed: int) -> None:
        order = torch.randperm(len(expected), generator=torch.Generator().manual_seed(seed)).tolist()
        start.wait()
        for at in order * 5:
            i, j = divmod(at, len(kinds))
            launch(toy_kernel, plans[i], *kinds[j])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    made = gpu.take()
    assert len(made) == 8 * 5 * len(expected)
    by_kernel: dict[Any, list[tuple[Any, ...]]] = {}
    for e in expected.values():
        by_kernel.setdefault(e[4], []).append(e)
    wrong = [m for m in made if not any(same(m, e) for e in by_kernel[m[4]])]
    assert not wrong


# --- when Triton launches itself --------------------------------------------------------------------------------------


def hook(*args: Any, **kwargs: Any) -> None:
    pass


@contextmanager
def a_hook(chain: Any) -> Iterator[None]:
    chain.add(hook)
    yield
    chain.remove(hook)


@contextmanager
def a_setting(settings: Any, name: str, value: Any) -> Iterator[None]:
    with settings.scope():
        setattr(settings, name, value)
        yield


@contextmanager
def a_pre_run_hook() -> Iterator[None]:
    toy_kernel.add_pre_run_hook(hook)
    yield
    toy_kernel.pre_run_hooks.clear()


@contextmanager
def another_version() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launches, "DIRECT", False)
        yield


@contextmanager
def run_replaced() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        own = JITFunction.run
        patch.setattr(JITFunction, "run", lambda *args, **kwargs: own(*args, **kwargs))
        yield


DISTURBANCES = {
    "enter hook": lambda: a_hook(knobs.runtime.launch_enter_hook),
    "exit hook": lambda: a_hook(knobs.runtime.launch_exit_hook),
    "hook that is set": lambda: a_setting(knobs.runtime, "launch_enter_hook", hook),
    "debug": lambda: a_setting(knobs.runtime, "debug", True),
    "instrumentation": lambda: a_setting(knobs.compilation, "instrumentation_mode", "x"),
    **({"casts": lambda: a_setting(knobs.compilation, CASTS, True)} if hasattr(knobs.compilation, CASTS) else {}),
    "pre-run hook": a_pre_run_hook,
    "another version": another_version,
    "run replaced": run_replaced,
}


@pytest.mark.parametrize("name", DISTURBANCES)
def test_triton_launches_itself(name: str, gpu: Recorder, runs: list[str]) -> None:
    p, tensors = plan(), (draw(), draw(), draw())
    launch(toy_kernel, p, *tensors)
    with DISTURBANCES[name]():
        launch(toy_kernel, p, *tensors)
        launch(toy_kernel, p, *tensors)
    assert len(runs) == 3
    launch(toy_kernel, p, *tensors)
    assert len(runs) == 3, "directly again"
    made = gpu.take()
    assert same(made[0], made[3])


# --- the operations ---------------------------------------------------------------------------------------------------


def unaligned(x: Tensor | None) -> Tensor | None:
    """The same values one element further on in memory."""
    if x is None or x.numel() == 0 or not x.is_contiguous():
        return x
    moved = x.detach().new_empty(x.numel() + 1)[1:].view(x.shape)
    moved.copy_(x.detach())
    return moved.requires_grad_(x.requires_grad)


def forward_and_backward(
    op: OpSpec, case: Case, args: dict[str, Tensor | None], before: Callable[[], None] = lambda: None
) -> None:
    before()
    with torch.no_grad():
        call(op, args, case.options, backend="triton")
    before()
    outputs = [o for o in call(op, args, case.options, backend="triton") if o.requires_grad]
    wanted = [t for t in args.values() if t is not None and t.requires_grad]
    if wanted and outputs:
        cotangents = [lay_out(torch.zeros_like(o), case.cotangent) for o in outputs]
        before()
        torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True)


def described(made: tuple[Any, ...]) -> tuple[Any, ...]:
    """A launch but for the addresses of what was allocated for it."""

    def kind(x: Any) -> Any:
        if hasattr(x, "block_shape"):  # a descriptor
            return kind(x.base), x.shape, x.strides, x.block_shape, x.layout
        if isinstance(x, tuple):  # what a score function captures
            return tuple(map(kind, x))
        return (x.dtype, x.shape, x.stride(), x.data_ptr() % 16) if isinstance(x, Tensor) else x

    return (*made[:6], *map(kind, made[9:]))


@pytest.mark.parametrize("dtype", rest_slow([torch.bfloat16, torch.float32]), ids=str)
@pytest.mark.parametrize("op", OPS)
def test_all_cases(op: OpSpec, dtype: torch.dtype, gpu: Recorder, runs: list[str], monkeypatch: Any) -> None:
    """Forward with and without gradients, and backward, of aligned and unaligned tensors: once every launch has been
    made, all are direct, and each is the one that Triton makes from a plan that is made for it alone. The quick tests
    take one case of each kind, and every third one unaligned."""
    inputs, cases, quick = [], op.cases.CASES[op.name], dtype == torch.bfloat16
    for number, case in enumerate(small_cases(cases) if quick else cases):
        args = case.make(dtype)
        inputs.append((case, args))
        if not quick or number % 3 == 0:
            inputs.append((case, {name: unaligned(x) for name, x in args.items()}))
    for case, args in inputs:
        forward_and_backward(op, case, args)
    gpu.take(), runs.clear()
    for case, args in inputs:
        forward_and_backward(op, case, args)
    made = gpu.take()
    assert set(runs) <= {"flash_attention_fwd_gluon_kernel"}, "whose descriptors Triton makes for each call"
    runs.clear()
    monkeypatch.setattr(launches, "DIRECT", False)
    for case, args in inputs:
        forward_and_backward(op, case, args, before=plans.forget_plans)
    assert len(made) == len(runs) >= len(inputs)
    for direct, expected in zip(made, gpu.take(), strict=True):
        assert described(direct) == described(expected)


# --- what is relied on ------------------------------------------------------------------------------------------------


def test_this_version_of_triton_is_known() -> None:
    """A failure means: read JITFunction.run and CompiledKernel of the new one, then add it to `launches.KNOWN`."""
    assert launches.DIRECT, f"Triton {triton.__version__} is launched the slow way"


def test_a_real_compiled_kernel() -> None:
    """Compiled, loaded and launched by Triton and by us: the same call."""
    import importlib

    compiler = importlib.import_module("triton.compiler.compiler")
    driver = Recorder()
    p, tensors = plan(), (draw(), draw(), draw())
    fresh = JITFunction(toy_kernel.fn)
    with pytest.MonkeyPatch.context() as patch, stub_gpu(driver):
        patch.setattr(triton.compiler, "compile", compiler.compile)
        launch(fresh, p, *tensors)
        launch(fresh, p, *tensors)
    first, second = driver.take()
    assert len(p.kept) == 1
    assert same(first, second)
    assert first[4] == "toy_kernel"
    assert [type(hook_).__name__ for hook_ in first[7:9]] == ["HookChain"] * 2
    assert second[6:9] == (None, None, None)


def test_capability_recorded_is_part_of_a_plan() -> None:
    """Plans made for one GPU are forgotten when launches are recorded for another."""
    before = devices._RECORDED
    rows._plan_sum(3, 5, torch.float32)
    assert rows._plan_sum.cache_info().currsize > 0
    devices.record_for(80)
    assert rows._plan_sum.cache_info().currsize == 0
    devices.record_for(before)


# --- tuning -----------------------------------------------------------------------------------------------------------


def test_what_is_timed_is_the_launch_of_the_row(gpu: Recorder, runs: list[str]) -> None:
    """Launches are recorded on a GPU by replacing `JITFunction.run`, and repeated by it: the same calls."""
    op = fk.OPS["swiglu"]
    (job, *_) = tune.find_jobs([op], [torch.bfloat16], "cpu")
    forward, _ = tune.calls(job.op, job.case, job.dtype, "cpu")
    gpu.take()
    for row in job.choice.configs[:2]:
        with tuning.forced(job.choice.kernel, job.choice.key, row):
            repeat = measuring.recorded(forward, job.choice.kernel)
        (made,) = gpu.take()
        kernel = repeat()
        assert [k.src.fn.__name__ for k in kernel] == [job.choice.kernel]
        (again,) = gpu.take()
        assert same(made, again)
        assert all(f"{value}" in made[4][-1] + str(made[9:]) for value in row.values())


def test_rows_that_do_not_fit_are_dropped_ahead_of_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row is recorded with its own launches, of two dtypes; what they cost is made up."""

    def cost(launch: aot.Launch, arch: int) -> aot.Cost:
        stack = 8 * (dict(launch.constants)["BLOCK_COLS"] == 4096)
        return aot.Cost(32, stack, 0, dict(launch.options)["num_warps"], (16,), "", "", b"")

    monkeypatch.setattr(aot, "compile_for", cost)
    assert ahead.print_configs([fk.OPS["swiglu"]], 90, pytest.fail) == 0
    shown = capsys.readouterr().out
    assert shown.count("  built in  ") == shown.count("_kernel, ") == 4
    assert shown.count("dropped: 8 bytes of stack") == 4
    assert "num_warps=8: dropped" in shown
    assert "20 configs fit, 4 do not" in shown
    assert "as another config" not in shown
