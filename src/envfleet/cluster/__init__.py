"""Run pools on many machines, the policy beside them."""
