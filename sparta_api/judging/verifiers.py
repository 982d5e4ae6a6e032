"""Verifiers: programs that score a response on the judging scale, beside the judges or in their place.

They are judges in all but three things: they see one response at a time and the instruction's whole row, they have
a fixed weight instead of a reputation, and they never fight. One that fails, takes too long or gives no score on
the scale abstains.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import math
import os
import shutil
import signal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import orjson

from sparta_api.config.tribe import TribeConfig
from sparta_api.config.verifiers import CommandVerifier, JsonSchema, OutsideSection, PythonFunction, Regex
from sparta_api.data.rundir import file_name
from sparta_api.endpoints.accounts import Account
from sparta_api.errors import ConfigError
from sparta_api.judging.verifier_rules import Row, Rule, make_rule
from sparta_api.secrets import scrub

START_S = 60.0
"""How long a worker may take to import what it needs."""
SHOWN = 300
_LONGEST_LINE = 1 << 20

Scale = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Finding:
    """A verifier's word on a response; `reason` and `detail` say why there is no score."""

    score: float | None
    reason: str | None = None
    detail: str | None = None


def scored(value: Any, scale: Scale) -> Finding:
    """What a program's answer means: a number on the scale, true or false for its ends, None for an abstention."""
    if isinstance(value, bool):
        return Finding(float(scale[1] if value else scale[0]))
    if value is None:
        return Finding(None, "abstained")
    if isinstance(value, int | float) and math.isfinite(value):
        if scale[0] <= value <= scale[1]:
            return Finding(float(value))
        return Finding(None, "no_score", f"{value} is not on the scale {scale[0]} to {scale[1]}")
    return Finding(None, "no_score", scrub(f"{value!r:.{SHOWN}} is no number"))


class Verifier(abc.ABC):
    """One verifier of a run. `account` is its queue."""

    def __init__(self, name: str, scale: Scale, concurrency: int = 1) -> None:
        self.name = name
        self.scale = scale
        self.account = Account(f"verifier '{name}'", concurrency)

    @abc.abstractmethod
    async def open(self) -> None:
        """Makes sure that it can work; ConfigError when it cannot."""

    @abc.abstractmethod
    async def verify(self, response: str, row: Row) -> Finding:
        """The score of a response to the instruction of that row; never raises for what the response holds."""

    async def close(self) -> None:
        """Ends its queue and its processes."""
        await self.account.close()


class RuleVerifier(Verifier):
    """One of the rules that come with the package, at once and in this process."""

    def __init__(self, name: str, scale: Scale, rule: Rule) -> None:
        super().__init__(name, scale)
        self.rule = rule

    async def open(self) -> None:
        """It always can."""

    async def verify(self, response: str, row: Row) -> Finding:
        """The rule's share of the scale."""
        worst, best = self.scale
        return Finding(worst + (best - worst) * self.rule.share(response, row))


class WorkerVerifier(Verifier):
    """Code that a response could hold up, or that is the user's own, in processes that outlive a response."""

    def __init__(self, name: str, scale: Scale, section: OutsideSection, directory: Path, log: Path | None) -> None:
        super().__init__(name, scale, section.concurrency)
        self._timeout_s = section.timeout_s
        self._settings = {**section.model_dump(), "directory": str(directory)}
        self._directory = directory
        self._log = log
        self._idle: list[asyncio.subprocess.Process] = []
        self._busy: set[asyncio.subprocess.Process] = set()

    async def open(self) -> None:
        """Starts the first worker."""
        try:
            self._idle.append(await self._start())
        except OSError as error:
            raise ConfigError(f"judging.verifiers.{self.name}: {error}") from None

    async def verify(self, response: str, row: Row) -> Finding:
        """What the code says; a worker that fails or takes too long is replaced."""
        question = {"response": response, "instruction": dict(row)}
        worker = None
        try:
            worker = self._idle.pop() if self._idle else await self._start()
            self._busy.add(worker)
            answer = await asyncio.wait_for(_exchange(worker, question), self._timeout_s)
        except TimeoutError:
            return Finding(None, "timeout", f"it took longer than {self._timeout_s:g} s")
        except OSError as error:
            return Finding(None, "failed", scrub(str(error)))
        else:
            self._busy.discard(worker)
            self._idle.append(worker)
        finally:
            if worker is not None and worker in self._busy:
                self._busy.discard(worker)
                await _end([worker])
        if "error" in answer:
            return Finding(None, "failed", scrub(str(answer["error"])))
        return scored(answer["score"], self.scale)

    async def _start(self) -> asyncio.subprocess.Process:
        with self._errors() as errors:
            worker = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "sparta_api.judging.verifier_worker",
                cwd=self._directory,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                limit=_LONGEST_LINE,
                start_new_session=True,
            )
        try:
            answer = await asyncio.wait_for(_exchange(worker, self._settings), START_S)
            if "error" in answer:
                raise OSError(str(answer["error"]))
        except BaseException:
            await _end([worker])
            raise
        return worker

    def _errors(self) -> contextlib.AbstractContextManager[IO[bytes] | int]:
        if self._log is None:
            return contextlib.nullcontext(asyncio.subprocess.DEVNULL)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        return self._log.open("ab")

    async def close(self) -> None:
        """Ends all workers."""
        await super().close()
        await _end([*self._idle, *self._busy])
        self._idle.clear()


