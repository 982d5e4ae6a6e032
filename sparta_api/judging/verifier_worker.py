"""The process in which a verifier's code meets a response: `python -m sparta_api.judging.verifier_worker`.

One JSON object a line in, one out. The first line in is the verifier's settings and the first line out says whether
it is ready; after that every line is a response and its instruction, answered with {"score": value} or
{"error": sentence}. What the verifier's code prints goes to standard error. The process ends with its input, and
kills itself when a response takes much longer than its time, for nobody may be left to do so.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, BinaryIO

import orjson

from sparta_api.judging.verifier_rules import make_scoring

SHOWN = 300
SPARE_S = 5.0
"""How much longer than its time a response may take before the process kills itself."""


def serve(lines: BinaryIO, answers: BinaryIO) -> None:
    """Answers every line until there are no more."""
    settings: dict[str, Any] = orjson.loads(lines.readline())
    sys.path.insert(0, settings["directory"])
    try:
        scoring = make_scoring(settings)
    except (Exception, SystemExit) as error:  # the user's code raises what it likes
        _reply(answers, {"error": _sentence(error)})
        return
    _reply(answers, {"score": None})
    for line in lines:
        question = orjson.loads(line)
        signal.setitimer(signal.ITIMER_REAL, settings["timeout_s"] + SPARE_S)
        try:
            answer = {"score": scoring(question["response"], question["instruction"])}
        except (Exception, SystemExit) as error:  # the user's code raises what it likes
            answer = {"error": _sentence(error)}
        signal.setitimer(signal.ITIMER_REAL, 0)
        _reply(answers, answer)


def _reply(answers: BinaryIO, answer: dict[str, Any]) -> None:
    try:
        data = orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        data = orjson.dumps({"error": f"the score is of the type {type(answer['score']).__name__}, not a number"})
    answers.write(data + b"\n")
    answers.flush()


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:SHOWN]}"


def main() -> None:
    """Keeps the real standard output for answers."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
