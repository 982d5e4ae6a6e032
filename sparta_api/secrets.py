"""Keeps keys out of files, logs and messages.

Every secret that the process reads is registered once; `scrub` then masks it, in the forms in which
servers and libraries echo it, wherever text leaves the process, and `mask` in what servers send.
"""

from __future__ import annotations

import base64
import json
import re
from urllib.parse import quote

MASK = "***"
SHORTEST = 4
"""Shorter texts are no secrets."""
SHORTEST_IN_ANSWERS = 12
"""Placeholders like "none" or "EMPTY", which serve as keys of local servers, stand in answers as ordinary words."""

_known: set[str] = set()
_in_answers: set[bytes] = set()
_BEARER = re.compile(r"(?i)(bearer\s+|api[-_]?key['\"]?\s*[:=]\s*['\"]?)[^\s'\",}]{6,}")
_KEY_SHAPE = re.compile(r"\b(?:sk|pk|rk|tgp_v1|tml|hf|gsk|fw|xai|nvapi|AIza)[-_][A-Za-z0-9_\-]{12,}")
_URL_CREDENTIALS = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^\s/@]+@")


def register(secret: str) -> None:
    """Makes `scrub` and `mask` hide this text from now on: raw, stripped, percent-encoded, as in JSON, in base64."""
    bare = secret.strip()
    forms = {secret, bare, quote(bare, safe=""), json.dumps(bare)[1:-1], base64.b64encode(bare.encode()).decode()}
    _known.update(form for form in forms if len(form) >= SHORTEST)
    _in_answers.update(form.encode() for form in forms if len(form) >= SHORTEST_IN_ANSWERS)


def scrub(text: str) -> str:
    """The text with every registered secret, bearer token, key-like word and URL password masked."""
    for secret in sorted(_known, key=len, reverse=True):
        text = text.replace(secret, MASK)
    text = _BEARER.sub(lambda m: m.group(1) + MASK, text)
    text = _KEY_SHAPE.sub(MASK, text)
    return _URL_CREDENTIALS.sub(lambda m: m.group(1) + MASK + "@", text)


def mask(body: bytes) -> bytes:
    """What a server sent, with the registered secrets that it echoes masked. Other text is left as it is."""
    for secret in _in_answers:
        if secret in body:
            body = body.replace(secret, MASK.encode())
    return body


def looks_like_key(value: str) -> bool:
    """Whether a literal in a configuration file is most likely an API key."""
    return bool(_KEY_SHAPE.search(value) or _BEARER.search(value))
