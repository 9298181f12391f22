"""How passes run fast: precision, layout, compilation, a backward pass on the kept samples, CUDA graphs.

No part of torch.compile is imported before a pass is compiled.
"""

from .choice import TESTED_TORCH, Engine, Precision, choose
from .execution import Execution, Live
from .passes import Pass
from .recorder import Recorder, recordable
from .runner import Output, Runner

__all__ = [
    "TESTED_TORCH",
    "Engine",
    "Execution",
    "Live",
    "Output",
    "Pass",
    "Precision",
    "Recorder",
    "Runner",
    "choose",
    "recordable",
]
