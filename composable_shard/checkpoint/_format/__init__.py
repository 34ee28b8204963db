"""The format of a checkpoint on disk: directory, manifest, and tensor files."""
