"""Text and numbers as a terminal may safely show them.

Names, messages and answers come from files and models, so they are hostile: an escape sequence could
recolour or rewrite the screen, a bidirectional override could make one name look like another.
"""

from __future__ import annotations

import os
import re
import unicodedata

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

ELLIPSIS = "…"
_ESCAPE_SEQUENCE = re.compile(
    r"(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # OSC: window titles, links
    r"|(?:\x1b[PX^_]|[\x90\x98\x9e\x9f])[^\x1b\x9c]*(?:\x1b\\|\x9c)?"  # DCS and its kind
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # CSI: colours, cursor
    r"|\x1b[ -/]*[0-~]?"
)
_MARKS_ON_A_LETTER = 3


def clean(text: str, *, lines: bool = False) -> str:
    """The text without escape sequences, control characters, invisible or direction-changing characters.

    Line breaks become spaces unless `lines`; lone surrogates become U+FFFD; at most three combining marks
    stay on one letter. Rich markup is left as it is: show the result as a `Text`, never as markup.
    """
    kept: list[str] = []
    marks = 0
    for char in _ESCAPE_SEQUENCE.sub("", text.replace("\r\n", "\n")):
        category = unicodedata.category(char)
        marks = marks + 1 if category in ("Mn", "Me") else 0
        if char in "\n\t\r\v\f" or category in ("Zl", "Zp"):
            kept.append("\n" if lines and char != "\t" else " ")
        elif category == "Cs":
            kept.append("\N{REPLACEMENT CHARACTER}")
        elif category not in ("Cc", "Cf") and marks <= _MARKS_ON_A_LETTER:
            kept.append(char)
    return "".join(kept)


def shorten(text: str, cells: int) -> str:
    """A clean text of at most `cells` terminal columns; a longer one loses its middle, not its end."""
    if cell_len(text) <= cells:
        return text
    head = max(cells // 2, 0)
    tail = cells - 1 - head
    end = set_cell_size(text[::-1], tail)[::-1].strip() if tail > 0 else ""
    return set_cell_size(text, head).rstrip() + ELLIPSIS + end


def safe(text: str, cells: int = 400, style: str = "") -> Text:
    """A hostile text as one line that is shown literally and takes at most `cells` columns."""
    return Text(shorten(clean(text), cells), style=style, no_wrap=True, overflow="ellipsis")


def is_live(console: Console) -> bool:
    """Whether a live view may be drawn: a real, capable terminal whose user does not want plain output."""
    environment = os.environ
    if environment.get("NO_COLOR") or environment.get("CI"):
        return False
    return console.file.isatty() and not console.is_dumb_terminal


def count(number: float) -> str:
    """A count: 950, 9,999, 12.3k, 4.5M, 1.2G."""
    for limit, divisor, unit in ((10_000, 1, ""), (999_950, 1e3, "k"), (999_950_000, 1e6, "M")):
        if abs(number) < limit:
            return f"{number:,.0f}" if not unit else f"{number / divisor:.1f}{unit}"
    return f"{number / 1e9:.1f}G"


def clock(seconds: float) -> str:
    """A duration: 0:07, 12:04, 1:02:03."""
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def counted(number: int, noun: str) -> str:
    """ "1 iteration", "2 iterations"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def dollars(usd: float | None) -> str:
    """USD with the digits that matter: 12.30 USD, 0.0034 USD, or "unknown"."""
    if usd is None:
        return "unknown"
    digits = 2 if usd == 0 or usd >= 0.1 else 4
    return f"{usd:,.{digits}f} USD"
