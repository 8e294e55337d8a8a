"""Stochastic features: sines and filters."""
