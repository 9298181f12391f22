"""The methods, one file each."""

from .bn_adapt import BNAdapt
from .cotta import CoTTA
from .dat import DAT
from .eata import EATA, ETA
from .eata_c import EATAC, ETAC
from .memo import MEMO
from .plugins import Methods
from .rdumb import RDumb
from .roid import ROID
from .sar import SAR
from .source import Source
from .tea import TEA
from .tent import Tent

METHODS = Methods(
    {
        "source": Source,
        "bn-adapt": BNAdapt,
        "tent": Tent,
        "memo": MEMO,
        "cotta": CoTTA,
        "sar": SAR,
        "roid": ROID,
        "rdumb": RDumb,
        "tea": TEA,
        "dat": DAT,
        "eta": ETA,
        "eata": EATA,
        "eta-c": ETAC,
        "eata-c": EATAC,
    }
)
"""Every method by its name on the command line; methods of other packages are found by theirs."""

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
    "BNAdapt",
    "CoTTA",
    "RDumb",
    "Source",
    "Tent",
]
