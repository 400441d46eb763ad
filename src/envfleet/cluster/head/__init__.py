"""The process with the learner: the fleet of workers, their orders, the published policies."""
