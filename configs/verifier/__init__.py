"""Hydra group setting=."""
