"""Measurements of speed, scheduling and size; `python -m bench` runs them and prints one table of ratios."""
