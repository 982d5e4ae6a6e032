"""The connection to Together, and what its deployments cost."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import rich
import together

from sparta_api.errors import ConfigError
from sparta_api.trainers.config import TogetherTrainer as Settings
from sparta_api.trainers.faults import ProviderFault, asked, raw
from sparta_api.trainers.preflight import read_key

TIMEOUT_S = 60.0
CENTS = 100


def api_root(settings: Settings) -> str:
    """The API's address without a version, as the SDK wants it."""
    return settings.base_url.rstrip("/").removesuffix("/v1")


def make_client(settings: Settings, trainer: str) -> together.AsyncTogether:
    """An SDK client without retries of its own; what the SDK prints goes to stderr."""
    rich.reconfigure(stderr=True)
    return together.AsyncTogether(
        api_key=read_key(settings.api_key_env, trainer), base_url=api_root(settings), max_retries=0, timeout=TIMEOUT_S
    )


class TogetherPrices:
    """What a deployment costs: `price_per_hour` of the file, else the service's list for the configured hardware."""

    def __init__(self, trainer: str, settings: Settings) -> None:
        self._trainer = trainer
        self._settings = settings
        self._listed: float | None = None
        self._asked = False
        self._asking = asyncio.Lock()

    async def price(self) -> float | None:
        """USD for one member's deployment in one iteration; None where it cannot be known."""
        wanted, hourly = self._settings.deployment, await self.hourly()
        return None if hourly is None else hourly * wanted.hours * wanted.replicas

    async def explain(self) -> str:
        """Such as '0.5 h at 3.50 USD', or what is missing for a price."""
        wanted, hourly = self._settings.deployment, await self.hourly()
        if hourly is None:
            return f"give trainers.{self._trainer}.deployment.price_per_hour, or a config that the service prices"
        replicas = "" if wanted.replicas == 1 else f"{wanted.replicas} replicas, "
        return f"{replicas}{wanted.hours:g} h at {hourly:.2f} USD"

    async def hourly(self) -> float | None:
        """USD per hour and replica: `price_per_hour`, or what the service lists for the hardware of `config`."""
        wanted = self._settings.deployment
        if wanted.price_per_hour is not None:
            return wanted.price_per_hour
        async with self._asking:
            if wanted.config and not self._asked:
                with contextlib.suppress(ProviderFault, ConfigError):
                    self._listed = await self._ask(wanted.config)
                self._asked = True
        return self._listed

    async def _ask(self, config: str) -> float | None:
        _, project, _, identity = config.split("/")
        async with make_client(self._settings, self._trainer) as client:
            found = raw(await asked(together, lambda: client.models.configs.retrieve(identity, project_id=project)))
            listed = raw(await asked(together, client.endpoints.hardware.list))
        return instance_price(found.get("selectors") or [], listed.get("data") or [])


def instance_price(selectors: list[dict[str, Any]], instances: list[dict[str, Any]]) -> float | None:
    """USD per hour of the first instance type that a config's selectors name, by id or by GPU type and count."""
    values = {str(selector.get("value")) for selector in selectors}
    for instance in instances:
        by_gpu = {str(instance.get("gpuType")), str(instance.get("gpuCount"))} <= values
        if (str(instance.get("id")) in values or by_gpu) and instance.get("priceCentsPerHour") is not None:
            return float(instance["priceCentsPerHour"]) / CENTS
    return None
