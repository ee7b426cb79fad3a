"""Several trainings: submitted to a Ray cluster, and swept over axes."""
