"""For mkdocs: a link that leaves docs/, to a script or to results, becomes the path's name; the site has no such page.
tests/proof/test_readme.py checks that it leads somewhere in the repository."""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\((?:\.\./)+([^)#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    depth = page.file.src_uri.count("/") + 1  # of ../ that lead out of docs/

    def named(link: re.Match[str]) -> str:
        if link[0].count("../") < depth:
            return link[0]
        return f"`{link[2]}`" if link[1].strip("`") == link[2] else f"{link[1]} (`{link[2]}`)"

    return OUTSIDE.sub(named, markdown)
