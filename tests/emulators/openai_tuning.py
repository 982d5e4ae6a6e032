"""OpenAI's fine-tuning protocol on loopback: files, jobs, events, models, chat (base URL with /v1)."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from typing import Any

from aiohttp import web

from tests.emulators.base import Emulator, serve

ENDED = ("succeeded", "failed", "cancelled")


class OpenAITuning(Emulator):
    """An emulator of OpenAI-style fine-tuning."""

    name = "openai"
    prefix = "/v1"

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)
        for method, path, operation, handler in (
            ("POST", "/v1/files", "upload", self.upload),
            ("GET", "/v1/files", "list files", self.list_files),
            ("GET", "/v1/files/{id}", "file", self.file),
            ("POST", "/v1/fine_tuning/jobs", "create job", self.create),
            ("GET", "/v1/fine_tuning/jobs", "list jobs", self.list_jobs),
            ("GET", "/v1/fine_tuning/jobs/{id}", "job", self.job),
            ("GET", "/v1/fine_tuning/jobs/{id}/events", "events", self.events),
            ("GET", "/v1/fine_tuning/jobs/{id}/checkpoints", "checkpoints", self.checkpoints),
            ("POST", "/v1/fine_tuning/jobs/{id}/cancel", "cancel", self.cancel),
            ("GET", "/v1/models", "models", self.list_models),
            ("GET", "/v1/models/{id:.+}", "model", self.model),
            ("POST", "/v1/chat/completions", "chat", self.chat),
        ):
            self.route(method, path, operation, handler)

    async def upload(self, request: web.Request) -> web.Response:
        parts = await request.post()
        part = parts["file"]
        assert isinstance(part, web.FileField)
        data = part.file.read()
        identity = f"file-{next(self._numbers)}"
        self.contents[identity] = data
        self.files[identity] = {
            "id": identity,
            "object": "file",
            "bytes": len(data),
            "created_at": int(time.time()),
            "filename": part.filename,
            "purpose": parts["purpose"],
            "status": "uploaded",
        }
        return web.json_response(self.files[identity])

    async def list_files(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": list(self.files.values()), "has_more": False})

    async def file(self, request: web.Request) -> web.Response:
        known = self.files.get(request.match_info["id"])
        if known is None:
            return self.error(404, "no such file")
        known["status"] = self.step(self.state.file_statuses, "processed")
        if self.state.file_report:
            known["status_details"] = json.dumps(self.state.file_report)
        return web.json_response(known)

    async def create(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.state.refuse:
            return self.error(self.state.refuse["status"], self.state.refuse["message"], param="method")
        if body["training_file"] not in self.files:
            return self.error(400, "training_file is unknown", param="training_file")
        job = {
            "id": f"ftjob-{next(self._numbers)}",
            "object": "fine_tuning.job",
            "created_at": int(time.time()),
            "model": body["model"],
            "training_file": body["training_file"],
            "fine_tuned_model": None,
            "error": {},
            "method": body["method"],
            "metadata": body.get("metadata") if self.state.keep_metadata else None,
            "user_provided_suffix": body.get("suffix"),
            "seed": body.get("seed"),
            "result_files": [],
            "hyperparameters": None,
            "organization_id": "org-emulated",
            "parent": (self.job_of(body["model"]) or {}).get("id"),
        }
        return web.json_response(self.public(self.add_job(job, ["validating_files", "queued", "running", "succeeded"])))

    async def list_jobs(self, request: web.Request) -> web.Response:
        jobs = self.listed()
        if self.state.filter_metadata:
            wanted = {k[9:-1]: v for k, v in request.query.items() if k.startswith("metadata[")}
            jobs = [job for job in jobs if wanted.items() <= (job["metadata"] or {}).items()]
        after = request.query.get("after")
        if after:
            places = [place for place, job in enumerate(jobs) if job["id"] == after]
            jobs = jobs[places[0] + 1 :] if places else []
        limit = int(request.query.get("limit", "20"))
        return web.json_response({"object": "list", "data": jobs[:limit], "has_more": len(jobs) > limit})

    def _find(self, request: web.Request) -> dict[str, Any] | None:
        return next((job for job in self.jobs if job["id"] == request.match_info["id"]), None)

    async def job(self, request: web.Request) -> web.Response:
        job = self._find(request)
        if job is None:
            return self.error(404, "no such job")
        if job["status"] not in ENDED:
            job["status"] = self.step(job["script"], job["status"])
        if job["status"] == "succeeded" and not self.state.unnamed:
            digest = hashlib.sha256(job["id"].encode()).hexdigest()[:8]
            base = job["model"].split(":")[1] if job["model"].startswith("ft:") else job["model"]
            job["fine_tuned_model"] = f"ft:{base}:emulated:{job['user_provided_suffix']}:{digest}"
        if job["status"] == "failed":
            job["error"] = {"code": "invalid_training_file", "message": self.state.job_message, "param": None}
        return web.json_response(self.public(job))

    async def events(self, request: web.Request) -> web.Response:
        data = {"step": 3, "train_loss": 0.61, "rewards/margins": 0.2}
        event = {"id": "e1", "object": "fine_tuning.job.event", "created_at": 1, "level": "info", "message": "step 3"}
        return web.json_response(
            {"object": "list", "data": [{**event, "type": "metrics", "data": data}], "has_more": False}
        )

    async def checkpoints(self, request: web.Request) -> web.Response:
        job = self._find(request)
        if job is None:
            return self.error(404, "no such job")
        known = {"object": "fine_tuning.job.checkpoint", "created_at": 1, "fine_tuning_job_id": job["id"]}
        rows = [
            {
                **known,
                "id": f"ftckpt-{step}",
                "step_number": step,
                "fine_tuned_model_checkpoint": f"{job['fine_tuned_model']}:ckpt-step-{step}",
                "metrics": {"step": step, "train_loss": 0.61},
            }
            for step in (6, 3)
        ]
        return web.json_response({"object": "list", "data": rows, "has_more": False})

    async def cancel(self, request: web.Request) -> web.Response:
        job = self._find(request)
        if job is None:
            return self.error(404, "no such job")
        job["status"] = "cancelled"
        return web.json_response(self.public(job))

    async def list_models(self, request: web.Request) -> web.Response:
        names = [job["fine_tuned_model"] for job in self.jobs if job["fine_tuned_model"]]
        return web.json_response({"object": "list", "data": [{"id": n, "object": "model"} for n in names]})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        if self.gone(name):
            return self.error(404, f"model {name} not found")
        found = {"id": name, "object": "model", "created": 1, "owned_by": "emulated"}
        return web.json_response({**found, "shutdown_date": self.state.shutdown_date})

    def job_of(self, model: str) -> dict[str, Any] | None:
        return next((job for job in self.jobs if job["fine_tuned_model"] == model), None)

    def gone(self, model: str) -> bool:
        return model.startswith("ft:") and self.job_of(model) is None


if __name__ == "__main__":
    serve(OpenAITuning())
