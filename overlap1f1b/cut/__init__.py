"""Room ``cut``: what is made once with the model, and frozen from then on."""

from overlap1f1b.transport.versions import check_torch

check_torch()
