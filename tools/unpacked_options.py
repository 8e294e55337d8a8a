"""Shows options that functions hand on as `**options` one by one in the reference, where their docstrings do."""

import re
from collections.abc import Iterator

import griffe

from lagwise.call import DEFAULTS

KEYWORD, REST = griffe.ParameterKind.keyword_only, griffe.ParameterKind.var_keyword


class UnpackedOptions(griffe.Extension):
    """Replaces `**options: Unpack[...]` by the options of a call, and adds what a base class takes."""

    def on_package(self, *, pkg: griffe.Module, **_) -> None:
        for function in functions_of(pkg):
            told = arguments_told(function)
            added = [
                each for given in function.parameters for each in (*inherited(given, function, told), *unpacked(given, pkg, told))
            ]
            function.parameters = griffe.Parameters(*added)


def functions_of(parent: griffe.Module | griffe.Class) -> Iterator[griffe.Function]:
    """Yields all functions of a module or a class, those of its parts too."""
    for member in parent.members.values():
        if isinstance(member, griffe.Function):
            yield member
        elif isinstance(member, griffe.Module | griffe.Class):
            yield from functions_of(member)


def arguments_told(function: griffe.Function) -> set[str]:
    """Returns the arguments that a docstring tells about; those of a class are in the docstring of the class."""
    owner = function.parent if function.name == "__init__" else function
    words = owner.docstring.value if owner is not None and owner.docstring else ""
    return set(re.findall(r"^ {4,}(\w+): ", words, flags=re.MULTILINE))


def unpacked(given: griffe.Parameter, package: griffe.Module, told: set[str]) -> list[griffe.Parameter]:
    """Returns the options of a call that a parameter stands for; one that is told about itself stays."""
    kind = given.annotation
    if given.kind is not REST or given.name in told or not isinstance(kind, griffe.ExprSubscript):
        return [given]
    options = package[kind.slice.canonical_path.removeprefix(f"{package.name}.")].attributes
    return [
        griffe.Parameter(name, annotation=options[name].annotation, kind=KEYWORD, default=repr(default))
        for name, default in DEFAULTS.items()
        if name in options
    ]


def inherited(given: griffe.Parameter, function: griffe.Function, told: set[str]) -> list[griffe.Parameter]:
    """Returns the arguments of a base class that a class takes as `**options` and tells about."""
    owner = function.parent
    if given.kind is not REST or function.name != "__init__" or not isinstance(owner, griffe.Class):
        return []
    own = {each.name for each in function.parameters}
    makers = [base.members["__init__"] for base in owner.resolved_bases if "__init__" in base.members]
    return [each for maker in makers for each in maker.parameters if each.name in told - own]
