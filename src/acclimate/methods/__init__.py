"""The methods, one file each."""

from ..adapter import Adapter
from .bn_adapt import BNAdapt
from .eata import EATA, ETA
from .eata_c import EATAC, ETAC
from .source import Source
from .tent import Tent

METHODS: dict[str, type[Adapter]] = {
    "source": Source,
    "bn-adapt": BNAdapt,
    "tent": Tent,
    "eta": ETA,
    "eata": EATA,
    "eta-c": ETAC,
    "eata-c": EATAC,
}
"""Every method by its name on the command line."""

__all__ = ["EATA", "EATAC", "ETA", "ETAC", "METHODS", "BNAdapt", "Source", "Tent"]
