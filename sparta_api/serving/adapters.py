"""Making an endpoint serve a trained adapter, and proving that it does.

Every version of an adapter gets a name of its own: servers keep what they computed under an old name. An adapter
counts as served when the endpoint lists it with the path that was sent and has answered a request with it; nothing
here ever falls back to the base model.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

import httpx

from sparta_api.endpoints.seats import LOOPBACK
from sparta_api.errors import EndpointError
from sparta_api.serving.lora_host import NO_SLOTS, Dialect, LoraHost, Response
from sparta_api.trainers.adapters_check import read_adapter, refuse_saved_modules

VERSIONS = 20
"""How many names are tried when earlier ones are taken by something else."""
PROBES = (
    "Name three colours.",
    "How do I keep bread fresh?",
    "Write one sentence about the sea.",
    "Explain why the sky is blue.",
)
PROBE_TOKENS = 32
_UNSAFE = re.compile(r"[^a-z0-9]+")
_RANKS = re.compile(r"rank\D*(\d+)\D+max_lora_rank\D*(\d+)", re.IGNORECASE)
Notice = Callable[[str], None]


@dataclass(frozen=True)
class AdapterEndpoint:
    """A member's endpoint as the place where its adapters are loaded, on every replica.

    `path_map` turns path prefixes of this machine into those that the endpoint sees; `max_rank` is the largest rank
    that it takes, where that is known.
    """

    member: str
    base_urls: Sequence[str]
    key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    path_map: Mapping[str, str] = field(default_factory=dict)
    max_rank: int | None = None


def adapter_name(member: str, iteration: int, run_id: str) -> str:
    """A name for the adapter of a member's iteration: safe in URLs and paths, and of no other run, member or model."""
    slug = _UNSAFE.sub("-", member.lower()).strip("-")[:40].rstrip("-") or "member"
    mark = hashlib.sha256(f"{run_id}\0{member}".encode()).hexdigest()[:8]
    return f"{slug}-x{mark}-it{iteration}"


async def can_load(endpoint: AdapterEndpoint) -> None:
    """Raises EndpointError unless every replica knows how to load adapters while it runs."""
    async with _hosts(endpoint) as hosts:
        for host in hosts:
            await host.dialect()


async def publish(endpoint: AdapterEndpoint, name: str, adapter: str, base_model: str, notice: Notice) -> str:
    """Makes every replica serve the adapter (a directory here, or a hub id) and returns the model's name there.

    A name that already stands for something else is left alone and `-v2`, `-v3` ... is taken. Raises EndpointError
    when it cannot be loaded or does not answer, TrainingError when the directory holds no servable adapter; what the
    endpoint served before is still there then.
    """
    path = _checked_path(endpoint, adapter)
    async with _hosts(endpoint) as hosts:
        dialect = await hosts[0].dialect()
        for version in range(1, VERSIONS + 1):
            loading = _Loading(endpoint, dialect, name if version == 1 else f"{name}-v{version}", path, base_model)
            if await loading.everywhere(hosts):
                if loading.fresh:
                    await loading.compare(hosts[0], notice)
                return loading.model
    raise EndpointError(f"member '{endpoint.member}': {VERSIONS} names like {name} are taken at {hosts[0].shown}")


async def ensure(endpoint: AdapterEndpoint, model: str, adapter: str) -> None:
    """Loads an adapter again, under its name, where a replica has forgotten it. EndpointError when it cannot be."""
    path = _checked_path(endpoint, adapter)
    base, _, name = model.rpartition(":")
    async with _hosts(endpoint) as hosts:
        loading = _Loading(endpoint, await hosts[0].dialect(), name, path, base)
        if not await loading.everywhere(hosts):
            raise EndpointError(
                f"member '{endpoint.member}': {hosts[0].shown} serves something else as {model} than {path}; "
                "unload it there, then resume"
            )


async def retire(endpoint: AdapterEndpoint, model: str, notice: Notice) -> None:
    """Has every replica forget an adapter that is no longer used; failures are only noticed."""
    name = model.rpartition(":")[2]
    async with _hosts(endpoint) as hosts:
        for host in hosts:
            try:
                answer = await host.unload(await host.dialect(), name)
            except EndpointError as error:
                answer = Response(0, str(error))
            if not answer.ok and answer.status != 404:
                notice(
                    f"member '{endpoint.member}': the old adapter {name} could not be unloaded from {host.shown} "
                    f"({answer.message}); it keeps its place until that server restarts"
                )


