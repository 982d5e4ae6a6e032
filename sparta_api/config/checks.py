"""Combinations that no run could work with, conflicts within an account, and warnings."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sparta_api.config.keys import nearest
from sparta_api.config.tribe import Member, TribeConfig, TrlTrainer
from sparta_api.config.variables import strings
from sparta_api.config.verifiers import JsonSchema
from sparta_api.config.yaml_source import KeyPath, Place, Problem, Source

LIMITS = ("concurrency", "requests_per_minute", "tokens_per_minute")
"""The member fields that hold for its whole account."""

_PORTS = {"http": 80, "https": 443}


def duplicate_names(source: Source) -> list[Problem]:
    """Members that share a name, whatever else is wrong with them."""
    problems: list[Problem] = []
    first: dict[str, Place] = {}
    members = source.data.get("members")
    for index, member in enumerate(members if isinstance(members, list) else []):
        name = member.get("name") if isinstance(member, dict) else None
        if not isinstance(name, str):
            continue
        here = source.place(("members", index, "name"))
        if name in first:
            text = f"duplicate member '{name}', it stands at {first[name].label} already; give each its own name"
            problems.append(Problem(here, text))
        first.setdefault(name, here)
    return problems


def written(config: TribeConfig, source: Source) -> list[Problem]:
    """What can be told without the values of variables."""
    found = [*_panel(config), *_verifiers(config), *_references(config), *_prices(config)]
    return [Problem(source.place(path), text) for path, text in found]


def _panel(config: TribeConfig) -> list[tuple[KeyPath, str]]:
    fighters = [member.name for member in config.fighters]
    if len(fighters) < 2:
        return [(("members",), f"a tribe needs at least two fighters, it has {len(fighters)}; see roles")]
    judges = {member.name for member in config.members if member.judges}
    pairs = ((len(judges - {a, b}), a, b) for a, b in combinations(fighters, 2))
    fewest, a, b = min(pairs, key=lambda pair: pair[0])
    if fewest == 0 and not config.judging.verifiers:
        text = (
            f"no member may judge '{a}' against '{b}', for fighters never judge themselves;"
            " add a member that judges, or a verifier"
        )
        return [(("members",), text)]
    wanted = config.judging.judges_per_duel
    if wanted != "all" and wanted > fewest:
        text = f"judging.judges_per_duel is {wanted}, but only {fewest} can judge '{a}' against '{b}'"
        return [(("judging", "judges_per_duel"), text)]
    return []


def _verifiers(config: TribeConfig) -> list[tuple[KeyPath, str]]:
    """Verifiers that could be mistaken for members, and questions that may be left out only where none can tell."""
    found: list[tuple[KeyPath, str]] = []
    members = {member.name for member in config.members}
    for name, verifier in config.judging.verifiers.items():
        if name in members:
            text = f"judging.verifiers.{name}: a member is called '{name}' as well; name the verifier otherwise"
            found.append((("judging", "verifiers", name), text))
        if isinstance(verifier, JsonSchema) and find_spec("jsonschema") is None:
            text = f"judging.verifiers.{name}: a JSON schema needs jsonschema; pip install 'sparta-api[verify]'"
            found.append((("judging", "verifiers", name), text))
    reputation = config.reputation
    if config.judging.stop_when_decided and not (
        reputation.freeze or (reputation.weights_stay and reputation.model != "paper")
    ):
        text = (
            "judging.stop_when_decided needs judges whose votes weigh the same throughout, and ratings that margins do"
            " not change; set reputation.freeze, or reputation.judge_weight: uniform with a model other than paper"
        )
        found.append((("judging", "stop_when_decided"), text))
    return found


def _references(config: TribeConfig) -> list[tuple[KeyPath, str]]:
    found: list[tuple[KeyPath, str]] = []
    if "none" in config.trainers:
        found.append((("trainers", "none"), "trainers.none: 'none' means no training; name the trainer otherwise"))
    wanted: list[tuple[KeyPath, str]] = [(("training", "trainer"), config.training.trainer)]
    for index, member in enumerate(config.members):
        if member.server is not None and member.server not in config.servers:
            known = nearest(member.server, list(config.servers)) or "; `servers` has none"
            text = f"members[{index}].server: there is no server '{member.server}'{known}"
            found.append((("members", index, "server"), text))
        if member.trainer is not None:
            wanted.append((("members", index, "trainer"), member.trainer))
    for path, name in wanted:
        if name != "none" and name not in config.trainers:
            known = nearest(name, [*config.trainers, "none"])
            owner = f"members[{path[1]}]" if path[0] == "members" else "training"
            found.append((path, f"{owner}.trainer: there is no trainer '{name}'{known}"))
    if config.training.stop_on_collapse and config.heldout is None:
        text = "training.stop_on_collapse looks at held-out answers; give some instructions under heldout"
        found.append((("training", "stop_on_collapse"), text))
    return found


def _prices(config: TribeConfig) -> list[tuple[KeyPath, str]]:
    if config.limits.max_cost_usd is None:
        return []
    path: KeyPath = ("limits", "max_cost_usd")
    found = []
    missing = [f"'{m.name}'" for m in config.members if m.server is None and m.price is None]
    if missing:
        text = f"limits.max_cost_usd needs the price of every member; {', '.join(missing)} lacks one"
        found.append((path, text.replace("lacks", "lack") if len(missing) > 1 else text))
    for name in dict.fromkeys(config.trainer_of(member) for member in config.members):
        section = config.trainers.get(name or "none")
        keys = [] if section is None or isinstance(section, TrlTrainer) else section.unpriced
        if keys:
            wanted = " and ".join(f"trainers.{name}.{key}" for key in keys)
            found.append((path, f"limits.max_cost_usd needs to know what trainer '{name}' costs; give {wanted}"))
    return found


def expanded(resolved: TribeConfig, source: Source) -> list[Problem]:
    """What needs the values of variables and absolute paths."""
    problems = _urls(resolved, source)
    for index, member in enumerate(resolved.members):
        text = _adapter(resolved, member)
        if text:
            problems.append(Problem(source.place(("members", index, "adapter")), f"members[{index}].adapter: {text}"))
    prompt = Path(resolved.judging.prompt)
    if prompt.is_absolute() and not prompt.is_file():
        problems.append(Problem(source.place(("judging", "prompt")), f"judging.prompt: there is no file {prompt}"))
    for name, server in resolved.servers.items():
        if server.model and server.backend == "vllm" and _missing(server.model):
            text = f"servers.{name}.model: there is no directory {server.model}"
            problems.append(Problem(source.place(("servers", name, "model")), text))
    return problems


def _missing(text: str) -> bool:
    return Path(text).is_absolute() and not Path(text).exists()


def _urls(resolved: TribeConfig, source: Source) -> list[Problem]:
    problems = []
    data = resolved.model_dump(include={"members", "trainers"})
    for path, text in strings(data):
        names = [part for part in path if isinstance(part, str)]
        if names[-1] in ("base_url", "inference_url") and (wrong := _wrong_url(text)):
            place = source.place(path)
            problems.append(Problem(place, f"{place.key}: {wrong}"))
    return problems


def _wrong_url(text: str) -> str | None:
    """What is wrong with a base URL; the sentence never repeats the URL, which may hold a password."""
    try:
        url = urlsplit(text.strip())
        _ = url.port
    except ValueError:
        return "this is no URL; write it as http://HOST:PORT/v1"
    if "@" in text:
        return "a URL holds no user name or password; give the key by api_key_env"
    if url.scheme.lower() not in _PORTS or not url.hostname:
        return "a base URL starts with http:// or https:// and names a host"
    if url.query or url.fragment:
        return "a base URL ends before '?' and '#'"
    if url.path.rstrip("/").endswith(("/chat/completions", "/completions")):
        return "give the part before /chat/completions"
    if any(c.isspace() or not c.isprintable() for c in text):
        return "the URL holds spaces or control characters"
    return None


def _adapter(config: TribeConfig, member: Member) -> str | None:
    """What is wrong with the adapter that a member starts from, as far as its files are here."""
    if member.adapter is None or not Path(member.adapter).is_absolute():
        return None
    settings = Path(member.adapter) / "adapter_config.json"
    try:
        found = json.loads(settings.read_bytes())
    except OSError:
        return f"there is no {settings}"
    except ValueError:
        return f"{settings} is no JSON"
    if not isinstance(found, dict):
        return f"{settings} is no adapter configuration"
    if modules := found.get("modules_to_save"):
        return f"{settings} has modules_to_save ({', '.join(map(str, modules))}); no server can load them"
    trainer = config.trainers.get(config.trainer_of(member) or "none")
    if isinstance(trainer, TrlTrainer) and found.get("r") != trainer.lora.r:
        name = config.trainer_of(member)
        return (
            f"{member.adapter} has rank {found.get('r')}, but trainers.{name}.lora.r is {trainer.lora.r};"
            f" training goes on with the adapter's own rank, set lora.r to it"
        )
    return None


def origin(base_url: str) -> str:
    """Scheme, host and port of a URL, in the one form that tells accounts apart."""
    url = urlsplit(base_url.strip())
    scheme = url.scheme.lower()
    return f"{scheme}://{(url.hostname or '').lower()}:{url.port or _PORTS.get(scheme)}"


def _accounts(resolved: TribeConfig) -> dict[tuple[str, str | None], list[int]]:
    """The positions of the members of each account: (server or URL origin, key variable)."""
    accounts: dict[tuple[str, str | None], list[int]] = defaultdict(list)
    for index, member in enumerate(resolved.members):
        if member.server is not None:
            accounts[f"server {member.server}", None].append(index)
        urls = [member.base_url] if isinstance(member.base_url, str) else member.base_url or []
        for place in dict.fromkeys(origin(url) for url in urls):
            accounts[place, member.api_key_env].append(index)
    return accounts


def account_limits(resolved: TribeConfig, source: Source) -> dict[str, dict[str, Any]]:
    """The limits that members take from others of their account; conflicts join the source's problems.

    A limit that a member names holds for the account. It goes before one from `defaults`, one from `--set`
    goes before both, and two members that name different ones are a conflict.
    """
    changes: dict[str, dict[str, Any]] = defaultdict(dict)
    for (account, _), indices in _accounts(resolved).items():
        for field in LIMITS:
            named = [(index, _rank(source, index, field)) for index in indices]
            highest = max(rank for _, rank in named)
            first, *others = [index for index, rank in named if rank == highest]
            value = getattr(resolved.members[first], field)
            for index in others:
                if getattr(resolved.members[index], field) != value:
                    source.problems.append(_conflict(resolved, source, account, field, first, index))
            for index in indices:
                if getattr(resolved.members[index], field) != value:
                    changes[resolved.members[index].name][field] = value
    return changes


def _rank(source: Source, index: int, field: str) -> int:
    """Who named a limit: -1 nobody, else the rank of its place. Null names no limit."""
    place = source.places.get(("members", index, field))
    return place.rank if place and source.data["members"][index][field] is not None else -1


def _conflict(config: TribeConfig, source: Source, account: str, field: str, first: int, second: int) -> Problem:
    place = source.place(("members", second, field))
    one, two = config.members[first], config.members[second]
    earlier = source.place(("members", first, field)).label
    text = (
        f"{place.key} is {getattr(two, field)} for '{two.name}', but {getattr(one, field)} for '{one.name}'"
        f" ({earlier}); both share the account {account}, give it one value"
    )
    return Problem(place, text)


def with_limits(config: TribeConfig, changes: Mapping[str, Mapping[str, Any]]) -> TribeConfig:
    """The configuration with limits replaced by member name, as `account_limits` gives them."""
    if not changes:
        return config
    members = [member.model_copy(update=dict(changes.get(member.name, {}))) for member in config.members]
    return config.model_copy(update={"members": members})


def warnings(resolved: TribeConfig) -> list[str]:
    """What works but is probably not meant, one sentence each.

    Where all members are one model, none is preferred over another, so that is no warning.
    """
    found = []
    same: dict[tuple[Any, ...], list[Member]] = defaultdict(list)
    for member in resolved.members:
        urls = [member.base_url] if isinstance(member.base_url, str) else member.base_url or []
        same[member.server, tuple(origin(url) for url in urls), member.model, member.adapter].append(member)
        insecure = any(url.startswith("http://") and not _loopback(url) for url in urls)
        if insecure and member.api_key_env:
            found.append(f"member '{member.name}' sends its key over http, unencrypted; use https")
    for group in same.values():
        mixed = 1 < len(group) < len(resolved.members)
        if mixed and any(m.judges for m in group) and any(m.fights for m in group):
            names = ", ".join(f"'{member.name}'" for member in group)
            found.append(f"{names} are the same model ('{group[0].model}'), so their judging may show self-preference")
    for name in resolved.servers:
        if all(member.server != name for member in resolved.members):
            found.append(f"server '{name}' would start but no member uses it; remove it")
    return found


def _loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")
