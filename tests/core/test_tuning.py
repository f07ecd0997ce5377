"""The file of measured launches: what is taken from it, what is refused, and that nothing in it is lost."""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import foundry_kernels as fk
from foundry_kernels import _triton
from foundry_kernels._triton import tuning, tuning_file
from foundry_kernels._triton.tuning_file import Entry, TuningFileError
from foundry_kernels.core import registry
from foundry_kernels.core.registry import override

CPU = torch.device("cpu")
ROWS = [{"BLOCK": 64, "num_warps": 4}, {"BLOCK": 128, "num_warps": 4}, {"BLOCK": 128, "num_warps": 8}]
KEY = tuning_file.config_key("16-bit", ROWS[0])


@pytest.fixture(autouse=True)
def _as_found() -> Iterator[None]:
    yield
    tuning.use(None)
    registry.prefer("cuda", {})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the device that launch configs are looked up for."""
    monkeypatch.setattr(tuning, "gpu_name", lambda device: "Some GPU")
    return "Some GPU"


def entry(gpu: str = "Some GPU", row: dict[str, int] = ROWS[2], kernel: str = "a_kernel", **changes: Any) -> Entry:
    rows = {kernel: {KEY: {"row": row, "speedup": 1.2, "case": "16x16"}}}
    return Entry(**{"gpu": gpu, "triton": tuning.triton_version(), "capability": 90, "rows": rows} | changes)


def written(path: Path, *entries: Entry) -> Path:
    for each in entries:
        tuning_file.write(path, each, set())
    return path


def chosen(tags: str = "16-bit", rows: Any = ROWS) -> dict[str, int]:
    return tuning.choose("a_kernel", tags, rows, CPU)


# --- what is taken ----------------------------------------------------------------------------------------------------


def test_a_measured_row_is_taken(tmp_path: Path, gpu: str) -> None:
    assert chosen() == ROWS[0]
    tuning.use(written(tmp_path / "a.json", entry()))
    with tuning.watched() as seen:
        assert chosen() == ROWS[2]
    assert seen["a_kernel", KEY].origin == f"{tmp_path / 'a.json'}: Some GPU, , x1.20"
    tuning.use("off")
    assert chosen() == ROWS[0]


def test_what_was_measured_for_something_else_is_not(tmp_path: Path, gpu: str) -> None:
    """Nor is a config that is no candidate, with which the kernel may be wrong; nor for another row of the code."""
    others: list[dict[str, Any]] = [{"gpu": "Another GPU"}, {"triton": "2.0.0"}, {"kernel": "another_kernel"}]
    for number, other in enumerate((*others, {"row": {"BLOCK": 4096, "num_warps": 8}})):
        tuning.use(written(tmp_path / f"{number}.json", entry(**other)))
        assert chosen() == ROWS[0], other
    tuning.use(written(tmp_path / "a.json", entry()))
    assert chosen("32-bit") == ROWS[0]
    assert chosen(rows=ROWS[1:]) == ROWS[1]


def test_the_users_file_goes_before_the_packages(tmp_path: Path, gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "PACKAGED", written(tmp_path / "packaged.json", entry(row=ROWS[1])))
    tuning.use("off")
    assert chosen() == ROWS[1]
    tuning.use(written(tmp_path / "mine.json", entry()))
    assert chosen() == ROWS[2]


@pytest.mark.skipif(not _triton.INTERPRET, reason="launches kernels on the CPU")
def test_kernels_are_launched_with_it_and_plans_follow_a_change(tmp_path: Path) -> None:
    x = torch.randn(8, 64)
    with tuning.watched() as seen:
        fk.rms_norm(x, backend="triton")
    (found,) = seen.values()
    assert found.origin == "built in"
    assert found.config == found.configs[0]
    row = {"row": found.configs[1], "speedup": 1.5, "case": "8x64"}
    measured = entry(tuning.INTERPRETER, rows={found.kernel: {found.key: row}})
    tuning.use(written(tmp_path / "a.json", measured))
    asked: list[dict[str, int]] = []
    own = registry.OPS["rms_norm"].impl("triton")
    assert own is not None
    with tuning.watched() as seen:
        torch.testing.assert_close(fk.rms_norm(x, backend="triton"), fk.rms_norm(x, backend="reference"))
        asked += [choice.config for choice in seen.values()]
    assert asked == [found.configs[1]]


def test_files_are_read_once(tmp_path: Path, gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning.use(written(tmp_path / "a.json", entry()))
    read, paths = tuning_file.read, []
    monkeypatch.setattr(tuning, "read", lambda path: (paths.append(path), read(path))[1])
    for device in (CPU, torch.device("cuda:0"), torch.device("cuda:1")) * 3:
        assert tuning.choose("a_kernel", "16-bit", ROWS, device) == ROWS[2]
    assert paths == [tmp_path / "a.json", tuning.PACKAGED]


@pytest.mark.skipif(not _triton.INTERPRET, reason="launches kernels on the CPU")
def test_no_file_is_read_in_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is whole, and the first launch, which reads, comes after it was traced."""
    tuning.forget()
    read = tuning_file.read

    def reads(path: Path) -> Any:
        assert not torch.compiler.is_compiling()
        return read(path)

    monkeypatch.setattr(tuning, "read", reads)
    x = torch.randn(4, 32)
    compiled = torch.compile(lambda x: fk.rms_norm(x, backend="triton"), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), fk.rms_norm(x, backend="reference"))
    assert tuning._sources is not None


