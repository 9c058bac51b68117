"""Policy ``hcattention``: keys as indices into codebooks on the model's device, values in host memory."""
