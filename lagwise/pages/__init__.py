"""What the pages of the lens and of the report share: a look, charts, tables, and how a template is filled."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
"""Those of curves, on pages and in figures: Okabe and Ito's, which the colour-blind can tell apart."""


def fill(template: str, values: Mapping[str, str]) -> str:
    """Returns a template with values in the places of their names; the style and the charts of all pages are there already.

    All places are filled in one pass, so that what is filled in is never read as a place to fill.

    Args:
        template: A page with places `{{name}}`, see `text_of`.
        values: HTML by name; what comes from outside must be escaped.

    >>> fill("<h1>{{title}}</h1>", {"title": "{{style}}"})
    '<h1>{{style}}</h1>'
    """
    known = {"style": style(), "charts": charts(), **values}
    return re.sub(r"\{\{(\w+)\}\}", lambda match: known[match[1]], template)


def style() -> str:
    """Returns the style of all pages, with the colours of curves as `--c0`, `--c1`, ..."""
    colours = "".join(f"--c{number}: {colour}; " for number, colour in enumerate(COLOURS))
    return f":root {{ {colours}}}\n{text_of('lagwise.pages', 'style.css')}"


def charts() -> str:
    """Returns the script that all pages share."""
    return f"const COLOURS = {len(COLOURS)};\n{text_of('lagwise.pages', 'charts.js')}"


def text_of(package: str, name: str) -> str:
    """Returns a file that comes with a package."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def embedded(content: Any) -> str:
    """Returns JSON that can stand in a script element: nothing in it ends the element.

    >>> embedded({"</script>": float("nan")})
    '{"\\\\u003c/script\\\\u003e": null}'
    """
    return json.dumps(finite(content), allow_nan=False).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def finite(content: Any) -> Any:
    """Returns numbers in lists and dicts with six digits, and None for those that are not finite, which JSON does not have.

    >>> finite([1 / 3, float("inf"), 7])
    [0.333333, None, 7]
    """
    if isinstance(content, dict):
        return {name: finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    if isinstance(content, float):
        return float(f"{content:.6g}") if math.isfinite(content) else None
    return content


def notes(said: Sequence[str]) -> str:
    """Returns what a reader must know before the numbers, as paragraphs."""
    return "".join(f'<p class="note" role="note">{escape(each)}</p>' for each in said)


def definitions(fields: Mapping[str, str]) -> str:
    """Returns names and words as a list of HTML."""
    entries = "".join(f"<dt>{escape(name)}</dt><dd>{escape(words)}</dd>" for name, words in fields.items())
    return f"<dl>{entries}</dl>"


def options(names: Sequence[str]) -> str:
    """Returns the choices of a select."""
    return "".join(f"<option>{escape(name)}</option>" for name in names)


def cell(value: float | None, text: str) -> str:
    """Returns a cell with the number that it is sorted by."""
    return f'<td data-value="{"" if value is None or not math.isfinite(value) else value!r}">{escape(text)}</td>'


def html_table(headers: Sequence[str], body: str, mark: str, *, label: str, plain: Sequence[str] = ()) -> str:
    """Returns a table whose headers are buttons that sort it, but for the plain ones; it scrolls in a box of its own."""
    heads = "".join(
        f'<th scope="col">{escape(name)}</th>'
        if name in plain
        else f'<th scope="col" aria-sort="none"><button type="button">{escape(name)}</button></th>'
        for name in headers
    )
    table = f'<table class="sorts" {mark}><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'
    return scroll_box(table, label)


def scroll_box(content: str, label: str) -> str:
    """Returns a box in which what is wide scrolls, by keys too."""
    return f'<div class="wide" tabindex="0" role="group" aria-label="{escape(label)}">{content}</div>'
