"""Schemas of the torchvision operators that its Python code refers to at import time."""

import torch

_library = torch.library.Library("torchvision", "FRAGMENT")  # the schemas live as long as this object
for _op in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _op):
        _library.define(f"{_op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
