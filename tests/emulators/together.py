"""Together's files, fine-tunes, endpoints and deployments on loopback (base URL without /v1)."""

from __future__ import annotations

import hashlib
import itertools
import time
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from tests.emulators.base import Emulator, serve

ENDED = ("completed", "cancelled", "error", "user_error")
PROJECT, SLUG = "proj-emulated", "emulated"
STATE = "DEPLOYMENT_STATE_"


class Together(Emulator):
    """An emulator of Together's fine-tuning service and dedicated deployments."""

    name = "together"

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)
        deployments = "/v2/projects/{p}/endpoints/{e}/deployments"
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
            ("GET", "/v3/whoami", "whoami", self.whoami),
            ("GET", "/v2/public/inference-instance-types", "hardware", self.hardware),
            ("GET", "/v2/projects/{p}/configs", "configs", self.configs),
            ("GET", "/v2/projects/{p}/configs/{id}", "config", self.config),
            ("GET", "/v2/projects/{p}/endpoints", "list endpoints", self.list_endpoints),
            ("POST", "/v2/projects/{p}/endpoints", "create endpoint", self.create_endpoint),
            ("PATCH", "/v2/projects/{p}/endpoints/{e}", "route", self.update_endpoint),
            ("DELETE", "/v2/projects/{p}/endpoints/{e}", "delete endpoint", self.delete_endpoint),
            ("GET", deployments, "list deployments", self.list_deployments),
            ("POST", deployments, "create deployment", self.create_deployment),
            ("GET", deployments + "/{d}", "deployment", self.deployment),
            ("PATCH", deployments + "/{d}", "scale", self.update_deployment),
            ("DELETE", deployments + "/{d}", "delete deployment", self.delete_deployment),
        ):
            self.route(method, path, operation, handler)

    def clear(self) -> None:
        super().clear()
        self.endpoints: dict[str, dict[str, Any]] = {}
        self.deployments: dict[str, dict[str, Any]] = {}
        self.most_replicas = 0

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

    async def whoami(self, request: web.Request) -> web.Response:
        project = {"id": PROJECT, "name": "emulated", "slug": SLUG}
        return web.json_response({"type": "project_api_key", "api_key": {"id": "k"}, "project": project})

    async def hardware(self, request: web.Request) -> web.Response:
        kind = {"id": "hw-1", "name": "1xH100", "gpuType": "H100", "gpuCount": 1, "gpuMemoryGib": 80}
        return web.json_response({"data": [{**kind, "description": "", "regions": [], "priceCentsPerHour": 350}]})

    def _config(self) -> dict[str, Any]:
        selectors = [{"key": "gpu_type", "value": "H100"}, {"key": "gpu_count", "value": "1"}]
        return {"id": "cr_1", "projectId": "proj-public", "selectors": selectors, "certifications": []}

    async def configs(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [self._config()]})

    async def config(self, request: web.Request) -> web.Response:
        return web.json_response(self._config())

    async def list_endpoints(self, request: web.Request) -> web.Response:
        return web.json_response({"data": list(self.endpoints.values())})

    async def create_endpoint(self, request: web.Request) -> web.Response:
        name = f"{SLUG}/{(await request.json())['name']}"
        if any(endpoint["name"] == name for endpoint in self.endpoints.values()):
            return self.error(409, "the name is taken")
        identity = f"ep-{next(self._numbers)}"
        self.endpoints[identity] = {"id": identity, "name": name, "projectId": PROJECT, "trafficSplit": [], "etag": "1"}
        return web.json_response(self.endpoints[identity])

    async def update_endpoint(self, request: web.Request) -> web.Response:
        endpoint = self.endpoints.get(request.match_info["e"])
        if endpoint is None:
            return self.error(404, "no such endpoint")
        endpoint |= await request.json()
        return web.json_response(endpoint)

    async def delete_endpoint(self, request: web.Request) -> web.Response:
        if any(d["endpointId"] == request.match_info["e"] for d in self.deployments.values()):
            return self.error(400, "the endpoint has deployments")
        self.endpoints.pop(request.match_info["e"], None)
        return web.json_response({})

    async def list_deployments(self, request: web.Request) -> web.Response:
        endpoint = request.match_info["e"]
        return web.json_response({"data": [d for d in self.deployments.values() if d["endpointId"] == endpoint]})

    async def create_deployment(self, request: web.Request) -> web.Response:
        body = await request.json()
        endpoint = self.endpoints[request.match_info["e"]]
        identity = f"dep-{next(self._numbers)}"
        self.deployments[identity] = {
            **body,
            "id": identity,
            "endpointId": endpoint["id"],
            "name": f"{endpoint['name']}/{body['name']}",
            "status": {"state": STATE + "PROVISIONING", "message": ""},
            "script": list(self.state.deployment_statuses or ["PROVISIONING", "SCALING", "READY"]),
        }
        self._count()
        return web.json_response(self.deployments[identity])

    def _count(self) -> None:
        up = sum(d["autoscaling"]["maxReplicas"] for d in self.deployments.values())
        self.most_replicas = max(self.most_replicas, up)

    async def deployment(self, request: web.Request) -> web.Response:
        deployment = self.deployments.get(request.match_info["d"])
        if deployment is None:
            return self.error(404, "no such deployment")
        state = self.step(deployment["script"], "READY")
        deployment["status"] = {"state": STATE + state, "message": self.state.job_message}
        return web.json_response(deployment)

    async def update_deployment(self, request: web.Request) -> web.Response:
        deployment = self.deployments.get(request.match_info["d"])
        if deployment is None:
            return self.error(404, "no such deployment")
        deployment |= await request.json()
        up = deployment["autoscaling"]["maxReplicas"] > 0
        deployment["script"] = ["SCALING", "READY"] if up else ["STOPPING", "STOPPED"]
        self._count()
        return web.json_response(deployment)

    async def delete_deployment(self, request: web.Request) -> web.Response:
        deployment = self.deployments.get(request.match_info["d"])
        if deployment is not None and deployment["status"]["state"] not in (STATE + "STOPPED", STATE + "FAILED"):
            return self.error(400, "the deployment is not stopped")
        self.deployments.pop(request.match_info["d"], None)
        return web.json_response({})

    async def list_models(self, request: web.Request) -> web.Response:
        names = [endpoint["name"] for endpoint in self.endpoints.values()]
        return web.json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in names]})

    def gone(self, model: str) -> bool:
        """A deployed model answers while traffic is routed to a ready deployment."""
        if not model.startswith(SLUG + "/"):
            return False
        endpoint = next((e for e in self.endpoints.values() if e["name"] == model), None)
        routed = [self.deployments.get(entry["deploymentId"]) for entry in (endpoint or {}).get("trafficSplit", [])]
        return not any(d and d["status"]["state"] == STATE + "READY" for d in routed)

    def snapshot(self) -> dict[str, Any]:
        return {
            **super().snapshot(),
            "endpoints": list(self.endpoints.values()),
            "deployments": list(self.deployments.values()),
            "most_replicas": self.most_replicas,
        }


def event(kind: str, message: str, **more: Any) -> dict[str, Any]:
    """An event of a job."""
    return {"object": "fine-tune-event", "created_at": "2026-01-01T00:00:00Z", "type": kind, "message": message, **more}


if __name__ == "__main__":
    serve(Together())
