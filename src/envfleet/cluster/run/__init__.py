"""One run: the head, the launched workers and what both need, from start to end."""
