"""Training a layer around its frozen experts: cutting experts, the loss of layer-wise distillation, and its steps."""
