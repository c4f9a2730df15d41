"""How anchors are compared with rows: `pairing` says which pairs count, `streaming`, `triton` and `dense` compute the loss."""
