"""What a run is on disk: its directory, lock, records, how they are read back, and statistics of one run."""
