"""Attention of a clipped encoding as a near band and two far fields."""