async def _exchange(worker: asyncio.subprocess.Process, question: Mapping[str, Any]) -> dict[str, Any]:
    """One line to a worker and one back; OSError when it ends instead."""
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(orjson.dumps(question) + b"\n")
    await worker.stdin.drain()
    line = await worker.stdout.readline()
    if not line.endswith(b"\n"):
        raise OSError(f"its process ended (code {await worker.wait()}); its log says more")
    answer: dict[str, Any] = orjson.loads(line)
    return answer


async def _end(processes: Iterable[asyncio.subprocess.Process]) -> None:
    """Kills processes with all that they started."""
    for process in processes:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if process.stdin is not None:
            process.stdin.close()


class ProgramVerifier(Verifier):
    """A command that is started for every response."""

    def __init__(self, name: str, scale: Scale, section: CommandVerifier, directory: Path) -> None:
        super().__init__(name, scale, section.concurrency)
        self._command = section.command
        self._timeout_s = section.timeout_s
        self._directory = directory

    async def open(self) -> None:
        """Looks whether the program is there."""
        program = self._command[0]
        if "/" in program:
            program = str(self._directory / Path(program).expanduser())
        if shutil.which(program) is None:
            raise ConfigError(
                f"judging.verifiers.{self.name}: there is no program {self._command[0]}; install it or correct the path"
            )

    async def verify(self, response: str, row: Row) -> Finding:
        """What the command prints: a number, true, false, null, or {"score": one of these}."""
        question = orjson.dumps({"response": response, "instruction": dict(row), "scale": list(self.scale)})
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                cwd=self._directory,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            return Finding(None, "failed", f"cannot start {self._command[0]} ({error.strerror})")
        try:
            output, errors = await asyncio.wait_for(process.communicate(question), self._timeout_s)
        except TimeoutError:
            return Finding(None, "timeout", f"it took longer than {self._timeout_s:g} s")
        finally:
            await _end([process])
        if process.returncode:
            said = scrub(" ".join(errors.decode("utf-8", "replace").split())[-SHOWN:])
            return Finding(None, "failed", f"it ended with code {process.returncode}: {said}")
        return self._read(output)

    def _read(self, output: bytes) -> Finding:
        try:
            value = orjson.loads(output)
        except orjson.JSONDecodeError:
            said = scrub(output.decode("utf-8", "replace").strip()[:SHOWN])
            return Finding(None, "no_score", f"it printed {said!r}, which is no number and no JSON")
        if isinstance(value, dict):
            value = value.get("score", "an object without a score")
        return scored(value, self.scale)


class Verifiers:
    """All verifiers of a run, by name in the order of the file."""

    def __init__(self, config: TribeConfig, directory: Path, logs: Path | None = None) -> None:
        """`directory` is that of tribe.yaml; without `logs` what workers print is lost."""
        self.by_name: dict[str, Verifier] = {}
        scale = config.judging.scale
        for name, section in config.judging.verifiers.items():
            rule = make_rule(section)
            if rule is not None:
                self.by_name[name] = RuleVerifier(name, scale, rule)
            elif isinstance(section, CommandVerifier):
                self.by_name[name] = ProgramVerifier(name, scale, section, directory)
            elif isinstance(section, Regex | JsonSchema | PythonFunction):
                log = logs and logs / f"verifier-{file_name(name)}.log"
                self.by_name[name] = WorkerVerifier(name, scale, section, directory, log)

    async def open(self) -> None:
        """Makes sure that all can work; ConfigError naming the first that cannot."""
        for verifier in self.by_name.values():
            await verifier.open()

    async def close(self) -> None:
        """Ends all processes."""
        for verifier in self.by_name.values():
            await verifier.close()


def unverifiable(config: TribeConfig, rows: Iterable[Row]) -> str | None:
    """Why the first instruction that judging cannot work with is one: "instruction 'ID' ...", or None."""
    rules = {name: rule for name, section in config.judging.verifiers.items() if (rule := make_rule(section))}
    for row in rows:
        if config.judging.reference is True and not row.get("answer"):
            return f"instruction '{row['id']}' has no `answer`, which judging.reference shows to judges"
        for name, rule in rules.items():
            if lack := rule.lacks(row):
                return f"instruction '{row['id']}' {lack}, which judging.verifiers.{name} needs"
    return None
