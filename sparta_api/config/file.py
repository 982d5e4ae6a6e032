"""Reads `tribe.yaml` into a `TribeConfig`: defaults, `--set`, `${VAR}`, keys, and every problem with its line.

A configuration exists twice: `config` as it was written (defaults merged into the members, variables
unexpanded), which goes into the run directory, and `resolved` (variables expanded, paths absolute), which the
run works with. Only `resolved` and `keys` may hold secrets.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sparta_api.config import checks as config_checks
from sparta_api.config import overrides, yaml_source
from sparta_api.config.complaints import problems_of, unknown_keys
from sparta_api.config.defaults import merge_defaults
from sparta_api.config.section import Section
from sparta_api.config.tribe import TribeConfig
from sparta_api.config.variables import expand_all, literal_keys, read_key
from sparta_api.config.yaml_source import KeyPath, Place, Problem, Source
from sparta_api.errors import ConfigError
from sparta_api.ratings.warm_start import member_problem, read_scores
from sparta_api.secrets import scrub

_TEMPLATE_SUFFIXES = (".j2", ".jinja", ".jinja2", ".md", ".txt")


@dataclass(frozen=True)
class LoadedTribe:
    """A configuration that was read and checked."""

    config: TribeConfig
    """As written: defaults merged, variables unexpanded. This is what the run directory keeps."""
    resolved: TribeConfig = field(repr=False)
    """Variables expanded, paths absolute. It may hold secrets and is never written."""
    path: Path
    base_dir: Path
    """What relative paths are relative to."""
    warnings: list[str]
    keys: dict[str, str] = field(repr=False)
    """API keys by member name, for members with `api_key_env`."""


def load_tribe(
    path: Path,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
    base_dir: Path | None = None,
    *,
    keys: bool = True,
) -> LoadedTribe:
    """Reads, merges and checks a configuration file.

    `overrides` are the values of `--set`; `base_dir` takes the place of the file's own directory for relative
    paths (a run directory holds a copy of a file that stood elsewhere). `keys=False` is for those who only look
    at a run and need no environment: keys are not read, texts with unset variables stay as they were written, URLs
    and files are not checked. Raises ConfigError with one line per problem, in the order of the file.
    """
    base = (path.parent if base_dir is None else base_dir).absolute()
    source = _read(path, overrides)
    config = _validated(source.data, source)
    data, unset = expand_all(source.data, source, environ)
    source.problems += unset if keys else []
    if config is None:
        raise _error(source)
    source.problems += config_checks.written(config, source)
    found = _keys(config, source, environ) if keys else {}
    resolved = None if unset and keys else _validated(data, source)
    if resolved is None:
        raise _error(source)
    config, resolved = _with_warm_start(config, _with_absolute_paths(resolved, base), source)
    source.problems += config_checks.expanded(resolved, source) if keys else []
    shared = config_checks.account_limits(resolved, source) if keys and not source.problems else {}
    if source.problems:
        raise _error(source)
    config, resolved = config_checks.with_limits(config, shared), config_checks.with_limits(resolved, shared)
    warnings = config_checks.warnings(resolved) if keys else []
    return LoadedTribe(config, resolved, path, base, warnings, found)


def read_tribe(path: Path) -> TribeConfig:
    """The configuration as it was written, for those who need neither variables nor keys.

    Raises ConfigError as `load_tribe` does.
    """
    source = _read(path, ())
    config = _validated(source.data, source)
    if config is None or source.problems:
        raise _error(source)
    return config


def dump_tribe(config: TribeConfig) -> str:
    """The YAML text of a configuration: every default filled in, variables as they were written."""
    return yaml_source.dump(config.model_dump(mode="json", exclude={"defaults"}))


def _read(path: Path, changes: Sequence[str]) -> Source:
    """The file with overrides applied and defaults merged; raises ConfigError when it is no map."""
    source = yaml_source.read(path)
    if source.data is None:
        raise ConfigError(f"{path}: the file is empty; `sparta-api init` writes one to start from")
    if not isinstance(source.data, dict):
        raise ConfigError(f"{path}:1: the file holds {yaml_source.kind_of(source.data)}, not a map of keys")
    overrides.apply(source, changes)
    source.problems += literal_keys(source)
    for key, known in TribeConfig.model_fields.items():
        if isinstance(known.default, dict | Section) and source.data.get(key, ...) is None:
            del source.data[key]
    merge_defaults(source)
    source.problems += config_checks.duplicate_names(source)
    return source


def _validated(data: Any, source: Source) -> TribeConfig | None:
    """The model of the data, unknown keys left out; None when it cannot be made. Problems join the source's."""
    try:
        return TribeConfig.model_validate(data)
    except ValidationError as error:
        at_fault = {problem.place for problem in source.problems}
        for problem in problems_of(error, Source(data, source.places)):
            if problem.place not in at_fault or not problem.text.startswith("unknown key"):
                source.problems.append(problem)
        unknown = unknown_keys(error, data)
        if len(unknown) < error.error_count():
            return None
        return TribeConfig.model_validate(_without(data, unknown))


