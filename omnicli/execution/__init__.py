"""Stages, networks and caches: everything that computes."""
