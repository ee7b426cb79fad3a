"""Hydra group hardware=."""
