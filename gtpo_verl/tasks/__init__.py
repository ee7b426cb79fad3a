"""Embedded tasks: small verifiable problems, a tiny model and its warm start, made on the spot."""
