"""Heads that draft from a target's hidden states: their checkpoints, their graphs, and their place in a bundle."""
