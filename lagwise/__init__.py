"""Relative positions for attention: encodings as functions of the lag, and one exact attention call for all of them."""

from lagwise import linear, nn
from lagwise.encodings import (
    AT5,
    ENCODINGS,
    T5,
    XL,
    ALiBi,
    AT5Free,
    ConvSPE,
    Encoding,
    HuangM1,
    HuangM2,
    HuangM3,
    HuangM4,
    Kerple,
    Learned,
    NoEncoding,
    PermuteFormer,
    Rotary,
    Sandwich,
    Shaw,
    SineSPE,
    Sinusoidal,
    T5Free,
    XPos,
    make,
)
from lagwise.feature_maps import Favor, FeatureMap
from lagwise.lags import LagTable
from lagwise.linear import linear_attention
from lagwise.softmax import attention, which_impl
from lagwise.terms import FeatureTransform, Terms, Transform
from lagwise.warming import warmup

__version__ = "0.1.0"

__all__ = [
    "AT5", "ENCODINGS", "T5", "XL", "ALiBi", "AT5Free", "ConvSPE", "Encoding", "Favor", "FeatureMap", "FeatureTransform",
    "HuangM1", "HuangM2", "HuangM3", "HuangM4", "Kerple", "LagTable", "Learned", "NoEncoding", "PermuteFormer", "Rotary",
    "Sandwich", "Shaw", "SineSPE", "Sinusoidal", "T5Free", "Terms", "Transform", "XPos", "attention", "linear",
    "linear_attention", "make", "nn", "warmup", "which_impl",
]  # fmt: skip
