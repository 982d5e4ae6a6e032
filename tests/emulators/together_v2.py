"""Together's v2 side on loopback: projects, endpoints, deployments, configs, hardware."""

from __future__ import annotations

import itertools
from typing import Any

from aiohttp import web

from tests.emulators.base import Emulator

PROJECT, SLUG = "proj-emulated", "emulated"
STATE = "DEPLOYMENT_STATE_"


class Deployments(Emulator):
    """Dedicated deployments; `most_replicas` is the highest number that was up at once."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)
        deployments = "/v2/projects/{p}/endpoints/{e}/deployments"
        for method, path, operation, handler in (
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

    def _routed(self, model: str) -> dict[str, Any] | None:
        """The ready deployment that an endpoint's traffic goes to."""
        endpoint = next((e for e in self.endpoints.values() if e["name"] == model), None)
        routed = [self.deployments.get(entry["deploymentId"]) for entry in (endpoint or {}).get("trafficSplit", [])]
        return next((d for d in routed if d and d["status"]["state"] == STATE + "READY"), None)

    def gone(self, model: str) -> bool:
        """A deployed model answers while traffic is routed to a ready deployment."""
        return model.startswith(SLUG + "/") and self._routed(model) is None

    def job_of(self, model: str) -> dict[str, Any] | None:
        deployment = self._routed(model)
        identity = str((deployment or {}).get("model")).rpartition("ml_")[2]
        return next((job for job in self.jobs if job["id"] == identity), None)

    def snapshot(self) -> dict[str, Any]:
        return {
            **super().snapshot(),
            "endpoints": list(self.endpoints.values()),
            "deployments": list(self.deployments.values()),
            "most_replicas": self.most_replicas,
        }
