"""Duels among language models, peer judgment, reputation, preferences, DPO."""
