"""The peer tool, LangChain's `abatch`, in a virtual environment of its own: `python -m bench.peer` installs it.

It lives in the user's cache, so that its dependencies stay away from the project's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("langchain-openai", "uvloop")


@dataclass(frozen=True)
class Peer:
    """An installed peer tool; `command` takes BASE_URL BODIES REQUESTS as bench.clients does after its first word."""

    name: str
    command: list[str]


def _home() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "sparta-api" / "bench-peer"


def _interpreter() -> Path:
    return _home() / "bin" / "python"


def installed() -> Peer | None:
    """The peer tool, where it was installed."""
    mark = _home() / "installed"
    if not mark.exists():
        return None
    script = Path(__file__).with_name("langchain_batch.py")
    return Peer(f"{PACKAGES[0]} {mark.read_text().strip()}", [str(_interpreter()), str(script)])


def install() -> None:
    """Makes the virtual environment and installs the tool into it."""
    subprocess.run([sys.executable, "-m", "venv", _home()], check=True)
    subprocess.run([_interpreter(), "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    asked = f"from importlib.metadata import version; print(version({PACKAGES[0]!r}))"
    found = subprocess.run([_interpreter(), "-c", asked], check=True, capture_output=True, text=True)
    (_home() / "installed").write_text(found.stdout)


if __name__ == "__main__":
    install()
