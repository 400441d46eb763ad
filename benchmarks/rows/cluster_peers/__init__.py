"""Contenders of the cluster, each in a process of its own and perhaps in an interpreter of its own."""
