"""Hydra group backend=."""
