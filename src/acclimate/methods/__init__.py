"""The methods, one file each."""

from ..adapter import Adapter
from .bn_adapt import BNAdapt
from .eata import EATA, ETA
from .source import Source
from .tent import Tent

METHODS: dict[str, type[Adapter]] = {
    "source": Source,
    "bn-adapt": BNAdapt,
    "tent": Tent,
    "eta": ETA,
    "eata": EATA,
}
"""Every method by its name on the command line."""

__all__ = ["EATA", "ETA", "METHODS", "BNAdapt", "Source", "Tent"]
