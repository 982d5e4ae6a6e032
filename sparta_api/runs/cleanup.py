"""`cleanup`: takes down what a run's ledger says is still up at its providers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from sparta_api.config.tribe import TribeConfig
from sparta_api.data.rundir import RunDirectory
from sparta_api.errors import SpartaError, TrainingError
from sparta_api.runs.bill import read_bill
from sparta_api.trainers.factory import build_deployer


async def take_down(run: RunDirectory, config: TribeConfig) -> AsyncIterator[str]:
    """Takes everything down that the ledger does not know to be down; yields a sentence for each, and for each
    training job that goes on.

    One that cannot be taken down does not keep the others up: TrainingError, with all reasons, comes at the end.
    """
    before = read_bill(run, config)
    problems = []
    record = run.read_json(run.state)
    for name, section in config.trainers.items():
        deployer = build_deployer(name, section, str(record["id"]), run.root, Path(record["base_dir"]))
        if deployer is None:
            continue
        try:
            for line in await deployer.cleanup():
                yield line
        except SpartaError as error:
            problems.append(str(error))
        finally:
            await deployer.close()
    known = set(config.trainers)
    problems += [
        f"member '{entry.get('member')}': {entry.get('model') or entry['name']} was brought up by the trainer "
        f"'{entry.get('trainer')}', which {run.tribe} does not have any more; take it down at its provider"
        for entry in before.up
        if entry.get("trainer") not in known
    ]
    for job in before.going_on:
        yield f"{job} was not ended here; resume the run to wait for it, or cancel it at its provider"
    if problems:
        raise TrainingError("\n".join(problems))
    if not before.up:
        yield "nothing is up"
