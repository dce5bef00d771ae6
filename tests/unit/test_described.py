"""`help()` of a config says what each field means."""

from __future__ import annotations

import dataclasses
import pydoc
import re

from offload import OffloadConfig
from offload.config import described


def test_help_shows_each_field_of_the_config_with_its_meaning() -> None:
    page = re.sub(r"^ \|  ", "", pydoc.plain(pydoc.render_doc(OffloadConfig)), flags=re.MULTILINE)
    for field in dataclasses.fields(OffloadConfig):
        # the field's line, and below it a text of its own
        assert re.search(rf"^{field.name}: .+ = .+\n    \S.{{20,}}", page, re.MULTILINE), field.name
    assert "Bytes pinned at construction, so that the first step finds its blocks." in page
    assert 'A size in bytes may also be text, as in "8GB"' in page


def test_a_class_whose_source_is_nowhere_keeps_its_own_text() -> None:
    made = described(type("Made", (), {"__doc__": "Made without source.", "__module__": "builtins"}))
    assert made.__doc__ == "Made without source."
