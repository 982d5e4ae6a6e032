"""DPO on this machine: one worker process per member, one per GPU, or one at a time on the CPU.

A job's directory tells everything: an ended training is adopted, an interrupted one goes on from its last whole
checkpoint (optimizer and random states included, so the adapter is the same as without the interruption), or
starts again where there is none. Short trainings end before their first checkpoint and simply start again.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from sparta_api.config.tribe import TrlTrainer
from sparta_api.data.journal import disk_error, read_lines
from sparta_api.errors import TrainingError
from sparta_api.secrets import scrub
from sparta_api.trainers.adapters_check import read_adapter, refuse_other_shape, refuse_saved_modules
from sparta_api.trainers.protocol import Capabilities, JobState, JobStatus, TrainedModel, TrainingSpec
from sparta_api.trainers.trl_job import Job, JobFiles, begin, read_result

LIBRARIES = ("torch", "transformers", "peft", "trl", "datasets", "accelerate")
WORKER = "sparta_api.trainers.trl_worker"
STOP_S = 3.0
LOG_TAIL = 1 << 16
FIGURES = {"step", "total"}
ERROR_LINE = re.compile(r"^[\w.]*(Error|Exception|Interrupt|Exit)\b.*|.*\b(killed|fatal error)\b.*", re.IGNORECASE)


@dataclass
class _Running:
    """A job that this process knows: where its files are, and its worker while that lives."""

    spec: TrainingSpec
    files: JobFiles
    process: asyncio.subprocess.Process | None = None
    cancelled: bool = False
    offset: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    watcher: asyncio.Task[None] | None = None


class LocalTrl:
    """Trains members with TRL in subprocesses; see `Trainer` for the methods.

    Args:
        name: the key under `trainers`.
        config: its section.
        root: the directory that a relative base model is looked up in (that of tribe.yaml).
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        parents=frozenset({"adapter"}), serves="adapter", loss_extras=("sft_weight",)
    )

    def __init__(self, name: str, config: TrlTrainer, root: Path = Path()) -> None:
        self.name = name
        self.config = config
        self.root = root
        self._devices: deque[str] = deque(usable_gpus(config.gpus) or [""])
        self.slots = len(self._devices)
        self._free = asyncio.Semaphore(self.slots)
        self._jobs: dict[str, _Running] = {}

    async def preflight(self, spec_base: str, parent: TrainedModel | None, member: str) -> list[str]:
        """Checks libraries, weights and the adapter to start from; returns warnings."""
        place = self._place(member)
        missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
        if missing:
            raise TrainingError(f"{place} needs {', '.join(missing)}; run: pip install 'sparta-api[local]'")
        base = self._base(spec_base, place)
        self._parent(parent, place)
        if Path(base).is_absolute():
            return []
        return [f"{place}: {base} is no directory here, so training fetches it from the hub"]

    async def find(self, spec: TrainingSpec) -> str | None:
        """The job of `spec.key` if its worker lives or its result is here; an interrupted one is not."""
        known = self._jobs.get(spec.key)
        if known and known.process and known.process.returncode is None:
            return spec.key
        result = read_result(JobFiles(spec.directory), spec.key)
        if result is None or result.state != "succeeded":
            return None
        self._jobs.setdefault(spec.key, _Running(spec, JobFiles(spec.directory)))
        return spec.key

    async def submit(self, spec: TrainingSpec) -> str:
        """Starts or continues the training in a worker; waits for a free slot."""
        place = self._place(spec.member)
        if spec.pairs == 0:
            raise TrainingError(f"{place}: no preference pairs, so there is nothing to train; the model stays")
        files = JobFiles(spec.directory)
        job = self._job(spec, place)
        running = _Running(spec, files)
        await self._free.acquire()
        device = self._devices.popleft()
        try:
            begin(job, files)
            running.process = await self._start(files, device, Path(job.base_model).is_dir())
        except BaseException:
            self._release(device)
            raise
        self._jobs[spec.key] = running
        running.watcher = asyncio.create_task(self._watch(running.process, device))
        return spec.key

    async def poll(self, job: str) -> JobStatus:
        """State, progress and the figures of the latest step."""
        running = self._known(job)
        for row, offset, length in read_lines(running.files.metrics, running.offset):
            running.figures, running.offset = row, offset + length
        state, message = self._state(job, running)
        total = running.figures.get("total")
        progress = 1.0 if state is JobState.SUCCEEDED else running.figures["step"] / total if total else None
        metrics = {name: value for name, value in running.figures.items() if name not in FIGURES}
        return JobStatus(state, raw=state.value, message=message, progress=progress, metrics=metrics)

    async def result(self, job: str) -> TrainedModel:
        """The adapter's directory, both to train on and to serve. Raises TrainingError when the job failed."""
        running = self._known(job)
        state, message = self._state(job, running)
        if state is not JobState.SUCCEEDED:
            raise TrainingError(message or f"{self._place(running.spec.member)} is {state.value}, not succeeded")
        directory = str(running.files.adapter.resolve())
        return TrainedModel(kind="adapter", train=directory, serve=directory)

    async def cancel(self, job: str) -> None:
        """Stops the worker and what it started, at the latest after a few seconds."""
        running = self._known(job)
        process = running.process
        if process is None or process.returncode is not None:
            return
        running.cancelled = True
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), STOP_S)
                break
        if running.watcher:
            await running.watcher

    async def close(self) -> None:
        """Stops every worker that still runs."""
        await asyncio.gather(*(self.cancel(job) for job in list(self._jobs)))

    def describe(self, job: str) -> dict[str, Any]:
        """Adapter and log (names in the job's directory), pairs used and dropped, seconds, last figures, warnings."""
        running = self._known(job)
        known: dict[str, Any] = {"adapter": running.files.adapter.name, "log": running.files.log.name}
        result = read_result(running.files, job)
        return known | (result.model_dump(exclude={"key", "state", "error"}) if result else {})

    def _place(self, member: str) -> str:
        return f"training of '{member}' (trainers.{self.name})"

    def _known(self, job: str) -> _Running:
        try:
            return self._jobs[job]
        except KeyError:
            raise TrainingError(f"trainers.{self.name} has no job {job}; resume the run to find it again") from None

    def _base(self, base: str, place: str) -> str:
        directory = (self.root / Path(base).expanduser()).absolute()
        if directory.is_dir():
            if not (directory / "config.json").exists():
                raise TrainingError(f"{place}: {directory} holds no config.json, so it is not a model directory")
            return str(directory)
        if base.startswith(("/", "./", "../", "~")) or not re.fullmatch(r"[\w.-]+/[\w.-]+", base):
            raise TrainingError(f"{place}: there is no model directory {directory}; set base_model of the trainer")
        return base

    def _parent(self, parent: TrainedModel | None, place: str) -> str | None:
        if parent is None:
            return None
        if parent.kind not in self.capabilities.parents:
            raise TrainingError(f"{place} cannot continue a model of kind '{parent.kind}', only a LoRA adapter")
        directory = (self.root / Path(parent.train).expanduser()).absolute()
        if not directory.is_dir() and re.fullmatch(r"[\w.-]+/[\w.-]+", parent.train):
            return parent.train
        try:
            shape = read_adapter(directory)
            refuse_saved_modules(shape)
            refuse_other_shape(shape, self.config.lora, f"trainers.{self.name}.lora")
        except TrainingError as error:
            raise TrainingError(f"{place}: {error}") from None
        return str(directory)

    def _job(self, spec: TrainingSpec, place: str) -> Job:
        return Job(
            key=spec.key,
            member=spec.member,
            place=f"trainers.{self.name}",
            preferences=spec.preferences.absolute(),
            system_prompt=spec.system_prompt,
            fold_system=spec.fold_system,
            base_model=self._base(spec.base_model, place),
            served_base=spec.base_model,
            parent=self._parent(spec.parent, place),
            seed=spec.seed % 2**31,
            config=self.config,
            parent_pid=os.getpid(),
        )

    async def _start(self, files: JobFiles, device: str, offline: bool) -> asyncio.subprocess.Process:
        environment = {
            "HF_HUB_OFFLINE": "1" if offline else "0",
            **os.environ,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TQDM_DISABLE": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "PYTHONUNBUFFERED": "1",
            "CUDA_VISIBLE_DEVICES": device,
            **self.config.env,
        }
        try:
            with files.log.open("ab") as log:
                return await asyncio.create_subprocess_exec(
                    sys.executable, "-m", WORKER, str(files.job.absolute()),
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            raise disk_error(files.log, error) from error

    async def _watch(self, process: asyncio.subprocess.Process, device: str) -> None:
        await process.wait()
        self._release(device)

    def _release(self, device: str) -> None:
        self._devices.append(device)
        self._free.release()

    def _state(self, job: str, running: _Running) -> tuple[JobState, str]:
        code = running.process.returncode if running.process else 0
        if code is None:
            return JobState.RUNNING, ""
        result = read_result(running.files, job)
        if result and result.state == "succeeded":
            return JobState.SUCCEEDED, ""
        place = self._place(running.spec.member)
        if running.cancelled:
            return JobState.CANCELLED, f"{place} was cancelled"
        if result and result.error:
            return JobState.FAILED, f"{place}: {scrub(result.error)}; its log is {running.files.log}"
        return JobState.FAILED, f"{place}: {_death(code, running.files.log)}"


def usable_gpus(configured: list[int] | None) -> list[str]:
    """The GPUs for CUDA_VISIBLE_DEVICES, one entry each: as configured, else those that are visible, else none."""
    if configured is not None:
        return [str(index) for index in configured]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [entry.strip() for entry in visible.split(",") if entry.strip() not in ("", "-1")]
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [str(index) for index in range(len(re.findall(r"^GPU \d+:", listing, re.MULTILINE)))]


def _death(code: int, log: Path) -> str:
    """Why a worker ended without a result, with the last useful line of its log."""
    line = last_line(log)
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (most likely out of memory: lower batch_size or max_length)" if code == -signal.SIGKILL else ""
        return f"the worker was killed by {name}{hint}; its log is {log}"
    return f"the worker ended with exit code {code}: {line or 'it printed nothing'}; its log is {log}"


def last_line(log: Path) -> str:
    """The last line of a log that tells an error, else the last one that is not empty; keys are masked."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_TAIL))
            lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    except FileNotFoundError:
        return ""
    errors = [line for line in lines if ERROR_LINE.match(line)]
    return scrub((errors or lines or [""])[-1])[:500]
