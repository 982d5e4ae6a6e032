"""`merge`: one trained adapter and its base model as a whole model directory, for servers that load no adapters."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sparta_api.config.keys import nearest
from sparta_api.config.tribe import TribeConfig
from sparta_api.data.rundir import RunDirectory
from sparta_api.errors import ConfigError, TrainingError
from sparta_api.runs.bill import read_job
from sparta_api.runs.models import Models
from sparta_api.trainers.merge import merge

LIBRARIES = ("torch", "transformers", "peft")


def merge_member(run: RunDirectory, config: TribeConfig, member: str, iteration: int | None, out: Path) -> None:
    """Writes the model that a member became in an iteration (the last that trained it if None) to `out`.

    Raises ConfigError for a member or iteration without an adapter, an `out` that exists, and missing packages;
    TrainingError when the two do not fit.
    """
    entry = _trained(run, config, member, iteration)
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        raise ConfigError(f"merging needs {', '.join(missing)}; run: pip install 'sparta-api[local]'")
    if out.exists():
        raise ConfigError(f"{out} is there already; name a directory that does not exist yet")
    base = str(read_job(run.iteration(entry["iteration"]).job(member))["base"])
    root = Path(run.read_json(run.state)["base_dir"])
    local = root / Path(base).expanduser()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        merge(str(local) if local.is_dir() else base, root / entry["serve"], out)
    except (OSError, ValueError, RuntimeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise TrainingError(f"member '{member}': {entry['serve']} cannot be merged into {base} ({first})") from error


def _trained(run: RunDirectory, config: TribeConfig, member: str, iteration: int | None) -> dict[str, Any]:
    """The member's entry in models.json."""
    models = Models(run, config).members
    if member not in models:
        raise ConfigError(f"{run.root}: there is no member '{member}'{nearest(member, list(models))}")
    history = [entry for entry in models[member].history if iteration in (None, entry["iteration"])]
    if not history:
        when = "in any iteration yet" if iteration is None else f"in iteration {iteration}"
        raise ConfigError(f"{run.root}: member '{member}' was not trained {when}; `sparta-api status` tells what was")
    entry = history[-1]
    if entry["kind"] != "adapter":
        raise ConfigError(
            f"{run.root}: the model of '{member}' is {entry['serve']} (kind '{entry['kind']}'), which lies at its "
            "provider; only adapters on this machine can be merged"
        )
    return entry
