"""acclimate: test-time adaptation for PyTorch vision models.

model = acclimate.EATA(net, source=clean_batches)   # any nn.Module that returns logits
for x in stream:
    logits = model(x)                               # predicts, then learns from x
"""

from . import functional
from ._version import __version__
from .adapter import Adapter
from .collect import collect_in_distribution
from .fisher import Fisher
from .methods import EATA, ETA, METHODS, BNAdapt, Source, Tent
from .norm import Normalisation
from .parameters import norm_parameters
from .passes import Step
from .selection import Everything, NonRedundant, Reliable, Selector
from .state import Snapshot, StateError

__all__ = [
    "EATA",
    "ETA",
    "METHODS",
    "Adapter",
    "BNAdapt",
    "Everything",
    "Fisher",
    "NonRedundant",
    "Normalisation",
    "Reliable",
    "Selector",
    "Snapshot",
    "Source",
    "StateError",
    "Step",
    "Tent",
    "__version__",
    "collect_in_distribution",
    "functional",
    "norm_parameters",
]
