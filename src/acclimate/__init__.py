"""acclimate: test-time adaptation for PyTorch vision models.

model = acclimate.EATAC(net, source=clean_batches)   # any nn.Module that returns logits
for x in stream:
    logits = model(x)                               # predicts, then learns from x
"""

from . import functional
from ._version import __version__
from .adapter import Adapter
from .collect import collect_in_distribution
from .engine import Engine
from .fisher import Fisher
from .methods import DAT, EATA, EATAC, ETA, ETAC, MEMO, METHODS, ROID, SAR, TEA, BNAdapt, CoTTA, RDumb, Source, Tent
from .norm import Normalisation
from .normalised import Normalised
from .parameters import norm_parameters
from .passes import Step, Uncertainty
from .selection import Everything, NonRedundant, Reliable, Scaled, Selector
from .state import Snapshot, StateError
from .subnetwork import StochasticDepth, subnetwork

__all__ = [
    "DAT",
    "EATA",
    "EATAC",
    "ETA",
    "ETAC",
    "MEMO",
    "METHODS",
    "ROID",
    "SAR",
    "TEA",
    "Adapter",
    "BNAdapt",
    "CoTTA",
    "Engine",
    "Everything",
    "Fisher",
    "NonRedundant",
    "Normalisation",
    "Normalised",
    "RDumb",
    "Reliable",
    "Scaled",
    "Selector",
    "Snapshot",
    "Source",
    "StateError",
    "Step",
    "StochasticDepth",
    "Tent",
    "Uncertainty",
    "__version__",
    "collect_in_distribution",
    "functional",
    "norm_parameters",
    "subnetwork",
]
