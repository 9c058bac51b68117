"""Schemas of the torchvision operators that torchvision's Python code refers to at import time.

They are needed only beside a CPU build of torch, where torchvision's compiled part cannot load.
With a CUDA build the compiled part declares them itself.
"""

import torch

_library = torch.library.Library("torchvision", "FRAGMENT")  # the schemas live as long as this object

if torch.version.cuda is None and torch.version.hip is None:
    for _op in ("nms", "qnms"):
        _library.define(f"{_op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
