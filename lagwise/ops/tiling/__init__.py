"""Attention tile by tile in PyTorch, in lag coordinates."""
