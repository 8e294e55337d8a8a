"""What a model learned about position, as arrays; `lagwise.lens.plots` makes figures of them.

>>> import lagwise
>>> found = prior(lagwise.ALiBi(heads=4), 100)
>>> effective_range(found.probability, found.lags)[1]                                   # the lags that hold 90 %, of each head
tensor([ 9, 37, 79, 88])
"""

from lagwise.lens.ablation import Ablation, PriorHead, ablate, only_priors, prior_heads
from lagwise.lens.calls import Captured, capture, watching
from lagwise.lens.learned import Kernels, bucket_edges, dependency_ranges, spe_kernels
from lagwise.lens.measured import Extrapolation, Losses
from lagwise.lens.metrics import effective_range, effective_size, entropy, kl, monotonicity_violation, translation_invariance
from lagwise.lens.parts import ByLag, Parts, attention_parts, average_attention, expected_logits, mean_by_lag
from lagwise.lens.priors import Prior, prior

__all__ = [
    "Ablation", "ByLag", "Captured", "Extrapolation", "Kernels", "Losses", "Parts", "Prior", "PriorHead", "ablate",
    "attention_parts", "average_attention", "bucket_edges", "capture", "dependency_ranges", "effective_range",
    "effective_size", "entropy", "expected_logits", "kl", "mean_by_lag", "monotonicity_violation", "only_priors", "prior",
    "prior_heads", "spe_kernels", "translation_invariance", "watching",
]  # fmt: skip
