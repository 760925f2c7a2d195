"""The algorithms as the papers write them: float64 NumPy, n workers simulated in one process, no cleverness.

This is the slowest and plainest of three fidelities (this, the reference kernels, the compiled kernels) and shares no code with the
library. Letters are those of docs/algorithms: worker i, parameter tensor l, local gradients ``g[i][l]``, averaged moments ``m[l]`` and
``v[l]``, weights ``x[l]``, worker residuals ``e[i][l]``, server residuals ``d[l]``. All tensors are kept flat.
"""

from oracle.adam import Adam
from oracle.binsgdm import BinSGDM
from oracle.blocks import Exchange, blocks, compress
from oracle.lamb import Lamb
from oracle.sgd import SGD
from oracle.zero_one_adam import SyncPolicy, VariancePolicy, ZeroOneAdam

__all__ = [
    "SGD",
    "Adam",
    "BinSGDM",
    "Exchange",
    "Lamb",
    "SyncPolicy",
    "VariancePolicy",
    "ZeroOneAdam",
    "blocks",
    "compress",
]
