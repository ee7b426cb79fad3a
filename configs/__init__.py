"""Hydra configuration of gtpo_verl, packaged as ``gtpo_verl.configs``."""
