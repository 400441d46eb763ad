"""A process on some node: one pool, one local policy, one connection to the head."""
