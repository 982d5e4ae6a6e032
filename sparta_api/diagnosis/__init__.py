"""Looking back at a run: the same judgments under other settings, and how far judges can be trusted."""