# --- which file -------------------------------------------------------------------------------------------------------


def test_the_variable_names_a_file(tmp_path: Path, gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tuning.VARIABLE, str(written(tmp_path / "a.json", entry())))
    tuning.forget()
    assert chosen() == ROWS[2]
    monkeypatch.setenv(tuning.VARIABLE, "off")
    tuning.forget()
    assert chosen() == ROWS[0]
    assert tuning.path_in_use() is None


def test_the_cache_folder(tmp_path: Path, gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tuning.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuning.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen() == ROWS[0], "there is no file, which is the default"
    written(tmp_path / "foundry_kernels" / "tuning.json", entry())
    tuning.forget()
    assert chosen() == ROWS[2]
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert tuning_file.default_path() == Path.home() / ".cache" / "foundry_kernels" / "tuning.json"


GOOD = {"format": tuning_file.FORMAT, "version": tuning_file.VERSION, "entries": [vars(entry())]}
DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot be read"),
    "truncated": (json.dumps(GOOD).encode()[:-40], "cannot be read"),
    "something else": (b'{"learning_rate": 0.1}', "is not a tuning file"),
    "another version": (json.dumps(GOOD | {"version": 2}).encode(), "has version 2; this package reads version 1"),
    "fields of another version": (json.dumps(GOOD | {"entries": [{"gpu": "x", "cpu": "y"}]}).encode(), "damaged"),
    "a speedup that is text": (
        json.dumps(GOOD).replace("1.2", '"x"').encode(),
        "entry 0 .*the speedup of a_kernel, .* must be a int or float; got 'x'",
    ),
    "a backend that is none": (
        json.dumps(GOOD | {"entries": [vars(entry(auto={"rope": {"float32": ["numpy"]}}))]}).encode(),
        "must be some of reference, triton, native",
    ),
}


