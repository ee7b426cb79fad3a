"""What a configuration means before a GPU is used: arithmetic of a step, memory, time, and what is known to go wrong."""
