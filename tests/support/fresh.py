"""Python in a process of its own, without the second that importing torch takes: a copy of a process that has imported
torch and nothing else. A test whose environment concerns torch's import must start an interpreter instead."""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def python(
    *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | str | None = None
) -> subprocess.CompletedProcess[str]:
    """`python *arguments`, which are `-c CODE ...`, `-m MODULE ...` or `FILE ...`, with its output as text."""
    if sys.platform != "linux":  # where a copy of a process may lack what its libraries need
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as folder:
        output = [Path(folder, name) for name in ("stdout", "stderr")]
        request = {
            "arguments": arguments,
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd or os.getcwd()),
            "output": list(map(str, output)),
        }
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        print(json.dumps(request), file=server.stdin, flush=True)
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(arguments, code, *(path.read_text() for path in output))


@functools.cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.communicate)  # closes its input, after which it ends
    return server


def _serve() -> dict[str, Any] | None:
    """Forks for each request. A child returns it; the server returns None in the end."""
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        child = os.fork()
        if child == 0:
            return request
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


def _become(request: dict[str, Any]) -> None:
    """What the interpreter does before it runs a program."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, path in enumerate(request["output"], 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    sys.path[:1] = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _run(first: str, *rest: str) -> None:
    if first == "-c":
        sys.path.insert(0, "")
        sys.argv = [first, *rest[1:]]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    elif first == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = list(rest)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(first).parent))
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    importlib.import_module("torch")
    if (request := _serve()) is not None:
        _become(request)
        _run(*request["arguments"])
