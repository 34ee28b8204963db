"""Use this library from other libraries and from unchanged scripts, and send its figures to loggers."""
