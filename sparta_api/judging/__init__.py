"""Judging: prompts, reading scores, verifiers."""
