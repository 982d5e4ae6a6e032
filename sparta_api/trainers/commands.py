"""Commands of the user: filling in their placeholders, and reading the JSON on the last line that they print."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from sparta_api.errors import ConfigError, TrainingError
from sparta_api.secrets import scrub

_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
TAIL_BYTES = 1 << 16
SHOWN = 300


def fill(command: Sequence[str], values: Mapping[str, str], what: str) -> list[str]:
    """The command with every {name} replaced; other braces stay. ConfigError for a name that is not known."""

    def one(match: re.Match[str]) -> str:
        if match[1] not in values:
            known = ", ".join(f"{{{name}}}" for name in values)
            raise ConfigError(f"{what}: {{{match[1]}}} is not known; the placeholders are {known}")
        return values[match[1]]

    return [_PLACEHOLDER.sub(one, part) for part in command]


def environment(values: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, with each value as SPARTA_<NAME>, and more on top."""
    return {**os.environ, **{f"SPARTA_{name.upper()}": value for name, value in values.items()}, **more}


def last_json(output: bytes) -> dict[str, Any] | None:
    """The JSON object on the last line that is not blank, or None."""
    lines = output.strip().splitlines()
    try:
        found = orjson.loads(lines[-1]) if lines else None
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def last_line(output: bytes) -> str:
    """The last line that is not blank, masked and cut, or 'it printed nothing'."""
    lines = output.decode("utf-8", "replace").strip().splitlines()
    return scrub(lines[-1].strip())[:SHOWN] if lines else "it printed nothing"


async def ask_command(
    command: list[str], env: Mapping[str, str], cwd: Path, timeout_s: float, what: str
) -> dict[str, Any]:
    """Runs a command to its end and returns the JSON object that it prints last.

    Raises TrainingError when it cannot start, fails, takes longer, or prints no JSON object at the end.
    """
    output = await run_command(command, env, cwd, timeout_s, what)
    answer = last_json(output[-TAIL_BYTES:])
    if answer is None:
        raise TrainingError(f"{what}: the last line of {command[0]} must be a JSON object, but is: {last_line(output)}")
    return answer


async def run_command(command: list[str], env: Mapping[str, str], cwd: Path, timeout_s: float, what: str) -> bytes:
    """Runs a command to its end and returns what it prints; TrainingError when it fails or takes longer."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            env=dict(env),
            cwd=cwd,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise TrainingError(
            f"{what}: cannot start {command[0]} ({error.strerror}); install it or correct the path"
        ) from error
    try:
        output, errors = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError as error:
        raise TrainingError(
            f"{what}: {command[0]} took longer than {timeout_s:g} s and was stopped; raise timeout_s"
        ) from error
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode:
        raise TrainingError(f"{what}: {command[0]} ended with code {process.returncode}: {last_line(errors or output)}")
    return output
