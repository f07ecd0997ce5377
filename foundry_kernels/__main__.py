"""Which backends of each operation work here, and why the others do not; or, with a command:

python -m foundry_kernels check                   # tests every operation on this device, 30 seconds
python -m foundry_kernels tune                    # the fastest launches and backends on this GPU, measured and kept
python -m foundry_kernels inspect OP --arch 90    # what Triton kernels cost on a GPU that is not present
python -m foundry_kernels size llama-2-7b         # a model's parameters, cache, FLOPs and training memory, by part
python -m foundry_kernels patch-report            # what fk.patch replaces in a family of transformers or a checkpoint
python -m foundry_kernels hub-layout FOLDER       # this package as the Hub's library `kernels` loads it from a path

`foundry-kernels` is the same command.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

from foundry_kernels import _triton
from foundry_kernels.tools import environment


def main(argv: list[str]) -> int:
    _triton.load()  # or it would not be known whether Triton imports
    commands = {
        "check": check,
        "hub-layout": hub_layout,
        "inspect": inspect,
        "patch-report": patch_report,
        "size": size,
        "tune": tune,
    }
    if argv and argv[0] in commands:  # which parse what follows
        return commands[argv[0]](argv[1:])
    parser = argparse.ArgumentParser(
        prog="python -m foundry_kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=environment.heading())
    parser.add_argument("--report", action="store_true", help="with all that a bug report should say of this machine")
    parser.add_argument("command", nargs="?", choices=tuple(commands), help="each has a --help of its own")
    options = parser.parse_args(argv)
    print("\n".join(environment.report() if options.report else environment.overview()))
    return 0


def inspect(argv: list[str]) -> int:
    from foundry_kernels.tools.inspect.command import main

    return main(argv)


def check(argv: list[str]) -> int:
    from foundry_kernels.tools.check import main

    return main(argv, [environment.heading(), "", *environment.versions()])


def tune(argv: list[str]) -> int:
    from foundry_kernels.tools.tune import main

    return main(argv, [environment.heading(), "", *environment.versions()])


def size(argv: list[str]) -> int:
    from foundry_kernels.diagnostics.size import main

    return main(argv)


def patch_report(argv: list[str]) -> int:
    from foundry_kernels.integrations.patching.patch_report import main

    return main(argv)


def hub_layout(argv: list[str]) -> int:
    from foundry_kernels.integrations.trainers.hub import main

    return main(argv)


def command() -> int:
    """The program: `main` of its arguments, which ends quietly where nobody reads on (`... | head -1`)."""
    try:
        try:
            return main(sys.argv[1:])
        finally:  # also of a SystemExit: what argparse printed
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        return 128 + signal.SIGPIPE if hasattr(signal, "SIGPIPE") else 1


if __name__ == "__main__":
    sys.exit(command())
