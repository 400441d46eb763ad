"""Run N environments on this machine."""
