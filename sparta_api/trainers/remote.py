"""What the hosted back ends share: a job is submitted once, found again, watched, and never lost.

The order of a submission, each step repeatable after a death at any moment:

1. `find`: the ledger's job; else the provider's list, matched by the job's key (several looks if a create may
   have been on its way);
2. the file is written, uploaded, and checked by the provider;
3. the price is asked; a job that would not be allowed stops here;
4. the intent is recorded and synced, and the create sent, once, with the SDK's retries off;
5. after an ambiguous failure the list is looked at again, over a minute, before another create;
6. the job's id is recorded and synced.

Duplicates that turn up nevertheless are cancelled and recorded; the oldest stays.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

from sparta_api.errors import TrainingError
from sparta_api.trainers.faults import Pace, ProviderFault, patiently
from sparta_api.trainers.ledger import OVER, Ledger
from sparta_api.trainers.protocol import Estimate, JobState, JobStatus, TrainedModel, TrainingSpec
from sparta_api.trainers.provider import Provider
from sparta_api.trainers.upload import Upload, write_upload
from sparta_api.trainers.watch import Watch

SLOTS = 64
CANCELLING, CANCELLED = "cancelling", "cancelled"


class RemoteTrainer(Provider):
    """A back end whose jobs run at a provider."""

    keeps_ledger = True
    """It writes job.json itself."""

    def __init__(self, name: str, endpoint: str, max_length: int | None, max_hours: float, pace: Pace | None) -> None:
        self.name = name
        self.slots = SLOTS
        self.endpoint = endpoint
        self.pace = pace or Pace.from_environment()
        self._max_length = max_length
        self._max_hours = max_hours
        self._watches: dict[str, Watch] = {}

    async def find(self, spec: TrainingSpec) -> str | None:
        """The id of the job of `spec.key`: the recorded one, else an unrecorded one that the provider lists."""
        ledger = self._ledger(spec)
        if ledger.job and ledger.status in OVER:
            ledger.set_aside()
        await self._cancel_duplicates(ledger)
        if ledger.job:
            self._watch(ledger.job, spec, ledger)
            return ledger.job
        looks = self.pace.looks if ledger.data.get("intent") else 1
        return await self._look(spec, ledger, looks)

    async def submit(self, spec: TrainingSpec) -> str:
        """Uploads the pairs and creates the job, unless it is found."""
        found = await self.find(spec)
        if found:
            return found
        ledger = self._ledger(spec)
        upload, file = await self._ensure_file(spec, ledger)
        estimate = await self._priced(spec, upload, file)
        ledger.update(**estimate.facts)
        problem = ""
        for attempt in range(1, self.pace.creates + 1):
            ledger.update(intent={"key": spec.key, "file": file}, status="creating", creates=attempt)
            try:
                job = await self._create(spec, file)
            except ProviderFault as fault:
                problem = str(fault)
                if not fault.transient:
                    ledger.update(intent=None, status="refused", message=problem)
                    break
                if (fault.wait or 0) > self.pace.max_wait:
                    break
                await asyncio.sleep(fault.wait or 0)
                found = await self._look(spec, ledger, self.pace.looks)
                if found:
                    return found
                continue
            return self._record(spec, ledger, job)
        raise TrainingError(
            f"member '{spec.member}': {self._where()} did not create the job ({problem}); the uploaded file {file} is "
            "kept; correct the cause, then resume the run"
        )

    async def estimate(self, spec: TrainingSpec) -> Estimate:
        """The cost of this very job; uploads its file. A job that exists already costs nothing more."""
        if await self.find(spec):
            return Estimate(usd=0.0, detail="already started")
        upload, file = await self._ensure_file(spec, self._ledger(spec))
        return await self._priced(spec, upload, file)

    async def poll(self, job: str) -> JobStatus:
        """Where the job stands. Asks the provider when a look is due, else repeats what it said last."""
        watch = self._watch(job)
        if not watch.due:
            return watch.status
        try:
            answer = await self._retrieve(job)
            await self._sweep(watch)
        except ProviderFault as fault:
            return watch.fault(fault, f"member '{watch.member}': {self._where()} job {job} ({self.url(job)})")
        status = await self._measured(self._read(watch, job, answer), job)
        watch.seen(status)
        if watch.hours > self._max_hours and not status.state.ended:
            raise TrainingError(
                f"member '{watch.member}': job {job} ({self.url(job)}) is still {status.raw} after "
                f"{self._max_hours:g} hours; it goes on there: raise max_hours and resume, or cancel it"
            )
        return status

    async def _measured(self, status: JobStatus, job: str) -> JobStatus:
        """The status with the provider's figures, where it has any at the moment."""
        if status.state not in (JobState.RUNNING, JobState.SUCCEEDED):
            return status
        try:
            figures = await self._metrics(job)
        except ProviderFault:
            return status
        return replace(status, metrics={**status.metrics, **figures})

    async def result(self, job: str) -> TrainedModel:
        """The model of a succeeded job; TrainingError when it did not succeed or names no model."""
        watch = self._watch(job)
        answer: dict[str, Any] = await self._calmly(lambda: self._retrieve(job), watch.member)
        status = self._read(watch, job, answer)
        if status.state is not JobState.SUCCEEDED:
            raise TrainingError(status.message or f"job {job} ({self.url(job)}) is {status.raw}, not finished")
        model = self._trained(answer)
        if model is None:
            raise TrainingError(
                f"member '{watch.member}': job {job} ({self.url(job)}) ended as {status.raw} but names no model; ask "
                f"{self._where()} about it, and resume when it does"
            )
        if watch.ledger:
            result = {"kind": model.kind, "train": model.train, "serve": model.serve}
            watch.ledger.update(result=result, **await self._more(job))
        return model

    async def _more(self, job: str) -> dict[str, Any]:
        """What is good to know of a succeeded job; a provider that does not tell stops nothing."""
        try:
            return await self._kept(job)
        except ProviderFault:
            return {}

    async def cancel(self, job: str) -> None:
        """Stops the job; ended jobs are left alone."""
        watch = self._watch(job)
        answer = await self._calmly(lambda: self._retrieve(job), watch.member)
        if not self._read(watch, job, answer).state.ended:
            await self._calmly(lambda: self._cancel(job), watch.member)

    def describe(self, job: str) -> dict[str, Any]:
        """What job.json holds of the job."""
        ledger = self._watch(job).ledger
        return dict(ledger.data) if ledger else {"backend": self.backend, "job": job, "url": self.url(job)}

    def _where(self) -> str:
        return f"trainer '{self.name}' ({self.endpoint})"

    def _ledger(self, spec: TrainingSpec) -> Ledger:
        ledger = Ledger(spec.directory)
        parent = spec.parent.train if spec.parent else None
        ledger.claim(self.backend, self.name, self.endpoint, key=spec.key, base=spec.base_model, parent=parent)
        return ledger

    def _watch(self, job: str, spec: TrainingSpec | None = None, ledger: Ledger | None = None) -> Watch:
        watch = self._watches.get(job)
        if watch is None:
            watch = self._watches[job] = Watch(self.pace)
        if spec is not None:
            watch.spec, watch.ledger = spec, ledger
        return watch

    def _record(self, spec: TrainingSpec, ledger: Ledger, job: dict[str, Any]) -> str:
        """Writes down that the job exists."""
        identity = str(job["id"])
        ledger.update(job=identity, url=self.url(identity), status=JobState.QUEUED, raw=job.get("status"), intent=None)
        self._watch(identity, spec, ledger)
        return identity

    async def _look(self, spec: TrainingSpec, ledger: Ledger, looks: int) -> str | None:
        """Looks for an unrecorded job in the provider's list; adopts the oldest and cancels the others."""
        for left in reversed(range(looks)):
            live = await self._calmly(lambda: self._live(spec, ledger), spec.member)
            if live:
                ledger.update(
                    duplicates=ledger.data.get("duplicates", {}) | {str(j["id"]): CANCELLING for j in live[1:]}
                )
                identity = self._record(spec, ledger, live[0])
                await self._cancel_duplicates(ledger)
                return identity
            if left:
                await asyncio.sleep(self.pace.look)
        return None

    async def _live(self, spec: TrainingSpec, ledger: Ledger) -> list[dict[str, Any]]:
        """Jobs with the spec's key that have not failed, oldest first."""
        jobs = await self._jobs(spec)
        live = [
            job
            for job in jobs
            if str(job["id"]) not in ledger.abandoned and self._state(job) not in (JobState.FAILED, JobState.CANCELLED)
        ]
        return sorted(live, key=lambda job: (str(job.get("created_at")), str(job["id"])))

    async def _sweep(self, watch: Watch) -> None:
        """After more than one create: cancels what turned up late beside the recorded job."""
        ledger, spec = watch.ledger, watch.spec
        if ledger is None or spec is None or ledger.data.get("creates", 0) < 2:
            return
        others = [str(job["id"]) for job in await self._live(spec, ledger) if str(job["id"]) != ledger.job]
        if others:
            ledger.update(duplicates=ledger.data.get("duplicates", {}) | dict.fromkeys(others, CANCELLING))
        await self._cancel_duplicates(ledger)

    async def _cancel_duplicates(self, ledger: Ledger) -> None:
        for job, state in dict(ledger.data.get("duplicates", {})).items():
            if state == CANCELLING:
                await self._cancel_duplicate(job)
                ledger.update(duplicates=ledger.data["duplicates"] | {job: CANCELLED})

    async def _cancel_duplicate(self, job: str) -> None:
        try:
            await patiently(self.pace, lambda: self._cancel(job))
        except ProviderFault as fault:
            if fault.transient:
                raise TrainingError(
                    f"{self._where()}: the duplicate job {job} ({self.url(job)}) could not be cancelled ({fault}); "
                    "resume to try again, or cancel it by hand"
                ) from fault

    async def _ensure_file(self, spec: TrainingSpec, ledger: Ledger) -> tuple[Upload, str]:
        """The id of the checked file at the provider; uploads it where it is not there yet."""
        upload = write_upload(spec, "openai", self._max_length, self.minimum_pairs)
        file = ledger.data.get("file") if ledger.data.get("file_sha256") == upload.sha256 else None
        if file is None:
            file = await self._calmly(lambda: self._find_file(upload), spec.member)
            file = file or await self._calmly(lambda: self._send_file(upload), spec.member)
            ledger.update(file=file, file_sha256=upload.sha256, pairs=upload.pairs, dropped=upload.dropped)
        try:
            await self._checked(str(file), upload)
        except ProviderFault as fault:
            ledger.update(file=None, file_sha256=None)
            raise self._stopped(fault, spec.member) from fault
        except TrainingError as error:
            ledger.update(status="refused", message=str(error))
            raise TrainingError(f"member '{spec.member}': {error}") from error
        return upload, str(file)

    async def _checked(self, file: str, upload: Upload) -> None:
        """Waits until the provider has checked the file."""
        deadline = time.monotonic() + self.pace.file_wait
        ready = await patiently(self.pace, lambda: self._file_ready(file, upload))
        while not ready:
            if time.monotonic() > deadline:
                raise TrainingError(f"{self._where()} still checks the file {file} ({upload.path}); resume to wait on")
            await asyncio.sleep(self.pace.file_poll)
            ready = await patiently(self.pace, lambda: self._file_ready(file, upload))

    @property
    def minimum_pairs(self) -> int:
        """The fewest pairs that the provider trains on."""
        return self.capabilities.minimum_pairs

    async def _calmly(self, call: Any, member: str) -> Any:
        """An idempotent request, repeated while that may help; TrainingError when it does not."""
        try:
            return await patiently(self.pace, call)
        except ProviderFault as fault:
            raise self._stopped(fault, member) from fault

    def _stopped(self, fault: ProviderFault, member: str) -> TrainingError:
        hint = "resume the run to go on" if fault.transient else "correct the cause, then resume the run"
        return TrainingError(f"member '{member}': {self._where()} answered {fault}; {hint}")

    def _read(self, watch: Watch, job: str, answer: dict[str, Any]) -> JobStatus:
        """The job's status, recorded in its ledger; ended jobs carry a whole sentence."""
        word = str(answer.get("status"))
        state = self._state(answer)
        message = self._explain(answer)
        if state in (JobState.FAILED, JobState.CANCELLED):
            message = (
                f"member '{watch.member}': {self._where()} job {job} ({self.url(job)}) ended as {word}: "
                f"{message or 'no reason given'}; correct the cause, then resume to start another"
            )
        elif word not in self.states:
            message = f"unknown status '{word}' counts as running"
        progress, metrics = self._figures(answer)
        status = JobStatus(state, word, message, 1.0 if state is JobState.SUCCEEDED else progress, metrics)
        if watch.ledger:
            watch.ledger.update(status=state.value, raw=word, message=message or None)
        return replace(status, metrics={**watch.status.metrics, **metrics})
