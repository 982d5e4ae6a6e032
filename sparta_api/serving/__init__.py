"""Servers of the run, adapters in endpoints, and who sits where."""
