"""Serving by the user's own command: for endpoints that cannot load an adapter while they run, and for hosted
models that want a deployment.

What a command brought up is in the run's `deployments.json`, so that the same model is not brought up twice
and `cleanup` takes it down where `undeploy` says how.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

from sparta_api.errors import TrainingError
from sparta_api.trainers.commands import ask_command, environment, fill, run_command
from sparta_api.trainers.config import ServeCommand
from sparta_api.trainers.deployments import DOWN, UP, DeploymentLedger, all_of, short_name
from sparta_api.trainers.protocol import ServedModel, TrainedModel

MERGE = "sparta_api.trainers.merge"


class ServeByCommand:
    """Runs `command` for every new model of a member, and `undeploy` for the one before.

    `backend` and `name` are the trainer's; `key_variable` names the key that the served models want, None for
    the member's own. `root` is the directory of tribe.yaml.
    """

    def __init__(
        self,
        backend: str,
        name: str,
        settings: ServeCommand,
        run_id: str,
        ledger: DeploymentLedger,
        root: Path = Path(),
        key_variable: str | None = None,
    ) -> None:
        self.backend = backend
        self.name = name
        self.settings = settings
        self.keep = settings.keep
        self._run_id = run_id
        self._ledger = ledger
        self._root = root.resolve()
        self._key_variable = key_variable

    def up(self) -> list[str]:
        """The models that commands brought up."""
        return [str(entry.get("model", name)) for name, entry in self._ledger.up(self.backend, self.name).items()]

    async def close(self) -> None:
        """Nothing is held open."""

    async def deploy(self, model: TrainedModel, base_model: str, member: str, iteration: int) -> ServedModel:
        """Runs the command unless the ledger says that this model is up already."""
        name = f"{short_name(self._run_id, member)}-{hashlib.sha256(model.serve.encode()).hexdigest()[:8]}"
        known = self._ledger.read().get(name)
        if known and known["state"] == UP:
            return ServedModel(known["model"], known["base_url"], self._key_variable)
        what = f"member '{member}': serving {model.serve} by trainers.{self.name}"
        values = {
            "adapter": model.serve,
            "model": model.serve,
            "merged": await self._merged(model, base_model, what),
            "base_model": base_model,
            "member": member,
            "iteration": str(iteration),
            "name": name,
        }
        command = fill(self.settings.command, values, what)
        self._ledger.begin(name, backend=self.backend, trainer=self.name, member=member)
        answer = await ask_command(command, environment(values, {}), self._root, self.settings.timeout_s, what)
        served, base_url = answer.get("model"), answer.get("base_url")
        if not isinstance(served, str) or not served or not isinstance(base_url, str | None):
            raise TrainingError(
                f'{what}: the command must print {{"base_url": ..., "model": ...}}, but printed {answer}'
            )
        self._ledger.record(name, state=UP, model=served, base_url=base_url)
        await self._take_down(member, keep=name)
        return ServedModel(served, base_url, self._key_variable)

    async def cleanup(self) -> list[str]:
        """Runs `undeploy` for everything that is up; without one it says what is left to do by hand."""
        return await self._take_down(None, keep=None)

    async def _take_down(self, member: str | None, keep: str | None) -> list[str]:
        entries = self._ledger.up(self.backend, self.name)
        ours = [name for name in entries if name != keep and member in (None, entries[name]["member"])]
        if self.settings.undeploy is not None:
            return await all_of(self._undeploy(self.settings.undeploy, name, entries[name]) for name in ours)
        if member is not None:
            return []
        return [
            f"member '{entries[name]['member']}': {entries[name].get('model', name)} may still be up; "
            f"trainers.{self.name} names no undeploy"
            for name in ours
        ]

    async def _undeploy(self, command: list[str], name: str, entry: dict[str, Any]) -> str:
        model, base_url = str(entry.get("model", name)), str(entry.get("base_url") or "")
        values = {"model": model, "base_url": base_url, "member": entry["member"], "name": name}
        what = f"member '{entry['member']}': taking {model} down by trainers.{self.name}"
        filled = fill(command, values, what)
        await run_command(filled, environment(values, {}), self._root, self.settings.timeout_s, what)
        self._ledger.record(name, state=DOWN)
        return f"member '{entry['member']}': {model} is down"

    async def _merged(self, model: TrainedModel, base_model: str, what: str) -> str:
        """The directory of base model and adapter in one, made where the command asks for it; else ""."""
        if not self.settings.merges:
            return ""
        adapter = Path(model.serve)
        merged = adapter.with_name(adapter.name + "-merged")
        command = [sys.executable, "-m", MERGE, base_model, str(adapter), str(merged)]
        await ask_command(command, dict(os.environ), self._root, self.settings.timeout_s, f"{what}: merging {adapter}")
        return str(merged)
