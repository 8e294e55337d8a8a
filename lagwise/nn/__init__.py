"""Layers: attention with projections, transformer layers, encoder and decoder stacks with a cache.

>>> import torch
>>> encoder = Encoder(64, layers=2, heads=4, encoding="at5")
>>> encoder(torch.randn(2, 10, 64)).shape
torch.Size([2, 10, 64])
"""

from lagwise.nn.caches import Cache, DecoderCache, LayerCache, LinearCache
from lagwise.nn.layer import Layer
from lagwise.nn.relative import RelativeAttention
from lagwise.nn.stacks import Decoder, Encoder, Stack

__all__ = ["Cache", "Decoder", "DecoderCache", "Encoder", "Layer", "LayerCache", "LinearCache", "RelativeAttention", "Stack"]
