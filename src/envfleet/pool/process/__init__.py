"""Run Python environments in child processes."""
