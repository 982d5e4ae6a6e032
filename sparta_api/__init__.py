"""Aligns a tribe of language models: duels, peer judgment, reputation, preferences, DPO.

The command line is `sparta-api`; from Python:

    from sparta_api import Rating, Reputation, ReputationConfig, parse_score
"""

from sparta_api.config.tribe import ReputationConfig
from sparta_api.duels.matchmaking import Matchup, plan
from sparta_api.duels.preferences import Preference
from sparta_api.errors import (
    ConfigError,
    DirectoryBusy,
    DiskError,
    EndpointError,
    Interrupted,
    LimitReached,
    SpartaError,
    TrainingError,
)
from sparta_api.judging.expected import Expected, expected_score
from sparta_api.judging.scores import parse_score
from sparta_api.ratings.reputation import Change, Rating, Reputation

__all__ = [
    "Change",
    "ConfigError",
    "DirectoryBusy",
    "DiskError",
    "EndpointError",
    "Expected",
    "Interrupted",
    "LimitReached",
    "Matchup",
    "Preference",
    "Rating",
    "Reputation",
    "ReputationConfig",
    "SpartaError",
    "TrainingError",
    "expected_score",
    "parse_score",
    "plan",
]
