"""A run as files that need no xbm: ONNX, a torch.export program, and a card that says what they are."""
