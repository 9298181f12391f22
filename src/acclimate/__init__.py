"""acclimate: test-time adaptation for PyTorch vision models.

model = acclimate.EATAC(net, source=clean_batches)   # any nn.Module that returns logits
for x in stream:
    logits = model(x)                               # predicts, then learns from x
"""

from . import functional
from ._version import __version__
from .checks import DivergenceError
from .core.adapter import Adapter
from .core.snapshot import Snapshot, StateError
from .core.step import Step, Uncertainty
from .data.collect import collect_in_distribution
from .engine import Engine
from .methods import DAT, EATA, EATAC, ETA, ETAC, MEMO, METHODS, ROID, SAR, TEA, BNAdapt, CoTTA, RDumb, Source, Tent
from .online.cameras import Streams
from .online.guard import Guard
from .online.one_by_one import Stream
from .online.policy import POLICIES, Policy
from .parts.batchnorm import Normalisation
from .parts.fisher import Fisher
from .parts.normalised import Normalised
from .parts.parameters import norm_parameters
from .parts.ranks import RankError, Ranks
from .parts.selection import Everything, NonRedundant, Reliable, Scaled, Selector
from .parts.subnetwork import StochasticDepth, subnetwork

__all__ = [
    "DAT",
    "EATA",
    "EATAC",
    "ETA",
    "ETAC",
    "MEMO",
    "METHODS",
    "POLICIES",
    "ROID",
    "SAR",
    "TEA",
    "Adapter",
    "BNAdapt",
    "CoTTA",
    "DivergenceError",
    "Engine",
    "Everything",
    "Fisher",
    "Guard",
    "NonRedundant",
    "Normalisation",
    "Normalised",
    "Policy",
    "RDumb",
    "RankError",
    "Ranks",
    "Reliable",
    "Scaled",
    "Selector",
    "Snapshot",
    "Source",
    "StateError",
    "Step",
    "StochasticDepth",
    "Stream",
    "Streams",
    "Tent",
    "Uncertainty",
    "__version__",
    "collect_in_distribution",
    "functional",
    "norm_parameters",
    "subnetwork",
]
