"""Images, labels and batches: everything between the disk and the model."""
