"""The forms in which libraries for learning want their environments; one module for each library."""
