"""Gradients that are smaller than they look: a compressor for DDP, and a word for those of others.

    topk = holdfast.compression.TopK(ratio=0.01)
    topk.register(ddp_model)                 # ranks exchange 1 % of each gradient; the rest waits
    state = {"model": ddp_model, "optim": optimizer, "topk": topk}

Records of a gradient that is known to be sparse hold what is not zero in it, and where.  Another
compressor, or a layer whose gradient is sparse by itself, says so by `sparse(parameters, at_most=0.02)`.
Where ranks exchange gradients in bfloat16, `rounded(parameters, torch.bfloat16)` halves the records.
"""

from holdfast.live.gradient_compression.marks import rounded, sparse
from holdfast.live.gradient_compression.topk import TopK

__all__ = ["TopK", "rounded", "sparse"]
