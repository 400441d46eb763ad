"""Rollouts on a worker: the collectors, what they record, and the copies of the policy that act."""
