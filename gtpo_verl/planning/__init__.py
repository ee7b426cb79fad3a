"""Plans of a run, made without a GPU: arithmetic of a step, memory, time, and known problems."""
