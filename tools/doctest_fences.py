"""Shows doctests of docstrings as code: Markdown reads `>>>` as three quotations."""

import re

import griffe

# A doctest goes on to the next empty line.
DOCTEST = re.compile(r"^( *)>>> .*(?:\n(?! *$).*)*", flags=re.MULTILINE)


def fenced(text: str) -> str:
    """Returns a docstring with its doctests in fences.

    >>> fenced("Adds.\\n\\n>>> 1 + 1\\n2").splitlines()
    ['Adds.', '', '```pycon', '>>> 1 + 1', '2', '```']
    """
    return DOCTEST.sub(lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", text)


class DoctestFences(griffe.Extension):
    """Puts the doctests of every object into fences before its docstring is read."""

    def on_object(self, *, obj: griffe.Object, **_) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
