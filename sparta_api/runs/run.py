"""The iterations of a run: what is done, what comes next.

Every stage of an iteration leaves a file (or an entry) that says it is done, so that a run goes on exactly where
it stopped: matchups, duels, ratings, preferences, trained models, served models, held-out answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
from collections.abc import Iterator
from typing import Any

from sparta_api.data.journal import read_lines, write_lines
from sparta_api.data.rundir import IterationFiles
from sparta_api.duels.engine import Engine, owed_sentence
from sparta_api.duels.matchmaking import Matchup, plan
from sparta_api.duels.preferences import PairCounts, configured
from sparta_api.duels.standing import Standing
from sparta_api.endpoints.budget import Budget
from sparta_api.endpoints.client import Client
from sparta_api.errors import DiskError, Interrupted
from sparta_api.judging.verifiers import Verifiers
from sparta_api.ratings.reputation import Reputation
from sparta_api.runs.bill import read_bill
from sparta_api.runs.gain import stop_at_collapse
from sparta_api.runs.heldout import ask_heldout
from sparta_api.runs.heldout_scores import HeldoutScores
from sparta_api.runs.models import Models
from sparta_api.runs.outcome import count_lines, first_reputation, next_reputation, standings
from sparta_api.runs.session import InstructionStore, Session
from sparta_api.runs.training import TrainingStage
from sparta_api.serving.seating import Seating
from sparta_api.show.progress import Progress
from sparta_api.trainers.factory import make_trainers

FIGURES_EVERY_S = 0.2
INTERRUPT_GRACE_S = 2.0


class Run:
    """One run from where it stands to its end. `progress` receives the figures for whoever shows them."""

    def __init__(self, session: Session, progress: Progress) -> None:
        self._session = session
        self._config = session.config
        self._files = session.run
        self._progress = progress
        self._models = Models(session.run, session.config)
        self._instructions = InstructionStore(session.run.instructions)
        self._engine: Engine | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopped: BaseException | None = None
        progress.roles = {member.name: tuple(member.roles) for member in session.config.members}

    async def execute(self) -> None:
        """Plays, trains and serves until all iterations are done.

        Raises a SpartaError when something stops it; everything done so far is in the run directory.
        """
        self._task = asyncio.current_task()
        if self._session.record.get("completed", 0) >= self._config.iterations:
            return
        rounds = standings(self._config, self._files)
        self._budget = self._spent_so_far(rounds)
        self._client = Client(self._budget, self._notice)
        self._seating = Seating(self._session, self._models, self._notice, self._stop)
        self._trainers = make_trainers(self._session.loaded)
        self._verifiers = Verifiers(self._config, self._session.loaded.base_dir, self._files.logs)
        figures = asyncio.create_task(self._update_figures())
        try:
            self._session.save(state="running")
            await self._prepare()
            self._session.adopt()
            await self._iterations(rounds)
            self._show_figures()
            self._session.save(state="done", phase="done", lost=self._budget.lost)
            self._progress.enter("done")
        except asyncio.CancelledError:
            if self._stopped is None:
                raise
            raise self._stopped from None
        finally:
            figures.cancel()
            await self._close()

    def interrupt(self, signum: int) -> None:
        """Stops the run: requests in flight may arrive for a moment. A second call does not wait for them."""
        self._stop(Interrupted(f"interrupted by {signal.Signals(signum).name}", signum), INTERRUPT_GRACE_S)

    def _stop(self, reason: BaseException, grace: float = 0.0) -> None:
        """Ends the run with that reason, whatever it is doing."""
        self._stopped = self._stopped or reason
        ending = self._engine is not None and self._engine.stop(reason, grace)
        if not ending and self._task is not None:
            self._task.cancel()

    async def _close(self) -> None:
        """Ends whatever the run has started, also where its directory cannot be written any more."""
        interrupted = isinstance(self._stopped, Interrupted)
        record = self._session.record
        notices = list(dict.fromkeys([*record.get("notices", ()), *self._progress.notices]))
        state = "done" if record.get("state") == "done" else "stopped"
        with contextlib.suppress(DiskError):
            self._session.save(state=state, lost=self._budget.lost, notices=notices)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._client.close)
            stack.push_async_callback(self._seating.close, keep_up=interrupted)
            stack.push_async_callback(self._verifiers.close)
            for trainer in self._trainers.values():
                stack.push_async_callback(trainer.close)

    def _notice(self, text: str) -> None:
        if text not in self._progress.notices:
            self._progress.notices.append(text)

    def _spent_so_far(self, rounds: list[Standing]) -> Budget:
        totals = [totals for standing in rounds for totals in standing.tally.totals.values()]
        jobs = read_bill(self._files, self._config).total.total
        budget = Budget(
            self._config.limits,
            requests=sum(t.requests for t in totals),
            tokens=sum(t.usage.prompt + t.usage.completion for t in totals),
            cost=math.fsum([*(t.cost_usd or 0.0 for t in totals), jobs]),
        )
        budget.restore(self._session.record.get("lost", {}))
        return budget

    async def _update_figures(self) -> None:
        while True:
            self._show_figures()
            await asyncio.sleep(FIGURES_EVERY_S)

    def _show_figures(self) -> None:
        priced = all(member.price or member.server for member in self._config.members)
        self._progress.requests = self._budget.requests
        self._progress.tokens = self._budget.tokens
        self._progress.spent_usd = self._budget.cost if priced or self._budget.cost else None

    # Stages

    async def _prepare(self) -> None:
        """Everything that must work before the first request of the run: verifiers, trainers, servers, adapters."""
        await self._verifiers.open()
        for member in self._config.members:
            name = self._config.trainer_of(member)
            if name:
                base = self._config.base_model_of(member, self._config.trainers[name])
                for warning in await self._trainers[name].preflight(
                    base, self._models.trained(member.name), member.name
                ):
                    self._notice(warning)
        self._enter("serving")
        await self._seating.open(self._trainers)

    async def _iterations(self, rounds: list[Standing]) -> None:
        reputation, history = first_reputation(self._config), []
        for number in range(self._config.iterations):
            self._progress.begin_iteration(number)
            if number < self._session.record.get("completed", 0):
                ended = rounds[number].reputation
            else:
                ended = await self._iteration(number, reputation)
            history.append(ended.reputations)
            reputation = next_reputation(self._config, ended, history)

    async def _iteration(self, number: int, start: Reputation) -> Reputation:
        files = self._files.iteration(number)
        self._session.save(iteration=number)
        if number == 0:
            await self._heldout(trained=0)
        elif self._config.training.stop_on_collapse:
            stop_at_collapse(self._files, self._config)
        standing = await self._duels(files, start)
        self._files.write_json(self._files.ratings, standing.reputation.to_json())
        pairs = self._preferences(files)
        await self._training(files, pairs)
        self._enter("serving")
        await self._seating.serve()
        await self._heldout(trained=number + 1)
        self._session.save(completed=number + 1)
        return standing.reputation

    def _enter(self, phase: str) -> None:
        self._show_figures()
        self._progress.enter(phase)
        self._session.save(phase=phase)

    async def _duels(self, files: IterationFiles, start: Reputation) -> Standing:
        if not files.matchups.exists():
            write_lines(files.matchups, (matchup.to_json() for matchup in self._plan(files.number, start)))
        total = count_lines(files.matchups)
        standing = Standing(self._config, self._files, files, start)
        standing.load()
        if standing.dropped:
            self._notice(f"{files.root}: a half-written line was dropped; its work is done again")
        progress = self._progress
        progress.totals = standing.tally.totals
        progress.reputation_before = standing.before
        progress.duels_total, progress.duels_done = total, standing.folded
        progress.duels_void = sum(standing.tally.void.values())
        progress.answers_expected = _answers(files, self._config.judging.rounds)
        self._enter("duels")
        if standing.folded < total:
            standing.start()
            await self._play(files, standing)
        progress.reputation = standing.reputation.reputations
        return standing

    async def _play(self, files: IterationFiles, standing: Standing) -> None:
        self._engine = Engine(
            self._config,
            files.number,
            standing,
            self._seating.seats,
            self._client,
            self._instructions.row,
            self._progress,
            self._verifiers.by_name,
        )
        try:
            owed = await self._engine.play(_matchups(files))
            if owed:
                raise owed_sentence(self._engine, owed)
        finally:
            self._engine = None
            self._files.write_json(self._files.ratings, standing.reputation.to_json())

    def _plan(self, number: int, start: Reputation) -> Iterator[Matchup]:
        config = self._config
        return plan(
            config.seed,
            number,
            start.reputations,
            self._instructions.ids,
            [member.name for member in config.members if member.fights],
            [member.name for member in config.members if member.judges],
            config.matchmaking,
            config.instructions.per_iteration,
            config.judging.judges_per_duel,
        )

    def _preferences(self, files: IterationFiles) -> int:
        """Writes the iteration's pairs, where that was not done; returns their number."""
        self._enter("preferences")
        if not files.preferences.exists():
            counts = PairCounts()
            duels = (row for row, _, _ in read_lines(files.duels))
            responses = (row for row, _, _ in read_lines(files.responses) if "error" not in row)
            prompts = self._instructions.messages
            write_lines(files.preferences, configured(self._config, files.number, duels, responses, prompts, counts))
            self._session.record.setdefault("pairs", {})[str(files.number)] = {
                "pairs": counts.pairs,
                "ties": counts.ties,
                "void": counts.void,
                "identical": counts.identical,
            }
        return count_lines(files.preferences)

    async def _training(self, files: IterationFiles, pairs: int) -> None:
        if not self._trainers or self._models.learned(files.number):
            return
        self._enter("training")
        stage = TrainingStage(self._session, self._models, self._trainers, self._progress, self._budget)
        learners = [member for member in self._config.members if self._config.trainer_of(member)]
        async with self._seating.training(learners):
            learned = await stage.train(files, pairs)
        self._models.set_trained(files.number, learned)

    async def _heldout(self, trained: int) -> None:
        """Asks the held-out instructions of all fighters, once per stage of training."""
        if self._config.heldout is not None:
            self._enter("held-out answers")
            seats = self._seating.seats
            await ask_heldout(self._session, seats, self._client, trained)
            scores = HeldoutScores(self._session, seats, self._client, self._verifiers.by_name, self._notice)
            await scores.score(trained)


def _matchups(files: IterationFiles) -> Iterator[Matchup]:
    for row, _, _ in read_lines(files.matchups):
        yield _matchup(row)


def _matchup(row: dict[str, Any]) -> Matchup:
    a, b = row["fighters"]
    return Matchup(row["duel"], row["instruction"], (a, b), tuple(row["judges"]))


def _answers(files: IterationFiles, rounds: int) -> int:
    """Responses and judgments that an iteration will hold when nothing is void."""
    return sum(2 + 2 * rounds * len(row["judges"]) for row, _, _ in read_lines(files.matchups))
