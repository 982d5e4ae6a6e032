"""From a section of `trainers:` to the object that trains, and to the one that makes its models answer.

A back end is imported when it is used: the providers' SDKs take longer to load than a small run.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparta_api.config.tribe import CommandTrainer as CommandSection
from sparta_api.config.tribe import OpenAITrainer as OpenAISection
from sparta_api.config.tribe import ServeCommand, TrlTrainer
from sparta_api.config.tribe import TinkerTrainer as TinkerSection
from sparta_api.config.tribe import TogetherTrainer as TogetherSection
from sparta_api.config.tribe import Trainer as Section
from sparta_api.trainers.protocol import Deployer, Trainer

if TYPE_CHECKING:
    from sparta_api.config.file import LoadedTribe


def _load(module: str, name: str) -> Any:
    return getattr(import_module(f"sparta_api.trainers.{module}"), name)


def build_trainer(name: str, section: Section, root: Path = Path()) -> Trainer:
    """The trainer of a section whose variables are expanded; `root` is the directory of tribe.yaml."""
    trainer: Trainer
    match section:
        case TrlTrainer():
            trainer = _load("trl", "LocalTrl")(name, section, root)
        case TogetherSection():
            trainer = _load("together", "TogetherTrainer")(name, section)
        case OpenAISection():
            trainer = _load("openai_style", "OpenAITrainer")(name, section)
        case TinkerSection():
            trainer = _load("tinker", "TinkerTrainer")(name, section)
        case CommandSection():
            trainer = _load("command", "CommandTrainer")(name, section, root)
    return trainer


def build_deployer(
    name: str, section: Section, run_id: str, run_directory: Path, root: Path = Path()
) -> Deployer | None:
    """What serves the section's models; None where they are adapters for the member's own endpoint to load."""
    deployer: Deployer | None = None
    match section:
        case TogetherSection():
            ledger = _load("deployments", "DeploymentLedger")(run_directory)
            deployer = _load("together_deploy", "TogetherDeployments")(name, section, run_id, ledger)
        case OpenAISection(deploy=None):
            deployer = _load("instant", "Instant")(section.base_url, section.api_key_env)
        case TinkerSection():
            deployer = _load("instant", "Instant")(section.inference_url, section.api_key_env)
        case (
            OpenAISection(deploy=ServeCommand() as command)
            | TrlTrainer(serve=ServeCommand() as command)
            | CommandSection(serve=ServeCommand() as command)
        ):
            key = section.api_key_env if isinstance(section, OpenAISection) else None
            ledger = _load("deployments", "DeploymentLedger")(run_directory)
            deployer = _load("serve_command", "ServeByCommand")(
                section.backend, name, command, run_id, ledger, root, key
            )
        case _:
            pass
    return deployer


def make_trainers(loaded: LoadedTribe) -> dict[str, Trainer]:
    """A trainer per section that a member learns with, by its name."""
    config = loaded.resolved
    names = dict.fromkeys(name for member in config.members if (name := config.trainer_of(member)))
    return {name: build_trainer(name, config.trainers[name], loaded.base_dir) for name in names}
