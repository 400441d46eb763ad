"""Infos of many envs: of one batch, of many steps, of several workers."""
