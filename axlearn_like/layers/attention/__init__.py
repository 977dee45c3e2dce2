"""Attention layers and rotary position embedding."""
