"""What lies on disk: data files, journals, the run directory."""
