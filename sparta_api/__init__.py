"""Aligns a tribe of language models: duels, peer judgment, reputation, preferences, DPO.

The command line is `sparta-api`; from Python:

    from sparta_api import Rating, Reputation, ReputationConfig, parse_score
"""

from sparta_api.config import ReputationConfig
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
from sparta_api.expected import Expected, expected_score
from sparta_api.matchmaking import Matchup, plan
from sparta_api.preferences import Preference
from sparta_api.reputation import Change, Rating, Reputation
from sparta_api.scores import parse_score

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
