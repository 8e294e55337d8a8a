"""Puts the lines of results onto the site, so that links to `results/` of the repository lead there."""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

RESULTS = Path(__file__).parent.parent / "results"

LINK = re.compile(r"\]\((?:\.\./)+results/([\w.-]+\.jsonl)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files."""
    for path in sorted(RESULTS.glob("*.jsonl")):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lets links out of docs/ lead to the files' places on the site."""
    up = "../" * page.file.src_uri.count("/")
    return LINK.sub(lambda found: f"]({up}results/{found[1]})", markdown)
