"""`make test-integrations`: trainers and other libraries around patched models.

They are installed into build/libraries, by the versions of tests/integrations/libraries/requirements.txt; torch,
transformers and all else are those of the environment which runs this script.
"""

from __future__ import annotations

import sys

from releases import ROOT, environment, run_tests

TESTS = ROOT / "tests" / "integrations" / "libraries"


def main(arguments: list[str]) -> int:
    python = environment("libraries", "--requirement", str(TESTS / "requirements.txt"))
    return run_tests(python, str(TESTS), *arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
