"""Export: a trained model as ONNX and torch.export files that run without xbm, with a model card."""
