"""What a server's log says about its end: the line that names the cause, without the noise around it."""

from __future__ import annotations

import re
from pathlib import Path

from sparta_api.secrets import scrub

TAIL_BYTES = 1 << 17
SHOWN = 300
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PREFIX = re.compile(
    r"^(?:\(\w[\w-]* pid=\d+\)\s*)?(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)[:\s]+\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? )?"
    r"(?:\[[\w./-]+:\d+\] )?"
)
_ERROR = re.compile(
    r"^(?:[A-Za-z_][\w.]*(?:Error|Exception|Exit)\b|.*\b(?:error|fatal|failed|cannot)\b)", re.IGNORECASE
)
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Exit)\b:? *\S")
_CONSEQUENCE = re.compile(
    r"root cause|initialization failed|EngineDeadError|KeyboardInterrupt|CancelledError|SystemExit|BrokenPipe|"
    r"EngineCore (?:failed|encountered)|reference leak|leaked|nanobind|Traceback|Warning: "
)
_COUNTED = re.compile(r"validation errors? for \S+$")


def useful_line(log: Path, start: int = 0) -> str:
    """The line of the log, from byte `start` on, that most likely names the cause of the server's end.

    The last exception that is not merely the consequence of another one; else the last line that speaks of an
    error; else the last line. Masked and cut; "it printed nothing" where there is none.
    """
    lines = _lines(log, start)
    plain = [text for text in (_plain(line) for line in lines) if text]
    causes = [index for index, text in enumerate(plain) if not _CONSEQUENCE.search(text)]
    for pattern in (_EXCEPTION, _ERROR):
        found = [index for index in causes if pattern.match(plain[index])]
        if found:
            return _shown(plain, found[-1])
    return _shown(plain, causes[-1]) if causes else "it printed nothing"


def _lines(log: Path, start: int) -> list[str]:
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(start, size - TAIL_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def _plain(line: str) -> str:
    """The line without colours and logger's prefix; empty for indented lines, such as those of a traceback."""
    text = _PREFIX.sub("", _COLOUR.sub("", line).rstrip(), count=1)
    return "" if text.startswith((" ", "\t")) and not text.strip().startswith("Value error") else text.strip()


def _shown(lines: list[str], index: int) -> str:
    text = lines[index]
    if _COUNTED.search(text) and index + 1 < len(lines):
        text = lines[index + 1]
    return scrub(text)[:SHOWN]
