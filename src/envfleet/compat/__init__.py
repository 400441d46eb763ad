"""Other programs' ways of speaking: modules that stand in for theirs."""
