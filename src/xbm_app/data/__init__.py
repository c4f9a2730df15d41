"""Images, labels, batches: everything between the disk and the model."""
