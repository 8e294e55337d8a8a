"""Feature maps of linear attention: queries and keys become positive features, whose products are the weights."""

import math
from abc import ABC, abstractmethod
from functools import cache, partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lagwise.errors import nearest, require_seed_number, require_sizes, shown


class FeatureMap(nn.Module, ABC):
    """Makes features of queries and keys, whose products are the weights of linear attention.

        weight(i, j) = queries(factor q'_i) . keys(factor k'_j)

    A map of one's own writes `queries`, and `keys` where the two differ. Features must not be negative.
    """

    estimates_softmax: ClassVar[bool] = False
    """Whether the weights estimate `exp(scale q' . k')`, those of softmax attention, in the mean over random features."""

    def factor(self, *, width: int, head_dim: int, scale: float) -> float:
        """Returns what q' and k' are multiplied by first: `(width / head_dim)^(1/4)`, 1 unless an encoding changes the width.

        The released code of stochastic encodings scales its queries and keys so, which are those of this library otherwise.
        """
        return (width / head_dim) ** 0.25

    @abstractmethod
    def queries(self, x: Float[Tensor, "batch heads time width"]) -> Float[Tensor, "batch heads time features"]:
        """Returns the features of queries. Each row may have a factor of its own, which cancels in the output."""

    def keys(
        self, x: Float[Tensor, "batch heads time width"]
    ) -> tuple[Float[Tensor, "batch heads time features"], Float[Tensor, "batch heads time"] | None]:
        """Returns the features of keys, and the logarithm of a factor that they are still to be multiplied by, or None.

        With the factor apart, features that are exponentials never leave the range of a dtype.
        """
        return self.queries(x), None

    # nn.Module's own annotation makes every call Any; a map has two sides, so that its forward pass is not defined.
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{type(self).__name__} is not called like a layer: pass it to lagwise.linear_attention as feature_map")


class Relu(FeatureMap):
    """`phi(x) = relu(x) + 0.001`, without a projection."""

    def queries(self, x: Float[Tensor, "batch heads time width"]) -> Float[Tensor, "batch heads time width"]:
        return torch.relu(x) + 1e-3


class Elu(FeatureMap):
    """`phi(x) = elu(x) + 1`: exp(x) below 0 and x + 1 above. Katharopoulos et al. (2020)."""

    def queries(self, x: Float[Tensor, "batch heads time width"]) -> Float[Tensor, "batch heads time width"]:
        return nn.functional.elu(x) + 1.0


class Favor(FeatureMap):
    """Positive orthogonal random features, whose products estimate `exp(scale q' . k')` without bias.

        phi(x)_m = exp(w_m . x - |x|^2 / 2) / sqrt(M)        x = sqrt(scale) q' or sqrt(scale) k',   w_m ~ N(0, 1), orthogonal

    Choromanski et al. (2021). Each query's features are divided by their largest one, and then 1e-6 is added, so that no
    denominator is zero; the largest one is a constant for gradients. The released code adds 1e-6 to keys as well, after it has
    divided them by the largest of all: then it would weigh more or less with each later key, and chunks, steps and one pass
    could not agree.

    Args:
        width: Width of the queries: `head_dim`, or the `realizations` of a stochastic encoding.
        features: Number M of features.
        seed: Where the random numbers of the projection start, the same on every device; None draws them from the default
            generator.

    >>> Favor(16, features=64).projection.shape
    torch.Size([64, 16])
    """

    estimates_softmax = True
    projection: Tensor

    def __init__(self, width: int, *, features: int = 256, seed: int | None = 0):
        super().__init__()
        require_sizes(width=width, features=features)
        self.register_buffer("projection", torch.empty(features, width, dtype=torch.float32))
        self.redraw(seed)

    def redraw(self, seed: int | None = None) -> None:
        """Draws another projection: that of a seed, or by default a fresh one from the default generator."""
        if seed is None:
            seed = int(torch.randint(2**62, (), device="cpu"))
        require_seed_number(seed)
        features, width = self.projection.shape
        self.projection.copy_(orthogonal_gaussian(features, width, seed))

    def factor(self, *, width: int, head_dim: int, scale: float) -> float:
        if scale < 0.0:
            raise ValueError(f"scale must not be negative for the features of Favor, but is {scale}")
        return math.sqrt(scale)

    def queries(self, x: Float[Tensor, "batch heads time width"]) -> Float[Tensor, "batch heads time features"]:
        # |x|^2 / 2 is the same for all features of a query and cancels.
        exponent = self._project(x)
        top = exponent.detach().amax(-1, keepdim=True) + self._log_norm
        return torch.exp(exponent - top) + 1e-6 * math.exp(-self._log_norm)

    def keys(
        self, x: Float[Tensor, "batch heads time width"]
    ) -> tuple[Float[Tensor, "batch heads time features"], Float[Tensor, "batch heads time"]]:
        exponent, half = self._project(x), x.square().sum(-1) / 2
        log_scale = exponent.detach().amax(-1) - half.detach()
        return torch.exp(exponent - (half + log_scale + self._log_norm)[..., None]), log_scale

    @property
    def _log_norm(self) -> float:
        return math.log(len(self.projection)) / 2

    def _project(self, x: Tensor) -> Tensor:
        width = self.projection.shape[1]
        if x.shape[-1] != width:
            raise ValueError(
                f"the feature map Favor is made for width {width}, but the encoding makes queries of width {x.shape[-1]}: "
                f"make it with Favor({x.shape[-1]})"
            )
        return x @ self.projection.to(x.dtype).T


FEATURE_MAPS: dict[str, Any] = {"favor": Favor, "relu": Relu, "elu": Elu}


def named(feature_map: FeatureMap | str, width: int, device: torch.device) -> FeatureMap:
    """Returns a feature map that is given by name, always the same one; "favor" has the projection of seed 0."""
    if isinstance(feature_map, FeatureMap):
        return feature_map
    if not isinstance(feature_map, str) or feature_map not in FEATURE_MAPS:
        raise ValueError(
            f"feature_map must be a FeatureMap or one of {', '.join(FEATURE_MAPS)}, "
            f"but is {shown(feature_map)}{nearest(feature_map, FEATURE_MAPS)}"
        )
    return _made(feature_map, width if feature_map == "favor" else None, device)


@cache
def _made(name: str, width: int | None, device: torch.device) -> FeatureMap:
    return FEATURE_MAPS[name](*[] if width is None else [width]).to(device)


def orthogonal_gaussian(rows: int, width: int, seed: int) -> Float[Tensor, "rows width"]:
    """Returns Gaussian rows of which any `width` that follow each other in a block are orthogonal, in float64, from the CPU."""
    draw = partial(torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), device="cpu")
    blocks = []
    for _ in range(math.ceil(rows / width)):
        basis, triangle = torch.linalg.qr(draw(width, width))
        # With the signs of the diagonal, every orthogonal basis is equally likely.
        blocks.append((basis * triangle.diagonal().sign()).T)
    lengths = draw(rows, width).norm(dim=1, keepdim=True)
    return torch.cat(blocks)[:rows] * lengths
