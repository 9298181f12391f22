"""How passes run fast: precision, layout, compilation, a backward pass on the kept samples, CUDA graphs.

No part of torch.compile is imported before a pass is compiled.
"""

from .capture import LIVE_CALLS
from .choice import TESTED_TORCH, Engine, Precision, choose, without_recording
from .compiler import Compiler
from .execution import Execution, Live, Rehearsal
from .host_compiler import has_fast_bfloat16
from .passes import Pass
from .portable import ForeignError, compiled_code, pack, purpose, unpack, use_compiled_code
from .progress import show_with
from .recorder import Recorder, recordable
from .runner import Output, Runner

__all__ = [
    "LIVE_CALLS",
    "TESTED_TORCH",
    "Compiler",
    "Engine",
    "Execution",
    "ForeignError",
    "Live",
    "Output",
    "Pass",
    "Precision",
    "Recorder",
    "Rehearsal",
    "Runner",
    "choose",
    "compiled_code",
    "has_fast_bfloat16",
    "pack",
    "purpose",
    "recordable",
    "show_with",
    "unpack",
    "use_compiled_code",
    "without_recording",
]
