"""Policies that workers can run: torch modules in the form of CleanRL, plain functions, import paths."""
