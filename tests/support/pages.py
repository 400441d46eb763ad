"""Parts of a page of docs/ that a test follows."""

import re

from tests.support.scripts import DOCS

_BLOCK = re.compile(r"(\*Not run in tests: [^\n]*\*\n\n)?^```([\w-]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands_of(page, heading):
    """The blocks of shell below a heading of the second level, without those that say that they are not run."""
    section = (DOCS / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert section, f"{page} has no heading {heading!r}"
    return [text for excuse, language, text in _BLOCK.findall(section) if language == "sh" and not excuse]


def program_of(page):
    """The page's first block of Python."""
    return next(text for _, language, text in _BLOCK.findall((DOCS / page).read_text()) if language == "python")
