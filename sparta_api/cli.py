"""The command line: `sparta-api init | check | run | resume | status | export | replay | judges | ...`.

Results go to stdout, progress and logs to stderr. Exit codes: 0 done; 1 a bug; 2 bad configuration or input, or a
directory in use; 3 stopped by a fault, resumable; 4 stopped at a limit, resumable; 130/143 interrupted, resumable.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from sparta_api.config import scaffold
from sparta_api.config.file import LoadedTribe, load_tribe
from sparta_api.data.journal import disk_error
from sparta_api.data.rundir import RunDirectory, new_run_directory
from sparta_api.diagnosis import replay as replays
from sparta_api.diagnosis.judges import diagnose
from sparta_api.duels.exports import Format, export
from sparta_api.errors import ConfigError, SpartaError
from sparta_api.runs import check as checks
from sparta_api.runs import forecast as forecasts
from sparta_api.runs.bill import read_bill
from sparta_api.runs.cleanup import take_down
from sparta_api.runs.merged import merge_member
from sparta_api.runs.outcome import report
from sparta_api.runs.run import Run
from sparta_api.runs.session import Session, continued, create
from sparta_api.secrets import scrub
from sparta_api.show import judges_report
from sparta_api.show import report as reports
from sparta_api.show.progress import Progress
from sparta_api.show.terminal import clean
from sparta_api.show.view import LiveView

RUNS = Path("runs")

app = typer.Typer(
    name="sparta-api",
    help="Aligns a tribe of language models: duels, peer judgment, reputation, preferences, DPO.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

TribeOption = Annotated[Path, typer.Option("--tribe", help="The tribe.yaml.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Changes one value; may be repeated.")
]
RunArgument = Annotated[Path, typer.Argument(help="A run directory.")]


def main() -> None:
    """Runs the command line and ends the process with the contract's exit code."""
    try:
        code = app(standalone_mode=False)
    except SpartaError as error:
        _fail(error)
    except typer.Exit as ended:
        sys.exit(ended.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(128 + signal.SIGINT)
    except OSError as error:
        if error.filename is None or error.errno is None:
            raise
        _fail(disk_error(Path(str(error.filename)), error))
    except Exception as error:
        usage = getattr(error, "format_message", None)
        if usage is None:
            raise
        if sentence := usage():
            sys.stderr.write(f"sparta-api: {sentence}\n")
        sys.exit(2)
    else:
        sys.exit(code if isinstance(code, int) else 0)


def _fail(error: SpartaError) -> NoReturn:
    sys.stderr.write(f"sparta-api: {clean(scrub(str(error)), lines=True)}\n")
    sys.exit(error.exit_code)


@app.command()
def init(
    directory: Annotated[Path, typer.Argument(help="Where to write it.")] = Path(),
    template: Annotated[str, typer.Option(help="quickstart, vllm or hosted.")] = "quickstart",
) -> None:
    """Writes a commented tribe.yaml and what it needs."""
    for path in scaffold.init(directory, template):
        typer.echo(path)


@app.command()
def check(tribe: TribeOption, set_: SetOption = None) -> None:
    """Validates the file, then asks every endpoint one small question in each of its roles."""
    loaded = _load(tribe, set_)
    rows = asyncio.run(checks.check(loaded))
    checks.show(rows, Console())
    if any(row.problem for row in rows):
        raise typer.Exit(3)


@app.command()
def run(
    tribe: TribeOption,
    run_dir: Annotated[Path | None, typer.Option(help="Where it lives; a new directory in runs/ if absent.")] = None,
    trainer: Annotated[str | None, typer.Option(help="A key of trainers for all that learn, or none.")] = None,
    iterations: Annotated[int | None, typer.Option(help="Overrides iterations.")] = None,
    set_: SetOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Prints the plan and what it would cost.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Does not ask before money is spent.")] = False,
) -> None:
    """Starts a run, or goes on with the one in --run-dir."""
    overrides = list(set_ or [])
    if iterations is not None:
        overrides.append(f"iterations={iterations}")
    loaded = _load(tribe, overrides, trainer)
    if dry_run:
        forecasts.show(asyncio.run(forecasts.forecast(loaded)), Console())
        return
    root = run_dir or new_run_directory(RUNS, loaded.config.name)
    directory = RunDirectory(root)
    if not directory.exists and not yes:
        _ask_to_spend(loaded)
    with directory.locked():
        _play(continued(root, loaded) if directory.exists else create(root, loaded))


@app.command()
def resume(directory: RunArgument, set_: SetOption = None) -> None:
    """Goes on with a run from its directory alone."""
    run = RunDirectory(directory)
    record = run.read_json(run.state)
    with run.locked():
        loaded = load_tribe(run.tribe, set_ or [], base_dir=Path(record["base_dir"]))
        _play(continued(directory, loaded))


@app.command()
def status(directory: RunArgument, as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """Where a run stands."""
    figures = report(*_opened(directory))
    if as_json:
        typer.echo(json.dumps(figures.to_json(), indent=2, ensure_ascii=False))
    else:
        reports.render(figures, Console())


@app.command(name="export")
def export_(
    directory: RunArgument,
    format_: Annotated[Format, typer.Option("--format", help="trl or openai.")],
    iteration: Annotated[int | None, typer.Option(help="One iteration, counted from 0; all if absent.")] = None,
    out: Annotated[Path | None, typer.Option(help="A file; stdout if absent.")] = None,
) -> None:
    """Writes the preference pairs for other tools."""
    export(RunDirectory(directory), format_, iteration, out)


@app.command()
def merge(
    directory: RunArgument,
    member: Annotated[str, typer.Option(help="Whose adapter.")],
    out: Annotated[Path, typer.Option(help="A directory that does not exist yet.")],
    iteration: Annotated[int | None, typer.Option(help="Counted from 0; the last that trained it if absent.")] = None,
) -> None:
    """Writes a member's adapter and its base model as one model, for servers that load no adapters."""
    merge_member(*_opened(directory), member, iteration, out)
    typer.echo(out)


@app.command()
def replay(
    directory: RunArgument,
    set_: SetOption = None,
    out: Annotated[Path | None, typer.Option(help="Writes the results into this new directory, too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Recomputes verdicts, reputations and preferences under other settings, without a request."""
    result = replays.replay(RunDirectory(directory), set_ or [], out)
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=2, ensure_ascii=False))
    else:
        replays.show(result, Console())


@app.command()
def judges(directory: RunArgument, as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """How far each judge of a run can be trusted."""
    found = diagnose(RunDirectory(directory))
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2, ensure_ascii=False))
    else:
        judges_report.show(found, Console())


@app.command()
def cleanup(directory: RunArgument) -> None:
    """Takes down the deployments that a run has left up."""
    run, config = _opened(directory)
    with run.locked():
        asyncio.run(_echo(take_down(run, config)))


async def _echo(lines: AsyncIterator[str]) -> None:
    async for line in lines:
        typer.echo(clean(scrub(line)))


def _load(tribe: Path, overrides: list[str] | None, trainer: str | None = None) -> LoadedTribe:
    overrides = list(overrides or [])
    loaded = load_tribe(tribe, overrides)
    if trainer is not None:
        overrides += checks.trainer_overrides(loaded, trainer)
        loaded = load_tribe(tribe, overrides)
    for warning in loaded.warnings:
        sys.stderr.write(f"warning: {clean(scrub(warning))}\n")
    return loaded


def _ask_to_spend(loaded: LoadedTribe) -> None:
    """On a terminal, asks before a run that costs money."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    plan = asyncio.run(forecasts.forecast(loaded))
    if plan.costs_money:
        forecasts.show(plan, Console(stderr=True))
        typer.confirm("Start?", abort=True, err=True)


def _opened(directory: Path) -> tuple[RunDirectory, Any]:
    run = RunDirectory(directory)
    record = run.read_json(run.state)
    try:
        config = load_tribe(run.tribe, base_dir=Path(record["base_dir"]), keys=False).resolved
    except ConfigError as error:
        raise ConfigError(f"{run.tribe}: cannot be read back ({error})") from error
    return run, config


def _play(session: Session) -> None:
    """Runs a session to its end on an event loop of its own, then prints its report."""
    progress = Progress(run=session.run.root.name, iterations=session.config.iterations)
    try:
        _loop_run(_shown(session, progress))
    except SpartaError as error:
        if error.exit_code != 2:
            again = shlex.quote(str(session.run.root))
            for sentence in read_bill(session.run, session.config).sentences(session.run.root):
                sys.stderr.write(f"sparta-api: {clean(scrub(sentence))}\n")
            sys.stderr.write(f"sparta-api: to go on: sparta-api resume {again}\n")
        raise
    reports.render(report(session.run, session.config), Console())


async def _shown(session: Session, progress: Progress) -> None:
    loop = asyncio.get_running_loop()
    running = Run(session, progress)
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, running.interrupt, signum)
    async with LiveView(progress, Console(stderr=True)):
        await running.execute()


def _loop_run(main: Coroutine[Any, Any, None]) -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


if __name__ == "__main__":
    main()
