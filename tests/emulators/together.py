"""Together's files, fine-tunes, endpoints and deployments on loopback (base URL without /v1)."""

from __future__ import annotations

import hashlib
import time
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from tests.emulators.base import serve
from tests.emulators.together_v2 import Deployments

ENDED = ("completed", "cancelled", "error", "user_error")


class Together(Deployments):
    """An emulator of Together's fine-tuning service and dedicated deployments."""

    name = "together"

    def __init__(self) -> None:
        super().__init__()
        for method, path, operation, handler in (
            ("POST", "/v1/files", "upload", self.upload),
            ("PUT", "/upload/{id}", "put file", self.put),
            ("POST", "/v1/files/{id}/preprocess", "preprocess", self.preprocess),
            ("GET", "/v1/files/{id}", "file", self.file),
            ("GET", "/v1/fine-tunes/models/limits", "limits", self.limits),
            ("POST", "/v1/fine-tunes/estimate-price", "estimate", self.estimate),
            ("POST", "/v1/fine-tunes", "create job", self.create),
            ("GET", "/v1/fine-tunes", "list jobs", self.list_jobs),
            ("GET", "/v1/fine-tunes/{id}", "job", self.job),
            ("GET", "/v1/fine-tunes/{id}/metrics", "metrics", self.metrics),
            ("POST", "/v1/fine-tunes/{id}/cancel", "cancel", self.cancel),
            ("POST", "/v1/chat/completions", "chat", self.chat),
            ("GET", "/v1/models", "models", self.list_models),
        ):
            self.route(method, path, operation, handler)

    async def upload(self, request: web.Request) -> web.Response:
        form = await request.post()
        checksum = str(form["checksum"])
        for identity, file in self.files.items():
            if file["checksum"] == checksum and identity in self.contents:
                return web.json_response({"file_id": identity}, status=409, headers={"x-should-retry": "false"})
        identity = f"file-{next(self._numbers)}"
        self.files[identity] = {
            "id": identity,
            "object": "file",
            "bytes": 0,
            "created_at": int(time.time()),
            "filename": form["file_name"],
            "FileType": form["file_type"],
            "purpose": form["purpose"],
            "checksum": checksum,
            "processing_status": "PENDING",
        }
        location = f"{self.origin}/upload/{identity}"
        return web.Response(status=302, headers={"Location": location, "X-Together-File-Id": identity})

    async def put(self, request: web.Request) -> web.Response:
        data = await request.read()
        file = self.files[request.match_info["id"]]
        if hashlib.sha256(data).hexdigest() != file["checksum"] or "authorization" in request.headers:
            return web.Response(status=400)
        self.contents[file["id"]] = data
        file["bytes"] = len(data)
        return web.Response()

    async def preprocess(self, request: web.Request) -> web.Response:
        file = self.files[request.match_info["id"]]
        file["processing_status"] = "QUEUED"
        return web.json_response(file)

    async def file(self, request: web.Request) -> web.Response:
        file = self.files.get(request.match_info["id"])
        if file is None:
            return self.error(404, "no such file")
        if file["processing_status"] != "PENDING":
            file["processing_status"] = self.step(self.state.file_statuses, "COMPLETED")
        if file["processing_status"] == "COMPLETED":
            lines = self.contents[file["id"]].count(b"\n")
            file["validation_report"] = {"valid": True, "dataset_format": "PREFERENCE_OPENAI", "nlines": lines}
        if self.state.file_report:
            file["validation_report"] = self.state.file_report
        return web.json_response(file)

    async def limits(self, request: web.Request) -> web.Response:
        batches = {"max_batch_size": 64, "max_batch_size_dpo": 32, "min_batch_size": 8}
        return web.json_response(
            {
                "model_name": request.query["model_name"],
                "default_gradient_accumulation_steps": 1,
                "lora_training": {"default_rank": 8, "max_rank": 64, "target_modules": ["q_proj"], **batches},
                "full_training": None,
                "max_learning_rate": 0.01,
                "min_learning_rate": 1e-8,
                "max_num_checkpoints": 10,
                "max_num_epochs": 20,
                "max_num_evals": 10,
                "max_seq_length_dpo": 8192,
                "max_seq_length_sft": 16384,
                "min_max_seq_length": 256,
                "merge_output_lora": True,
                "supports_full_training": False,
                "supports_reasoning": False,
                "supports_tools": True,
                "supports_vision": False,
            }
        )

    async def estimate(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.state.estimate.get("estimation_available") is False:
            return web.json_response(self.state.estimate)
        tokens = len(self.contents[body["training_file"]]) // 4 * body["n_epochs"]
        answer = {
            "estimation_available": True,
            "allowed_to_proceed": True,
            "estimated_total_price": round(tokens / 1e6 * 2, 6),
            "estimated_train_token_count": tokens,
            "estimated_eval_token_count": 0,
            "user_limit": 100,
        }
        return web.json_response({**answer, **self.state.estimate})

    async def create(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.state.refuse:
            return self.error(self.state.refuse["status"], self.state.refuse["message"])
        parent = next((job for job in self.jobs if job["id"] == body.get("from_checkpoint")), None)
        if "from_checkpoint" in body and (parent is None or parent["status"] != "completed"):
            return self.error(400, f"from_checkpoint {body['from_checkpoint']} is no finished job")
        if self.files.get(body["training_file"], {}).get("processing_status") != "COMPLETED":
            return self.error(400, "training_file is not validated")
        now = datetime.now(UTC).isoformat()
        job = {
            "id": f"ft-{next(self._numbers)}",
            "user_id": "u1",
            "created_at": now,
            "updated_at": now,
            "events": [],
            "training_type": body.get("training_type") or (parent or {}).get("training_type"),
            "body": body,
            "parent": body.get("from_checkpoint"),
            **{
                key: body.get(key)
                for key in ("training_file", "suffix", "training_method", "random_seed", "from_checkpoint")
            },
            "model": body.get("model") or (parent or {}).get("model"),
        }
        script = ["pending", "queued", "running", "compressing", "uploading", "completed"]
        return web.json_response(self.public(self.add_job(job, script)))

    async def list_jobs(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{k: v for k, v in job.items() if k != "events"} for job in self.listed()]})

    def _find(self, request: web.Request) -> dict[str, Any] | None:
        return next((job for job in self.jobs if job["id"] == request.match_info["id"]), None)

    async def job(self, request: web.Request) -> web.Response:
        job = self._find(request)
        if job is None:
            return self.error(404, "no such job")
        if job["status"] not in ENDED:
            job["status"] = self.step(job["script"], job["status"])
        if job["status"] == "running":
            job["events"] = [event("training_start", "step 1 of 2", step=1, total_steps=2)]
        if job["status"] in ("error", "user_error"):
            job["events"] = [event("job_error", self.state.job_message)]
        if job["status"] == "completed":
            job |= {"total_price": 1, "token_count": 100}
            if not self.state.unnamed:
                job["model_output_name"] = f"emulated/{job['model']}-{job['suffix']}"
                job["model_object_id"] = f"ml_{job['id']}"
        return web.json_response(self.public(job))

    async def metrics(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"metrics": [{"train/loss": 0.6, "train/rewards/margins": 0.1, "train/global_step": 1}]}
        )

    async def cancel(self, request: web.Request) -> web.Response:
        job = self._find(request)
        if job is None:
            return self.error(404, "no such job")
        if job["status"] not in ENDED:
            job["status"] = "cancelled"
        return web.json_response(self.public(job))


def event(kind: str, message: str, **more: Any) -> dict[str, Any]:
    """An event of a job."""
    return {"object": "fine-tune-event", "created_at": "2026-01-01T00:00:00Z", "type": kind, "message": message, **more}


if __name__ == "__main__":
    serve(Together())
