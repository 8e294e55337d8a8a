"""Optional packages: how a user installs the ones that are missing."""

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname


def install_command(extra: str) -> str:
    """Returns the command that adds an extra to this installation, from where Lagwise itself came.

    Lagwise may come from a folder, from a repository or from an index, and only the last of them knows it by its name alone.
    """
    clone = Path(__file__).parent.parent
    if (clone / "pyproject.toml").is_file():
        return from_folder(clone, extra)
    source = installed_from()
    if "dir_info" in source:
        return from_folder(Path(url2pathname(urlsplit(source["url"]).path)), extra)
    origin = f" @ {source['vcs_info']['vcs']}+{source['url']}" if "vcs_info" in source else ""
    return f"pip install 'lagwise[{extra}]{origin}'"


def from_folder(folder: Path, extra: str) -> str:
    """Returns the command that installs an extra from a clone."""
    return f"pip install '{'.' if folder == Path.cwd() else folder}[{extra}]'"


def installed_from() -> dict[str, Any]:
    """Returns what pip noted of where Lagwise came from; nothing where it came from an index."""
    try:
        return json.loads(distribution("lagwise").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        return {}
