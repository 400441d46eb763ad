"""Start one command many times, somewhere."""
