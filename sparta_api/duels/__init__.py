"""Duels: who meets whom, the engine, where it stands, the pairs that come of it."""