def _without(data: Any, paths: list[KeyPath]) -> Any:
    pruned = copy.deepcopy(data)
    for path in paths:
        container = pruned
        for part in path[:-1]:
            container = container[part]
        del container[path[-1]]
    return pruned


def _error(source: Source) -> ConfigError:
    """All problems, one line each, in the order of the file."""
    ordered = sorted(source.problems, key=lambda problem: problem.place.line)
    return ConfigError(scrub("\n".join(dict.fromkeys(str(problem) for problem in ordered))))


def _keys(config: TribeConfig, source: Source, environ: Mapping[str, str]) -> dict[str, str]:
    """The API keys by member name; a variable that gives none is a problem that names the members."""
    keys: dict[str, str] = {}
    wrong: dict[tuple[Place, str], list[str]] = {}
    for index, member in enumerate(config.members):
        if member.api_key_env is None:
            continue
        try:
            keys[member.name] = read_key(member.api_key_env, environ)
        except ValueError as error:
            place = source.place(("members", index, "api_key_env"))
            wrong.setdefault((place, str(error)), []).append(f"'{member.name}'")
    for (place, text), names in wrong.items():
        source.problems.append(Problem(place, f"{place.key}: {text} (for member {', '.join(names)})"))
    return keys


def resolve_path(text: str, base_dir: Path) -> Path:
    """The absolute path of a path in a configuration; `~/` is the home directory."""
    return (base_dir / (Path(text).expanduser() if text.startswith("~/") else text)).absolute()


def _directory(text: str | None, base: Path) -> str | None:
    """The absolute path when the text names something here or can only be a path, else the text: a hub id."""
    if text is None:
        return None
    path = resolve_path(text, base)
    return str(path) if path.exists() or text.startswith(("/", "./", "../", "~/")) else text


def _data_path(text: str, base: Path) -> str:
    return text if text.startswith("hf:") else str(resolve_path(text, base))


def _with_absolute_paths(config: TribeConfig, base: Path) -> TribeConfig:
    update: dict[str, Any] = {
        "servers": {
            name: server.model_copy(update={"model": _directory(server.model, base)})
            for name, server in config.servers.items()
        },
        "members": [m.model_copy(update={"adapter": _directory(m.adapter, base)}) for m in config.members],
        "trainers": {
            name: trainer.model_copy(update={"base_model": _directory(trainer.base_model, base)})
            for name, trainer in config.trainers.items()
        },
    }
    for name in ("instructions", "heldout"):
        if (section := getattr(config, name)) is not None:
            update[name] = section.model_copy(update={"path": _data_path(section.path, base)})
    prompt = config.judging.prompt
    if "/" in prompt or prompt.endswith(_TEMPLATE_SUFFIXES):
        update["judging"] = config.judging.model_copy(update={"prompt": str(resolve_path(prompt, base))})
    if isinstance(start := config.reputation.warm_start, str):
        update["reputation"] = config.reputation.model_copy(update={"warm_start": str(resolve_path(start, base))})
    return config.model_copy(update=update)


def _with_warm_start(config: TribeConfig, resolved: TribeConfig, source: Source) -> tuple[TribeConfig, TribeConfig]:
    """Both configurations with the scores that a warm start's file holds in the place of its name."""
    start = resolved.reputation.warm_start
    if start is None:
        return config, resolved
    scores = start if isinstance(start, dict) else read_scores(Path(start))
    if problem := member_problem(resolved, scores):
        source.problems.append(Problem(source.place(("reputation", "warm_start")), f"reputation.warm_start: {problem}"))
    update = {"reputation": resolved.reputation.model_copy(update={"warm_start": scores})}
    written = {"reputation": config.reputation.model_copy(update={"warm_start": scores})}
    return config.model_copy(update=written), resolved.model_copy(update=update)
