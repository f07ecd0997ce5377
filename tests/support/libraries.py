"""`make test-integrations`: trainers and other libraries around patched models, and their page.

They are installed into build/libraries, by the versions of tests/integrations/libraries/requirements.txt; torch,
transformers and all else are those of the environment which runs this script.
"""

from __future__ import annotations

import sys

from releases import ROOT, environment, run_tests

TESTS = ROOT / "tests" / "integrations" / "libraries"


def main(arguments: list[str]) -> int:
    # DeepSpeed's build asks for torch, which is there.
    python = environment("libraries", "--no-build-isolation", "--requirement", str(TESTS / "requirements.txt"))
    page = "tests/proof/test_readme.py::test_every_page_runs_from_top_to_bottom[docs/trainers.md]"
    batches = str(TESTS.parent / "test_continuous_batching.py")  # which finds psutil here
    return run_tests(python, str(TESTS), batches, page, *arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
