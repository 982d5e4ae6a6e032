"""Judge prompts: the templates of `prompts/` and a user's own, rendered as one user message.

A response is hostile text. It is shown between two lines that it cannot know (`boundary`), without
characters that a judge cannot see and without the signs by which chat templates and servers tell roles and
reasoning apart.
"""

from __future__ import annotations

import hashlib
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.sandbox import SandboxedEnvironment

from sparta_api.config.tribe import Judging
from sparta_api.errors import ConfigError
from sparta_api.judging.expected import label_scale

VARIABLES = ("instruction", "response", "worst", "best", "boundary", "rubric", "reference", "verdict")
"""What a template may use; prompts/README.md says what each holds."""
PAIR_VARIABLES = ("response_a", "response_b", *(name for name in VARIABLES if name != "response"))
"""What the template of a pairwise judgment may use."""

VERDICT = '{"score": n}'
PAIR_VERDICT = '{"score_a": n, "score_b": n}'

_HERE = Path(__file__).resolve().parent.parent
_DIRECTORY = _HERE / "prompts" if (_HERE / "prompts").is_dir() else _HERE.parent / "prompts"
_ENVIRONMENT = SandboxedEnvironment(
    undefined=jinja2.StrictUndefined,
    autoescape=False,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=False,
)
_SAMPLE: dict[str, Any] = {
    "instruction": "instruction", "worst": 1, "best": 10, "boundary": "boundary", "rubric": None, "reference": None,
    "verdict": "verdict",
}  # fmt: skip
_SHOWN = {name: f"{name}-5e0c1f" for name in ("response", "response_a", "response_b")}
_NO_RESPONSE = "{}: the template does not show {}; write {{{{ {} }}}} where it belongs."
_FORMAT_STYLE = re.compile(r"(?<!\{)\{\s*(" + "|".join({*VARIABLES, *PAIR_VARIABLES}) + r")\s*\}(?!\})")

_INVISIBLE = (
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\u3164\ufeff\uffa0"
    "\ufff0-\ufffb\U000e0000-\U000e0fff\U0001d173-\U0001d17a\ud800-\udfff\ue000-\uf8ff\U000f0000-\U0010ffff"
)
_HIDDEN = re.compile(
    rf"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f{_INVISIBLE}]+|[\ufe00-\ufe0f]{{2,}}|[\u200c\u200d]{{2,}}"
    r"|(?<=[\x00-\x7f])[\u200c\u200d\ufe00-\ufe0e]|[\u200c\u200d](?=[\x00-\x7f])"
)
_UNSEEN = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
"""Those of the hidden characters that Python calls printable."""
_LINE_ENDS = re.compile("\r\n?|[\u0085\u2028\u2029]")
_SPACES = re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f]")
_ROLE_SIGNS = re.compile(
    r"<(?=[|\uff5c]|/?(?:s|eos|bos|pad|unk|start_of_turn|end_of_turn|(?:\w{1,12}:)?(?:think(?:ing)?|thoughts?|reason(?:ing)?|"
    r"reflection|scratch_?pad|analysis)|tool_call|tool_response)\s{0,4}>|<\s{0,4}/?SYS>>)|\[(?=/?(?:INST|THINK|SYSTEM_PROMPT)\])|◁(?=/?think▷)",
    re.IGNORECASE,
)
_HARMLESS = {"<": "\u2039", "[": "\uff3b", "◁": "\u2039"}


class Template:
    """A checked judge prompt.

    `name` is what messages and run.json call it; `sha256` is the hash of its source, by which a continued run
    notices a change. With `pair` it shows two responses.
    """

    def __init__(self, source: str, name: str, filename: str, pair: bool = False) -> None:
        """Compiles and tries the source; raises ConfigError naming file:line for whatever is wrong with it."""
        self.name = name
        self.filename = filename
        self.variables = PAIR_VARIABLES if pair else VARIABLES
        self._responses = ("response_a", "response_b") if pair else ("response",)
        self.sha256 = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()
        try:
            tree = _ENVIRONMENT.parse(source, name, filename)
            code = _ENVIRONMENT.compile(tree, name, filename)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"{filename}:{error.lineno}: the template is not valid Jinja ({error.message})."
            ) from None
        self._check_names(source, tree)
        self._template = _ENVIRONMENT.template_class.from_code(_ENVIRONMENT, code, _ENVIRONMENT.make_globals(None))
        shown = {name: _SHOWN[name] for name in self._responses}
        for values in (_SAMPLE, _SAMPLE | {"rubric": "rubric", "reference": "reference"}):
            prompt = self.render(**values, **shown)
            for name, text in shown.items():
                if text not in prompt:
                    raise self._no_response(name)

    def render(self, **values: Any) -> str:
        """The prompt with these values; ConfigError naming file:line when the template cannot use them."""
        try:
            return self._template.render(values)
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            lines = [
                frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == self.filename
            ]
            place = f"{self.filename}:{lines[-1]}" if lines else self.filename
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"{place}: the template fails ({reason}); it may use {', '.join(self.variables)}."
            ) from None

    def _check_names(self, source: str, tree: nodes.Template) -> None:
        undeclared = jinja2.meta.find_undeclared_variables(tree)
        for name in sorted(undeclared - set(self.variables)):
            line = min((n.lineno for n in _names(tree) if n.name == name), default=1)
            raise ConfigError(
                f"{self.filename}:{line}: unknown variable '{name}'; a template may use {', '.join(self.variables)}."
            )
        for found in _FORMAT_STYLE.finditer(source):
            line = source.count("\n", 0, found.start()) + 1
            raise ConfigError(
                f"{self.filename}:{line}: {found[0]} is plain text here; write {{{{ {found[1]} }}}} instead."
            )
        for name in self._responses:
            if name not in undeclared:
                raise self._no_response(name)

    def _no_response(self, variable: str) -> ConfigError:
        what = "the response" if variable == "response" else f"response {variable[-1].upper()}"
        return ConfigError(_NO_RESPONSE.format(self.filename, what, variable))


