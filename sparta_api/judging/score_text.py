"""What of a judge's reply is its own verdict text: reasoning, quotations and markup are taken away.

Every function keeps positions where it can (masked characters are replaced one by one), so that a number
can still be seen in its surroundings.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable

MASK = "\ufffc"
"""Stands for each character of a quotation, a code block or an object."""

_SIGNS = {
    "：": ":", "／": "/", "．": ".", "，": ",", "％": "%", "－": "-", "−": "-", "‐": "-", "‑": "-", "｛": "{",
    "“": '"', "”": '"', "„": '"', "‟": '"', "＂": '"', "‘": "'", "’": "'", "＇": "'", "٫": ".", "٪": "%", "｝": "}",
    "（": "(", "）": ")", "\u00a0": " ", "\u202f": " ", "\u2009": " ", "\u3000": " ",
}  # fmt: skip
_ZEROS = (
    "\u0660\u06f0\u07c0\u0966\u09e6\u0a66\u0ae6\u0b66\u0be6\u0c66\u0ce6\u0d66\u0de6\u0e50\u0ed0\u0f20\u1040"
    "\u1090\u17e0\u1810\u1946\u19d0\u1a80\u1a90\u1b50\u1bb0\u1c40\u1c50\ua620\ua8d0\ua900\ua9d0\ua9f0\uaa50"
    "\uabf0\uff10"
)
"""The digit zero of every script of the basic plane; its other digits follow it."""
_TABLE = {ord(sign): plain for sign, plain in _SIGNS.items()} | {
    ord(zero) + digit: str(digit) for zero in _ZEROS for digit in range(10)
}

_TAG_NAMES = (
    r"(?:[\w]{1,12}:)?(?:think(?:ing)?|thoughts?|reason(?:ing)?|reflection|scratch_?pad|analysis|rationale|"
    r"begin_of_thought|end_of_thought)"
)
_REASONING = re.compile(
    rf"(?P<open><{_TAG_NAMES}(?:\s[^<>\n]{{0,80}})?>|\[THINK\]|◁think▷|<\|START_THINKING\|>|<\|begin_of_thought\|>"
    r"|<\|channel\|>(?:analysis|commentary)<\|message\|>)"
    rf"|(?P<close></{_TAG_NAMES}\s{{0,4}}>|\[/THINK\]|◁/think▷|<\|END_THINKING\|>|<\|end_of_thought\|>"
    r"|<\|channel\|>final<\|message\|>)",
    re.IGNORECASE,
)
_STRIPPED_CHANNELS = re.compile(r"\s*analysis.*assistantfinal", re.DOTALL)
_SPECIAL_TOKENS = re.compile(r"<\|[^|<>\n]{1,40}\|>|</?s>|<eos>|<end_of_turn>|<\uff5c[^<>\n]{1,40}\uff5c>")

_QUOTED_NUMBER = re.compile(
    r"(?P<before>(?:^|[:=(]|\bis)\s{0,3})(?P<mark>[`\"']{1,3})(?P<inner>[0-9][0-9., /]{0,12})(?P=mark)"
)
_FENCE = re.compile(r"^[ \t]{0,3}(?:```+|~~~+)[^\n`]*$", re.MULTILINE)
_CLOSED_CODE = re.compile(r"(?<!`)`++[^`]++`++")
_BLOCKQUOTE = re.compile(r"^[ \t]{0,3}>.*$", re.MULTILINE)
_INLINE_CODE = re.compile(r"(?<!`)`++[^`]++(?:`++|\Z)")
_BRACKET_QUOTES = re.compile(r"«[^»]*(?:»|\Z)|「[^」]*(?:」|\Z)|『[^』]*(?:』|\Z)|《[^》]*(?:》|\Z)")
_QUOTES = re.compile(r"\"|(?<![\w\ufffc])'(?=[\w{\[<])|(?<=[\w.!?}\])>])'(?!\w)")
_OPENS_AFTER = re.compile(r"[\s(\[{:;,=/>\u2013\u2014\ufffc-]")

_SENTENCE_START = re.compile(r"(?<=[.!?;。！？])\s+|(?<=[。！？])|(?<![:\s])[ \t]*\n\s*\n")
_VERDICT_CUE = re.compile(
    r"\b(?:therefore|thus|hence|so|overall|here(?:'s| is)|"
    r"i(?:'d| would| will| have)? (?:give|rate|assign|award|score))\b",
    re.IGNORECASE,
)
_ATTRIBUTED = re.compile(
    r"\b(?:answers?|responses?|repl(?:y|ies)|candidate|assistant|author|user|student|writer|model|text|prompt|"
    r"instructions?|injection|submission|completion|output|it|they|he|she|which|that)\b[^.\n]{0,80}?"
    r"\b(?:ends?|ending|contains?|containing|includes?|including|says?|saying|claims?|claiming|states?|stating|asks?|"
    r"asking|writes?|wrote|tries|trying|attempts?|demands?|requests?|instructs?|(?:gives|grades|rates|scores) itself|"
    r"quotes?|reads?|appends?|adds?|inserts?|embeds?|begins?|starts?|concludes?|closes?|tells?|wants?)\b"
    r"|\b(?:quot(?:e|es|ing|ation)|verbatim|planted|injected|injection|self-assigned|fake)\b"
    r"|\b(?:answer|response|reply)(?:'s)? (?:text|content|body|end|ending)\b"
    r"|(?<!\bof )(?<!\bfor )\b(?:the|this|its|their|candidate's|student's|model's) "
    r"(?:answer|response|reply|text|output|submission)(?: \w+){0,2}\s*:\s*\Z",
    re.IGNORECASE,
)
_DISOWNED = re.compile(
    r"[\s,;\"'`\ufffc()<←\-–—]{0,12}(?:which|this (?:was|is (?:in|from|part|what))|"
    r"trying|in an? (?:attempt|effort)|an (?:attempt|injection)|"
    r"is (?:what|an? |the )|was |as (?:the|if|it) |to (?:grade|rate|score|manipulate|trick|fool)|at the end of|"
    r"in the (?:answer|response)|(?:that )?(?:it|they|he|she|the \w{1,12}) "
    r"(?:planted|wrote|writes|adds|added|inserted|appended|claims|claimed|put|asks|asked|wants))",
    re.IGNORECASE,
)


def plain_signs(text: str) -> str:
    """The text with decimal digits of every script, full-width signs and curly quotes as ASCII."""
    return text if text.isascii() else text.translate(_TABLE)


def without_reasoning(text: str) -> str:
    """The text without reasoning blocks.

    A block that never closes takes the rest of the text with it; a closing tag without an opening one takes
    all that stands before it.
    """
    kept: list[str] = []
    position = 0
    inside = False
    for tag in _REASONING.finditer(text):
        if tag["open"]:
            if not inside:
                kept.append(text[position : tag.start()])
            inside = True
        elif tag.start() and text[tag.start() - 1] in "\"'`":
            continue
        else:
            if not inside:
                kept.clear()
            inside = False
            position = tag.end()
    if not inside:
        kept.append(text[position:])
    rest = "".join(kept)
    return _SPECIAL_TOKENS.sub("", _STRIPPED_CHANNELS.sub("", rest, count=1) if "assistantfinal" in rest else rest)


def _mask(text: str) -> str:
    return MASK * len(text)


def mask_quotations(text: str) -> str:
    """The text with quotations, code and block quotes masked; a quoted bare number after a label stays."""
    text = _QUOTED_NUMBER.sub(lambda m: m["before"] + " " * len(m["mark"]) + m["inner"] + " " * len(m["mark"]), text)
    text = _mask_fences(text)
    text = _BLOCKQUOTE.sub(lambda m: _mask(m[0]), text)
    text = _INLINE_CODE.sub(lambda m: _mask(m[0]), text)
    text = _BRACKET_QUOTES.sub(lambda m: _mask(m[0]), text)
    return mask_quotes(text)


def _mask_fences(text: str) -> str:
    """Fenced blocks are masked, but a fence around the whole reply is only removed."""
    fences = list(_FENCE.finditer(text))
    if not fences:
        return text
    outside = text[: fences[0].start()] + (text[fences[1].end() :] if len(fences) == 2 else "")
    if len(fences) <= 2 and not outside.strip():
        return _FENCE.sub(lambda m: " " * len(m[0]), text)
    parts: list[str] = []
    position = 0
    for opening, closing in zip(fences[::2], [*fences[1::2], None], strict=False):
        end = closing.end() if closing else len(text)
        parts += [text[position : opening.start()], _mask(text[opening.start() : end])]
        position = end
    return "".join(parts) + text[position:]


def code_starts(text: str) -> Callable[[int], int | None]:
    """A function that tells where the code block or inline code around a position starts, or None outside of any."""
    if "`" not in text and "~~~" not in text:
        return lambda position: None
    fences = list(_FENCE.finditer(text))
    spans = [
        (opening.start(), closing.end() if closing else len(text))
        for opening, closing in zip(fences[::2], [*fences[1::2], None], strict=False)
    ]
    outside = _mask_fences(text)
    spans = sorted(spans + [match.span() for match in _CLOSED_CODE.finditer(outside)])
    starts = [start for start, _ in spans]

    def start_of(position: int) -> int | None:
        place = bisect_right(starts, position) - 1
        return starts[place] if place >= 0 and position < spans[place][1] else None

    return start_of


def mask_quotes(text: str) -> str:
    """Text between paired quotation marks; one that is never closed masks the rest."""
    parts: list[str] = []
    position = 0
    opened: re.Match[str] | None = None
    for mark in _QUOTES.finditer(text):
        if opened is None:
            if mark.start() == 0 or _OPENS_AFTER.match(text[mark.start() - 1]):
                opened = mark
                parts.append(text[position : mark.start()])
        elif mark[0] == opened[0] and not text[mark.end() : mark.end() + 1].isalnum():
            parts.append(_mask(text[opened.start() : mark.end()]))
            position = mark.end()
            opened = None
    if opened is not None:
        return "".join(parts) + _mask(text[opened.start() :])
    return "".join(parts) + text[position:]


def belongs_to_response(text: str, start: int, end: int) -> bool:
    """Whether the words around text[start:end] say that it stands in the response that is judged."""
    if is_attributed(text, start):
        return True
    line_end = text.find("\n", end)
    return _DISOWNED.match(text[end : min(end + 60, line_end if line_end >= 0 else len(text))]) is not None


def is_attributed(text: str, start: int) -> bool:
    """Whether the sentence that leads up to text[start] speaks of what the response says."""
    lead = _SENTENCE_START.split(text[max(0, start - 240) : start])[-1]
    attributed = _ATTRIBUTED.search(lead)
    return attributed is not None and not _VERDICT_CUE.search(lead, attributed.end())
