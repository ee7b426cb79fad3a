"""Hydra group algo=."""
