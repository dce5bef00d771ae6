"""What `help()` shows of a dataclass: its fields, with the docstring that stands under each.

One invariant: the text under a field is written once. Python keeps no docstring of a field, so it is read
from the source when the class is made; where there is no source, `help()` shows the class's own text only.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import TypeVar

C = TypeVar("C", bound=type)


def described(cls: C) -> C:
    """The class, with `__doc__` continued by its fields: name, type, default and docstring of each."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError, SyntaxError):
        return cls
    assert isinstance(tree, ast.ClassDef)
    fields = []
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        text = below.value if isinstance(below, ast.Expr) else None
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Constant):
            meaning = inspect.cleandoc(str(text.value))
            fields.append(f"{ast.unparse(field)}\n{textwrap.indent(meaning, '    ')}")
    cls.__doc__ = "\n\n".join([inspect.cleandoc(cls.__doc__ or ""), "Fields:", *fields])
    return cls
