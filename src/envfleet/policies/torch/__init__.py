"""Torch modules as policies: in the forms of CleanRL, with and without memory."""
