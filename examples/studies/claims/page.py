"""The page: a row and a section for each claim, from the results and the explanations in `why.md`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from examples.studies.ablation.page import table
from examples.studies.ablation.settings import UsageError
from examples.studies.claims.claims import CLAIMS
from examples.studies.claims.results import Results
from examples.studies.claims.studies import STUDIES
from examples.studies.claims.tables import MISSING

WHY = Path(__file__).with_name("why.md")
#: The sections of `why.md` without a claim: the beginning and end of the page.
FRAME = ("begin", "end")
#: The studies with a picture of losses during training, and the losses: of batches, or of held-out text.
DRAWN = {"placement_deep": "curve", "placement_xavier": "curve", "dropout_often": "held_out_curve"}


def write(results: Results, path: Path) -> None:
    """Writes the page to `path` and its pictures to the folder of the same name.

    Raises:
        UsageError: it cannot be written, or an explanation is missing or names a number that its claim does not have.
    """
    why = explanations(WHY.read_text(encoding="utf-8"))
    draw(results, path.with_suffix(""))
    text = render(results, why, pictures(results, path.with_suffix("")))
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--page {path}: {error.strerror or error}") from None
    print(f"{path}: written")


def render(results: Results, why: Mapping[str, str], shown: Mapping[str, list[str]]) -> str:
    """The page as Markdown. shown: lines with pictures, by claim."""
    values = {key: claim.values(results) for key, claim in CLAIMS.items()}
    rows = [
        [f"[{claim.title}](#{anchor(claim.title)})", claim.says, fill(claim.measured, values[key], key)]
        for key, claim in CLAIMS.items()
    ]
    parts = [why["begin"], table(["claim", "tutorials", "measured"], rows).replace("---:", "---")]
    for key, claim in CLAIMS.items():
        parts += [
            f"## {claim.title}",
            f"**Claimed:** {claim.says}.",
            f"**Measured:** {fill(claim.measured, values[key], key)}.",
            claim.body(results),
            *shown.get(key, []),
            f"**Why it differs:**\n\n{fill(why[key], values[key], key)}",
        ]
    parts.append(why["end"])
    return "\n\n".join(parts) + "\n"


def explanations(text: str) -> dict[str, str]:
    """The sections of `why.md` by the comments before them.

    Raises:
        UsageError: a section is missing, empty or has no claim.
    """
    parts = re.split(r"^<!-- (\w+) -->$", text, flags=re.MULTILINE)[1:]
    found = {key: body.strip() for key, body in zip(parts[::2], parts[1::2], strict=True)}
    wanted = {*CLAIMS, *FRAME}
    if found.keys() != wanted or not all(found.values()):
        different = sorted(found.keys() ^ wanted | {key for key, body in found.items() if not body})
        raise UsageError(f"{WHY} must explain each claim once; look at {', '.join(different)}")
    return found


def fill(text: str, values: Mapping[str, str], key: str) -> str:
    """The text with numbers in place of their names in braces. If a line has no measured number, it only says so.

    Raises:
        UsageError: there is no such number.
    """

    named = re.findall(r"\{(\w+)\}", text)
    if named and all(values.get(name) == MISSING for name in named) and "\n" not in text:
        return MISSING

    def number(found: re.Match[str]) -> str:
        if found[1] not in values:
            raise UsageError(f"{key}: there is no number {found[0]}; there are {', '.join(values)}")
        return values[found[1]]

    return re.sub(r"\{(\w+)\}", number, text)


def anchor(title: str) -> str:
    """The anchor of a heading on GitHub."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def pictures(results: Results, folder: Path) -> dict[str, list[str]]:
    """The lines with pictures of losses during training by claim, for the pictures in the folder."""
    found: dict[str, list[str]] = {}
    for key, curve in DRAWN.items():
        if key in results.get("studies", {}) and (folder / f"{key}.png").exists():
            what = "Losses" if curve == "curve" else "Held-out losses"
            line = f"![{what} on the way, {key.replace('_', ' ')}]({folder.name}/{key}.png)"
            found.setdefault(key.partition("_")[0], []).append(line)
    return found


def draw(results: Results, folder: Path) -> None:
    """Draws the losses during training. Without matplotlib, existing pictures stay."""
    try:
        from examples.studies.ablation import plots
    except ImportError as error:
        print(f"no new pictures: matplotlib does not import ({error}); pip install 'foundry-kernels[train]'")
        return
    for key, curve in DRAWN.items():
        if (study := results.get("studies", {}).get(key)) is not None:
            runs = {
                label: {seed: {"curve": run[curve]} for seed, run in study["runs"][label].items()}
                for label in STUDIES[key].variants
                if label in study["runs"]
            }
            titles = {label: label for label in runs}
            plots.curves({"settings": study["settings"], "runs": runs, "titles": titles}, folder / f"{key}.png")