def _names(tree: nodes.Template) -> Iterator[nodes.Name]:
    yield from tree.find_all(nodes.Name)


def template_names() -> list[str]:
    """The templates that come with the package."""
    return sorted(path.stem for path in _DIRECTORY.glob("*.j2"))


def load_template(name_or_path: str, directory: Path | None = None, pair: bool = False) -> Template:
    """A template by its name in prompts/, or a file relative to `directory` (that of tribe.yaml).

    `pair` says that it shows two responses.

    Raises ConfigError naming the file, and the line where there is one, when it is missing or wrong.
    """
    shipped = template_names()
    if name_or_path in shipped:
        path = _DIRECTORY / f"{name_or_path}.j2"
    else:
        path = (directory or Path()) / Path(name_or_path).expanduser()
    try:
        source = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(
            f"judging.prompt: no template '{name_or_path}' ({path}); name a file or one of: {', '.join(shipped)}."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"judging.prompt: {path} cannot be read ({error}); it must be a UTF-8 text file.") from None
    return Template(source, name_or_path, str(path), pair)


def template_for(judging: Judging, directory: Path | None = None) -> Template:
    """The template that a configuration means by `score`: one response, a pair, a rubric."""
    name = judging.prompt
    pair = judging.mode == "pairwise"
    if pair and name == "score":
        name = "pair"
    elif judging.rubric and name == "score":
        name = "score_rubric"
    return load_template(name, directory, pair)


def pair_messages(
    template: Template,
    *,
    instruction: Sequence[Mapping[str, Any]],
    responses: tuple[str, str],
    scale: tuple[int, int],
    boundary: str,
    rubric: str | None = None,
    reference: str | None = None,
    verdict: str = PAIR_VERDICT,
) -> list[dict[str, str]]:
    """The messages that ask a judge for the scores of two responses, shown in this order."""
    first, second = (sanitize(response).replace(boundary, "\ufffd") for response in responses)
    prompt = template.render(
        instruction=conversation(instruction),
        response_a=first,
        response_b=second,
        worst=scale[0],
        best=scale[1],
        boundary=boundary,
        rubric=rubric,
        reference=sanitize(reference) if reference else None,
        verdict=verdict,
    )
    return [{"role": "user", "content": prompt}]


def boundary(seed: int, iteration: int, duel: int, fighter: int | str, response: str = "") -> str:
    """The line around a response: the same for the same duel, and unknown to the response.

    `response` makes it depend on the text that it surrounds, so that not even somebody who knows the seed can
    write it into that text.
    """
    key = f"{seed}/{iteration}/{duel}/{fighter}/{response}".encode("utf-8", "surrogatepass")
    return f"=== {hashlib.blake2b(key, digest_size=9).hexdigest()} ==="


def sanitize(text: str) -> str:
    """The text as a judge may see it.

    Runs of invisible, bidirectional, control and private characters and lone surrogates become one U+FFFD; line
    ends become newlines and odd spaces plain ones; the signs of chat templates and reasoning blocks lose their
    meaning (`<|` becomes `‹|`). Joiners and variation selectors stay where scripts and emoji need them.
    """
    if not text.replace("\n", "").replace("\t", "").isprintable() or not (
        text.isascii() or _UNSEEN.search(text) is None
    ):
        text = _HIDDEN.sub("\ufffd", _SPACES.sub(" ", _LINE_ENDS.sub("\n", text)))
    if "<" in text or "[" in text or "◁" in text:
        text = _ROLE_SIGNS.sub(lambda sign: _HARMLESS[sign[0]], text)
    return text


def conversation(messages: Sequence[Mapping[str, Any]]) -> str:
    """An instruction as text for a judge: one user message alone, several with their roles in front."""
    if len(messages) == 1 and messages[0].get("role") == "user":
        return sanitize(_content(messages[0]))
    return "\n\n".join(f"{str(m.get('role', 'user')).capitalize()}: {sanitize(_content(m))}" for m in messages)


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str))


def judge_messages(
    template: Template,
    *,
    instruction: Sequence[Mapping[str, Any]],
    response: str,
    scale: tuple[int, int],
    boundary: str,
    expected: bool,
    rubric: str | None = None,
    reference: str | None = None,
    verdict: str = VERDICT,
) -> list[dict[str, str]]:
    """The messages that ask a judge for the score of one response; the same for all judges of a duel.

    `expected` shows the scale by its one-token labels (`expected.labels`), else by its own numbers.
    """
    worst, best = label_scale(scale) if expected else scale
    prompt = template.render(
        instruction=conversation(instruction),
        response=sanitize(response).replace(boundary, "\ufffd"),
        worst=worst,
        best=best,
        boundary=boundary,
        rubric=rubric,
        reference=sanitize(reference) if reference else None,
        verdict=verdict,
    )
    return [{"role": "user", "content": prompt}]
