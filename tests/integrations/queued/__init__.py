"""Tests that share one TransferQueue: this file makes the folder the scope of its fixture."""
