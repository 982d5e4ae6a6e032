"""Dedicated deployments at Together: one endpoint a member, whose name never changes, and behind it the model in use.

A new model gets a new deployment on the member's endpoint; once it is ready the endpoint's traffic moves, and
the old deployment is stopped and deleted. With `deployments: serial` the old one goes first, and members come
up one after another: never more than one replica a member is paid for.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import together

from sparta_api.errors import TrainingError
from sparta_api.trainers.config import TogetherTrainer as Settings
from sparta_api.trainers.deployments import DOWN, UP, DeploymentLedger, all_of, short_name
from sparta_api.trainers.faults import Pace, ProviderFault, asked, patiently, raw
from sparta_api.trainers.protocol import ServedModel, TrainedModel
from sparta_api.trainers.together_client import make_client

STATE = "DEPLOYMENT_STATE_"
READY, STOPPED, STOPPING, FAILED = (STATE + word for word in ("READY", "STOPPED", "STOPPING", "FAILED"))
NOT_FOUND = 404


class TogetherDeployments:
    """Brings the models of one run's members up, and takes them down."""

    backend: ClassVar[str] = "together"

    def __init__(self, name: str, settings: Settings, run_id: str, ledger: DeploymentLedger, pace: Pace | None = None):
        self.name = name
        self.settings = settings
        self.keep = settings.deployment.keep
        self._run_id = run_id
        self._ledger = ledger
        self._pace = pace or Pace.from_environment()
        self._turn: Any = asyncio.Lock() if settings.deployments == "serial" else contextlib.nullcontext()
        self._opened: together.AsyncTogether | None = None
        self._project: tuple[str, str] | None = None

    def up(self) -> list[str]:
        """The endpoints that are up and billed."""
        return [str(entry.get("model", name)) for name, entry in self._ledger.up(self.backend, self.name).items()]

    async def close(self) -> None:
        """Closes the connections."""
        if self._opened is not None:
            await self._opened.close()
            self._opened = None

    async def deploy(self, model: TrainedModel, base_model: str, member: str, iteration: int) -> ServedModel:
        """Waits until the member's endpoint serves the model; TrainingError when it cannot."""
        async with self._turn, self._sentences(f"member '{member}': deploying {model.serve}"):
            name = short_name(self._run_id, member)
            self._ledger.begin(name, backend=self.backend, trainer=self.name, member=member)
            project, slug = await self._identity()
            endpoint = await self._endpoint(project, name)
            self._ledger.record(name, project=project, endpoint=endpoint["id"])
            wanted = "m-" + hashlib.sha256(model.serve.encode()).hexdigest()[:12]
            others = [d for d in await self._deployments(project, endpoint["id"]) if _last(d["name"]) != wanted]
            if self.settings.deployments == "serial":
                await self._remove(project, endpoint["id"], others)
            deployment = await self._deployment(project, endpoint["id"], wanted, model)
            await self._ready(project, endpoint["id"], deployment["id"], member)
            await self._route(project, endpoint["id"], [{"deployment_id": deployment["id"], "weight": 1.0}])
            await self._remove(project, endpoint["id"], others)
            self._ledger.record(name, state=UP, deployment=deployment["id"], model=f"{slug}/{name}", serves=model.serve)
            return ServedModel(f"{slug}/{name}", self.settings.answers_at, self.settings.api_key_env)

    async def cleanup(self) -> list[str]:
        """Takes down every endpoint that the ledger does not know to be down; one sentence for each."""

        async def down(name: str, entry: dict[str, Any]) -> str:
            async with self._sentences(f"member '{entry['member']}': taking {name} down"):
                await self._take_down(name)
                self._ledger.record(name, state=DOWN)
            return f"member '{entry['member']}': Together endpoint {entry.get('model', name)} is down"

        return await all_of(down(name, entry) for name, entry in self._ledger.up(self.backend, self.name).items())

    async def _take_down(self, name: str) -> None:
        """Unroutes, stops and deletes an endpoint with all its deployments, where it still exists."""
        project, _ = await self._identity()
        endpoint = await self._known_endpoint(project, name)
        if endpoint is not None:
            identity = endpoint["id"]
            await self._route(project, identity, [])
            await self._remove(project, identity, await self._deployments(project, identity))
            await self._gone(lambda: self._client.endpoints.delete(identity, project_id=project))

    @property
    def _client(self) -> together.AsyncTogether:
        if self._opened is None:
            self._opened = make_client(self.settings, self.name)
        return self._opened

    @contextlib.asynccontextmanager
    async def _sentences(self, what: str) -> AsyncIterator[None]:
        try:
            yield
        except ProviderFault as fault:
            raise TrainingError(
                f"{what} at {self.settings.base_url} failed ({fault}); resume to go on, or take down what is up with "
                f"`sparta-api cleanup {self._ledger.path.parent}`"
            ) from fault

    async def _ask(self, call: Any) -> dict[str, Any]:
        """An idempotent request, repeated while that may help."""
        return raw(await patiently(self._pace, lambda: asked(together, call)))

    async def _pages(self, page: Any) -> list[dict[str, Any]]:
        """All items of a paged list."""

        async def every() -> list[dict[str, Any]]:
            return [raw(item) async for item in page()]

        items: list[dict[str, Any]] = await patiently(self._pace, lambda: asked(together, every))
        return items

    async def _identity(self) -> tuple[str, str]:
        """The id and the slug of the key's project."""
        if self._project is None:
            me = await self._ask(self._client.whoami)
            project = me.get("project") or {}
            if not project.get("id") or not project.get("slug"):
                raise TrainingError(
                    f"trainer '{self.name}': the key in {self.settings.api_key_env} belongs to no project; deployments "
                    "need a project's key"
                )
            self._project = (project["id"], project["slug"])
        return self._project

    async def _known_endpoint(self, project: str, name: str) -> dict[str, Any] | None:
        found = await self._pages(lambda: self._client.endpoints.list(project_id=project))
        return next((endpoint for endpoint in found if _last(endpoint["name"]) == name), None)

    async def _endpoint(self, project: str, name: str) -> dict[str, Any]:
        """The member's endpoint; created only where it is not listed, and looked for again after a failure."""
        return await self._once(
            lambda: self._known_endpoint(project, name),
            lambda: self._client.endpoints.create(project_id=project, name=name),
        )

    async def _deployments(self, project: str, endpoint: str) -> list[dict[str, Any]]:
        return await self._pages(lambda: self._client.endpoints.deployments.list(endpoint, project_id=project))

    async def _deployment(self, project: str, endpoint: str, name: str, model: TrainedModel) -> dict[str, Any]:
        """The model's deployment on the endpoint, created or started again where that is needed."""
        wanted = self.settings.deployment
        scale = {"min_replicas": wanted.replicas, "max_replicas": wanted.replicas}
        served = model.serve if model.serve.startswith("projects/") else f"projects/{project}/models/{model.serve}"
        config = wanted.config or await self._config(project, served)
        client = self._client.endpoints.deployments

        async def known() -> dict[str, Any] | None:
            listed = await self._deployments(project, endpoint)
            return next((item for item in listed if _last(item["name"]) == name), None)

        found = await self._once(
            known,
            lambda: client.create(
                endpoint,
                project_id=project,
                name=name,
                model=served,
                config=config,
                autoscaling=scale,  # type: ignore[arg-type]
                inactive_timeout=wanted.inactive_timeout_min,
            ),
        )
        if found["status"]["state"] in (STOPPED, STOPPING):
            await self._ask(
                lambda: client.update(found["id"], project_id=project, endpoint_id=endpoint, autoscaling=scale)  # type: ignore[arg-type]
            )
        return found

    async def _config(self, project: str, model: str) -> str:
        """The first config that the service offers for the model."""
        configs = await self._pages(lambda: self._client.models.configs.list(project_id=project, reference_model=model))
        if not configs:
            raise TrainingError(
                f"trainer '{self.name}': {self.settings.base_url} offers no deployment config for {model}; name one as "
                f"trainers.{self.name}.deployment.config"
            )
        return f"projects/{configs[0]['projectId']}/configs/{configs[0]['id']}"

    async def _once(self, find: Any, create: Any) -> dict[str, Any]:
        """Finds an object by its name, or creates it, never twice: after a failed create it is looked for again."""
        last = ProviderFault("not tried")
        for _ in range(self._pace.creates):
            found: dict[str, Any] | None = await find()
            if found is not None:
                return found
            try:
                return raw(await asked(together, create))
            except ProviderFault as fault:
                if not fault.transient or (fault.wait or 0) > self._pace.max_wait:
                    raise
                last = fault
            await asyncio.sleep(last.wait or self._pace.look)
        raise last

    async def _ready(self, project: str, endpoint: str, deployment: str, member: str) -> None:
        deadline = time.monotonic() + self.settings.deployment.ready_timeout_s
        client = self._client.endpoints.deployments
        while True:
            now = await self._ask(lambda: client.retrieve(deployment, project_id=project, endpoint_id=endpoint))
            state, message = now["status"]["state"], now["status"].get("message") or "no reason given"
            if state == READY:
                return
            if state == FAILED or time.monotonic() > deadline:
                raise TrainingError(
                    f"member '{member}': deployment {deployment} at {self.settings.base_url} is "
                    f"{state.removeprefix(STATE)} ({message}); resume to try again, or take it down with "
                    f"`sparta-api cleanup {self._ledger.path.parent}`"
                )
            await asyncio.sleep(self._pace.poll[0])

    async def _route(self, project: str, endpoint: str, split: list[Any]) -> None:
        await self._ask(lambda: self._client.endpoints.update(endpoint, project_id=project, traffic_split=split))

    async def _remove(self, project: str, endpoint: str, deployments: list[dict[str, Any]]) -> None:
        """Stops deployments, waits until they are stopped, and deletes them."""
        client = self._client.endpoints.deployments
        off: Any = {"min_replicas": 0, "max_replicas": 0}
        for item in deployments:
            known = item["id"]
            await self._gone(
                lambda d=known: client.update(d, project_id=project, endpoint_id=endpoint, autoscaling=off)
            )
        for item in deployments:
            await self._stopped(project, endpoint, item["id"])
            await self._gone(lambda d=item["id"]: client.delete(d, project_id=project, endpoint_id=endpoint))

    async def _stopped(self, project: str, endpoint: str, deployment: str) -> None:
        deadline = time.monotonic() + self.settings.deployment.ready_timeout_s
        client = self._client.endpoints.deployments
        while time.monotonic() < deadline:
            now = await self._gone(lambda: client.retrieve(deployment, project_id=project, endpoint_id=endpoint))
            if now is None or now["status"]["state"] in (STOPPED, FAILED):
                return
            await asyncio.sleep(self._pace.file_poll)
        raise TrainingError(
            f"deployment {deployment} at {self.settings.base_url} does not stop; stop it by hand, it is billed"
        )

    async def _gone(self, call: Any) -> dict[str, Any] | None:
        """A request about something that may be gone already; None when it is."""
        try:
            return await self._ask(call)
        except ProviderFault as fault:
            if fault.status != NOT_FOUND:
                raise
            return None


def _last(name: str) -> str:
    """The part of a qualified name behind the last slash."""
    return name.rpartition("/")[2]
