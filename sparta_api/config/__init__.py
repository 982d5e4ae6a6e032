"""tribe.yaml: every key, how it is read, and what is wrong with it."""
