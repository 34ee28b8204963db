"""Files and checksums without torch, so that the background writer process can import them quickly."""
