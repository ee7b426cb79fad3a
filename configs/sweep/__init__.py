"""Hydra group sweep=."""
