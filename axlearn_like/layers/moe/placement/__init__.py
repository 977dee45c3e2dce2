"""Placement of experts on devices: plans, and the rules that make them."""
