"""Policies that workers can run: torch modules in the forms of CleanRL, plain functions, import paths."""
