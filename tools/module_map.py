"""The table of modules on the page of the kernels: `<!-- modules: FOLDER -->` becomes the first sentence of each docstring."""

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def modules(folder: str) -> str:
    """Returns a table of the modules below a folder, with the first sentence of their docstrings."""
    lines = ["| module | what is there |", "| --- | --- |"]
    for path in sorted((ROOT / folder).rglob("*.py")):
        words = ast.get_docstring(ast.parse(path.read_text()))
        if words:
            sentence = re.split(r"(?<=[.:])\s", " ".join(words.split()), maxsplit=1)[0]
            lines.append(f"| `{path.relative_to(ROOT).as_posix()}` | {sentence.rstrip(':')} |")
    return "\n".join(lines)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fills in the tables, when MkDocs reads a page."""
    return re.sub(r"<!-- modules: (\S+) -->", lambda found: modules(found[1]), markdown)
