"""Who computes attention: `dense` is the specification, the others are fast."""
