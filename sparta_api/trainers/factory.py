"""From a section of `trainers:` to the object that trains, and to the one that makes its models answer."""

from __future__ import annotations

from pathlib import Path

from sparta_api.config import CommandTrainer as CommandSection
from sparta_api.config import OpenAITrainer as OpenAISection
from sparta_api.config import ServeCommand, TrlTrainer
from sparta_api.config import TinkerTrainer as TinkerSection
from sparta_api.config import TogetherTrainer as TogetherSection
from sparta_api.config import Trainer as Section
from sparta_api.config_file import LoadedTribe
from sparta_api.trainers.command import CommandTrainer
from sparta_api.trainers.deployments import DeploymentLedger
from sparta_api.trainers.instant import Instant
from sparta_api.trainers.openai_style import OpenAITrainer
from sparta_api.trainers.protocol import Deployer, Trainer
from sparta_api.trainers.serve_command import ServeByCommand
from sparta_api.trainers.tinker import TinkerTrainer
from sparta_api.trainers.together import TogetherTrainer
from sparta_api.trainers.together_deploy import TogetherDeployments
from sparta_api.trainers.trl import LocalTrl


def build_trainer(name: str, section: Section, root: Path = Path()) -> Trainer:
    """The trainer of a section whose variables are expanded; `root` is the directory of tribe.yaml."""
    match section:
        case TrlTrainer():
            return LocalTrl(name, section, root)
        case TogetherSection():
            return TogetherTrainer(name, section)
        case OpenAISection():
            return OpenAITrainer(name, section)
        case TinkerSection():
            return TinkerTrainer(name, section)
        case CommandSection():
            return CommandTrainer(name, section, root)


def build_deployer(
    name: str, section: Section, run_id: str, run_directory: Path, root: Path = Path()
) -> Deployer | None:
    """What serves the section's models; None where they are adapters for the member's own endpoint to load."""
    ledger = DeploymentLedger(run_directory)

    def by_command(command: ServeCommand, key_variable: str | None) -> Deployer:
        return ServeByCommand(section.backend, name, command, run_id, ledger, root, key_variable)

    match section:
        case TogetherSection():
            return TogetherDeployments(name, section, run_id, ledger)
        case OpenAISection(deploy=None):
            return Instant(section.base_url, section.api_key_env)
        case OpenAISection(deploy=ServeCommand() as command):
            return by_command(command, section.api_key_env)
        case TinkerSection():
            return Instant(section.inference_url, section.api_key_env)
        case TrlTrainer(serve=ServeCommand() as command) | CommandSection(serve=ServeCommand() as command):
            return by_command(command, None)
        case _:
            return None


def make_trainers(loaded: LoadedTribe) -> dict[str, Trainer]:
    """A trainer per section that a member learns with, by its name."""
    config = loaded.resolved
    names = dict.fromkeys(name for member in config.members if (name := config.trainer_of(member)))
    return {name: build_trainer(name, config.trainers[name], loaded.base_dir) for name in names}
