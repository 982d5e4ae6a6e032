"""Training jobs that are processes on this machine: started once, found again, outliving the run that started them.

A job's id is its key; its directory holds the command, its log and how it ended (`job_worker`). A worker that
is killed leaves no end: `find` then knows no job, and `submit` starts the command again.
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
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import orjson

from sparta_api.data.journal import disk_error, write_atomic
from sparta_api.errors import TrainingError
from sparta_api.trainers import job_worker
from sparta_api.trainers.commands import last_line
from sparta_api.trainers.ledger import OVER, Ledger
from sparta_api.trainers.protocol import Capabilities, JobState, JobStatus, TrainedModel, TrainingSpec

STOP_S = 10.0
TICK_S = 0.05


@dataclass(frozen=True)
class Launch:
    """What to run. `env` is written to a file, so keys are handed on by the environment itself instead."""

    command: list[str]
    env: dict[str, str]
    cwd: Path
    timeout_s: float


class ProcessTrainer(abc.ABC):
    """A back end whose jobs are processes."""

    backend: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    keeps_ledger = True
    """It writes job.json itself."""
    resumes: ClassVar[bool] = False
    """Whether its command goes on from what an interrupted one left in the output directory."""

    def __init__(self, name: str, slots: int) -> None:
        self.name = name
        self.slots = slots
        self._free = asyncio.Semaphore(slots)
        self._specs: dict[str, TrainingSpec] = {}
        self._slots: dict[str, asyncio.Task[None]] = {}

    @abc.abstractmethod
    async def preflight(self, spec_base: str, parent: TrainedModel | None, member: str) -> list[str]:
        """Checks that the back end could train the member on that base model; returns warnings."""

    @abc.abstractmethod
    def _launch(self, spec: TrainingSpec) -> Launch:
        """Writes what the command needs and says how to run it."""

    @abc.abstractmethod
    def _trained(self, spec: TrainingSpec, result: dict[str, Any]) -> TrainedModel:
        """The model that a command's result names; TrainingError when it names none that is there."""

    def _figures(self, spec: TrainingSpec) -> tuple[float | None, dict[str, float]]:
        """Progress and metrics of a running job, where the command leaves any."""
        return None, {}

    async def find(self, spec: TrainingSpec) -> str | None:
        """The job of `spec.key` if its worker lives or it ended; failed ones only once."""
        ledger = self._ledger(spec)
        end = job_worker.read_end(spec.directory)
        if ledger.job != spec.key or (end is None and not job_worker.alive(spec.directory)):
            return None
        if ledger.status in OVER:
            ledger.set_aside()
            return None
        self._specs[spec.key] = spec
        if end is None:
            await self._occupy(spec)
        return spec.key

    async def submit(self, spec: TrainingSpec) -> str:
        """Starts the command in a worker of its own session, when a slot is free."""
        found = await self.find(spec)
        if found:
            return found
        launch = self._launch(spec)
        await self._free.acquire()
        try:
            self._prepare(spec, launch)
            await self._start(spec)
        except BaseException:
            self._free.release()
            raise
        self._specs[spec.key] = spec
        self._slots[spec.key] = asyncio.create_task(self._until_ended(spec))
        return spec.key

    async def poll(self, job: str) -> JobStatus:
        """Where the process stands."""
        spec = self._known(job)
        status = self._status(spec)
        self._ledger(spec).update(status=status.state.value, message=status.message or None)
        return status

    async def result(self, job: str) -> TrainedModel:
        """The model of a succeeded job."""
        spec = self._known(job)
        status = self._status(spec)
        end = job_worker.read_end(spec.directory)
        if status.state is not JobState.SUCCEEDED or end is None:
            raise TrainingError(status.message or f"{self._place(spec)}: the job is {status.state.value}, not finished")
        model = self._trained(spec, end["result"])
        self._ledger(spec).update(result={"kind": model.kind, "train": model.train, "serve": model.serve})
        return model

    async def cancel(self, job: str) -> None:
        """Stops the worker and its command; ended jobs are left alone."""
        spec = self._known(job)
        pid = job_worker.read_pid(spec.directory)
        for sign in (signal.SIGTERM, signal.SIGKILL):
            if pid is None or not job_worker.alive(spec.directory):
                break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, sign)
            await self._within(STOP_S, lambda: not job_worker.alive(spec.directory))
        if job_worker.read_end(spec.directory) is None:
            self._ledger(spec).update(status=JobState.CANCELLED.value)

    def describe(self, job: str) -> dict[str, Any]:
        """What job.json holds of the job."""
        return dict(self._ledger(self._known(job)).data)

    async def close(self) -> None:
        """Forgets the jobs; they go on, and the next process finds them."""
        for task in self._slots.values():
            task.cancel()
        await asyncio.gather(*self._slots.values(), return_exceptions=True)

    def _place(self, spec: TrainingSpec) -> str:
        return f"member '{spec.member}': trainer '{self.name}' ({spec.directory})"

    def _known(self, job: str) -> TrainingSpec:
        if job not in self._specs:
            raise TrainingError(f"trainer '{self.name}' knows no job {job}; resume the run to find it")
        return self._specs[job]

    def _ledger(self, spec: TrainingSpec) -> Ledger:
        ledger = Ledger(spec.directory)
        parent = spec.parent.train if spec.parent else None
        ledger.claim(self.backend, self.name, "this machine", key=spec.key, base=spec.base_model, parent=parent)
        return ledger

    def _prepare(self, spec: TrainingSpec, launch: Launch) -> None:
        """Clears what an earlier try left and writes the command."""
        try:
            (spec.directory / job_worker.END).unlink(missing_ok=True)
            if not self.resumes:
                shutil.rmtree(self.output(spec), ignore_errors=True)
            self.output(spec).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise disk_error(spec.directory, error) from error
        job = {
            "command": launch.command,
            "env": launch.env,
            "cwd": str(launch.cwd),
            "timeout_s": launch.timeout_s,
        }
        write_atomic(spec.directory / job_worker.COMMAND, orjson.dumps(job, option=orjson.OPT_INDENT_2))

    @staticmethod
    def output(spec: TrainingSpec) -> Path:
        """Where the command leaves its model."""
        return spec.directory.resolve() / "output"

    async def _start(self, spec: TrainingSpec) -> None:
        """Leaves a worker behind that holds the job's lock."""
        self._ledger(spec).update(job=spec.key, status=JobState.QUEUED.value, message=None)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "sparta_api.trainers.job_worker",
            str(spec.directory.resolve()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        _, errors = await process.communicate()
        if process.returncode:
            raise TrainingError(f"{self._place(spec)}: the job's worker did not start: {last_line(errors)}")

    async def _occupy(self, spec: TrainingSpec) -> None:
        """A found job takes a slot too."""
        if spec.key not in self._slots:
            await self._free.acquire()
            self._slots[spec.key] = asyncio.create_task(self._until_ended(spec))

    async def _until_ended(self, spec: TrainingSpec) -> None:
        try:
            await self._within(math.inf, lambda: job_worker.ended(spec.directory))
        finally:
            self._free.release()

    async def _within(self, seconds: float, condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + seconds
        done = bool(condition())
        while not done and time.monotonic() < deadline:
            await asyncio.sleep(TICK_S)
            done = bool(condition())
        return done

    def _status(self, spec: TrainingSpec) -> JobStatus:
        end = job_worker.read_end(spec.directory)
        log = spec.directory / job_worker.LOG
        progress, figures = self._figures(spec)
        if end is None and job_worker.alive(spec.directory):
            return JobStatus(JobState.RUNNING, "running", "", progress, figures)
        end = end or job_worker.read_end(spec.directory)
        if end is None:
            word = "was cancelled" if self._ledger(spec).status == JobState.CANCELLED.value else "was killed"
            state = JobState.CANCELLED if word.endswith("cancelled") else JobState.FAILED
            return JobStatus(
                state, state.value, f"{self._place(spec)}: its command {word} (log: {log}); resume to start it again"
            )
        if end["code"]:
            message = (
                f"{self._place(spec)}: {end['message']} (log: {log}); correct the cause, then resume to start it again"
            )
            return JobStatus(JobState.FAILED, f"code {end['code']}", message, progress, figures)
        return JobStatus(JobState.SUCCEEDED, "succeeded", "", 1.0, figures)
