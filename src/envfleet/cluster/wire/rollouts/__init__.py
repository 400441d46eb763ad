"""Rollouts on the wire: which arrays they consist of, how each is checked, how those of several workers are joined."""
