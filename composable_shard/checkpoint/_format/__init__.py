"""What a checkpoint is on the disk: its directory, its manifest, and files of tensors."""
