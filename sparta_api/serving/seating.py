"""Who sits where: every member's endpoint, model and account at this moment, from the first request to the last.

It starts the run's own servers, loads adapters into endpoints, brings deployments up, and hands out a `Seat` per
member. A member whose trained model cannot be served stops the run: its base model never answers for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from functools import partial
from urllib.parse import urlsplit

from sparta_api.config.tribe import Member
from sparta_api.config.variables import read_key
from sparta_api.endpoints.accounts import Account
from sparta_api.endpoints.seats import Seat
from sparta_api.errors import EndpointError, SpartaError
from sparta_api.runs.models import Models
from sparta_api.runs.session import Session
from sparta_api.serving.adapters import AdapterEndpoint, adapter_name, can_load, ensure, publish, retire
from sparta_api.serving.servers import ServerManager
from sparta_api.trainers.factory import build_deployer
from sparta_api.trainers.protocol import Deployer, ServedModel, TrainedModel, Trainer

ADAPTER = "adapter"


class Seating:
    """The seats of a run. `seats` is current after `open`, `serve` and `training`.

    `on_failure` is called when a server of the run ends that should not have.
    """

    def __init__(
        self,
        session: Session,
        models: Models,
        notice: Callable[[str], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._session = session
        self._config = session.config
        self._models = models
        self._notice = notice
        self._on_failure = on_failure
        self._servers = ServerManager(session.config, session.run.logs, session.loaded.base_dir, notice)
        self._watch: asyncio.Task[None] | None = None
        self._accounts: dict[tuple[object, ...], Account] = {}
        self._deployers: dict[str, Deployer | None] = {}
        self.seats: dict[str, Seat] = {}

    async def open(self, trainers: Mapping[str, Trainer]) -> None:
        """Starts servers, makes every member's current model answer, and checks that the next ones could.

        Raises EndpointError, TrainingError or ConfigError before any question of the run is asked.
        """
        for name in trainers:
            section = self._config.trainers[name]
            self._deployers[name] = build_deployer(
                name, section, self._session.id, self._session.run.root, self._session.loaded.base_dir
            )
        self._servers.preflight()
        await self._servers.start_all()
        self._watch = asyncio.create_task(self._watch_servers())
        await self._each(self._take_seat, self._config.members)
        learners = [member for member in self._config.members if self._loads_adapters(member)]
        await self._each(self._check_loading, learners)

    async def serve(self) -> None:
        """Makes every model that was trained since answer in its member's seat; the ones before are let go."""
        await self._each(self._take_seat, [m for m in self._config.members if not self._models.is_served(m.name)])

    @contextlib.asynccontextmanager
    async def training(self, learners: Iterable[Member]) -> AsyncIterator[None]:
        """While members are trained: their servers sleep or stop, as configured, and are back afterwards.

        They come back only when the training went well: after a failure or an interruption the run ends.
        """
        await self._servers.pause(member.name for member in learners)
        yield
        await self._servers.resume()
        moved = [member for member in self._config.members if member.server]
        await self._each(self._take_seat, [m for m in moved if self._models.is_served(m.name)])

    async def close(self, keep_up: bool = False) -> None:
        """Closes accounts, stops the run's servers, and takes down deployments that shall not stay up.

        `keep_up` leaves all of them: taking down takes minutes, and a run that is resumed at once needs them.
        """
        if self._watch:
            self._watch.cancel()
        for account in self._accounts.values():
            await account.close()
        stopping = asyncio.create_task(self._servers.stop_all())
        for name, deployer in self._deployers.items():
            if deployer is not None:
                await self._let_go(name, deployer, keep_up)
        await stopping

    async def _let_go(self, name: str, deployer: Deployer, keep_up: bool) -> None:
        try:
            if not (keep_up or deployer.keep):
                await deployer.cleanup()
        except SpartaError as error:
            self._notice(
                f"trainer '{name}': deployments may still be up and billed ({error}); "
                f"take them down with: sparta-api cleanup {self._session.run.root}"
            )
        finally:
            await deployer.close()

    # Seats

    async def _each(self, act: Callable[[Member], Awaitable[None]], members: Iterable[Member]) -> None:
        """Acts on all members side by side; the first failure is raised after all have ended."""
        outcomes = await asyncio.gather(*(act(member) for member in members), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _take_seat(self, member: Member) -> None:
        """Seats a member with its current model, after making that answer."""
        entry = self._models.members[member.name]
        before = self.seats.get(member.name)
        if entry.trained is None:
            self.seats[member.name] = self._seat(member, ServedModel(member.model))
            return
        deployer = self._deployer(member)
        if deployer is None:
            seat = await self._load(member, entry.trained, entry.served)
        else:
            base = self._config.base_model_of(member, self._config.trainers[str(self._config.trainer_of(member))])
            served = await deployer.deploy(entry.trained, base, member.name, self._models.trained_iterations)
            seat = self._seat(member, served)
            self._models.set_served(member.name, served)
        self.seats[member.name] = seat
        if before and before.model not in (seat.model, member.model) and deployer is None:
            await retire(self._endpoint(member), before.model, self._notice)

    async def _load(self, member: Member, trained: TrainedModel, served: ServedModel | None) -> Seat:
        """Loads an adapter into the member's endpoint and proves that it answers."""
        if trained.kind != ADAPTER:
            raise EndpointError(
                f"member '{member.name}': its model {trained.serve} (kind '{trained.kind}') was made by another "
                "trainer than it has now, and cannot be loaded into its endpoint; keep the trainer that made it"
            )
        endpoint = self._endpoint(member)
        name = served.model if served else adapter_name(member.name, self._models.stage(member.name), self._session.id)
        model = await publish(endpoint, name, trained.serve, member.model, self._notice)
        seat = self._seat(member, ServedModel(model))
        seat.reload = partial(ensure, endpoint, model, trained.serve)
        self._models.set_served(member.name, ServedModel(model))
        return seat

    async def _check_loading(self, member: Member) -> None:
        await can_load(self._endpoint(member))

    def _loads_adapters(self, member: Member) -> bool:
        """Whether the member's next models are adapters for its own endpoint."""
        return self._config.trainer_of(member) is not None and self._deployer(member) is None

    def _deployer(self, member: Member) -> Deployer | None:
        trainer = self._config.trainer_of(member)
        return self._deployers.get(trainer) if trainer else None

    def _endpoint(self, member: Member) -> AdapterEndpoint:
        key = self._session.loaded.keys.get(member.name)
        rank = self._servers.running[member.server].lora_rank if member.server else 0
        return AdapterEndpoint(member.name, self._urls(member), key, member.headers, member.path_map, rank or None)

    def _urls(self, member: Member) -> list[str]:
        if member.server:
            return [self._servers.running[member.server].base_url]
        return [member.base_url] if isinstance(member.base_url, str) else list(member.base_url or [])

    def _seat(self, member: Member, served: ServedModel) -> Seat:
        urls = [served.base_url] if served.base_url else self._urls(member)
        key = self._session.loaded.keys.get(member.name)
        if served.api_key_env:
            key = read_key(served.api_key_env, os.environ)
        return Seat(member, urls, served.model, key, self._account(member, urls, key))

    def _account(self, member: Member, urls: Iterable[str], key: str | None) -> Account:
        """The account of some URLs and a key; members that share it share its limits."""
        origins = sorted({"://".join(urlsplit(url)[:2]) for url in urls})
        identity = (*origins, key)
        account = self._accounts.get(identity)
        if account is None:
            account = self._accounts[identity] = Account(
                ", ".join(origins),
                member.concurrency,
                member.requests_per_minute,
                member.tokens_per_minute,
                replicas=len(origins),
            )
        return account

    async def _watch_servers(self) -> None:
        try:
            await self._servers.watch()
        except Exception as error:
            self._on_failure(error)
