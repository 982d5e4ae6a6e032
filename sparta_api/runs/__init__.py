"""A run from opening to report: its stages, its held-out answers, its plan."""