#: What may stand in any place of a file.
JSON = (None, True, 7, -1.5, 10**400, "x", [], ["x"], [[]], {}, {"x": 1}, {"row": "x"}, {"x": {"x": {"row": []}}})


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in inner:
        yield from places(below, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[path[0]] = replaced(value[path[0]], path[1:], new)
    return copied


def test_any_value_in_any_place_is_slower_at_the_worst(
    tmp_path: Path, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is used, or named in one warning together with the entry; launches then are the code's own."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    good = GOOD | {"entries": [vars(entry("Other GPU")), vars(entry(auto={"rope": {"float32": ["native"]}}))]}
    path = tmp_path / "a.json"
    monkeypatch.setenv(tuning.VARIABLE, str(path))
    for at in places(good):
        for value in JSON:
            path.write_text(json.dumps(replaced(good, at, value)))
            tuning.forget()
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                with tuning.watched() as seen:
                    assert chosen() in (ROWS[0], ROWS[2])
                tuning._order_backends()
                assert chosen() in (ROWS[0], ROWS[2])
            assert seen["a_kernel", KEY].origin
            assert len(told) <= 1, (at, value)
            for warning in told:
                assert str(path) in str(warning.message), (at, value)
                if len(at) > 1:
                    assert f"entry {at[1]}" in str(warning.message), (at, value)
            if told:
                assert chosen() == ROWS[0]


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_named_and_left_alone(
    name: str, tmp_path: Path, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, reason = DAMAGED[name]
    path = tmp_path / "some.json"
    path.write_bytes(content)
    with pytest.raises(TuningFileError, match=reason) as refused:
        tuning.use(path)
    assert str(path) in str(refused.value)
    with pytest.raises(TuningFileError, match=reason):
        tuning_file.write(path, entry(), set())
    with pytest.raises(TuningFileError, match=reason):
        tuning_file.check_writable(path)
    monkeypatch.setenv(tuning.VARIABLE, str(path))
    tuning.forget()
    with pytest.warns(UserWarning, match=reason) as warned:
        assert [chosen() for _ in range(2)] == [ROWS[0], ROWS[0]]
    assert len(warned) == 1
    assert str(path) in str(warned[0].message)
    assert path.read_bytes() == content


def test_a_file_that_is_not_there(tmp_path: Path, gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning.use(written(tmp_path / "a.json", entry()))
    with pytest.raises(FileNotFoundError, match="missing"):
        tuning.use(tmp_path / "missing.json")
    assert chosen() == ROWS[2], "what was in use stays"
    tuning.use(None)
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path / "missing.json"))
    with pytest.warns(UserWarning, match=r"missing.json does not exist; built-in"):
        assert chosen() == ROWS[0]


# --- writing ----------------------------------------------------------------------------------------------------------


def test_what_is_there_is_kept(tmp_path: Path) -> None:
    path = written(tmp_path / "deep" / "er" / "a.json", entry("GPU A"), entry("GPU B"), entry("GPU A", triton="3.5.1"))
    newer = entry("GPU A", kernel="b_kernel", measured="2026-11-22", auto={"rope": {"float32": ["native", "triton"]}})
    tuning_file.write(path, newer, {("b_kernel", KEY)})
    table = tuning_file.read(path)
    assert len(table) == 3
    merged = table[newer.key]
    assert set(merged.rows) == {"a_kernel", "b_kernel"}
    assert merged.auto == newer.auto
    assert merged.measured == "2026-11-22"
    tuning_file.write(path, entry("GPU A", rows={}), {("a_kernel", KEY)})
    assert set(tuning_file.read(path)[newer.key].rows) == {"b_kernel"}, "measured again, it does not win any more"
    assert tuning_file.read(path)[newer.key].auto == newer.auto


def test_a_write_that_fails_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a.json", entry())
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TuningFileError, match=r"a\.json cannot be written .*No space left"):
        tuning_file.write(path, entry(kernel="b_kernel"), set())
    assert path.read_bytes() == before
    assert {p.name for p in tmp_path.iterdir()} == {"a.json", ".a.json.lock"}


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """A file is in the folder's place: permissions do not stop root."""
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "a.json"
    for refused in (lambda: tuning_file.check_writable(path), lambda: tuning_file.write(path, entry(), set())):
        with pytest.raises(TuningFileError, match=r"file/a\.json .*cannot be (written|read)"):
            refused()


def test_several_write_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    threads = [
        threading.Thread(target=tuning_file.write, args=(path, entry(kernel=f"kernel_{i}"), set())) for i in range(8)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    (found,) = tuning_file.read(path).values()
    assert set(found.rows) == {f"kernel_{i}" for i in range(8)}


# --- backend="auto" ---------------------------------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the GPUs of this machine."""
    names = ["Some GPU", "Some GPU"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(tuning, "gpu_name", lambda device: names[device.index])
    return names


def test_the_order_that_was_measured(tmp_path: Path, gpus: list[str]) -> None:
    """It is known as soon as CUDA is initialised."""
    op = fk.OPS["rms_norm"]
    assert tuning._order_backends in [call for call, _ in torch.cuda._queued_calls] or torch.cuda.is_initialized()
    measured = entry(auto={"rms_norm": {"float32": ["reference", "native"]}})
    tuning.use(written(tmp_path / "a.json", measured))
    with override(op, "triton", devices=("cuda",), missing=None):

        def first(device: str, dtype: torch.dtype) -> Any:
            return op.chosen["auto", device, dtype]

        functions = {backend: impl.fn for backend in registry.BACKENDS if (impl := op.impl(backend)) is not None}
        before = dict(op.chosen)
        assert first("cuda", torch.float32) is functions["triton"]
        tuning._order_backends()
        assert op.order("cuda", torch.float32) == ("reference", "native", "triton")
        assert first("cuda", torch.float32) is functions["reference"]
        assert first("cuda", torch.bfloat16) is functions["triton"]
        assert first("cpu", torch.float32) is before["auto", "cpu", torch.float32]
        gpus[1] = "Another GPU"
        tuning._order_backends()
        assert op.chosen == before, "a choice for all GPUs, of two kinds"


def test_orders_do_not_stop_cuda_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise RuntimeError("a driver's error")

    monkeypatch.setattr(torch.cuda, "device_count", broken)
    with pytest.warns(UserWarning, match="measured launches are not used: a driver's error"):
        tuning._order_backends()
