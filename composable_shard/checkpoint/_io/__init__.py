"""Files and checksums, without torch: what the process that writes checkpoints in the background loads, too."""
