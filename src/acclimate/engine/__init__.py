"""How passes run fast: precision, layout, compilation, a backward on the kept samples alone, CUDA graphs.

Nothing of torch.compile is imported before a pass is compiled.
"""

from .choice import Engine, Precision, choose
from .graphs import Graphs, Part, recordable
from .pieces import Pieces
from .runner import Runner

__all__ = ["Engine", "Graphs", "Part", "Pieces", "Precision", "Runner", "choose", "recordable"]
