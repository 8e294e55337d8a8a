"""Music as tokens."""
