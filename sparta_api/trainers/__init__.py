"""Trainer back ends: each turns the preferences of an iteration into a member's next model."""
