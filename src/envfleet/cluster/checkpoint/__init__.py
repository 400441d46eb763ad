"""Checkpoints: what a run needs to go on after its head has ended."""
