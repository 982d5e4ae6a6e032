"""Keeps keys out of files, logs and messages.

Every secret that the process reads is registered once; `scrub` then masks it, in the forms in which
servers and libraries echo it, wherever text leaves the process.
"""

from __future__ import annotations

import re
from urllib.parse import quote

MASK = "***"
_known: set[str] = set()
_BEARER = re.compile(r"(?i)(bearer\s+|api[-_]?key['\"]?\s*[:=]\s*['\"]?)[^\s'\",}]{6,}")
_KEY_SHAPE = re.compile(r"\b(?:sk|pk|rk|tgp_v1|tml|hf|gsk|fw|xai|nvapi|AIza)[-_][A-Za-z0-9_\-]{12,}")
_URL_CREDENTIALS = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^\s/@]+@")


def register(secret: str) -> None:
    """Makes `scrub` mask this text from now on (raw, stripped and percent-encoded)."""
    for form in (secret, secret.strip(), quote(secret.strip(), safe="")):
        if len(form) >= 4:
            _known.add(form)


def scrub(text: str) -> str:
    """The text with every registered secret, bearer token, key-like word and URL password masked."""
    for secret in sorted(_known, key=len, reverse=True):
        text = text.replace(secret, MASK)
    text = _BEARER.sub(lambda m: m.group(1) + MASK, text)
    text = _KEY_SHAPE.sub(MASK, text)
    return _URL_CREDENTIALS.sub(lambda m: m.group(1) + MASK + "@", text)


def looks_like_key(value: str) -> bool:
    """Whether a literal in a configuration file is most likely an API key."""
    return bool(_KEY_SHAPE.search(value) or _BEARER.search(value))
