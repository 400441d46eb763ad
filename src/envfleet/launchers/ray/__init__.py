"""Start workers as the actors of a Ray cluster."""
