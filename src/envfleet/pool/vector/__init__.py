"""Run environments that come vectorized."""