@dataclass
class _Loading:
    """One adapter on its way into an endpoint under one name."""

    endpoint: AdapterEndpoint
    dialect: Dialect
    name: str
    path: str
    base_model: str
    fresh: list[LoraHost] = field(default_factory=list)
    """The replicas that did not have it before."""

    @property
    def model(self) -> str:
        """What requests name."""
        return f"{self.base_model}:{self.name}" if self.dialect.joined else self.name

    async def everywhere(self, hosts: Sequence[LoraHost]) -> bool:
        """Loads it where it is missing and asks for a token everywhere; False when the name is taken anywhere."""
        served = False
        try:
            served = await self._placed(hosts) and await self._probed(hosts)
        finally:
            if not served:
                await self._withdraw()
        return served

    async def _placed(self, hosts: Sequence[LoraHost]) -> bool:
        for host in hosts:
            if not await self._place(host):
                return False
        return True

    async def _probed(self, hosts: Sequence[LoraHost]) -> bool:
        """Whether it answers; a stranger's adapter of that name and path that does not is left alone."""
        for host in hosts:
            answer = await host.reply(self.model, PROBES[0], 1)
            if not answer.ok:
                if host not in self.fresh:
                    return False
                raise self._refusal(host, answer, "was loaded but cannot answer")
        return True

    async def _place(self, host: LoraHost) -> bool:
        """Whether the host now has it under this name; False when the name stands for something else."""
        known = await self._known_as(host)
        if known is not None:
            return known == self.path
        answer = await host.load(self.dialect, self.name, self.path)
        if not answer.ok:
            if answer.status in (400, 409) and "already" in answer.message.lower():
                return await self._known_as(host) == self.path
            raise self._refusal(host, answer, "cannot be loaded")
        self.fresh.append(host)
        listed = await self._known_as(host)
        if listed != self.path and not (self.dialect.joined and listed is None):
            raise EndpointError(
                f"{self._place_name(host)} was loaded, but the endpoint lists it as {listed!r}; it is not used"
            )
        return True

    async def _known_as(self, host: LoraHost) -> str | None:
        """The path that the server names for this adapter; None where it does not list it, "" without a path."""
        listed = await host.models()
        for known in (self.name, self.model):
            if known in listed:
                return listed[known] or ""
        return None

    async def _withdraw(self) -> None:
        for host in self.fresh:
            with suppress(EndpointError):
                await host.unload(self.dialect, self.name)

    async def compare(self, host: LoraHost, notice: Notice) -> None:
        """Notices an adapter that changes no greedy reply to any of the probes."""
        replies = await asyncio.gather(
            *(host.reply(model, prompt, PROBE_TOKENS) for model in (self.base_model, self.model) for prompt in PROBES)
        )
        base, tuned = replies[: len(PROBES)], replies[len(PROBES) :]
        if all(a.ok and b.ok and a.message == b.message for a, b in zip(base, tuned, strict=True)):
            notice(
                f"member '{self.endpoint.member}': adapter has no visible effect at {host.shown} ({self.name} "
                f"answers {len(PROBES)} probes word for word like {self.base_model})"
            )

    def _place_name(self, host: LoraHost) -> str:
        return f"member '{self.endpoint.member}': the adapter {self.path} at {host.shown}"

    def _refusal(self, host: LoraHost, answer: Response, what: str) -> EndpointError:
        """The server's refusal in words that say what to change."""
        place, text = self._place_name(host), answer.message.lower()
        ranks = _RANKS.search(answer.message)
        if ranks:
            advice = f"rank {ranks[1]} is above the server's {ranks[2]}; start it with --max-lora-rank {ranks[1]}"
        elif NO_SLOTS in text:
            advice = "all LoRA slots are in use; start the server with a larger --max-loras"
        elif "no adapter found" in text or "not found" in text or answer.status == 404:
            advice = (
                f"it does not see {self.path}; set the member's path_map to that directory's place on the server, "
                "or check the hub id"
            )
        else:
            advice = "correct the cause"
        return EndpointError(f"{place} {what} ({answer.status}: {answer.message}): {advice}, then resume")


def _checked_path(endpoint: AdapterEndpoint, adapter: str) -> str:
    """The adapter's path as the endpoint sees it, after a look at its own description."""
    directory = Path(adapter)
    if not directory.is_dir():
        if directory.is_absolute():
            raise EndpointError(f"member '{endpoint.member}': the adapter {adapter} is not there any more")
        return adapter
    shape = read_adapter(directory)
    refuse_saved_modules(shape)
    if endpoint.max_rank is not None and shape.largest_rank > endpoint.max_rank:
        raise EndpointError(
            f"member '{endpoint.member}': the adapter {adapter} has rank {shape.largest_rank} but its server takes "
            f"{endpoint.max_rank}; start it with --max-lora-rank {shape.largest_rank}"
        )
    return _mapped(str(directory.absolute()), endpoint.path_map)


def _mapped(path: str, path_map: Mapping[str, str]) -> str:
    """The path with its longest known prefix of whole components replaced."""
    here = PurePosixPath(path)
    prefixes = [prefix for prefix in path_map if here.is_relative_to(prefix)]
    if not prefixes:
        return path
    longest = max(prefixes, key=lambda prefix: len(PurePosixPath(prefix).parts))
    return str(PurePosixPath(path_map[longest]) / here.relative_to(longest))


@asynccontextmanager
async def _hosts(endpoint: AdapterEndpoint) -> AsyncIterator[list[LoraHost]]:
    headers = dict(endpoint.headers)
    if endpoint.key:
        headers["Authorization"] = f"Bearer {endpoint.key}"
    local = all(urlsplit(url).hostname in LOOPBACK for url in endpoint.base_urls)
    async with httpx.AsyncClient(headers=headers, trust_env=not local) as http:
        yield [LoraHost(http, endpoint.member, url) for url in endpoint.base_urls]
